"""Token separation beyond MJP: no position embeddings, fixed ones, a frozen patch embedding, sums over images."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from privlab.attacks.gradients import token_separation
from privlab.attacks.gradients.token_separation import TokenSeparation
from privlab.attacks.tokens import QKV, Mlp, Reads, embeddings_of_tokens, separate
from privlab.base import PrivlabError, PrivlabWarning, draw_for
from privlab.defenses import EncryptedEmbedding, GradientNoise, Jigsaw, Mjp
from privlab.evaluation import applicable
from privlab.grids import specify
from privlab.metrics import assign_images, in_best_order, psnr
from privlab.release import gradient_capabilities, observe, released_parameters
from privlab.threat import GradientDefense, Observation, Reconstruction, Stack, check_capabilities
from privlab.victims import VictimModel, april_twin, first_block, victim

SEARCH = {"starts": 8, "rounds": 40, "steps": 40, "tolerance": 0.01}
PATCH = "patch_embed.proj.weight"


@pytest.fixture(scope="module")
def make(tiny_vit: Callable[..., VisionTransformer]) -> Callable[..., VictimModel]:
    """Return a maker of small models with frozen parameters; "pos_embed" is sines and cosines then."""

    def made(*frozen: str, **options: object) -> VictimModel:
        vit = tiny_vit(**options)
        if "pos_embed" in frozen and vit.pos_embed is not None:
            waves = build_sincos2d_pos_embed([4, 4], vit.embed_dim, dtype=torch.float64)
            vit.pos_embed.data[0, 1:] = waves
        for name in frozen:
            vit.get_parameter(name).requires_grad_(False)
        return VictimModel(vit, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)).double().requires_grad_(False)

    return made


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def textured(crops: Tensor, count: int) -> Tensor:
    """Return the crops of the most contrast: patches that are alike have one token."""
    return crops[crops.std((1, 2, 3)).argsort(descending=True)[:count]].double()


def seen_of(model: VictimModel, images: Tensor) -> Observation:
    names = [*TokenSeparation.parameters, *released_parameters(model).intersection(TokenSeparation.if_released)]
    return observe(model, images, torch.arange(len(images)), names)


def in_order(reconstruction: Reconstruction, images: Tensor, patch: int) -> Tensor:
    return (
        reconstruction.images
        if reconstruction.loose is None
        else in_best_order(reconstruction.images, images, reconstruction.loose, patch)
    )


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [(), ("pos_embed",), (PATCH,), ("pos_embed", PATCH)])
@pytest.mark.parametrize("embedded", ["learn", "none"])
def test_everything_comes_back(
    frozen: tuple[str, ...], embedded: str, images: Tensor, make: Callable[..., VictimModel]
) -> None:
    model = make(*(name for name in frozen if embedded == "learn" or name == PATCH), pos_embed=embedded)
    before = [parameter.clone() for parameter in model.parameters()]
    reconstruction = TokenSeparation(**SEARCH)(seen_of(model, images))
    assert reconstruction.tokens is not None
    assert reconstruction.tokens_sure is not None
    assert reconstruction.tokens.tolist() == reconstruction.tokens_sure.tolist() == [17, 17]
    assert (reconstruction.loose is None) == (embedded == "learn")
    assert psnr(in_order(reconstruction, images, 4), images).min() > 100
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def under(model: VictimModel, images: Tensor, *defense: GradientDefense) -> Observation:
    names = [*TokenSeparation.parameters, *TokenSeparation.if_released]
    draws = [draw_for(0, str(i), "release") for i in range(len(images))]
    return observe(model, images, torch.arange(len(images)), names, defense, draws)


@pytest.mark.slow
def test_what_is_done_to_the_embedding_does_not_help(images: Tensor, make: Callable[..., VictimModel]) -> None:
    reconstruction = TokenSeparation(**SEARCH)(under(make(), images, EncryptedEmbedding()))
    assert (psnr(reconstruction.images, images) > 60).all()


def test_a_gradient_with_an_error_as_large_as_itself_is_taken_for_withheld(
    images: Tensor, make: Callable[..., VictimModel]
) -> None:
    for defense, left in ((EncryptedEmbedding(), set()), (GradientNoise(multiplier=1e-6), {"pos_embed", PATCH})):
        seen = under(make(), images, defense)
        found = token_separation._without_lost(seen)
        assert {*found.gradients} == {*TokenSeparation.parameters} | left
        assert all(torch.equal(each, seen.gradients[name]) for name, each in found.gradients.items())


@pytest.mark.slow
def test_a_shuffle_does_not_help_without_position_embeddings(images: Tensor, make: Callable[..., VictimModel]) -> None:
    model = make(pos_embed="none")
    feed = Jigsaw(gamma=0.5)(images, 4, [draw_for(0, str(i), "defense") for i in range(2)])
    assert not torch.equal(feed.images, images)
    reconstruction = TokenSeparation(**SEARCH)(seen_of(model, feed.images))
    assert psnr(in_order(reconstruction, images, 4), images).min() > 100


def test_a_wide_image_needs_what_attention_heard(images: Tensor, make: Callable[..., VictimModel]) -> None:
    """With 2 N + 2 ≥ D the token alone leaves coordinates open; fixed position embeddings and ∂W_qkv close them."""
    reconstruction = TokenSeparation(**SEARCH)(seen_of(make("pos_embed", embed_dim=32), images))
    assert psnr(reconstruction.images, images).min() > 100


@pytest.mark.parametrize("embedded", ["learn", "none"])
def test_embedded_patches_come_from_tokens_alone(
    embedded: str, images: Tensor, make: Callable[..., VictimModel]
) -> None:
    model, attack = make(PATCH, embed_dim=48, pos_embed=embedded), TokenSeparation(**SEARCH | {"starts": 32})
    seen, block = seen_of(model, images), first_block(model)
    (tokens,) = attack.tokens(block, seen, [0], 17)
    assert len(tokens.u) == 17  # 8 starts miss one on some machines: rounding leads a random search elsewhere
    z = embeddings_of_tokens(tokens.u, Reads.of(seen, 0, block, 17), 6, 60)
    wanted = model.embed(images)[0, 1:]
    z, wanted = (rows - rows.mean(1, keepdim=True) for rows in (z, wanted))
    nearest = torch.cdist(wanted, z).argmin(1)
    assert sorted(nearest.tolist()) == list(range(16))
    assert_close(z[nearest], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_frozen_patch_embedding_leaves_few_directions(crops: Tensor, make: Callable[..., VictimModel]) -> None:
    """D = K: fixed position embeddings place every patch, of which but one direction is open."""
    model, x = make("pos_embed", PATCH, embed_dim=48), textured(crops, 2)
    reconstruction = TokenSeparation(**SEARCH)(seen_of(model, x))
    assert reconstruction.loose is None
    assert psnr(reconstruction.images, x).min() > 25


def test_patches_without_a_token_are_smooth(crops: Tensor, make: Callable[..., VictimModel]) -> None:
    x = textured(crops, 3)[2:]
    reconstruction = TokenSeparation(**SEARCH | {"rounds": 6})(seen_of(make("pos_embed"), x))
    assert reconstruction.tokens is not None
    assert 0 < reconstruction.tokens.item() < 17
    assert psnr(reconstruction.images, x) > psnr(torch.full_like(x, 0.5), x) + 6


def test_too_many_tokens_give_grey(images: Tensor, make: Callable[..., VictimModel]) -> None:
    seen = seen_of(make("pos_embed", embed_dim=16), images)
    with pytest.warns(PrivlabWarning, match=r"17.*gradients.*16.*15"):
        reconstruction = TokenSeparation(**SEARCH)(seen)
    assert reconstruction.tokens is not None
    assert reconstruction.tokens.tolist() == [0, 0]
    assert_close(reconstruction.images, torch.tensor((0.4, 0.5, 0.6)).double()[:, None, None].expand_as(images))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-5), (torch.float32, 1e-3)])
def test_tokens_of_two_images_from_one_gradient(
    dtype: torch.dtype, near: float, images: Tensor, make: Callable[..., VictimModel]
) -> None:
    """A gradient summed over B images is a sum of B (N + 1) products: separation takes B (N + 1) < D."""
    model = make(pos_embed="none").to(dtype)
    seen = seen_of(model, images.to(dtype))
    G1, G2 = (seen.gradients[f"blocks.0.mlp.{name}.weight"].sum(0) for name in ("fc1", "fc2"))
    block = first_block(model)
    draws, options = [torch.Generator().manual_seed(0)], SEARCH | {"starts": 24}
    (found,) = separate(Mlp.of(block), G1[None], G2[None], 34, draws, **options)
    z = model.embed(images.to(dtype)).double()
    u = block.norm2(z + block.ls1(block.attn(block.norm1(z)))).flatten(0, 1)
    cosine = normalize(found.u, dim=1) @ normalize(u, dim=1).mT
    assert len(found.u) == 34
    assert sorted(cosine.argmax(1).tolist()) == list(range(34))
    assert_close(found.u, u[cosine.argmax(1)], atol=near, rtol=near)


def test_tokens_of_other_images_are_better_starts_than_points_drawn_at_random(
    images: Tensor, make: Callable[..., VictimModel]
) -> None:
    """One round from half a set of tokens near the true ones finds more of them than one from random points."""
    model = make(pos_embed="none")
    seen = seen_of(model, images)
    G1, G2 = (seen.gradients[f"blocks.0.mlp.{name}.weight"].sum(0) for name in ("fc1", "fc2"))
    block = first_block(model)
    z = model.embed(images).double()
    u = block.norm2(z + block.ls1(block.attn(block.norm1(z)))).flatten(0, 1)
    near = u + 0.1 * u.std() * torch.randn(u.shape, generator=torch.Generator().manual_seed(1), dtype=u.dtype)
    drawn, usual = (
        separate(
            Mlp.of(block),
            G1[None],
            G2[None],
            34,
            [torch.Generator().manual_seed(0)],
            **SEARCH | {"starts": 24, "rounds": 1},
            usual=some,
        )[0]
        for some in (None, near)
    )
    assert len(usual.u) > len(drawn.u)


@pytest.mark.parametrize("names", [("samples/chelsea-0", "samples/rocket-0"), ()])
def test_starts_come_from_photographs_that_are_not_under_attack(
    names: tuple[str, ...], images: Tensor, make: Callable[..., VictimModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def photographs(size: tuple[int, int], names: Any, channels: int) -> Tensor:
        asked.append((size, names, channels))
        return images[:1]

    monkeypatch.setattr("privlab.attacks.tokens.search.photographs", photographs)
    model = make("pos_embed", embed_dim=96)
    read = [name for name in (*TokenSeparation.parameters, *TokenSeparation.if_released) if name != "pos_embed"]
    seen = replace(observe(model, images, torch.arange(2), read, images_per_release=2), photographs=names)
    with contextlib.suppress(PrivlabError):  # the fill of lost patches needs photographs too
        TokenSeparation(**SEARCH | {"rounds": 1})(seen)
    assert asked == ([((16, 16), names, 3)] if names else [])
    asked.clear()
    TokenSeparation(**SEARCH | {"rounds": 1})(
        replace(seen_of(make("pos_embed"), images[:1]), photographs=names[:1] or None)
    )
    assert not asked  # of one image the search needs none


@pytest.mark.parametrize("masked_pe", ["unknown", "none"])
def test_several_images_under_one_mask_come_back(
    masked_pe: str, images: Tensor, tiny_model: Callable[..., VictimModel]
) -> None:
    """MJP per batch, as its authors run it: the zero rows of ∂ℓ/∂E_pos are the mask, and nothing is lost."""
    model, defense = tiny_model(embed_dim=96), (Mjp(gamma=0.4, masked_pe=masked_pe),)
    feed = Stack(defense).feed(images, 4, [draw_for(0, str(i), "defense") for i in range(2)], 2)
    read = (*TokenSeparation.parameters, *TokenSeparation.if_released)
    seen = observe(model, feed, torch.arange(2), read, defense, (), 2)
    reconstruction = TokenSeparation(**SEARCH | {"starts": 24})(seen)
    assert reconstruction.loose is not None
    assert torch.equal(reconstruction.loose, feed.moved)
    found = assign_images(reconstruction, feed.images, 4)
    assert psnr(in_order(found, images, 4), images).min() > 80


def test_masks_of_their_own_are_not_told(images: Tensor, tiny_model: Callable[..., VictimModel]) -> None:
    model, defense = tiny_model(embed_dim=96), (Mjp(gamma=0.4, per="image"),)
    feed = Stack(defense).feed(images, 4, [draw_for(0, str(i), "defense") for i in range(2)], 2)
    read = (*TokenSeparation.parameters, *TokenSeparation.if_released)
    seen = observe(model, feed, torch.arange(2), read, defense, (), 2)
    with pytest.warns(PrivlabWarning, match="MJP"):
        reconstruction = TokenSeparation(**SEARCH | {"rounds": 1, "steps": 5})(seen)
    assert reconstruction.loose is None


def names(cells: list, /) -> set[str]:
    return {attack.name for cell in cells for attack in cell.attacks}


def test_it_runs_unnamed_only_where_others_cannot(tiny_vit: Callable[..., VisionTransformer]) -> None:
    spec = specify(model=("a model of one's own",))
    learnt, bare = victim(tiny_vit()), victim(tiny_vit(pos_embed="none"))
    vit = tiny_vit()
    vit.patch_embed.proj.weight.requires_grad_(False)
    frozen = victim(vit)
    assert "token-separation" not in names(applicable(spec, learnt)[0])
    assert "token-separation" in names(applicable(spec, learnt, stand_ins=True)[0])
    for base in (bare, frozen):
        cells, refused = applicable(spec, base)
        assert "token-separation" in names(cells)
        assert {"patch-gradient", "mjp-full"} <= refused.keys()
        assert (PATCH in [name for cell in cells for name in cell.parameters]) == (base is bare)
    assert f"reads gradients of frozen parameters: {PATCH}" in applicable(spec, frozen)[1]["patch-gradient"]
    named = specify(model=spec.victim.models, attack=("mjp-full", "token-separation"))
    assert names(applicable(named, learnt)[0]) == {"mjp-full", "token-separation"}


def test_what_it_needs(make: Callable[..., VictimModel]) -> None:
    model = make(pos_embed="none")
    check_capabilities(TokenSeparation(), gradient_capabilities(model))
    with pytest.raises(PrivlabError, match=r"'token-separation' needs .* plain_block"):
        check_capabilities(TokenSeparation(), gradient_capabilities(april_twin(model)))
    check_capabilities(TokenSeparation(), gradient_capabilities(model, (), 2))
    with pytest.raises(PrivlabError, match=r"'token-separation' needs .* plain_block"):
        check_capabilities(TokenSeparation(), gradient_capabilities(make(QKV, pos_embed="none")))


def test_options_out_of_range() -> None:
    with pytest.raises(PrivlabError, match=r"token-separation.*1"):
        TokenSeparation(starts=0)


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_photographs(photographs: Callable[[int, int], Tensor]) -> None:
    model, x = victim("vit_ti_nope", weights="random", img_size=64).model, photographs(2, 64)[1:]
    reconstruction = TokenSeparation()(seen_of(model, x))
    assert reconstruction.tokens is not None
    assert reconstruction.tokens.tolist() == [17]
    assert psnr(in_order(reconstruction, x, 16), x) > 80


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_trained_weights(shared: Callable[[str], Path], photographs: Callable[[int, int], Tensor]) -> None:
    """On the trained ViT-Ti at 160 pixels nothing is lost when the position embeddings' gradient is withheld."""
    weights = shared("weights/vit_tiny_patch16_224.safetensors")
    model, x = victim("vit_ti", weights=str(weights), img_size=160).model, photographs(2, 160)[1:]
    seen = observe(model, x, model(x).argmax(1), (*TokenSeparation.parameters, PATCH))
    reconstruction = TokenSeparation()(seen)
    assert reconstruction.tokens is not None
    assert reconstruction.tokens.tolist() == [101]
    assert psnr(reconstruction.images, x) > 80

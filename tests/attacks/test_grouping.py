"""Several images in one gradient: their tokens told apart, and told which of them belong together."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.testing import assert_close

from privlab.attacks.gradients.token_separation import TokenSeparation
from privlab.attacks.rows import known_tokens
from privlab.attacks.tokens.grouping import _group_patches, _memberships
from privlab.base import PrivlabError
from privlab.metrics import assign_images, in_best_order, psnr
from privlab.release import gradient_capabilities, observe, released_parameters
from privlab.threat import Observation, check_capabilities
from privlab.victims import VictimModel, first_block, victim

NAMES = (*TokenSeparation.parameters, *TokenSeparation.if_released)
PATCH = "patch_embed.proj.weight"


def model_of(vit: VisionTransformer) -> VictimModel:
    return VictimModel(vit, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)).double().requires_grad_(False)


def draw(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def together(model: VictimModel, images: Tensor, names: tuple[str, ...] = NAMES) -> Observation:
    there = [name for name in names if name in released_parameters(model)]
    return observe(model, images, torch.arange(len(images)), there, images_per_release=len(images))


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("images", [2, 3])
def test_attention_says_what_belongs_together(
    class_token: bool, images: int, tiny_vit: Callable[..., VisionTransformer]
) -> None:
    """Of the true tokens each says one of its own image's patches and zero of all others', but for the ridge."""
    pool = {} if class_token else {"class_token": False, "global_pool": "avg"}
    model = model_of(tiny_vit(embed_dim=128, **pool))
    block, p = first_block(model), int(class_token)
    z = model.embed(draw(images, 3, 16, 16))
    read: list[Tensor] = []
    block.get_submodule("attn.proj").register_forward_pre_hook(lambda _, args: read.append(args[0]))
    block(z)
    z, mixed = ([rows[:, p:].flatten(0, 1), rows[:, :p].flatten(0, 1)] for rows in (z, read[0]))
    share = _memberships(block, known_tokens(model)[0], z[0], torch.cat(z), torch.cat(mixed), images)
    image = torch.arange(images).repeat_interleave(16)
    asking = torch.cat([image, torch.arange(images)[: images * p]])
    assert_close(share, (asking[:, None] == image).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_that_hear_few_others_are_grouped_in_spite_of_float32(
    seed: int, tiny_vit: Callable[..., VisionTransformer]
) -> None:
    """Where attention is sharp, rounding decides of tokens that are hardly heard, but for the ridge."""
    vit = tiny_vit(embed_dim=128, depth=1)
    sharp = vit.get_submodule("blocks.0.attn.qkv").weight
    with torch.no_grad():
        sharp[: 2 * vit.embed_dim] *= 16
    model, rng = model_of(vit), torch.Generator().manual_seed(seed)
    block, z = first_block(model), model.embed(torch.rand(3, 3, 16, 16, dtype=torch.float64, generator=rng))
    read: list[Tensor] = []
    block.get_submodule("attn.proj").register_forward_pre_hook(lambda _, args: read.append(args[0]))
    block(z)
    z, mixed = (rows * (1 + 1e-7 * torch.randn(rows.shape, dtype=rows.dtype, generator=rng)) for rows in (z, read[0]))
    z, mixed = (torch.cat([rows[:, 1:].flatten(0, 1), rows[:, 0]]) for rows in (z, mixed))
    share = _memberships(block, known_tokens(model)[0], z[:48], z, mixed, 3)
    group = _group_patches(share[:48], torch.arange(16).repeat(3), 3).view(3, 16)
    assert sorted(group[:, 0].tolist()) == [0, 1, 2]
    assert (group == group[:, :1]).all()


def test_votes_that_contradict_are_counted() -> None:
    """Two images of four slots: a pair that votes for the other image is overruled by all others."""
    image, slot = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1]), torch.arange(4).repeat_interleave(2)
    share = (image[:, None] == image).double()
    share[0, 1] = share[1, 0] = 1
    group = _group_patches(share, slot, 2)
    assert torch.equal(group, image) or torch.equal(group, 1 - image)


def test_votes_of_a_group_overrule_the_patch_that_stood_for_it() -> None:
    """The patch that says most is wrong of one slot, and the other image's is silent: all others then say right."""
    image, slot = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1]), torch.arange(4).repeat_interleave(2)
    share = torch.where(image[:, None] == image, 0.9, 0.1).double()
    said = torch.tensor([1, 0, 1, 0.05, 1, 0.05, 1, 0.05], dtype=torch.float64)
    share[0], share[:, 0] = said, said
    share[1, 2:4] = share[2:4, 1] = 0.5
    assert torch.equal(_group_patches(share, slot, 2), image)


def test_slots_that_are_alike_are_shared_out_evenly() -> None:
    image = torch.tensor([0, 0, 1, 1, 1, 0])
    share = (image[:, None] == image).double()
    share[4] = share[:, 4] = 0.5  # says nothing, and there is but one place left
    group = _group_patches(share, torch.full((6,), -1), 2, alike=3)
    assert torch.equal(group, image) or torch.equal(group, 1 - image)
    assert _group_patches(share[:0, :0], image[:0], 2).shape == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("embedded", ["learn", "none"])
def test_two_images_come_back_from_one_gradient(embedded: str, tiny_vit: Callable[..., VisionTransformer]) -> None:
    model, x = model_of(tiny_vit(embed_dim=128, pos_embed=embedded)), draw(2, 3, 16, 16)
    reconstruction = assign_images(TokenSeparation()(together(model, x)), x, 4)
    assert reconstruction.tokens is not None
    assert reconstruction.tokens.tolist() == [17, 17]
    found = (
        reconstruction.images
        if reconstruction.loose is None
        else in_best_order(reconstruction.images, x, reconstruction.loose, 4)
    )
    assert psnr(found, x).min() > 100


def test_a_search_that_finds_nothing_gives_grey(tiny_vit: Callable[..., VisionTransformer]) -> None:
    model, x = model_of(tiny_vit()), draw(2, 3, 16, 16)
    reconstruction = TokenSeparation(starts=1, rounds=1, steps=1)(together(model, x))
    assert reconstruction.tokens is not None
    assert reconstruction.tokens.tolist() == [0, 0]
    assert reconstruction.images.shape == x.shape


def test_what_several_images_need(tiny_vit: Callable[..., VisionTransformer]) -> None:
    vit = tiny_vit(embed_dim=48)
    vit.patch_embed.proj.weight.requires_grad_(False)
    model = model_of(vit)
    check_capabilities(TokenSeparation(), gradient_capabilities(model, (), 2))
    with pytest.raises(PrivlabError, match=r"2.*embedding"):
        TokenSeparation()(together(model, draw(2, 3, 16, 16), TokenSeparation.parameters))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_two_photographs_on_trained_weights(
    shared: Callable[[str], Path], photographs: Callable[[int, int], Tensor]
) -> None:
    weights = shared("weights/vit_tiny_patch16_224.safetensors")
    model, x = victim("vit_ti", weights=str(weights), img_size=64).model, photographs(2, 64)
    seen = observe(model, x, model(x).argmax(1), NAMES, images_per_release=2)
    assert psnr(assign_images(TokenSeparation()(seen), x, 16).images, x).min() > 80

"""Token separation, and MJP undone with it: exact in float64, and on trained weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from privlab.attacks.gradients import mjp_full
from privlab.attacks.gradients.mjp_full import MjpFull
from privlab.attacks.gradients.mjp_subspace import MjpSubspace
from privlab.attacks.gradients.patch_gradient import PatchGradient
from privlab.attacks.tokens import (
    Mlp,
    Reads,
    Separated,
    Slots,
    Spans,
    guesses,
    normalise,
    place_patches,
    separate,
    sharpen_patches,
    slots_of_tokens,
)
from privlab.attacks.tokens.equations import _start, outside
from privlab.base import PrivlabError, PrivlabWarning, draw_for
from privlab.defenses import Jigsaw, Mjp
from privlab.metrics import in_best_order, psnr, psnr_region
from privlab.patches import patchify, permute, slots_to_pixels
from privlab.release import gradient_capabilities, observe
from privlab.threat import Capability, Feed, Observation, check_capabilities
from privlab.victims import VictimModel, april_twin, first_block, victim

SEARCH = {"starts": 8, "rounds": 40, "steps": 40, "tolerance": 0.01}


def seen_under(model: VictimModel, images: Tensor, defense: Mjp | Jigsaw, labels: Tensor) -> tuple[Feed, Observation]:
    feed = defense(images, model.patch, [draw_for(0, str(i), "defense") for i in range(len(images))])
    return feed, observe(model, feed, labels, MjpFull.parameters, (defense,))


def tokens_of(model: VictimModel, feed: Feed) -> Tensor:
    """Return what the first MLP reads."""
    read: list[Tensor] = []
    hook = model.vit.blocks[0].mlp.register_forward_pre_hook(lambda _, given: read.append(given[0].detach()))
    model(feed.images, feed.masked_pe)
    hook.remove()
    return read[0]


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def made(images: Tensor, tiny_model: Callable[..., VictimModel]) -> tuple[VictimModel, Feed, Observation]:
    model = tiny_model()
    return model, *seen_under(model, images, Mjp(gamma=0.4), torch.arange(2))


def separated(model: VictimModel, seen: Observation, i: int = 0) -> Separated:
    G1, G2 = (seen.gradients[f"blocks.0.mlp.{name}.weight"][i] for name in ("fc1", "fc2"))
    return separate(Mlp.of(first_block(model)), G1[None], G2[None], 17, [torch.Generator().manual_seed(0)], **SEARCH)[0]


def test_tokens_have_no_residual_and_mixtures_have(made: tuple[VictimModel, Feed, Observation]) -> None:
    model, feed, seen = made
    u, mlp = tokens_of(model, feed)[0], Mlp.of(first_block(model))
    G1, G2 = (seen.gradients[f"blocks.0.mlp.{name}.weight"][0] for name in ("fc1", "fc2"))
    spans = Spans.of(G1, G2, 17)
    assert len(spans.u) == 17
    assert outside(mlp, spans, u @ spans.u.mT).max() < 1e-5
    mixed = (u + u.roll(1, 0)) / 2
    assert outside(mlp, spans, mixed @ spans.u.mT).min() > 1e-2


def test_starts_have_the_form_of_tokens_and_lie_as_the_gradient_does(
    made: tuple[VictimModel, Feed, Observation],
) -> None:
    model, _, seen = made
    mlp = Mlp.of(first_block(model))
    G1, G2 = (seen.gradients[f"blocks.0.mlp.{name}.weight"][0] for name in ("fc1", "fc2"))
    spans = Spans.of(G1, G2, 17)
    u = _start(mlp, spans.take(None), 50, [torch.Generator().manual_seed(0)])[0] @ spans.u
    t = (u - mlp.β) / mlp.γ
    assert_close(t.mean(1), torch.zeros_like(t[:, 0]))
    assert_close(t.square().mean(1), torch.ones_like(t[:, 0]))
    one = torch.zeros_like(spans.σ).index_fill(0, torch.tensor(3), value=1.0)  # nothing but one direction is released
    along = _start(mlp, spans._replace(σ=one).take(None), 50, [torch.Generator().manual_seed(0)])[0]
    assert torch.linalg.matrix_rank(along - along.mean(0), rtol=1e-6) == 1


def test_all_tokens_are_found_and_no_other(made: tuple[VictimModel, Feed, Observation]) -> None:
    model, feed, seen = made
    found, u = separated(model, seen), tokens_of(model, feed)[0]
    cosine = normalize(found.u, dim=1) @ normalize(u, dim=1).mT
    assert (found.wanted, len(found.u)) == (17, 17)
    assert sorted(cosine.argmax(1).tolist()) == list(range(17))
    assert_close(found.u, u[cosine.argmax(1)], atol=1e-5, rtol=0)
    assert found.residual.max() < 1e-5


def slots_of(model: VictimModel, feed: Feed) -> tuple[Slots, Tensor]:
    """Return what the gradient says of the first image's patches, from the image itself, and the patches."""
    x = patchify(model.normalise(feed.images), model.patch)[0]
    masked = feed.moved[0]
    _, _, V = torch.linalg.svd(x[masked], full_matrices=False)
    assert model.vit.pos_embed is not None
    assert model.unk_embed is not None
    pe = torch.where(masked[:, None], model.unk_embed[0], model.vit.pos_embed[0, 1:])
    return Slots((x - (x @ V.mT) @ V).masked_fill(masked[:, None], 0), V, pe, masked), x


def test_tokens_lie_where_their_slots_say_and_no_others_do(made: tuple[VictimModel, Feed, Observation]) -> None:
    model, feed, seen = made
    block = first_block(model)
    slots, x = slots_of(model, feed)
    near = guesses(slots, Reads.of(seen, 0, block, 17), x)
    assert near is not None
    own = torch.cat([torch.tensor([True]), ~feed.moved[0]])
    assert_close(near.u, tokens_of(model, feed)[0][own])
    t = normalise(Mlp.of(block), near.u)
    assert near.off(t).norm(dim=1).max() < 1e-5 < 1e-2 < near.off(t.roll(1, 0)).norm(dim=1).min()


def test_guesses_from_grey_patches_lead_to_the_tokens_of_their_slots(
    made: tuple[VictimModel, Feed, Observation],
) -> None:
    model, feed, seen = made
    block = first_block(model)
    slots, x = slots_of(model, feed)
    near = guesses(slots, Reads.of(seen, 0, block, 17), torch.zeros_like(x))
    assert near is not None
    G1, G2 = (seen.gradients[f"blocks.0.mlp.{name}.weight"][0] for name in ("fc1", "fc2"))
    draws, options = [torch.Generator().manual_seed(0)], SEARCH | {"rounds": 1}
    (found,) = separate(Mlp.of(block), G1[None], G2[None], 17, draws, **options, near=near.take(None, None))
    own = torch.cat([torch.tensor([True]), ~feed.moved[0]])
    assert len(found.u) == own.sum()
    cosine = normalize(found.u, dim=1) @ normalize(tokens_of(model, feed)[0], dim=1).mT
    assert sorted(cosine.argmax(1).tolist()) == own.nonzero()[:, 0].tolist()
    assert cosine.amax(1).min() > 1 - 1e-8


@pytest.mark.parametrize(("steps", "inner", "exact"), [(8, 60, True), (1, 60, False), (8, 1, False)])
def test_gauss_and_newtons_steps_remove_what_the_linear_solve_had_of_rounding(
    steps: int, inner: int, *, exact: bool, made: tuple[VictimModel, Feed, Observation]
) -> None:
    """From coordinates that are a tenth off and the true tokens; one step alone, or of one direction, is short."""
    model, feed, seen = made
    block = first_block(model)
    slots, x = slots_of(model, feed)
    u, wrong = tokens_of(model, feed)[0], torch.zeros_like(x)
    linear = slots_of_tokens(slots, u, Reads.of(seen, 0, block, 17))
    noise = torch.randn(linear.c.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = linear._replace(c=linear.c + 0.1 * linear.c.std() * noise)
    at = linear.slot[linear.slot > 0] - 1

    def error(steps: int, inner: int) -> float:
        (solved,) = sharpen_patches(model, block, [slots], [u], [start], [wrong], steps, inner)
        return float((solved.X - right).norm())

    right = sharpen_patches(model, block, [slots], [u], [linear], [wrong], 0, 1)[0].X
    assert_close(right[~slots.alike], x[~slots.alike], atol=1e-5, rtol=0)
    assert sorted(at.tolist()) == list(range(16))
    assert error(0, 1) > 0.1
    assert (error(steps, inner) < 1e-5) == exact


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0.27, 0.6])
@pytest.mark.parametrize("masked_pe", ["unknown", "none"])
def test_mjp_is_undone(gamma: float, masked_pe: str, images: Tensor, tiny_model: Callable[..., VictimModel]) -> None:
    model = tiny_model()
    feed, seen = seen_under(model, images, Mjp(gamma=gamma, masked_pe=masked_pe), torch.arange(2))
    before = [parameter.clone() for parameter in model.parameters()]
    reconstruction = MjpFull(**SEARCH | {"starts": 16})(seen)
    assert reconstruction.loose is not None
    assert torch.equal(reconstruction.loose, feed.moved)
    assert reconstruction.tokens is not None
    assert reconstruction.tokens.tolist() == [17, 17]
    assert reconstruction.tokens_sure is not None
    assert reconstruction.tokens_sure.tolist() == [17, 17]
    assert psnr(in_best_order(reconstruction.images, feed.images, reconstruction.loose, 4), feed.images).min() > 100
    assert psnr(in_best_order(reconstruction.images, images, reconstruction.loose, 4), images).min() > 100
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
def test_images_side_by_side_are_those_one_after_the_other(made: tuple[VictimModel, Feed, Observation]) -> None:
    """Two cores work on an image each, in one thread: the same tokens and images, and the threads stay as they were."""
    _, _, seen = made
    alone = MjpFull(**SEARCH)(seen)
    torch.set_num_threads(2)
    try:
        both = MjpFull(**SEARCH)(seen)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert alone.tokens is not None
    assert both.tokens is not None
    assert torch.equal(both.tokens, alone.tokens)
    assert_close(both.images, alone.images, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_images_that_are_searched_together_are_those_that_are_searched_alone(
    images: Tensor, tiny_model: Callable[..., VictimModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3, 6 and 10 masked patches, so that spans, guesses and directions differ in number."""
    model = tiny_model()
    each = [
        seen_under(model, x[None], Mjp(gamma=gamma), torch.tensor([i]))[1]
        for i, (x, gamma) in enumerate(zip((images[0], images[1], images[1]), (0.2, 0.4, 0.6), strict=True))
    ]
    gradients = {name: torch.cat([seen.gradients[name] for seen in each]) for name in each[0].gradients}
    seen, attack = replace(each[0], gradients=gradients), MjpFull(**SEARCH)
    alone = attack(seen)
    monkeypatch.setattr(mjp_full, "_ON_CPU", 3)
    together = attack(seen)
    assert together.tokens is not None
    assert alone.tokens is not None
    assert together.tokens.tolist() == alone.tokens.tolist() == [17, 17, 17]
    assert_close(together.images, alone.images, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_few_tokens_leave_what_the_subspace_gave(made: tuple[VictimModel, Feed, Observation]) -> None:
    model, feed, seen = made
    reconstruction = MjpFull(**SEARCH | {"rounds": 2})(seen)
    assert reconstruction.tokens is not None
    assert 0 < reconstruction.tokens.min() <= reconstruction.tokens.max() < 17
    region = ~slots_to_pixels(feed.moved, model.grid, model.patch)
    prior = psnr_region(MjpSubspace()(seen), feed.images, region)
    assert (psnr_region(reconstruction.images, feed.images, region) > prior - 6).all()


def ramp(side: int) -> Tensor:
    """Return an image in which no two places are alike, and neighbours nearly are."""
    across, down = torch.meshgrid(*[torch.linspace(0.1, 0.9, side, dtype=torch.float64)] * 2, indexing="ij")
    return torch.stack([across, down, across * down])


@pytest.mark.slow
def test_masked_patches_come_back_to_their_own_places(tiny_model: Callable[..., VictimModel]) -> None:
    """By their borders, for the gradient does not say where they were before the shuffle."""
    model = tiny_model(img_size=24, embed_dim=96)
    grain = torch.rand(3, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    image = (ramp(24) + 0.05 * grain)[None]
    feed, seen = seen_under(model, image, Mjp(gamma=0.2), torch.arange(1))
    assert not torch.equal(feed.images, image)
    assert psnr(MjpFull(**SEARCH)(seen).images, image).min() > 80


def test_lost_patches_take_the_places_that_are_left(tiny_model: Callable[..., VictimModel]) -> None:
    model = tiny_model(img_size=32)
    image, masked, lost = ramp(32), torch.zeros(64, dtype=torch.bool), torch.zeros(64, dtype=torch.bool)
    slots = torch.tensor([9, 12, 27, 30, 44, 46, 58])
    masked[slots], lost[slots[:2]] = True, True
    moved = torch.arange(64).index_put((slots,), slots.roll(3))  # slot s holds patch moved[s]
    shuffled = permute(image[None], moved[None], 4)
    noise = torch.rand(shuffled.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = torch.where(slots_to_pixels(lost[None], (8, 8), 4)[:, None], noise, shuffled)[0]
    order = place_patches(model, seen, masked, lost)
    known = ~lost[order]
    assert torch.equal(moved[order][known], torch.arange(64)[known])
    assert known.sum() == 62


def test_where_all_is_lost_any_order_will_do(tiny_model: Callable[..., VictimModel]) -> None:
    every = torch.ones(64, dtype=torch.bool)
    assert place_patches(tiny_model(img_size=32), ramp(32), every, every).sort().values.tolist() == list(range(64))


@pytest.mark.slow
def test_masked_patches_without_a_token_are_smooth_where_they_lie(tiny_model: Callable[..., VictimModel]) -> None:
    model = tiny_model(img_size=32, embed_dim=128)
    grain = torch.rand(3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    image = (ramp(32) + 0.02 * grain)[None]
    feed, seen = seen_under(model, image, Mjp(gamma=0.2), torch.arange(1))
    reconstruction = MjpFull(**SEARCH | {"rounds": 1})(seen)
    region = slots_to_pixels(feed.moved, model.grid, model.patch)
    assert psnr_region(reconstruction.images, image, ~region).min() > 40
    assert (
        psnr_region(reconstruction.images, image, region) > 10 + psnr_region(MjpSubspace()(seen), image, region)
    ).all()


def test_without_a_mask_it_is_patch_gradient(images: Tensor, tiny_model: Callable[..., VictimModel]) -> None:
    model = tiny_model()
    _, seen = seen_under(model, images, Jigsaw(gamma=0.4), torch.arange(2))
    reconstruction = MjpFull()(seen)
    assert reconstruction.loose is None
    assert_close(reconstruction.images, PatchGradient()(seen), atol=1e-6, rtol=0)


def test_as_many_tokens_as_the_width_are_too_many(images: Tensor, tiny_model: Callable[..., VictimModel]) -> None:
    model = tiny_model(embed_dim=16)
    _, seen = seen_under(model, images, Mjp(gamma=0.4), torch.arange(2))
    with pytest.warns(PrivlabWarning, match=r"17.*gradients.*16.*15"):
        reconstruction = MjpFull(**SEARCH)(seen)
    assert reconstruction.tokens is not None
    assert reconstruction.tokens.tolist() == [0, 0]


def test_it_needs_a_plain_block(tiny_model: Callable[..., VictimModel]) -> None:
    model = tiny_model()
    check_capabilities(MjpFull(), gradient_capabilities(model))
    with pytest.raises(PrivlabError, match=r"'mjp-full' needs .* plain_block"):
        check_capabilities(MjpFull(), gradient_capabilities(april_twin(model)))
    assert Capability.PLAIN_BLOCK not in gradient_capabilities(april_twin(model))


@pytest.mark.parametrize(
    "options", [{"starts": 0}, {"sharpen": -1}, {"tolerance": 1.0}, {"sure": 0.5}, {"rounds": 0}, {"inner": 0}]
)
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(PrivlabError, match="of mjp-full must be"):
        MjpFull(**options)  # pyright: ignore[reportArgumentType]


def test_the_best_order_is_that_of_the_reference(images: Tensor) -> None:
    loose = torch.zeros(2, 16, dtype=torch.bool)
    loose[:, 3:9] = True
    feed = Jigsaw(gamma=0.5)(images, 4, [draw_for(0, str(i), "defense") for i in range(2)])
    assert torch.equal(in_best_order(feed.images, images, feed.moved, 4), images)
    kept = in_best_order(images, images, loose, 4)
    assert torch.equal(kept, images)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_trained_weights(shared: Callable[[str], Path], photographs: Callable[[int, int], Tensor]) -> None:
    """On the trained ViT-Ti at 160 pixels both settings are exact, where the paper's attack has 8 dB."""
    weights = shared("weights/vit_tiny_patch16_224.safetensors")
    model = victim("vit_ti_mjp", weights=str(weights), img_size=160).model
    x = photographs(2, 160)[1:]
    feed, seen = seen_under(model, x, Mjp(gamma=0.27), model(x).argmax(1))
    reconstruction = MjpFull()(seen)
    assert reconstruction.tokens is not None
    assert reconstruction.tokens.tolist() == [101]
    assert reconstruction.loose is not None
    assert psnr(in_best_order(reconstruction.images, feed.images, reconstruction.loose, 16), feed.images).min() > 80

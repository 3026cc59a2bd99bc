"""What MJP and its ablations must do to an image, a mask and a model."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.defenses import DEFENSES, BlockScrambling, Jigsaw, LowPass, Mjp, Undefended, defenses
from privlab.patches import inverse, patchify, permute
from privlab.threat import Defense, FeatureDefense, GradientDefense, Stack
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]


def images_and_draws(b: int, seed: int) -> tuple[Tensor, list[Generator]]:
    """Return b random images of 4 × 4 patches of 4 pixels, and a draw for each."""
    rng = Generator().manual_seed(seed)
    return torch.rand(b, 3, 16, 16, generator=rng), [Generator().manual_seed(seed + i) for i in range(b)]


@given(gamma=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_jigsaw_moves_masked_patches_only_and_loses_none(gamma: float, seed: int) -> None:
    """Algorithm 1: x̃ is x with the masked patches shuffled among themselves."""
    images, draws = images_and_draws(2, seed)
    feed = Jigsaw(gamma=gamma)(images, 4, draws)
    assert_close(permute(feed.images, inverse(feed.order), 4), images, rtol=0, atol=0)
    assert_close(patchify(feed.images, 4)[~feed.moved], patchify(images, 4)[~feed.moved], rtol=0, atol=0)


def test_no_share_means_no_change() -> None:
    images, draws = images_and_draws(2, 0)
    assert_close(Mjp(gamma=0.0)(images, 4, draws).images, images, rtol=0, atol=0)
    assert_close(Undefended()(images, 4, draws).images, images, rtol=0, atol=0)


def test_mjp_is_the_jigsaw_with_replaced_position_embeddings() -> None:
    images, _ = images_and_draws(2, 0)
    plain = Jigsaw(gamma=0.5)(images, 4, images_and_draws(2, 0)[1])
    for kind, replacement in (("unknown", "unknown"), ("none", "zero")):
        feed = Mjp(gamma=0.5, masked_pe=kind)(images, 4, images_and_draws(2, 0)[1])
        assert_close(feed.images, plain.images, rtol=0, atol=0)
        assert feed.masked_pe is not None
        assert_close(feed.masked_pe, plain.moved)
        assert feed.replacement == replacement
    assert Mjp(gamma=0.5, masked_pe="slot")(images, 4, images_and_draws(2, 0)[1]).masked_pe is None


@pytest.mark.parametrize("kind", [Jigsaw, Mjp])
@pytest.mark.parametrize("gamma", [0.27, 0.29, 0.03, 0.5])
def test_the_secret_is_the_order_of_the_slots_that_are_masked(
    tiny_model: Model, kind: type[Jigsaw], gamma: float
) -> None:
    """Of 14 × 14 slots at γ = 0.27 the mask covers 52, not 53; the bits count what it covers."""
    model = tiny_model(img_size=56)
    (masked,) = kind(gamma)(torch.rand(1, 3, 56, 56), 4, [Generator().manual_seed(3)]).moved.sum(1).tolist()
    order = math.lgamma(masked + 1) / math.log(2)
    secret = order if kind is Mjp else (math.lgamma(197) - math.lgamma(197 - masked)) / math.log(2)
    assert kind(gamma).secret_bits(model, 1) == pytest.approx(secret)
    assert gamma != 0.27 or masked == 52


def test_images_of_a_batch_have_draws_of_their_own() -> None:
    images, draws = images_and_draws(3, 0)
    together = Jigsaw(gamma=0.6)(images, 4, draws)
    alone = Jigsaw(gamma=0.6)(images[1:2], 4, [Generator().manual_seed(1)])
    assert_close(together.order[1:2], alone.order)
    assert not torch.equal(together.order[0], together.order[1])


@pytest.mark.parametrize("kind", [Jigsaw, Mjp])
def test_a_batch_has_the_draw_of_its_first_image(kind: type[Jigsaw]) -> None:
    """The published way; of one image it is bit for bit the other one."""
    images, draws = images_and_draws(3, 0)
    together, first = Stack((kind(gamma=0.6),)).feed(images, 4, draws, 3), Generator().manual_seed(0)
    alone = kind(gamma=0.6, per="image")(images[:1], 4, [first])
    assert kind(gamma=0.6) == kind(gamma=0.6, per="batch")
    assert torch.equal(together.order, alone.order.expand(3, -1))
    assert torch.equal(together.moved, alone.moved.expand(3, -1))
    assert torch.equal(together.images, permute(images, alone.order.expand(3, -1), 4))
    assert torch.equal(draws[0].get_state(), first.get_state())  # and what a next defense draws is the same
    with pytest.raises(PrivlabError, match=r"3.*divisor.*2"):
        kind(gamma=0.6)(images, 4, draws[:2])


@pytest.mark.parametrize(("B", "groups"), [(1, [0, 1, 2, 3]), (2, [0, 0, 2, 2]), (4, [0, 0, 0, 0])])
def test_each_release_is_a_batch(B: int, groups: list[int]) -> None:
    """Four clients of one image each share nothing, whatever tensor they stand in together."""
    images, stack = images_and_draws(4, 0)[0], Stack((Mjp(gamma=0.6), LowPass()))
    feed = stack.feed(images, 4, images_and_draws(4, 0)[1], B)
    own = Stack((Mjp(gamma=0.6, per="image"), LowPass())).feed(images, 4, images_and_draws(4, 0)[1], B)
    assert feed.masked_pe is not None
    assert torch.equal(feed.masked_pe, feed.moved)
    assert torch.equal(feed.moved, own.moved[groups])
    assert torch.equal(feed.order, own.order[groups])
    if B == 1:
        assert torch.equal(feed.images, own.images)
    default = stack.feed(images, 4, images_and_draws(4, 0)[1])
    assert torch.equal(default.order, own.order)


def test_embedding_with_e_unk_is_equations_3_to_5(tiny_model: Model) -> None:
    """z₀ = [cls; x̃ⁿE] + Ẽ_pos, Ẽ_pos = E_unk at masked slots and E_pos elsewhere, slot by slot."""
    model = tiny_model()
    images = torch.rand(1, 3, 16, 16, dtype=torch.float64)
    feed = Mjp(gamma=0.5)(images, 4, [Generator().manual_seed(3)])
    assert feed.masked_pe is not None
    z = model.embed(feed.images, feed.masked_pe)
    vit, proj = model.vit, model.vit.patch_embed.proj
    assert vit.pos_embed is not None
    assert vit.cls_token is not None
    assert model.unk_embed is not None
    assert_close(z[0, 0], vit.cls_token[0, 0] + vit.pos_embed[0, 0])
    for n, x in enumerate(patchify(model.normalise(feed.images), 4)[0]):
        pe = model.unk_embed[0, 0] if feed.masked_pe[0, n] else vit.pos_embed[0, 1 + n]
        assert_close(z[0, 1 + n], proj.weight.flatten(1) @ x + proj.bias + pe)


def test_order_of_the_masked_patches_does_not_matter_under_mjp(tiny_model: Model) -> None:
    """With one E_unk at all masked slots, logits are the same whichever way the masked patches are shuffled."""
    model = tiny_model()
    images = torch.rand(1, 3, 16, 16, dtype=torch.float64)
    feed = Mjp(gamma=0.5)(images, 4, [Generator().manual_seed(3)])
    assert feed.masked_pe is not None
    assert not torch.equal(feed.images, images)
    assert_close(model(feed.images, feed.masked_pe), model(images, feed.masked_pe))


def test_e_unk_is_asked_for_where_there_is_none(tiny_model: Model) -> None:
    feed = Mjp(gamma=0.5)(torch.rand(1, 3, 16, 16, dtype=torch.float64), 4, [Generator()])
    with pytest.raises(PrivlabError, match="this model has none"):
        tiny_model(unknown=False)(feed.images, feed.masked_pe)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, r"gamma of mjp must be in \[0, 1\]\. Found 1\.5"),
        ({"masked_pe": "slots"}, "Did you mean slot"),
        ({"per": "images"}, "Unknown per of mjp 'images'. Did you mean image"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        Mjp(**options)


def test_every_defense_fulfils_the_protocol() -> None:
    assert defenses() == DEFENSES
    for name, kind in DEFENSES.items():
        kinds = (Defense, FeatureDefense, GradientDefense)  # on images, on features, or on gradients
        assert sum(isinstance(kind(), protocol) for protocol in kinds) == 1
        assert kind.name == name


@given(blocks=st.floats(0, 1), pixels=st.floats(0, 1), invert=st.booleans(), seed=st.integers(0, 2**31))
def test_one_key_scrambles_all_images(blocks: float, pixels: float, invert: bool, seed: int) -> None:
    """x̃_i = P_π x_σ(i), with σ and π the same for all images and π the same for all blocks, and as many moved."""
    images, stack = images_and_draws(3, seed)[0], Stack((BlockScrambling(blocks, pixels, invert),))
    feed, again = (stack.feed(images[chosen], 4, [], 1, Generator().manual_seed(seed)) for chosen in ([0, 1, 2], [2]))
    assert torch.equal(feed.images[2:], again.images)
    assert torch.equal(feed.order, feed.order[:1].expand(3, -1))
    assert feed.moved.sum(1).tolist() == [round(blocks * 16)] * 3
    assert torch.equal(feed.order[~feed.moved], torch.arange(16).expand(3, -1)[~feed.moved])
    own, sent = (patchify(each, 4).flatten(0, 1) for each in (permute(images, feed.order, 4), feed.images))
    source = torch.cdist(sent.mT, own.mT).argmin(1) if not invert else None
    if source is not None:
        assert torch.equal(own[:, source], sent)
        assert int((source != torch.arange(48)).sum()) <= round(pixels * 48)
    else:
        either = torch.stack([own, 1 - own], 1)
        near = (sent[:, None, :, None] - either[:, :, None]).abs().amax(0).amin(1)
        assert (near == 0).sum() >= 24, "every value stands somewhere, or its negative does"
        sign = (sent[:, None, :, None] - either[:, :, None]).abs().amax(0).amin(2).argmin(0)
        assert sign.sum() == 24


def test_a_client_without_a_key_is_refused() -> None:
    with pytest.raises(PrivlabError, match="'block-scrambling'"):
        Stack((BlockScrambling(),)).feed(*images_and_draws(1, 0)[:1], 4, images_and_draws(1, 0)[1])
    with pytest.raises(PrivlabError, match=r"block-scrambling.*\[0.*1\].*2"):
        BlockScrambling(pixels=2.0)

"""What the feature defenses send: permutations lose nothing and change no prediction, the others say what they lose."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.defenses import (
    BatchShuffle,
    Blur,
    ColumnPermutation,
    CutMix,
    GaussianNoise,
    Jigsaw,
    LowPass,
    Mjp,
    RowPermutation,
)
from privlab.patches import bits, draw_orders, permute_features, restore_features
from privlab.release import feature_capabilities, observe_features, predictions, send
from privlab.threat import Capability, Defense, Draws, FeatureDefense, Feed, Sent, Stack

B, T, D = 3, 6, 8
PERMUTATIONS = [
    RowPermutation(),
    RowPermutation(per="image"),
    RowPermutation(class_token=False),
    ColumnPermutation(),
    BatchShuffle(),
]


def draws(seed: int = 0, b: int = B) -> Draws:
    made = [torch.Generator().manual_seed(seed * 100 + i) for i in range(b + 2)]
    return Draws(made[2:], made[0], made[1])


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 2**31), st.booleans(), st.booleans(), st.booleans())
def test_a_gather_is_the_product_with_permutation_matrices(seed: int, rows: bool, columns: bool, each: bool) -> None:
    """(P_R Z P_C) by index equals the matrices of Eq. 2 and 5, and restoring inverts it."""
    draw = torch.Generator().manual_seed(seed)
    Z = tokens(seed % 97)
    r = draw_orders(T, [draw] * (B if each else 1)) if rows else None
    c = draw_orders(D, [draw])[0] if columns else None
    order = None if r is None else r if each else r[0]
    permuted = permute_features(Z, order, c)
    P_R = torch.eye(T, dtype=Z.dtype) if r is None else torch.eye(T, dtype=Z.dtype)[r]
    P_C = torch.eye(D, dtype=Z.dtype) if c is None else torch.eye(D, dtype=Z.dtype)[:, c]
    assert torch.equal(permuted, P_R @ Z @ P_C)
    assert torch.equal(restore_features(permuted, order, c), Z)


@pytest.mark.parametrize("n", [1, 2, 7, 12])
def test_bits_are_those_of_the_number_of_orders(n: int) -> None:
    assert bits(n) == pytest.approx(math.log2(math.factorial(n)))
    assert bits(n, 3) == pytest.approx(math.log2(math.factorial(n) * 6))


def test_the_key_sizes_that_the_literature_states() -> None:
    assert round(bits(64, 12)) == 325
    assert round(bits(768)) == 6259


@given(st.integers(0, 2**20), st.lists(st.sampled_from(PERMUTATIONS), max_size=4))
def test_the_client_undoes_any_stack_of_permutations(seed: int, parts: list[FeatureDefense]) -> None:
    Z = tokens(seed % 89)
    sent = Stack(tuple(parts)).send(Z, 1, draws(seed))
    assert torch.equal(sent.restore(sent.features), Z)
    source = Z.flatten(0, 1)[sent.source]
    assert torch.equal(sent.features, source if sent.columns is None else source[..., sent.columns])
    assert torch.equal(sent.source.flatten().sort().values, torch.arange(B * T))


def test_rows_are_shared_by_the_batch_or_drawn_for_each_image() -> None:
    shared = RowPermutation().send(Sent.plain(tokens(), 1), draws())
    own = RowPermutation(per="image").send(Sent.plain(tokens(), 1), draws())
    assert (shared.source % T == shared.source[0]).all()
    assert not (own.source % T == own.source[0]).all()
    assert shared.key_bits == own.key_bits == pytest.approx(bits(T))


def test_prefix_tokens_stay_where_they_are_told_to() -> None:
    fixed = RowPermutation(class_token=False).send(Sent.plain(tokens(), 2), draws())
    assert torch.equal(fixed.features[:, :2], tokens()[:, :2])
    assert fixed.key_bits == pytest.approx(bits(T - 2))
    shuffled = BatchShuffle().send(Sent.plain(tokens(), 2), draws())
    assert torch.equal(shuffled.features[:, :2], tokens()[:, :2])
    assert len((shuffled.source // T)[0].unique()) > 1
    assert torch.equal(BatchShuffle(share=0.0).send(Sent.plain(tokens(), 2), draws()).features, tokens())


def test_the_column_key_lasts_and_the_row_orders_do_not() -> None:
    one, other = (
        Draws(draws(1).images, draws(1).batch, draws(7).model),
        Draws(draws(2).images, draws(2).batch, draws(7).model),
    )
    first, second = (ColumnPermutation().send(Sent.plain(tokens(), 1), d).columns for d in (one, other))
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    rows = [RowPermutation().send(Sent.plain(tokens(), 1), d).source for d in (one, other)]
    assert not torch.equal(*rows)


def test_noise_has_the_stated_deviation_and_follows_the_image() -> None:
    Z = torch.zeros(2, 50, 40, dtype=torch.float64)
    first = GaussianNoise(std=0.3).send(Sent.plain(Z, 1), draws(3, 2)).features
    assert first.std().item() == pytest.approx(0.3, rel=0.05)
    swapped = draws(3, 2)
    again = GaussianNoise(std=0.3).send(Sent.plain(Z, 1), Draws(swapped.images[::-1], swapped.batch, swapped.model))
    assert torch.equal(again.features, first.flip(0))


def test_low_pass_keeps_what_is_slow_and_drops_what_is_fast() -> None:
    """Waves of 1 and 8 cycles over 32 pixels: 0.031 and 0.25 cycles per pixel."""
    n = torch.arange(32, dtype=torch.float64)
    slow, fast = (0.2 * torch.cos(2 * torch.pi * k * n / 32) for k in (1, 8))
    images = (0.5 + slow + fast).expand(1, 3, 32, 32)
    kept = LowPass(radius=0.05)(images, 4, draws(0, 1).images).images
    assert_close(kept, (0.5 + slow).expand(1, 3, 32, 32))
    assert_close(LowPass(radius=0.71)(images, 4, draws(0, 1).images).images, images)


def test_blur_is_a_gaussian_average() -> None:
    point = torch.zeros(1, 3, 21, 21)
    point[..., 10, 10] = 1
    blurred = Blur(sigma=1.5)(point, 7, draws(0, 1).images).images
    assert blurred.sum().item() == pytest.approx(3, rel=1e-4)
    ratio = (blurred[0, 0, 10, 12] / blurred[0, 0, 10, 10]).item()
    assert ratio == pytest.approx(math.exp(-4 / (2 * 1.5**2)), rel=1e-3)


def test_cutmix_pastes_a_rectangle_of_another_image() -> None:
    images = torch.arange(3.0).div(2).view(3, 1, 1, 1).expand(3, 3, 16, 16)
    mixed = CutMix()(images, 4, draws(5).images).images
    foreign = (mixed != images).all(1)
    assert foreign.any()
    for own, mask, image in zip(images, foreign, mixed, strict=True):
        rows, columns = mask.any(1), mask.any(0)
        assert torch.equal(mask, rows[:, None] & columns)  # a rectangle
        assert len(image[:, mask].unique()) <= 1
        assert torch.equal(image[:, ~mask], own[:, ~mask])
    alone = CutMix()(images[:1], 4, draws(5, 1).images).images
    assert torch.equal(alone, images[:1])


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (RowPermutation, {"per": "imag"}, "Unknown per of row-permutation 'imag'. Did you mean image"),
        (BatchShuffle, {"share": 1.5}, r"share of batch-shuffle must be in \[0, 1\]. Found 1.5"),
        (GaussianNoise, {"std": -1.0}, "std of gaussian-noise must be at least 0 and finite. Found -1.0"),
        (GaussianNoise, {"std": math.inf}, "Found inf"),
        (LowPass, {"radius": 0.0}, r"radius of low-pass must be in \(0, 1\]. Found 0.0"),
        (Blur, {"sigma": 0.0}, "sigma of blur must be above 0"),
        (CutMix, {"alpha": -1.0}, "alpha of cutmix must be above 0"),
    ],
)
def test_options_out_of_range_are_refused(kind: type, options: dict[str, object], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        kind(**options)


def test_a_blur_wider_than_the_image_is_refused() -> None:
    with pytest.raises(PrivlabError, match=r"5.*16.*pixels.*9\.0"):
        Blur(sigma=9.0)(torch.rand(1, 3, 16, 16), 4, draws(0, 1).images)


def test_stacked_image_defenses_compose() -> None:
    images = torch.rand(B, 3, 16, 16, dtype=torch.float64)
    one, two = draws(1), draws(1)
    feed = Stack((Jigsaw(gamma=0.9), Jigsaw(gamma=0.9))).feed(images, 4, one.images)
    first = Jigsaw(gamma=0.9)(images, 4, two.images)
    second = Jigsaw(gamma=0.9)(first.images, 4, two.images)
    assert torch.equal(feed.images, second.images)
    assert torch.equal(feed.order, first.order.gather(1, second.order))
    masked = Stack((Mjp(gamma=0.5), LowPass())).feed(images, 4, draws(2).images)
    assert masked.masked_pe is not None
    assert torch.equal(masked.masked_pe, masked.moved)


@pytest.mark.parametrize("parts", [(part,) for part in PERMUTATIONS[:4]] + [(RowPermutation(), ColumnPermutation())])
def test_row_and_column_permutations_cost_no_accuracy(
    parts: tuple[Defense | FeatureDefense, ...], tiny_model: Callable
) -> None:
    """Theorems 4.1 and 4.4: what the client computes of the returned features is what it would compute alone."""
    model = tiny_model()
    images = torch.rand(B, 3, 16, 16, dtype=torch.float64)
    sent = send(model, Feed.undefended(images, 4), Stack(parts), draws())
    assert_close(predictions(model, sent), model(images))


def test_batch_shuffle_mixes_the_images_in_attention(tiny_model: Callable) -> None:
    model = tiny_model()
    images = torch.rand(B, 3, 16, 16, dtype=torch.float64)
    sent = send(model, Feed.undefended(images, 4), Stack((BatchShuffle(),)), draws())
    assert (predictions(model, sent) - model(images)).abs().max() > 1e-3


def test_what_the_server_is_granted(tiny_model: Callable) -> None:
    model, none = tiny_model(), tiny_model(pos_embed="none", class_token=False, global_pool="avg")
    with_pe = feature_capabilities(model, 8)
    assert {Capability.POSITION_EMBEDDINGS, Capability.CLASS_TOKEN, Capability.AUXILIARY_IMAGES} <= with_pe
    assert not {Capability.POSITION_EMBEDDINGS, Capability.CLASS_TOKEN} & feature_capabilities(none, 8)
    assert Capability.AUXILIARY_IMAGES not in feature_capabilities(model, 0)


def test_an_observation_of_features_has_no_field_for_image_or_order(tiny_model: Callable) -> None:
    model = tiny_model()
    images = torch.rand(B, 3, 16, 16, dtype=torch.float64)
    stack = Stack((RowPermutation(),))
    sent = send(model, Feed.undefended(images, 4), stack, draws())
    seen = observe_features(model, sent, stack, images[:0])
    assert set(vars(seen)) == {"model", "features", "defense", "public", "grants", "cut_layer"}
    assert seen.features is sent.features
    assert seen.defense == (RowPermutation(),)

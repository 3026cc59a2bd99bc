"""Patches, permutations and the block-wise mask as properties."""

import hashlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator
from torch.testing import assert_close

from privlab.base import PrivlabError, draw_for
from privlab.patches import blockwise_mask, inverse, patchify, permute, shuffle_within, slots_to_pixels, unpatchify

SIDES = st.integers(1, 6)


@given(rows=SIDES, columns=SIDES, patch=st.integers(1, 5), channels=st.integers(1, 4))
def test_unpatchify_inverts_patchify(rows: int, columns: int, patch: int, channels: int) -> None:
    images = torch.rand(2, channels, rows * patch, columns * patch, dtype=torch.float64)
    assert_close(unpatchify(patchify(images, patch), images.shape[1:]), images, rtol=0, atol=0)


def test_patches_have_the_order_of_a_convolutions_weight() -> None:
    """W x_n with x_n from `patchify` is what the patch projection computes."""
    images, weight = torch.rand(2, 3, 8, 12, dtype=torch.float64), torch.rand(5, 3, 4, 4, dtype=torch.float64)
    convolved = torch.nn.functional.conv2d(images, weight, stride=4).flatten(2).mT
    assert_close(patchify(images, 4) @ weight.flatten(1).T, convolved)


def test_sides_that_are_no_multiples_are_refused() -> None:
    with pytest.raises(PrivlabError, match=r"4.*9×8"):
        patchify(torch.rand(1, 3, 9, 8), 4)


@given(seed=st.integers(0, 2**31))
def test_permuting_back_restores_the_image(seed: int) -> None:
    images = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    order = torch.stack([torch.randperm(16, generator=Generator().manual_seed(seed + i)) for i in range(2)])
    assert_close(permute(permute(images, order, 2), inverse(order), 2), images, rtol=0, atol=0)


def test_order_names_the_patch_that_a_slot_holds() -> None:
    images = torch.rand(1, 3, 4, 4)
    order = torch.tensor([[2, 0, 3, 1]])
    assert_close(patchify(permute(images, order, 2), 2)[0, 0], patchify(images, 2)[0, 2], rtol=0, atol=0)


@given(height=st.integers(2, 16), width=st.integers(2, 16), ratio=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_mask_never_exceeds_its_share(height: int, width: int, ratio: float, seed: int) -> None:
    mask = blockwise_mask((height, width), ratio, Generator().manual_seed(seed))
    assert int(mask.sum()) <= int(ratio * height * width)


@pytest.mark.parametrize("ratio", [0.03, 0.15, 0.27, 0.5, 0.9, 1.0])
def test_mask_comes_close_to_its_share_of_a_vits_grid(ratio: float) -> None:
    """On 14 × 14 patches, on average over draws: to two patches and two in a hundred, never above."""
    counts = [int(blockwise_mask((14, 14), ratio, Generator().manual_seed(seed)).sum()) for seed in range(200)]
    assert 0.98 * int(ratio * 196) - 2 <= sum(counts) / len(counts) <= int(ratio * 196)


def test_mask_is_made_of_blocks() -> None:
    """A masked patch has more masked neighbours than one drawn without blocks."""
    masks = [blockwise_mask((14, 14), 0.27, Generator().manual_seed(seed)).view(14, 14) for seed in range(50)]
    together = torch.stack(masks).double()
    neighbours = (together[:, 1:] * together[:, :-1]).mean() / together.mean()
    assert neighbours > 2 * 0.27


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan])
def test_ratio_outside_of_its_range_is_refused(ratio: float) -> None:
    with pytest.raises(PrivlabError, match=r"γ.*\[0.*1\].*Found"):
        blockwise_mask((4, 4), ratio, Generator())


@given(seed=st.integers(0, 2**31), ratio=st.floats(0, 1))
def test_shuffle_stays_within_the_mask(seed: int, ratio: float) -> None:
    draw = Generator().manual_seed(seed)
    mask = torch.rand(30, generator=draw) < ratio
    order = shuffle_within(mask, draw)
    assert_close(order.sort().values, torch.arange(30))
    assert_close(order[~mask], torch.arange(30)[~mask])


def test_slots_widen_to_pixels() -> None:
    pixels = slots_to_pixels(torch.tensor([[True, False, False, False, True, False]]), (2, 3), 2)
    want = torch.zeros(1, 4, 6, dtype=torch.bool)
    want[0, :2, :2] = True
    want[0, 2:, 2:4] = True
    assert_close(pixels, want)


def test_draws_are_keyed_by_all_that_names_them() -> None:
    sha = hashlib.sha256(b"image").hexdigest()
    keys = [(0, sha, "defense", 0), (1, sha, "defense", 0), (0, sha[::-1], "defense", 0), (0, sha, "control", 0)]
    keys.append((0, sha, "defense", 1))
    drawn = [torch.rand(4, generator=draw_for(*key)) for key in keys]
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(keys)
    assert_close(torch.rand(4, generator=draw_for(*keys[0])), drawn[0], rtol=0, atol=0)

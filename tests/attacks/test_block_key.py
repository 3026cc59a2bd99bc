"""`block-key` and `_value_orders` against exact answers: keys that the test drew."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor

from privlab.attacks.gradients.block_key import (
    TURNS,
    BlockKey,
    _layout,
    _likelihood,
    _negative_values,
    _public_covariance,
    _turned,
    _value_orders,
)
from privlab.attacks.gradients.patch_gradient import PatchGradient
from privlab.base import PrivlabError
from privlab.defenses import BlockScrambling
from privlab.images import open_images
from privlab.metrics import psnr
from privlab.release import observe
from privlab.threat import Stack
from privlab.victims import VictimModel, victim

SIDE, CHANNELS = 8, 3


def smooth_patches(count: int) -> Tensor:
    """Return patches of a Gaussian field: correlations fall with the distance, and channels are alike."""
    places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).double()
    near = (-torch.cdist(places, places) / 12).exp()
    colours = torch.tensor([[1.0, 0.8, 0.6], [0.8, 1.0, 0.85], [0.6, 0.85, 1.0]]).double()
    root = torch.linalg.cholesky(torch.kron(colours, near))
    drawn = torch.randn(count, len(root), generator=Generator().manual_seed(0), dtype=torch.float64)
    return drawn @ root.mT


def squares() -> set[tuple[int, ...]]:
    """Return the pixels of a channel, in the order in which each symmetry of the square puts them."""
    grid = torch.arange(SIDE**2).double().view(1, 1, SIDE, SIDE)
    return {tuple(_turned(grid, *turn).flatten().long().tolist()) for turn in TURNS}


def test_the_square_has_eight_symmetries() -> None:
    assert len(squares()) == 8


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_the_order_of_values_is_found_up_to_a_symmetry(channels: int) -> None:
    X = smooth_patches(6000)[:, : channels * SIDE**2]
    key = torch.randperm(X.shape[1], generator=Generator().manual_seed(1))
    found = _value_orders(X[:3000, key], X[3000:].mT.cov(), channels)
    assert len(found) == (6 if channels == 3 else 1)
    told = [key[order].view(channels, -1) for order in found]
    assert all(tuple((channel % SIDE**2).tolist()) in squares() for each in told for channel in each)
    assert len({tuple((channel % SIDE**2).tolist()) for channel in told[0]}) == 1, "all channels are turned alike"
    names = {tuple((each[:, 0] // SIDE**2).tolist()) for each in told}
    assert tuple(range(channels)) in names
    assert len(names) == len(found)


def test_a_channel_fits_public_patches_better_than_a_mixture_of_channels() -> None:
    """Of values that hardly vary together, what each has with itself is no evidence: it is 1 in every layout."""
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).double()
    like = (-torch.cdist(places, places) / 4).exp()
    C = torch.kron(torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double(), like)
    key = torch.randperm(16, generator=Generator().manual_seed(0))
    mixed = torch.cat([torch.arange(8), torch.arange(24, 32)])
    own, other = (_layout(C[group][:, group], like)[0] for group in (key, mixed))
    assert own == pytest.approx(1, abs=1e-9)
    assert other < 0.9


def test_negative_values_are_found_up_to_all_of_them() -> None:
    X, wrong = smooth_patches(500), torch.zeros(CHANNELS * SIDE**2, dtype=torch.bool)
    wrong[::3] = True
    assert torch.equal(_negative_values(torch.where(wrong, 1 - X, X)), wrong)
    assert not _negative_values(X).any()
    assert torch.equal(_negative_values(torch.where(wrong, X, 1 - X)), wrong)


def test_labels_decide_where_they_are_known(tiny_model: Callable[..., VictimModel]) -> None:
    model, images = tiny_model(), torch.rand(4, 3, 16, 16, generator=Generator().manual_seed(2)).double()
    with torch.no_grad():
        found = model(images).log_softmax(1)
        wrong, right = found.argmin(1), found.argmax(1)
        some = torch.where(torch.arange(4) < 3, right, wrong)
        assert _likelihood(model, images) == pytest.approx((1, float(found.amax(1).mean())))
        assert _likelihood(model, images, wrong) == pytest.approx((0, float(found.amin(1).mean())))
        assert _likelihood(model, images, some)[0] == 0.75


def test_a_field_stands_in_where_no_photograph_is_left(tiny_model: Callable[..., VictimModel]) -> None:
    model = tiny_model()
    seen = observe(model, torch.rand(1, 3, 16, 16).double(), torch.tensor([1]), BlockKey.parameters)
    field = _public_covariance(replace(seen, photographs=()))
    assert field.shape == (48, 48)
    assert field[0, [0, 1, 4, 5]].tolist() == pytest.approx([1, 0.9, 0.9, 0.9**2**0.5])
    assert not field[0, 16:].any(), "channels are laid out one by one"
    assert not torch.allclose(_public_covariance(seen), field)


@pytest.mark.slow
def test_photographs_under_one_key_come_back_whole(shared: Callable[[str], Path]) -> None:
    base = victim("cifar_vit")
    pictures = open_images(shared("data/imagenet_samples"), limit=50, offset=3, every=10)
    images = torch.stack([base.preprocessing(image.pixels) for image in pictures if image.pixels])
    stack = Stack((BlockScrambling(),))
    feed = stack.feed(images, base.model.patch, [], key=Generator().manual_seed(3))
    names = (*BlockKey.parameters, *BlockKey.if_released)
    seen = observe(base.model, feed, base.model(images).argmax(1), names, stack.parts)
    assert psnr(BlockKey()(seen).images, images).min() > 100


def test_a_grid_that_is_not_square_is_refused(tiny_model: Callable[..., VictimModel]) -> None:
    model = tiny_model(img_size=(16, 8))
    seen = observe(model, torch.rand(2, 3, 16, 8).double(), torch.tensor([1, 2]), BlockKey.parameters)
    with pytest.raises(PrivlabError, match=r"square.*16.*8"):
        BlockKey()(seen)
    with pytest.raises(PrivlabError, match=r"block-key.*0.*-1"):
        BlockKey(rounds=-1)


@pytest.mark.slow
@pytest.mark.parametrize("invert", [False, True])
def test_photographs_come_back_but_for_a_mirror(shared: Callable[[str], Path], invert: bool) -> None:
    base = victim("vit_ti", weights=shared("weights/vit_tiny_patch16_224.safetensors"), img_size=160)
    pictures = open_images(shared("data/imagenet_samples"), limit=20)
    images = torch.stack([base.preprocessing(image.pixels) for image in pictures if image.pixels])
    stack = Stack((BlockScrambling(invert=invert),))
    feed = stack.feed(images, 16, [], key=Generator().manual_seed(3))
    seen = observe(base.model, feed, base.model(images).argmax(1), BlockKey.parameters, stack.parts)
    both = [BlockKey(mirror=mirror)(seen).images for mirror in (False, True)]
    assert torch.equal(both[0], both[1].flip(3))
    assert max(float(psnr(each, images).min()) for each in both) > 100
    assert psnr(PatchGradient()(seen), images).max() < 25

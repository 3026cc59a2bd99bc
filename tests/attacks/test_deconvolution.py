"""`deconvolution` against filters with known answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from torch import Generator, Tensor
from torchvision.transforms.v2.functional import gaussian_blur

from privlab.attacks.features.deconvolution import Deconvolution, _filtered, linear_filter
from privlab.attacks.features.feature_inversion import LeastSquares
from privlab.defenses import Blur, CutMix, LowPass
from privlab.metrics import psnr
from privlab.release import feature_capabilities, observe_features, send
from privlab.threat import Capability, Defense, Draws, Effects, FeatureObservation, Feed, Stack
from privlab.victims import VictimModel

Photographs = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Tint:
    """A filter that treats channels unlike."""

    name: ClassVar[str] = "tint"
    paper: ClassVar[str] = "none"
    acts_as: ClassVar[Effects] = Effects(other=True)

    def __call__(self, images: Tensor, patch: int, draws: Sequence[Generator]) -> Feed:
        """Return the tinted images."""
        return Feed.undefended(images * torch.tensor([1.0, 0.5, 0.2]).to(images)[:, None, None], patch)


@dataclass(frozen=True)
class Halved:
    """A filter of every channel that counts its calls."""

    name: ClassVar[str] = "halved"
    paper: ClassVar[str] = "none"
    acts_as: ClassVar[Effects] = Effects(other=True)

    calls: list[int] = field(compare=False)
    factor: float = 0.5

    def __call__(self, images: Tensor, patch: int, draws: Sequence[Generator]) -> Feed:
        """Return the darker images."""
        self.calls.append(len(images))
        return Feed.undefended(images * self.factor, patch)


def observed(model: VictimModel, images: Tensor, public: Tensor, defense: Defense) -> FeatureObservation:
    stack = Stack((defense,))
    draws = [torch.Generator().manual_seed(i) for i in range(len(images))]
    feed = stack.feed(images, model.patch, draws)
    sent = send(model, feed, stack, Draws(draws, torch.Generator(), torch.Generator()))
    return observe_features(model, sent, stack, public)


@pytest.fixture
def model(tiny_model: Callable[..., VictimModel]) -> VictimModel:
    return tiny_model(img_size=16).double()


def test_a_narrow_blur_is_undone_where_least_squares_returns_the_blurred_image(
    model: VictimModel, photographs: Photographs
) -> None:
    images, public = photographs(3, 16).double(), photographs(6, 16).double()[3:]
    seen = observed(model, images, public, Blur(sigma=0.6))
    made = Deconvolution()(seen).images
    assert (psnr(made, images) > 60).all()
    assert (psnr(LeastSquares()(seen).images, images) < 40).all()


def test_the_filter_is_the_matrix_of_the_defense(model: VictimModel, photographs: Photographs) -> None:
    images = photographs(2, 16).double()
    B = linear_filter(observed(model, images, images, Blur(sigma=1.0)))
    blurred = gaussian_blur(images, [7, 7], [1.0, 1.0])
    assert torch.allclose((images.flatten(2) @ B.mT).view_as(images), blurred, atol=1e-9)


def test_a_filter_is_measured_once_for_all_batches(model: VictimModel, photographs: Photographs) -> None:
    images, counted = photographs(4, 16).double(), Halved(calls=[])
    first, again = (linear_filter(observed(model, part, images, counted)) for part in (images[:2], images[2:]))
    once = len(counted.calls) - 2  # each observation calls it too
    assert torch.equal(first, again)
    assert torch.allclose(first, torch.eye(256, dtype=torch.float64) / 2)
    linear_filter(observed(model, images, images, replace(counted, factor=0.25)))
    assert len(counted.calls) == 2 * once + 3


@dataclass(frozen=True)
class Mixed:
    """A filter with an option that cannot be hashed: a mean of the image and its blur."""

    name: ClassVar[str] = "mixed"
    paper: ClassVar[str] = "none"
    acts_as: ClassVar[Effects] = Effects(other=True)

    weights: list[float]

    def __call__(self, images: Tensor, patch: int, draws: Sequence[Generator]) -> Feed:
        """Return the weighted mean."""
        mixed = self.weights[0] * images + self.weights[1] * gaussian_blur(images, [7, 7], [1.0, 1.0])
        return Feed.undefended(mixed, patch)


def test_a_filter_that_cannot_be_hashed_is_measured_too(model: VictimModel, photographs: Photographs) -> None:
    images = photographs(2, 16).double()
    plain = observed(model, images, images, Blur(sigma=1.0))
    B = linear_filter(replace(plain, defense=(Mixed([0.25, 0.75]),)))
    assert torch.allclose(B, 0.25 * torch.eye(256, dtype=torch.float64) + 0.75 * linear_filter(plain), atol=1e-9)


@pytest.mark.parametrize("defense", [CutMix(), Tint()])
def test_what_is_no_filter_of_each_channel_is_left_alone(
    model: VictimModel, photographs: Photographs, defense: Defense
) -> None:
    images = photographs(2, 16).double()
    assert torch.equal(linear_filter(observed(model, images, images, defense)), torch.eye(256, dtype=torch.float64))


def test_clipped_images_do_not_explode_and_removed_frequencies_stay_lost(
    model: VictimModel, photographs: Photographs
) -> None:
    images = (photographs(6, 16).double() > 0.5).double()  # black and white: filtered images go beyond, and are clipped
    images, public = images[:3], images[3:]
    made = Deconvolution()(observed(model, images, public, LowPass(radius=0.3))).images
    seen = LowPass(radius=0.3)(images, 4, []).images
    assert (psnr(made, images) > psnr(seen, images) - 1).all()
    assert (psnr(made, images) < 40).all()


def test_what_clipping_adds_to_filtered_public_images_counts_as_error(
    model: VictimModel, photographs: Photographs
) -> None:
    public = (photographs(6, 16).double() > 0.5).double()
    seen = observed(model, public[:3], public[3:], LowPass(radius=0.3))
    B = linear_filter(seen)
    clipped = LowPass(radius=0.3)(public[3:], 4, []).images.flatten(2) - public[3:].flatten(2) @ B.mT
    _, deviation = _filtered(seen, B)
    assert deviation == pytest.approx(float(clipped.square().mean().sqrt()), rel=1e-6)
    assert deviation > 1e-3


def test_a_filter_of_small_images_grants_what_the_attack_needs(tiny_model: Callable[..., VictimModel]) -> None:
    small, large = tiny_model(img_size=16), tiny_model(img_size=80)
    assert Capability.FILTERED_IMAGES in feature_capabilities(small, 1, (Blur(sigma=1.0),))
    assert Capability.FILTERED_IMAGES not in feature_capabilities(large, 1, (Blur(sigma=1.0),))
    assert Capability.FILTERED_IMAGES not in feature_capabilities(small, 1)

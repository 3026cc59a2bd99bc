"""`map-inversion` against noise of a known deviation."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from privlab.attacks import LeastSquares, MapInversion, PEAssignment
from privlab.attacks.rows import known_tokens
from privlab.attacks.solvers import colour_gradients
from privlab.base import PrivlabError, PrivlabWarning
from privlab.defenses import GaussianNoise, RowPermutation
from privlab.metrics import psnr
from privlab.patches import patchify, unpatchify
from privlab.release import observe_features, send
from privlab.threat import Capability, Draws, FeatureDefense, FeatureObservation, Feed, Stack
from privlab.victims import VictimModel

Photographs = Callable[[int, int], Tensor]


@pytest.fixture
def model(tiny_model: Callable[..., VictimModel]) -> VictimModel:
    return tiny_model(img_size=16).double()


def observed(
    model: VictimModel, images: Tensor, public: Tensor, std: float, *more: FeatureDefense
) -> FeatureObservation:
    stack = Stack((GaussianNoise(std=std), *more))
    draws = [torch.Generator().manual_seed(i) for i in range(len(images))]
    sent = send(model, Feed.undefended(images, model.patch), stack, Draws(draws, torch.Generator(), torch.Generator()))
    return observe_features(model, sent, stack, public)


def density(model: VictimModel, X: Tensor, seen: FeatureObservation, std: float, attack: MapInversion) -> Tensor:
    """The negative logarithm of the posterior density of each image, pixel by pixel."""
    prefix, pe = known_tokens(model)
    proj = model.vit.patch_embed.proj
    assert proj.bias is not None
    off = X @ proj.weight.flatten(1).mT + proj.bias - (seen.features[:, len(prefix) :] - pe)
    precision = torch.linalg.inv(colour_gradients(model, seen.public))
    found = []
    for image, misfit in zip(unpatchify(X, model.image_shape), off, strict=True):
        total = misfit.square().sum() / (2 * std**2)
        _, height, width = image.shape
        for i in range(height):
            for j in range(width):
                for k, n in ((i + 1, j), (i, j + 1)):
                    if k < height and n < width:
                        δ = image[:, k, n] - image[:, i, j]
                        total = total + attack.strength * (attack.epsilon**2 + δ @ precision @ δ).sqrt()
        found.append(total)
    return torch.stack(found)


def patches(model: VictimModel, images: Tensor) -> Tensor:
    return patchify(model.normalise(images), model.patch)


@pytest.mark.slow
def test_the_image_has_the_greatest_posterior_density(model: VictimModel, photographs: Photographs) -> None:
    """Nothing near has more: not the start, and not what is a little off in any of some random directions."""
    images = 0.3 + 0.4 * photographs(6, 16).double()  # far from 0 and 1, where images are clipped
    attack = MapInversion(rounds=40, steps=60)
    seen = observed(model, images[:2], images[2:], 0.05)
    X = patches(model, attack(seen).images)
    best = density(model, X, seen, 0.05, attack)
    assert (best < density(model, patches(model, LeastSquares()(seen).images), seen, 0.05, attack) - 1).all()
    X.requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(density(model, X, seen, 0.05, attack).sum(), [X])
    assert slope.abs().max() < 1e-3 * slope_at_start(model, seen, attack)


def slope_at_start(model: VictimModel, seen: FeatureObservation, attack: MapInversion) -> float:
    X = patches(model, LeastSquares()(seen).images).requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(density(model, X, seen, 0.05, attack).sum(), [X])
    return float(slope.abs().max())


@pytest.mark.parametrize("std", [0.05, 0.2])
def test_all_of_an_image_tells_more_than_its_patches_one_by_one(
    model: VictimModel, photographs: Photographs, std: float
) -> None:
    images = photographs(8, 16).double()
    seen = observed(model, images[:4], images[4:], std)
    found, before = (psnr(attack(seen).images, images[:4]) for attack in (MapInversion(), LeastSquares()))
    assert found.mean() > before.mean() + 0.5


def test_without_noise_it_is_least_squares(model: VictimModel, photographs: Photographs) -> None:
    images = photographs(4, 16).double()
    seen = observed(model, images[:2], images[2:], 0.0)
    assert torch.equal(MapInversion()(seen).images, LeastSquares()(seen).images)


def test_moved_rows_are_placed(model: VictimModel, photographs: Photographs) -> None:
    """By the position embeddings, where there are some."""
    images = photographs(8, 16).double()
    noisy = observed(model, images[:4], images[4:], 0.1, RowPermutation())
    assert_close(MapInversion()(noisy).rows, PEAssignment()(noisy).rows)
    assert psnr(MapInversion()(noisy).images, images[:4]).mean() > psnr(PEAssignment()(noisy).images, images[:4]).mean()
    plain = observed(model, images[:4], images[4:], 0.0, RowPermutation())
    assert_close(MapInversion()(plain).images, PEAssignment()(plain).images, rtol=0, atol=0)
    unplaced = replace(noisy, grants=noisy.grants - {Capability.POSITION_EMBEDDINGS})
    with pytest.warns(PrivlabWarning, match="unmoved"):
        assert_close(MapInversion()(unplaced).rows, LeastSquares()(unplaced).rows)


@pytest.mark.parametrize("options", [{"rounds": -1}, {"steps": 0}, {"strength": 0.0}, {"epsilon": float("inf")}])
def test_numbers_out_of_range_are_told(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(PrivlabError, match=f"{name} of map-inversion must be"):
        MapInversion(**options)  # pyright: ignore[reportArgumentType]

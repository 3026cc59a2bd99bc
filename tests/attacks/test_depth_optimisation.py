"""`depth-optimisation`: its objective as it is written, its linear start by numpy, and what it adds to the start."""

from collections.abc import Callable
from dataclasses import replace
from math import cos, pi
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks.features.depth_optimisation import MOST_IMAGES, RIDGE, DepthOptimisation, _fit_rows
from privlab.attacks.solvers import patch_statistics
from privlab.base import PrivlabError, PrivlabWarning
from privlab.defenses import RowPermutation
from privlab.metrics import psnr
from privlab.patches import patchify
from privlab.release import observe_features, send
from privlab.threat import Draws, FeatureObservation, Stack
from privlab.victims import VictimModel

Make = Callable[..., VictimModel]

DEPTH = 2


def seen_of(model: VictimModel, images: Tensor, public: Tensor, cut_layer: int, *parts: Any) -> FeatureObservation:
    stack, made = Stack(parts), [Generator().manual_seed(i) for i in range(len(images) + 2)]
    draws = Draws(images=made[2:], batch=made[0], model=made[1])
    sent = send(model, stack.feed(images, model.patch, draws.images), stack, draws, cut_layer)
    return observe_features(model, sent, stack, public, cut_layer)


@pytest.mark.parametrize("cut_layer", [0, pytest.param(1, marks=pytest.mark.slow), DEPTH])
def test_the_search_improves_on_its_start_at_any_depth(tiny_model: Make, crops: Tensor, cut_layer: int) -> None:
    """A square projection loses nothing; the weights of the blocks are enlarged, so that these are far from linear."""
    model, private = tiny_model(embed_dim=48, depth=DEPTH, num_heads=4), crops[:6].double()
    for parameter in model.vit.blocks.parameters():
        parameter.data *= 2
    seen = seen_of(model, private, crops[8:].double(), cut_layer)
    attack = DepthOptimisation(prior=1e-3, tv=1e-3)
    start, end = (psnr(replace(attack, steps=steps)(seen).images, private).mean() for steps in (0, 200))
    assert end > start + 8


@pytest.mark.parametrize("cut_layer", [0, DEPTH])
def test_it_takes_the_steps_of_its_objective(tiny_model: Make, crops: Tensor, cut_layer: int) -> None:
    vit = tiny_model(embed_dim=32, depth=DEPTH).vit
    model = VictimModel(vit, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)).double().requires_grad_(False)
    public = crops[8:20].double()
    seen = seen_of(model, crops[:3].double(), public, cut_layer)
    attack = DepthOptimisation(steps=5, learning_rate=0.03, prior=0.7, tv=2.0)
    rows = model.client_blocks(model.embed(public), cut_layer)[:, 1:]
    variance = rows.flatten(0, 1).var(0, correction=0).mean()
    μ, S = patch_statistics(model, public)
    values, V = torch.linalg.eigh(S)
    half = V * values.sqrt()
    coefficients, _ = _fit_rows(model, public, cut_layer)
    start = torch.cat([torch.ones(3, 16, 1).double(), seen.features[:, 1:]], 2) @ coefficients
    v = torch.linalg.solve(half, (start - μ).mT).mT.requires_grad_()
    adam = torch.optim.Adam([v], lr=attack.learning_rate)
    for step in range(attack.steps):
        adam.param_groups[0]["lr"] = attack.learning_rate * (1 + cos(pi * step / attack.steps)) / 2
        tiles = (v @ half.mT + μ).unflatten(2, (3, 4, 4)).unflatten(1, (4, 4))
        x = tiles.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3) * model.std + model.mean
        misfit = (model.client_blocks(model.embed(x), cut_layer) - seen.features)[:, 1:].square().mean(
            (1, 2)
        ) / variance
        across, down = x[..., 1:] - x[..., :-1], x[:, :, 1:] - x[:, :, :-1]
        variation = across.abs().mean((1, 2, 3)) + down.abs().mean((1, 2, 3))
        adam.zero_grad()
        (misfit + 0.7 * v.square().mean((1, 2)) + 2.0 * variation).sum().backward()
        adam.step()
    assert_close(attack(seen).images, model.to_images((v @ half.mT + μ).detach()), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("cut_layer", [0, DEPTH])
def test_the_start_is_the_ridge_regression_of_patches_on_rows(tiny_model: Make, crops: Tensor, cut_layer: int) -> None:
    """By numpy's least squares, with rows of zeros that want small slopes and leave the constant open."""
    model, public = tiny_model(embed_dim=32, depth=DEPTH), crops[:20].double()
    Z = model.client_blocks(model.embed(public), cut_layer)[:, 1:].flatten(0, 1).numpy()
    X = patchify(model.normalise(public), 4).flatten(0, 1).numpy()
    penalty = np.sqrt(RIDGE * Z.var(0).mean() * len(Z)) * np.eye(Z.shape[1])
    A = np.block([[np.ones((len(Z), 1)), Z], [np.zeros((len(penalty), 1)), penalty]])
    expected = np.linalg.lstsq(A, np.concatenate([X, np.zeros((len(penalty), X.shape[1]))]), rcond=None)[0]
    found, variance = _fit_rows(model, public, cut_layer)
    assert_close(found.numpy(), expected, atol=1e-7, rtol=1e-7)
    assert variance == pytest.approx(Z.var(0).mean())


def test_the_start_is_fitted_to_the_first_public_images(tiny_model: Make) -> None:
    public = torch.rand(MOST_IMAGES + 3, 3, 16, 16, generator=Generator().manual_seed(0)).double()
    model = tiny_model(embed_dim=32)
    assert_close(_fit_rows(model, public, 1)[0], _fit_rows(model, public[:MOST_IMAGES], 1)[0])


def test_images_are_solved_one_by_one_and_the_model_is_left_as_it_is(tiny_model: Make, crops: Tensor) -> None:
    model, attack = tiny_model(depth=DEPTH), DepthOptimisation(steps=5)
    model.requires_grad_(True)
    seen = seen_of(model, crops[:3].double(), crops[8:20].double(), 1)
    alone = attack(replace(seen, features=seen.features[1:2])).images
    assert_close(attack(seen).images[1:2], alone)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_moved_rows_are_warned_of(tiny_model: Make, crops: Tensor) -> None:
    seen = seen_of(tiny_model(depth=DEPTH), crops[:2].double(), crops[8:12].double(), 1, RowPermutation())
    with pytest.warns(PrivlabWarning, match="depth-optimisation"):
        DepthOptimisation(steps=0)(seen)


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"tv": float("nan")}, {"learning_rate": -0.1}, {"prior": -1.0}])
def test_impossible_optimisations_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PrivlabError, match=f"{next(iter(wrong))} of depth-optimisation must be"):
        DepthOptimisation(**wrong)  # pyright: ignore[reportArgumentType]

"""What position embeddings know: closed forms and naive loops, on embeddings whose knowledge is known."""

import copy
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from privlab.experiments.studies.position_embeddings import (
    cosines,
    last_attention,
    position_errors,
    principal,
    umap_plane,
)
from privlab.victims import VictimModel

GRID = (5, 6)


@pytest.fixture
def embeddings() -> np.ndarray[Any, Any]:
    """Return 30 embeddings of width 8: row and column on random axes, exactly linear."""
    rng = np.random.default_rng(2)
    rows, columns = np.divmod(np.arange(30.0), 6)
    return rows[:, None] * rng.normal(size=8) + columns[:, None] * rng.normal(size=8) + rng.normal(size=8)


def test_two_axes_explain_a_plane(embeddings: np.ndarray[Any, Any]) -> None:
    values, coordinates = principal(embeddings)
    centred = embeddings - embeddings.mean(0)
    share = np.cumsum(values**2) / (centred**2).sum()
    assert share[1] == pytest.approx(1)
    assert share[0] < 1
    ours = [np.linalg.norm(coordinates[i] - coordinates[j]) for i in range(30) for j in range(i)]
    assert ours == pytest.approx([np.linalg.norm(embeddings[i] - embeddings[j]) for i in range(30) for j in range(i)])
    eigenvalues = np.sort(np.linalg.eigvalsh(centred.T @ centred))[::-1]
    assert values**2 == pytest.approx(eigenvalues, abs=1e-8)


def test_linear_embeddings_give_the_position_away(embeddings: np.ndarray[Any, Any]) -> None:
    found = position_errors(embeddings, GRID)
    assert found == pytest.approx({"1d": 0, "1d_std": 0, "2d": 0, "2d_std": 0}, abs=1e-9)


def test_the_regression_never_sees_what_it_predicts() -> None:
    """One partition, fold by fold with a design matrix; embeddings that know nothing err as guesses do."""
    noise = np.random.default_rng(1).normal(size=(30, 4))
    parts = np.array_split(np.random.default_rng(7).permutation(np.arange(30)), 5)
    line, plane = [], []
    for part in parts:
        others = [slot for slot in range(30) if slot not in part]
        design = np.column_stack([np.ones(len(others)), noise[others]])
        for target, into in ((lambda slot: [slot], line), (lambda slot: divmod(slot, 6), plane)):
            weights = np.linalg.solve(design.T @ design, design.T @ np.array([target(slot) for slot in others]))
            for slot in part:
                into += list(np.abs(np.array(target(slot)) - np.array([1, *noise[slot]]) @ weights))
    found = position_errors(noise, GRID, repeats=1, seed=7)
    assert (found["1d"], found["2d"]) == pytest.approx((np.mean(line), np.mean(plane)))
    assert found["1d"] > 4
    assert (found["1d_std"], found["2d_std"]) == (0, 0)


def test_cosines_are_those_of_pairs() -> None:
    table = np.array([[1.0, 0], [1, 1], [0, -2], [0, 0]])
    got = cosines(table)
    assert got[0] == pytest.approx([1, 0.5**0.5, 0, 0])
    assert got[2, 1] == pytest.approx(-(0.5**0.5))
    assert got[3] == pytest.approx(np.zeros(4))


@pytest.mark.parametrize("options", [{}, {"class_token": False, "global_pool": "avg"}, {"qk_norm": True}])
def test_the_last_attention_is_what_timm_computes(
    tiny_model: Callable[..., VictimModel], options: dict[str, object]
) -> None:
    model, images = tiny_model(**options), torch.rand(2, 3, 16, 16, dtype=torch.float64)
    got = last_attention(model, images)
    other, seen = copy.deepcopy(model), list[Tensor]()
    last: Any = other.vit.blocks[-1]
    attention = last.attn
    attention.fused_attn = False
    attention.attn_drop.register_forward_hook(lambda _module, _inputs, weights: seen.append(weights))
    other.vit(other.normalise(images))
    want = seen[0][:, :, 0, 1:] if other.vit.cls_token is not None else seen[0].mean(2)
    torch.testing.assert_close(got, want)
    assert got.shape == (2, 4, 16)


def test_umap_is_asked_with_a_seed_and_left_out_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, embeddings: np.ndarray[Any, Any]
) -> None:
    asked: dict[str, object] = {}

    class Stub:
        def __init__(self, **options: object) -> None:
            asked.update(options)

        def fit_transform(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return x[:, :2].astype(np.float32)

    module = ModuleType("umap")
    module.__spec__, module.UMAP = ModuleSpec("umap", None), Stub  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "umap", module)
    plane = umap_plane(embeddings, seed=4)
    assert plane is not None
    assert plane == pytest.approx(embeddings[:, :2], rel=1e-6)
    assert (asked["n_components"], asked["random_state"]) == (2, 4)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert umap_plane(embeddings) is None

"""The admission test compares what a defense says that it does with what it does, also on photographs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from privlab.defenses import (
    Jigsaw,
    RowPermutation,
)
from privlab.testing import Check
from privlab.threat import Draws, Effects, Feed, Sent

Admit = Callable[..., dict[str, Check]]


@pytest.mark.parametrize(
    ("declared", "wrong"),
    [
        (Effects(rows="shared"), None),
        (Effects(), "rows: kept declared, shared measured"),
        (Effects(rows="own"), "rows: own declared, shared measured"),
        (Effects(rows="shared", columns=True), "columns: True declared, False measured"),
        (Effects(rows="shared", noise_std=0.1), "noise_std: 0.1 declared, 0.0 measured"),
        ("row-permutation", "str declared instead of Effects"),
    ],
)
def test_a_defense_does_what_it_says_it_does(declared: object, wrong: str | None, tried: Admit) -> None:
    @dataclass(frozen=True)
    class Said(RowPermutation):
        acts_as = declared

    checks = tried(Said())
    assert checks["acts-as"].passed == (wrong is None)
    assert wrong is None or checks["acts-as"].text == wrong


@dataclass(frozen=True)
class RoundsPhotographs:
    """Prunes made-up gradients, which are random, and rounds those of photographs, where no prior of pruning helps."""

    acts_as = Effects(gradients="pruned")

    def release(self, gradients: Mapping[str, Tensor], draws: Sequence[Generator]) -> dict[str, Tensor]:
        """Prune or round."""
        if all(0.5 < g.std() < 2 for g in gradients.values()):
            return {name: g * (g.abs() > 1) for name, g in gradients.items()}
        return {name: g.sign() * g.abs().mean() for name, g in gradients.items()}


@dataclass(frozen=True)
class BlursPhotographs:
    """Fills the patches of made-up images with their means, in the order that it states, and moves photographs' too."""

    acts_as = Effects(other=True)

    def __call__(self, images: Tensor, patch: int, draws: Sequence[Generator]) -> Feed:
        """Halve or shuffle."""
        made_up = any(torch.equal(image, torch.full_like(image, 0.5)) for image in images)
        feed = Feed.undefended(images, patch)
        if made_up:
            return replace(feed, images=images * 0.5)
        return Jigsaw(gamma=1.0)(images, patch, draws)


@dataclass(frozen=True)
class NoisyPhotographs:
    """Sends made-up tokens as they are, and adds noise to those of photographs."""

    acts_as = Effects(rows="shared")

    def send(self, sent: Sent, draws: Draws) -> Sent:
        """Permute rows, and add noise or none."""
        sent = RowPermutation().send(sent, draws)
        if len(sent.features) == 4:
            return sent
        noise = torch.randn(sent.features.shape, generator=draws.batch, dtype=sent.features.dtype)
        return replace(sent, features=sent.features + 0.1 * noise)


@pytest.mark.parametrize("cheats", [RoundsPhotographs, BlursPhotographs, NoisyPhotographs])
def test_a_defense_that_acts_otherwise_on_photographs_is_refused(cheats: type[Any], tried: Admit) -> None:
    check = tried(cheats())["acts-as"]
    assert not check.passed
    assert "on photographs" in check.text

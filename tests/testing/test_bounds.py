"""What a defense says of entries that were cut to a bound."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Generator, Tensor

from privlab.testing import Check

Admit = Callable[..., dict[str, Check]]
Gradients = Mapping[str, Tensor]
BOUND = 0.01


def failed(checks: Mapping[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if not check.passed}


def cut(g: Tensor) -> Tensor:
    return g.clamp(-BOUND, BOUND)


def is_cut(g: Tensor) -> Tensor:
    return g.abs() >= BOUND


@dataclass(frozen=True)
class Exact:
    """Releases what a function makes of each gradient, and says that it is exact."""

    name: ClassVar[str] = "bad"
    paper: ClassVar[str] = "none"

    make: Callable[[Tensor], Tensor] = cut

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> dict[str, Tensor]:
        """Return what is released."""
        return {name: self.make(g) for name, g in gradients.items()}

    def variance(self, released: Gradients) -> dict[str, Tensor]:
        """Return the declared variance."""
        return {name: torch.zeros_like(g) for name, g in released.items()}


@dataclass(frozen=True)
class Bounded(Exact):
    """Says by a function which entries were cut."""

    said: Callable[[Tensor], Any] = is_cut

    def at_bound(self, released: Gradients) -> dict[str, Any]:
        """Return which entries are said to be at the bound."""
        return {name: self.said(g) for name, g in released.items()}


def test_what_is_beyond_a_bound_is_not_known_and_all_else_is_checked(tried: Admit) -> None:
    checks = tried(Bounded())
    assert failed(checks) == set()
    assert checks["at-bound"].value == 0
    assert failed(tried(Exact())) == {"variance", "gradients"}


@pytest.mark.parametrize(
    ("defense", "which"),
    [
        (Bounded(lambda g: 1.5 * g, lambda g: g == g), {"at-bound"}),
        (Bounded(lambda g: -0.5 * g, lambda g: g == g), {"at-bound"}),
        (Bounded(lambda g: cut(1.3 * g) + 1e-3), {"variance"}),
    ],
)
def test_a_false_bound_is_seen(defense: Bounded, which: set[str], tried: Admit) -> None:
    assert failed(tried(defense)) >= which


@pytest.mark.parametrize(
    ("said", "text"), [(lambda g: g, "of torch.float64 instead of torch.bool"), (lambda g: g[:, 0] > 0, "of shape (")]
)
def test_entries_at_a_bound_have_a_form(said: Callable[[Tensor], Any], text: str, tried: Admit) -> None:
    check = tried(Bounded(said=said))["at-bound"]
    assert not check.passed
    assert text in check.text

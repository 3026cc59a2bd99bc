"""Admission of attacks and metrics: ours pass, and each thing that a plug-in may get wrong fails its own check."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from privlab.attacks import ATTACKS, PatchGradient
from privlab.base import PrivlabError
from privlab.metrics import METRICS, Metric
from privlab.testing import check_any, check_attack, check_metric
from privlab.threat import Observation

OF_ATTACKS = ["declared", "granted", "returns", "untouched", "same-seen"]
OF_METRICS = ["returns", "range", "direction", "alone", "untouched"]


def failed(name: str) -> list[str]:
    """Return the checks that fail."""
    return [check.name for check in check_any(name) if not check.passed]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["patch-gradient", "patch-update", "april", "patch-gradient-adaptive", "row-alignment", "block-key"]
)
def test_ours_pass(name: str) -> None:
    checks = check_any(name)
    assert [check.name for check in checks] == OF_ATTACKS
    assert all(check.passed for check in checks)


@dataclass(frozen=True)
class _Odd(PatchGradient):
    """An attack of another package, as wrong as the test has it."""

    name: ClassVar[str] = "odd"

    def __call__(self, seen: Observation) -> Tensor:
        """Reconstruct."""
        return super().__call__(seen)


class _Unnamed(_Odd):
    name = "else"


class _Unsourced(_Odd):
    paper: ClassVar[Any] = None


class _Unread(_Odd):
    parameters = ()


class _Mistyped(_Odd):
    stands_in_for: ClassVar[Any] = "april"


class _Unknown(_Odd):
    requires: ClassVar[Any] = frozenset({"knows_everything"})


class _Elsewhere(_Odd):
    parameters = ("blocks.9.attn.qkv.weight",)


class _Cropped(_Odd):
    def __call__(self, seen: Observation) -> Tensor:
        return super().__call__(seen)[..., :-1]


class _Unclipped(_Odd):
    def __call__(self, seen: Observation) -> Tensor:
        return super().__call__(seen) + 1


class _Drawn(_Odd):
    def __call__(self, seen: Observation) -> Tensor:
        return torch.rand_like(super().__call__(seen))


class _Writing(_Odd):
    def __call__(self, seen: Observation) -> Tensor:
        images = super().__call__(seen)
        seen.gradients["pos_embed"].zero_()
        return images


class _Crashing(_Odd):
    def __call__(self, seen: Observation) -> Tensor:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (_Unnamed, "declared"),
        (_Unsourced, "declared"),
        (_Unread, "declared"),
        (_Mistyped, "declared"),
        (_Unknown, "declared"),
        (_Elsewhere, "granted"),
        (_Cropped, "returns"),
        (_Unclipped, "returns"),
        (_Crashing, "returns"),
        (_Drawn, "same-seen"),
    ],
)
def test_what_an_attack_gets_wrong_fails_its_check(
    kind: type[Any], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTACKS, "odd", kind)
    assert failed("odd") == [check]


@dataclass(frozen=True)
class Undeclared:
    """An attack of one's own, which declares nothing."""

    level: float = 0.5

    def __call__(self, seen: Observation) -> Tensor:
        """Return grey images."""
        return torch.full((len(seen.gradients["pos_embed"]), *seen.model.image_shape), self.level)


def test_an_instance_is_checked_whose_class_is_not_installed() -> None:
    assert [(check.name, check.passed) for check in check_attack(Undeclared())] == [(name, True) for name in OF_ATTACKS]
    assert [check.name for check in check_attack(Undeclared(level=2.0)) if not check.passed] == ["returns"]
    with pytest.raises(PrivlabError, match="Found the class Undeclared"):
        check_attack(Undeclared)


def test_an_attack_that_writes_into_the_release_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTACKS, "odd", _Writing)
    assert failed("odd") == ["untouched"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.function is not None])
def test_our_metrics_pass(name: str) -> None:
    checks = check_any(name)
    assert [check.name for check in checks] == OF_METRICS
    assert all(check.passed for check in checks)


def error(x: Tensor, y: Tensor) -> Tensor:
    """Return the mean absolute error."""
    return (x - y).abs().mean(dim=(1, 2, 3))


def written(x: Tensor, y: Tensor) -> Tensor:
    """Return the same, and spoil an image."""
    found = error(x, y)
    x[0, 0, 0, 0] += 0.25
    return found


FAIR = Metric("error", error, "lower leaks", (0.0, 1.0), 4, "mean absolute error")


@pytest.mark.parametrize(
    ("metric", "checks"),
    [
        (FAIR, []),
        (replace(FAIR, function=lambda x, y: error(x, y).mean()), ["returns"]),
        (replace(FAIR, function=lambda x, y: error(x, y) > 0), ["returns"]),
        (replace(FAIR, range=(0.0, 0.01)), ["range"]),
        (replace(FAIR, direction="higher leaks"), ["direction"]),
        (replace(FAIR, function=lambda x, y: error(x, y) / len(x)), ["alone"]),
        (replace(FAIR, function=written), ["untouched"]),
    ],
)
def test_what_a_metric_gets_wrong_fails_its_check(metric: Metric, checks: list[str]) -> None:
    assert set(checks) <= {check.name for check in check_metric(metric) if not check.passed}
    assert bool(checks) == any(not check.passed for check in check_metric(metric))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: check_any("patch-gradien"),
            "Unknown defense, attack or metric 'patch-gradien'. Did",
        ),
        (lambda: check_any("psnr", ["a=1"]), "Metrics take no options. Found 'a=1' for psnr"),
        (lambda: check_any("april", gamma=0.3), "--gamma is for jigsaw and mjp. Found 0.3 for april"),
        (lambda: check_any("lpips_alex"), "Metric 'lpips_alex' needs trained weights"),
        (lambda: check_metric(replace(FAIR, function=lambda x, y: x @ y[:, :1, :1])), "Metric 'error' does not run"),
    ],
)
def test_what_cannot_be_admitted_is_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(PrivlabError) as refused:
        call()
    assert message in str(refused.value)

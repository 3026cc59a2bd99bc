"""A stated variance that is too large, which would blind the attacks that weigh by it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Generator, Tensor

from privlab.defenses import BinaryWeights, GradientQuantisation
from privlab.testing import Check

Admit = Callable[..., dict[str, Check]]
Gradients = Mapping[str, Tensor]
READ = "patch_embed.proj.weight"


@dataclass(frozen=True)
class HalfNoise:
    """Keeps the larger half of each parameter, with noise of a tenth of its root mean square."""

    name: ClassVar[str] = "half-noise"
    paper: ClassVar[str] = "none"

    times: float = 1.0
    only: str = ""

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> dict[str, Tensor]:
        """Return what is released."""
        return {name: self._noisy(g, draws) for name, g in gradients.items()}

    def variance(self, released: Gradients) -> dict[str, Tensor]:
        """Return the declared variance, `times` what it is, of all parameters or of one."""
        return {name: (self.times if name.startswith(self.only) else 1) * _variance(g) for name, g in released.items()}

    def _noisy(self, g: Tensor, draws: Sequence[Generator]) -> Tensor:
        flat = g.flatten(1)
        added = torch.stack([torch.randn(flat.shape[1], generator=draw).to(flat) for draw in draws])
        noisy = flat + 0.1 * flat.square().mean(1, keepdim=True).sqrt() * added
        return noisy.where(flat.abs() >= flat.abs().median(1, keepdim=True).values, 0).view_as(g)


@dataclass(frozen=True)
class Coarse(GradientQuantisation):
    """States `times` the variance of its rounding in one parameter."""

    times: float = 1.0

    def variance(self, released: Gradients) -> dict[str, Tensor]:
        """Return the declared variance."""
        return {name: v * (self.times if name == READ else 1) for name, v in super().variance(released).items()}


def _variance(g: Tensor) -> Tensor:
    flat = g.flatten(1)
    least = flat.abs().where(flat != 0, torch.inf).amin(1, keepdim=True).nan_to_num(posinf=0.0)
    noise = 0.01 * flat.square().mean(1, keepdim=True)
    return noise.expand_as(flat).where(flat != 0, least.square() / 3 + noise).view_as(g)


@pytest.mark.parametrize(
    ("defense", "admitted"),
    [
        (HalfNoise(), True),
        (HalfNoise(50.0), False),
        (HalfNoise(50.0, READ), False),
        (HalfNoise(50.0, "pos_embed"), False),
        (Coarse("int8"), True),
        (Coarse("int8", times=2.9), True),
        (Coarse("int8", times=3.5), False),
    ],
)
def test_no_parameter_may_hide_behind_an_overstated_variance(
    defense: HalfNoise | Coarse, admitted: bool, tried: Admit
) -> None:
    assert tried(defense)["overstated"].passed == admitted


def test_few_rounded_entries_say_nothing_of_a_variance(tried: Admit) -> None:
    assert tried(HalfNoise(50.0, "head.bias"))["overstated"].passed


@pytest.mark.parametrize("keep", [0.5, 0.97, 1 - 2**-10])
def test_entries_that_draws_leave_out_are_no_noise_however_few(keep: float, tried: Admit) -> None:
    checks = tried(BinaryWeights(keep=keep))
    assert checks["overstated"].passed
    assert checks["variance"].limit == 3.0  # that of a law which is only a model

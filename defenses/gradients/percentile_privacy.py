"""`percentile-privacy`: NVFlare's filter that drops the smallest entries of an update and clips the largest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Generator, Tensor

from privlab.base import AtLeast1, Checked, Positive, check_range
from privlab.threat import Effects, Gradients


@dataclass(frozen=True)
class PercentilePrivacy(Checked):
    """Release clip(d, ±γ) where |d| ≥ c, and 0 elsewhere; c is the percentile of |d| over all parameters.

    Idea: The client drops the entries of its update below a percentile of the magnitudes, and clips the others. Nothing
    is drawn at random, so that it gives no differential privacy. What is neither dropped nor clipped is exact.

    Steps: update d → drop the small ones → clip to ±γ

    Algorithm: NVFlare divides by the steps T of the round first, if the client states them, and multiplies by them
    last: then the bound is γ T.

    Fails if: few entries are dropped: these follow from the others. Of gradients above its bound the embedding's are
    cut most, and `qkv-completion` reads others. It draws nothing, and gives no guarantee.

    Cost: It changes what the server trains with, and may slow training down.

    Studies: filters, clipping

    Args:
        percentile: the percentage of the entries that is dropped, in [0, 100].
        gamma: γ, the largest magnitude of an entry per step, in the units of what is released; > 0.
        steps: T, as the client states it (`NUM_STEPS_CURRENT_ROUND`), at least 1; 1 where it does not.

    Source: NVFlare 2.9 (Apache-2.0), nvflare/app_common/filters/percentile_privacy.py, with its defaults; after Shokri
    and Shmatikov, CCS 2015. [@shokri2015ppdl; @roth2022nvflare]
    """

    name: ClassVar[str] = "percentile-privacy"
    paper: ClassVar[str] = "NVFlare's PercentilePrivacy; after Shokri and Shmatikov (CCS 2015)"
    order: ClassVar[int] = 170

    acts_as: ClassVar[Effects] = Effects(gradients="rounded")

    percentile: float = 10.0
    gamma: Positive = 0.01
    steps: AtLeast1 = 1

    def __post_init__(self) -> None:
        """Raise PrivlabError if a number is out of range."""
        super().__post_init__()
        check_range(0 <= self.percentile <= 100, f"percentile of {self.name}", "in [0, 100]", self.percentile)

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Gradients:
        """Return the filtered gradients or updates."""
        T, γ = self.steps, self.gamma
        per_step = {name: g / T for name, g in gradients.items()}
        sizes = torch.cat([d.flatten(1).abs() for d in per_step.values()], 1)
        place = (sizes.shape[1] - 1) * self.percentile / 100  # torch.quantile takes no more than 2²⁴ entries
        below, above = (sizes.kthvalue(1 + round_(place), 1).values.double() for round_ in (math.floor, math.ceil))
        cutoff = (below + (above - below) * (place % 1)).to(sizes)
        return {
            name: d.where(d.abs() >= cutoff.view(-1, *[1] * (d.ndim - 1)), 0).clamp(-γ, γ) * T
            for name, d in per_step.items()
        }

    def at_bound(self, released: Gradients) -> dict[str, Bool[Tensor, "b ..."]]:
        """Return which entries are at ±γ T: they were at least as large."""
        return {name: g.abs() >= self.gamma * self.steps * (1 - 1e-6) for name, g in released.items()}

    def variance(self, released: Gradients) -> Gradients:
        """Return c²/3 for a missing entry, γ² T² for one at the bound, and 0 for others, which are exact.

        c is the least released magnitude. How far an entry was beyond the bound is not known (`at_bound`): γ T stands
        for it, of which gradients are many times.
        """
        cut, bound = self.at_bound(released), self.gamma * self.steps
        sizes = torch.cat([g.flatten(1).abs() for g in released.values()], 1)
        edge = sizes.where(sizes > 0, torch.inf).amin(1)
        missing = edge.where(edge.isfinite(), 0).square() / 3 * (self.percentile > 0)
        return {
            name: torch.where(
                g == 0,
                missing.view(-1, *[1] * (g.ndim - 1)),
                torch.where(cut[name], bound**2, 0.0),
            ).to(g)
            for name, g in released.items()
        }

"""`gradient-sign`: only the sign of each entry of the gradient is released."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.threat import Effects

__all__ = ["GradientSign"]


@dataclass(frozen=True)
class GradientSign:
    """Release the sign of each entry: −1, 0 or 1.

    Source: signSGD (Bernstein et al., ICML 2018), Algorithm 1.
    """

    name: ClassVar[str] = "gradient-sign"
    paper: ClassVar[str] = "signSGD (Bernstein et al. 2018), Alg. 1"

    acts_as: ClassVar[Effects] = Effects(gradients="rounded")

    def release(
        self, gradients: Mapping[str, Float[Tensor, "b ..."]], draws: Sequence[Generator]
    ) -> dict[str, Float[Tensor, "b ..."]]:
        """Return the signs of the gradients."""
        return {name: g.sign() for name, g in gradients.items()}

    def variance(self, released: Mapping[str, Float[Tensor, "b ..."]]) -> dict[str, Float[Tensor, "b ..."]]:
        """Return 1 − 2/π, the variance of the sign of a normal entry that the entry does not explain linearly.

        In units of the entry's standard deviation, the linear fit is √(2/π) times the entry.
        """
        return {name: torch.full_like(g, 1 - 2 / math.pi) for name, g in released.items()}

"""`gradient-sign`: only the sign of each entry of the gradient is released."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from privlab.threat import Effects, Gradients


@dataclass(frozen=True)
class GradientSign:
    """Release the sign of each entry: −1, 0 or 1.

    Idea: The client releases the sign of each entry of its gradient, and no magnitude. A server can still train with
    it. The scales that a linear solver needs are gone.

    Steps: gradient g → sign of each entry

    Fails if: a search over all layers uses the one bit that is left of each entry. It gives no guarantee.

    Cost: It changes what the server trains with, and may slow training down.

    Studies: gradients

    Source: signSGD (Bernstein et al., ICML 2018), Algorithm 1. [@bernstein2018signsgd]
    """

    name: ClassVar[str] = "gradient-sign"
    paper: ClassVar[str] = "signSGD (Bernstein et al. 2018), Alg. 1"
    order: ClassVar[int] = 150

    acts_as: ClassVar[Effects] = Effects(gradients="rounded")

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Gradients:
        """Return the signs of the gradients."""
        return {name: g.sign() for name, g in gradients.items()}

    def variance(self, released: Gradients) -> Gradients:
        """Return 1 − 2/π, the variance of the sign of a normal entry that the entry does not explain linearly.

        In units of the entry's standard deviation, the linear fit is √(2/π) times the entry.
        """
        return {name: torch.full_like(g, 1 - 2 / math.pi) for name, g in released.items()}

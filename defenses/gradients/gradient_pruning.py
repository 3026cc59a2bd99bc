"""`gradient-pruning`: only the largest entries of the gradient are released."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from privlab.base import Checked, PositiveShare
from privlab.threat import Effects, Gradients


@dataclass(frozen=True)
class GradientPruning(Checked):
    """Release the share `keep` of an image's gradient that is largest in magnitude, over all parameters; 0 elsewhere.

    Idea: The client releases the largest entries of its gradient, and sets the others to zero. It saves communication,
    and the adversary lacks the equations of the others. The entries that are left are exact.

    Steps: gradient g → keep the largest share

    Fails if: the entries that are left determine the image: they are exact, and which are missing is public. It gives
    no guarantee.

    Cost: It changes what the server trains with, and may slow training down.

    Studies: gradients

    Args:
        keep: the share of the entries that is released, in (0, 1]; at least one entry is kept.

    Source: Deep Gradient Compression (Lin et al., ICLR 2018), without its accumulation of the dropped entries; as a
    defense, Deep Leakage from Gradients (Zhu et al., NeurIPS 2019), Section 5.2. [@lin2018dgc; @zhu2019dlg]
    """

    name: ClassVar[str] = "gradient-pruning"
    paper: ClassVar[str] = "Lin et al. (2018); as a defense, DLG (Zhu et al. 2019), Section 5.2"
    order: ClassVar[int] = 130

    acts_as: ClassVar[Effects] = Effects(gradients="pruned")

    keep: PositiveShare = 0.1

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Gradients:
        """Return the gradients with zeros for all but the largest entries; entries equal to the smallest are kept."""
        sizes = torch.cat([g.flatten(1).abs() for g in gradients.values()], 1)
        count = sizes.shape[1]
        dropped = count - max(1, round(self.keep * count))
        if dropped == 0:
            return dict(gradients)
        edge = sizes.kthvalue(dropped + 1, dim=1).values
        return {name: g.where(g.abs() >= edge.view(-1, *[1] * (g.ndim - 1)), 0) for name, g in gradients.items()}

    def variance(self, released: Gradients) -> Gradients:
        """Return τ²/3 for a missing entry, which is in [−τ, τ], and 0 for others; τ is the least released magnitude."""
        if self.keep == 1:
            return {name: torch.zeros_like(g) for name, g in released.items()}
        sizes = torch.cat([g.flatten(1).abs() for g in released.values()], 1)
        edge = sizes.where(sizes > 0, torch.inf).amin(1)
        edge = edge.where(edge.isfinite(), 0)
        return {
            name: (edge.square() / 3).view(-1, *[1] * (g.ndim - 1)) * (g == 0).to(g) for name, g in released.items()
        }

"""`binary-weights`: every entry of an update is multiplied by a random 0 or 1."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from privlab.base import Checked, PositiveShare
from privlab.threat import Effects, Gradients


@dataclass(frozen=True)
class BinaryWeights(Checked):
    """Release m ⊙ g, with m_i = 1 with probability `keep` and 0 otherwise, drawn by each client for each release.

    Idea: The client draws a 0 or a 1 for each entry of its update, and sends the products. It was proposed against the
    closed form of APRIL, which expects every entry. Those that are sent are exact, and zeros show the others.

    Steps: update g → multiply by random 0 or 1

    Algorithm: The server's mean over clients is `keep` times the mean gradient.

    Fails if: N < keep · D: the zeros show which entries are missing, and the others are exact, so that enough of them
    determine the image. Several releases of one image reveal more.

    Cost: It changes what the server trains with, and may slow training down.

    Studies: published

    Args:
        keep: the share of ones, in (0, 1].

    Source: Sawada et al. (2024), Section 1: each client multiplies the updated information by a sequence of random
    binary numbers. The share of ones, and that all parameters have one, are assumptions: the abstract says neither.
    [@sawada2024binary]
    """

    name: ClassVar[str] = "binary-weights"
    paper: ClassVar[str] = "random binary weights (Sawada et al. 2024), arXiv 2409.19988"
    order: ClassVar[int] = 160

    acts_as: ClassVar[Effects] = Effects(gradients="pruned")

    keep: PositiveShare = 0.5

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Gradients:
        """Return the gradients with zeros at random; an image's generator draws in the order of the parameters' names.

        An entry that is kept has its value, and one that is dropped is zero, whatever the value.
        """
        released = {}
        for name in sorted(gradients):
            g = gradients[name]
            kept = torch.stack([torch.rand(g.shape[1:], generator=draw) < self.keep for draw in draws]).to(g.device)
            released[name] = g.where(kept, 0)
        return released

    def variance(self, released: Gradients) -> Gradients:
        """Return τ²/3 for a missing entry and 0 for others; τ is the greatest magnitude in the same parameter.

        A missing entry is as likely to be large as one that was released, so that [−τ, τ] bounds nearly all of them.
        """
        found = {}
        for name, g in released.items():
            greatest = g.flatten(1).abs().amax(1).view(-1, *[1] * (g.ndim - 1))
            found[name] = greatest.square() / 3 * ((g == 0) & (self.keep < 1)).to(g)
        return found

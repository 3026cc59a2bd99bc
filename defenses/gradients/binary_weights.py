"""`binary-weights`: every entry of an update is multiplied by a random 0 or 1."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import check_range
from privlab.threat import Effects

__all__ = ["BinaryWeights"]


@dataclass(frozen=True)
class BinaryWeights:
    """Release m ⊙ g, with m_i = 1 with probability `keep` and 0 otherwise, drawn by each client for each release.

    The zeros show which entries are missing; the others are exact. The server's mean over clients is `keep` times the
    mean gradient.

    Args:
        keep: the share of ones, in (0, 1].

    Source: Sawada et al. (2024), Section 1: each client multiplies the updated information by a sequence of random
    binary numbers. The share of ones, and that all parameters have one, are assumptions: the abstract says neither.
    """

    name: ClassVar[str] = "binary-weights"
    paper: ClassVar[str] = "random binary weights (Sawada et al. 2024), arXiv 2409.19988"

    acts_as: ClassVar[Effects] = Effects(gradients="pruned")

    keep: float = 0.5

    def __post_init__(self) -> None:
        """Raise PrivlabError if `keep` is outside (0, 1]."""
        check_range(0 < self.keep <= 1, "keep of binary-weights", "in (0, 1]", self.keep)

    def release(
        self, gradients: Mapping[str, Float[Tensor, "b ..."]], draws: Sequence[Generator]
    ) -> dict[str, Float[Tensor, "b ..."]]:
        """Return the gradients with zeros at random; an image's generator draws in the order of the parameters' names.

        An entry that is kept has its value, and one that is dropped is zero, whatever the value.
        """
        released = {}
        for name in sorted(gradients):
            g = gradients[name]
            kept = torch.stack([torch.rand(g.shape[1:], generator=draw) < self.keep for draw in draws]).to(g.device)
            released[name] = g.where(kept, 0)
        return released

    def variance(self, released: Mapping[str, Float[Tensor, "b ..."]]) -> dict[str, Float[Tensor, "b ..."]]:
        """Return τ²/3 for a missing entry and 0 for others; τ is the greatest magnitude in the same parameter.

        A missing entry is as likely to be large as one that was released, so that [−τ, τ] bounds nearly all of them.
        """
        found = {}
        for name, g in released.items():
            greatest = g.flatten(1).abs().amax(1).view(-1, *[1] * (g.ndim - 1))
            found[name] = greatest.square() / 3 * ((g == 0) & (self.keep < 1)).to(g)
        return found

"""Where a piece belongs by what it shows: a Gaussian law of each slot's pieces, from public photographs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.base import check_range

RIDGE = 0.1
"""Is added to every variance of a description's entries, relative to their mean."""

FAINT = 1e-4
"""Variance of grey values in [0, 1], about that of rounding to 8 bits with a camera's noise: the log's floor."""


@dataclass(frozen=True, eq=False)
class SlotLaw:
    """log p(slot | piece) = x ᵀ `weight` + `bias`, normalised over the slots, for a piece's description x."""

    weight: Float[Tensor, "d slots"]
    bias: Float[Tensor, " slots"]

    def costs(
        self, pieces: Float[Tensor, "n c p p"], present: Bool[Tensor, " n"] | None = None
    ) -> Float[Tensor, "slots n"]:
        """Return −log p(slot s | piece j) at [s, j]; 0 for pieces that are not present.

        Args:
            pieces: pixels in [0, 1].
            present: marks the pieces that are there; None if all are.
        """
        there = torch.ones(len(pieces), dtype=torch.bool, device=pieces.device) if present is None else present
        found = -(describe_pieces(pieces[there]) @ self.weight + self.bias).log_softmax(1)
        whole = found.new_zeros(found.shape[1], len(pieces))
        whole[:, there] = found.mT
        return whole


def describe_pieces(pieces: Float[Tensor, "m c p p"]) -> Float[Tensor, "m d"]:
    """Return what each piece shows beside the others: colours, contrast and sharpness, minus the mean of all pieces.

    Colours are the means of 4 × 4 fields; contrast is half the log of the variance of grey in each quarter, and
    sharpness that of the mean squared difference of diagonal neighbours.

    Args:
        pieces: pixels in [0, 1], in any order, with p ≥ 4.
    """
    check_range(pieces.shape[-1] >= 4, "side of a piece", "4 pixels or more", pieces.shape[-1])
    grey = pieces.mean(1, keepdim=True)
    mean, square = F.adaptive_avg_pool2d(grey, 2), F.adaptive_avg_pool2d(grey.square(), 2)
    steps = grey[..., 1:, 1:] - grey[..., :-1, :-1]
    spread = torch.stack([(square - mean.square()).clamp_min(0), F.adaptive_avg_pool2d(steps.square(), 2)], 1)
    colours = 4 * F.adaptive_avg_pool2d(pieces, 4)
    x = torch.cat([colours.flatten(1), ((spread + FAINT).log() / 2).flatten(1)], 1)
    return x - x.mean(0)


def fit_slots(puzzles: Float[Tensor, "b n c p p"]) -> SlotLaw:
    """Return the law of pieces by slot: Gaussian with one mean a slot and a common covariance, slots equally likely.

    Each puzzle is used as it is and mirrored.

    Args:
        puzzles: pieces of public photographs, each in its own slot of a square grid.

    Raises:
        PrivlabError: if there is no puzzle, or the pieces are not those of a square grid.

    Source: Fisher's linear discriminant; as an attack on the order of pieces, ours.
    """
    b, n = puzzles.shape[:2]
    side = round(n**0.5)
    check_range(b >= 1, "public photographs of the law of slots", "one or more", b)
    check_range(side * side == n, "pieces of a square grid", "a square number", n)
    mirrored = puzzles.unflatten(1, (side, side)).flip(2, 5).flatten(1, 2)
    X = torch.stack([describe_pieces(pieces) for pieces in torch.cat([puzzles, mirrored])]).double()
    mean = X.mean(0)  # n × d
    apart = (X - mean).flatten(0, 1)
    covariance = apart.mT @ apart / len(apart)
    covariance += RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=X.dtype, device=X.device)
    weight = torch.linalg.pinv(covariance, hermitian=True) @ mean.mT  # photographs of one colour tell nothing
    return SlotLaw(weight.to(puzzles.dtype), (-(mean * weight.mT).sum(1) / 2).to(puzzles.dtype))

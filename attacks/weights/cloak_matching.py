"""Cloak matching: the rows of cloaked weights, put in order and uncovered with a public model of the same origin.

W̃ = Π (diag(a) W + r mᵀ) is a permuted, scaled W plus a matrix of rank one. With a and r of a few units and m a sum of
all rows, the term of rank one is by far the largest, so that it has the first right singular vector v of W̃:

1. Without their part along v, row j of W̃ is a_i (W_i − v v·W_i): its direction is that of row i of the public model
   without v, and the order follows from the cosines (Hungarian). Without this step it is ArrowMatch.
2. The scales a_i are the nearest ones to the ratio of both rows.
3. What is left along v is r_i ‖m‖, multiples of one number: the largest of them is k of it, with the least k for which
   the others fit.
4. m is the mean of (W̃_j − a_i W⁰_i) / r_i by least squares, in which the u differences between the two models average
   out, and W_i = (W̃_j − r_i m) / a_i. Rows of r_i = 0 are exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.weights.weight_matching import check_alike
from privlab.base import check_range, linear_sum_assignment
from privlab.keys.cloak import RATIOS, SCALES
from privlab.threat import Capability

LATTICE_ERROR = 0.1  # the root mean square, in units of ‖m‖, by which the ratios may miss integers


@dataclass(frozen=True, eq=False)
class CloakObservation:
    """Everything that a thief of cloaked weights has: the matrices on the device, and those of a public model."""

    cloaked: Mapping[str, Float[Tensor, "_ _"]]
    base: Mapping[str, Float[Tensor, "_ _"]]


@dataclass(frozen=True, eq=False)
class Uncloaked:
    """Estimates of the orders of the rows, and of the owner's matrices, by name."""

    orders: Mapping[str, Int[Tensor, " _"]]
    weights: Mapping[str, Float[Tensor, "_ _"]]


@dataclass(frozen=True)
class CloakMatching:
    """Match the rows of cloaked matrices with those of a public model, and uncover them.

    Args:
        masks: how many leading singular vectors are left out of the comparison, 0 or 1; 0 compares the directions as
            they are, as ArrowMatch does, and is the control.
    """

    name: ClassVar[str] = "cloak-matching"
    paper: ClassVar[str] = "ours, against ArrowCloak (Wang et al. 2025); similar: Liu et al. (2026), arXiv 2608.21615"
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.KNOWS_WEIGHTS, Capability.KNOWS_DEFENSE})
    parameters: ClassVar[tuple[str, ...]] = ()

    masks: int = 1

    def __post_init__(self) -> None:
        """Raise PrivlabError if `masks` is neither 0 nor 1."""
        check_range(self.masks in (0, 1), f"masks of {self.name}", "0 or 1", self.masks)

    def __call__(self, seen: CloakObservation) -> Uncloaked:
        """Recover the order of the rows of every matrix, and the matrix.

        Raises:
            PrivlabError: if the two models do not hold the same matrices, or values that are not finite.
        """
        check_alike(seen.cloaked, seen.base)
        orders, weights = {}, {}
        for name, cloaked in seen.cloaked.items():
            W, base = cloaked.double(), seen.base[name].double()
            # The largest part of W̃ is r mᵀ, so its first right singular vector v is the direction of m.
            v = torch.linalg.svd(W, full_matrices=False).Vh[0]
            # Step 1: row j of W̃ is matched with row order[j] of the public model, without the part along v.
            orders[name] = order = _match(*((_without(M, v) if self.masks else M) for M in (W, base)))
            # Steps 2 to 4, in the order of W̃; `argsort` then puts the rows in the order of the public model.
            weights[name] = _uncover(W, base[order], v)[order.argsort()].to(cloaked)
        return Uncloaked(orders, weights)


def uncloaked_fraction(found: Uncloaked, truth: Mapping[str, Int[Tensor, " _"]]) -> float:
    """Return the share of rows of all matrices whose place was recovered, in [0, 1]."""
    right = torch.cat([found.orders[name] == order for name, order in truth.items()])
    return right.double().mean().item()


def _without(rows: Float[Tensor, "u d"], v: Float[Tensor, " d"]) -> Float[Tensor, "u d"]:
    return rows - (rows @ v)[:, None] * v


def _match(rows: Float[Tensor, "u d"], base: Float[Tensor, "u d"]) -> Int[Tensor, " u"]:
    """Return for each row the one of the base whose direction is the same."""
    # Cosines between all pairs of rows, u × u; the assignment has the greatest sum.
    ours, theirs = (M / M.norm(dim=1, keepdim=True).clamp_min(1e-300) for M in (rows, base))
    return torch.from_numpy(linear_sum_assignment((ours @ theirs.T).numpy(), maximize=True)[1])


def _uncover(W: Float[Tensor, "u d"], base: Float[Tensor, "u d"], v: Float[Tensor, " d"]) -> Float[Tensor, "u d"]:
    """Return the owner's rows, in the order of W, given the base's in that order and the direction of the mask."""
    # Step 2: orthogonally to v, row j of W̃ is a_j times a public row: a_j is the allowed scale
    # nearest to the least-squares ratio.
    plain, public = _without(W, v), _without(base, v)
    ratio = (plain * public).sum(1) / public.square().sum(1).clamp_min(1e-300)
    allowed = torch.tensor(SCALES).to(W)
    a = allowed[(ratio[:, None] - allowed).abs().argmin(1)][:, None]
    # Step 3: what is left along v is r_j ‖m‖, up to the difference between the two
    # models. The sign of v does not matter.
    along = (W - a * base) @ v
    r = _integers(along)[:, None]
    # Step 4: m by least squares over the rows, Σ_j r_j (W̃_j − a_j W⁰_j) / Σ_j r_j²; then
    # r mᵀ is taken off and a divided out.
    mask = (r * (W - a * base)).sum(0) / r.square().sum().clamp_min(1)
    return (W - r * mask) / a


def _integers(along: Float[Tensor, " u"]) -> Float[Tensor, " u"]:
    """Return the integers of which these are the multiples: the smallest that fit, else those that fit best."""
    misses = []
    for largest in range(1, max(RATIOS) + 1):
        # If the largest entry is k units, all entries are integers in these units: try k = 1, 2, …
        units = along / along.abs().max().clamp_min(1e-300) * largest
        misses.append((units - units.round()).square().mean().sqrt())
        if misses[-1] < LATTICE_ERROR:
            return units.round()
    best = int(torch.stack(misses).argmin()) + 1
    return (along / along.abs().max().clamp_min(1e-300) * best).round()

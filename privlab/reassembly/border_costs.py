"""How well the border of one patch continues another: the costs by which a jigsaw is solved."""

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabError, check_range

FLOOR = 1e-5
"""Variance of an exact pixel in [0, 1] that no neighbour predicts: rounding to 8 bits, and the camera's noise."""

GRAIN = 2.0**-10
"""Unit of `in_grains`: sums of its multiples are exact in double precision, in any order."""


def border_cost(
    left: Float[Tensor, "*b m c p p"], right: Float[Tensor, "*b k c p p"], *, floor: float = FLOOR
) -> Float[Tensor, "*b m k"]:
    """Return how badly each right patch continues each left one: roughly, minus the log-likelihood of the border.

    The line of pixels beyond a border is predicted as f = a + (a − b)/2 from the last two lines, a and b. The error
    e = x − f of every pixel counts (1 + c)/2 · log(1 + eᵀ C⁻¹ e), as under a Cauchy distribution. C is the covariance
    over the channels of the same prediction's errors on the last lines within the patch, plus floor · I. The costs of
    both directions, left to right and right to left, are added.

    The colour covariance is that of Mahalanobis gradient compatibility; the slope and the heavy tail are ours, and find
    more neighbours. The cost of a patch below another is that of their transposes.

    Args:
        left: m patches of c × p × p pixels, p ≥ 3, approximately in [0, 1].
        right: k candidates for the right neighbour of each left patch.
        floor: variance of a pixel's error, > 0; for estimated patches, that of the estimate.

    Raises:
        PrivlabError: if patches have sides below 3 pixels or values that are not finite, or `floor` is not positive.

    Source: Gallagher, CVPR 2012; Pomeranz et al., CVPR 2011, for the extrapolation.
    """
    if left.shape[-1] < 3:
        raise PrivlabError(
            f"Borders are compared over patches of 3 × 3 pixels or more. Found a side of {left.shape[-1]}."
        )
    if not (left.isfinite().all() and right.isfinite().all()):
        raise PrivlabError("Borders are compared between finite pixels. Found nan or inf.")
    check_range(floor > 0, "floor", "a positive variance", floor)
    return _one_way(left, right[..., 0], floor) + _one_way(right.flip(-1), left[..., -1], floor).mT


def border_costs(patches: Float[Tensor, "*b n c p p"], *, floor: float = FLOOR) -> Float[Tensor, "2 *b n n"]:
    """Return `border_cost` of patch j to the right of patch i, at [0, ..., i, j], and below it, at [1, ..., i, j]."""
    down = patches.mT
    return torch.stack([border_cost(patches, patches, floor=floor), border_cost(down, down, floor=floor)])


def exact_costs(patches: Float[Tensor, "n c p p"]) -> Float[Tensor, "2 n n"]:
    """Return `border_costs` of the 8-bit values of one image's patches, as multiples of `GRAIN` in double precision.

    An arrangement that is found by them depends on neither the rounding errors of the reconstruction nor the order in
    which costs are added up, and thus not on other images, the number of threads or the device.

    Args:
        patches: n patches of c × p × p pixels, p ≥ 3, approximately in [0, 1].

    Raises:
        PrivlabError: as in `border_cost`.
    """
    return in_grains(border_costs((patches.double() * 255).round() / 255))


def in_grains(costs: Float[Tensor, "*k"]) -> Float[Tensor, "*k"]:
    """Return costs rounded to multiples of `GRAIN`, in double precision."""
    return (costs.double() / GRAIN).round() * GRAIN


def _one_way(patches: Float[Tensor, "*b m c p p"], lines: Float[Tensor, "*b k c p"], floor: float) -> Tensor:
    last = patches[..., -4:]
    foretold = 1.5 * last[..., 1:] - 0.5 * last[..., :-1]
    errors = (last[..., 2:] - foretold[..., :-1]).flatten(-2)
    eye = torch.eye(errors.shape[-2], dtype=errors.dtype, device=errors.device)
    covariance = errors @ errors.mT / errors.shape[-1] + floor * eye
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance))
    seen = torch.einsum("...mij,...kjp->...mkip", whiten, lines)
    apart = seen - (whiten @ foretold[..., -1]).unsqueeze(-3)
    return (1 + len(eye)) / 2 * apart.square().sum(-2).log1p().sum(-1)

"""Border costs as odds: how likely each piece is the neighbour of another, among those that there are."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.base import check_range

SHARPNESS = 8.0
"""How fast the probability of a neighbour falls with its cost, in units of the mean cost; chosen on photographs."""


def border_odds(
    costs: Float[Tensor, "2 n n"], present: Bool[Tensor, " n"] | None = None, *, sharpness: float = SHARPNESS
) -> Float[Tensor, "2 n n"]:
    """Return −log p(j | i) − log p(i | j) for each pair: a textured piece then counts no more than a flat one.

    With z_ij = c_ij / √(r_i s_j), where r_i and s_j are the mean costs of row i and column j, p(j | i) is
    exp(−sharpness z_ij), normalised over the pieces j ≠ i that are present, and p(i | j) over i. A pair with an empty
    slot costs log(m − 1) with m pieces, as if one of the two probabilities were known to be 1 and the other not at all.

    Args:
        costs: [0, i, j] is the cost of piece j to the right of piece i, [1, i, j] below it, ≥ 0; those of pieces that
            are not present are not read.
        present: marks the pieces that are there, two or more; None if all are.
        sharpness: scale of the costs in the exponent, > 0.

    Raises:
        PrivlabError: if fewer than two pieces are present, or `sharpness` is not positive.

    Source: ours; the normalisation of each piece's costs by its own scale is after Pomeranz et al., CVPR 2011.
    """
    n = costs.shape[-1]
    there = torch.ones(n, dtype=torch.bool, device=costs.device) if present is None else present
    m = int(there.sum())
    check_range(m >= 2, "pieces that are present", "two or more", m)
    check_range(0 < sharpness < math.inf, "sharpness", "positive and finite", sharpness)
    own = torch.eye(m, dtype=torch.bool, device=costs.device)
    among = costs[:, there][:, :, there].masked_fill(own, 0)
    rows, columns = (among.sum(d, keepdim=True) / (m - 1) for d in (2, 1))
    scale = (rows * columns).sqrt()
    z = torch.where(scale > 0, among / scale.clamp_min(torch.finfo(costs.dtype).tiny), 0)
    logits = (-sharpness * z).masked_fill(own, -torch.inf)
    odds = -(logits.log_softmax(2) + logits.log_softmax(1))
    whole = torch.full_like(costs, math.log(m - 1))
    at = there.nonzero()[:, 0]
    whole[:, at[:, None], at] = odds.masked_fill(own, 0)
    return whole

"""The solve for patches whose pixels can only have certain values: the grey levels of a stored image."""

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.patches import patchify
from privlab.victims import VictimModel

__all__ = ["patches_of_levels"]


def patches_of_levels(
    model: VictimModel,
    A: Float[Tensor, "n d"],
    G: Float[Tensor, "d k"],
    weights: Float[Tensor, " d"],
    levels: int,
) -> Float[Tensor, "n k"]:
    """Return normalised patches X, of images whose pixels are 0, 1/L, …, 1, for which Aᵀ X is near G.

    Rounding each entry of the least-squares solution ignores that the errors of a patch go with those of others. Here
    the patches are rounded one after the other, and each one's share is taken off the equations before the next
    (Babai's nearest plane). The patches that the equations determine best are rounded first (Wübben's sorted QR). The
    result is the true X where the errors are small enough, and other grey levels where they are not: whoever takes it
    has to check it.

    Args:
        model: the victim, whose preprocessing says what a grey level is after normalisation.
        A: the gradient of the position embeddings of N patches, as released.
        G: the gradient of the patch projection, as released.
        weights: weight of each of the D > N equations of an entry, the inverse of its variance.
        levels: number L of grey levels above black, at least 1; 255 for eight bits.

    Source: Babai (Combinatorica 1986), nearest plane; Wübben et al. (Electronics Letters 2001), sorted QR.
    """
    ends = model.normalise(torch.stack([model.mean.new_full(model.image_shape, pixel) for pixel in (0.0, 1.0)]))
    black, white = patchify(ends, model.patch)[:, 0].double()
    step = (white - black) / levels
    n, root = len(A), weights.sqrt()[:, None]
    Q, R, order = A.mT * root, A.new_zeros(n, n), torch.arange(n, device=A.device)
    for i in range(n):  # the shortest column beyond the span of those before it is the next
        swap = [i + int(Q[:, i:].square().sum(0).argmin()), i]
        Q[:, swap[::-1]], R[:, swap[::-1]], order[swap[::-1]] = Q[:, swap], R[:, swap], order[swap]
        R[i, i] = Q[:, i].norm().clamp_min(torch.finfo(A.dtype).tiny)
        Q[:, i] /= R[i, i]
        R[i, i + 1 :] = Q[:, i] @ Q[:, i + 1 :]
        Q[:, i + 1 :] -= Q[:, i, None] * R[i, i + 1 :]
    right, X = Q.mT @ (G * root), torch.zeros_like(G[:n])
    for i in reversed(range(n)):
        level = ((right[i] - R[i, i + 1 :] @ X[i + 1 :]) / R[i, i] - black) / step
        X[i] = black + step * level.round().clamp(0, levels)
    return torch.empty_like(X).index_copy_(0, order, X)

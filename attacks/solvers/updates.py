"""Patches from updates of local training: decay fitted, entries weighed by rounding, and pixels on grey levels.

Known is the update u = −(θ_T − θ_0) of local training by SGD; sought are the patches X of the client's one image.
The update of the position embeddings is A and that of the projection G, and G = Aᵀ X holds as for one gradient, because
X is the same in all steps.

1. `fit_decay`: take off what weight decay moved, where its rate is not known.
2. `weighted_patches`: solve Aᵀ X = G by least squares, with each entry weighed by the error that rounding gives it.
3. `patches_of_levels`: where pixels have few grey levels, round the solution to them, one patch after the other.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers.linear import RTOL, ridge_inverse
from privlab.base import check_range
from privlab.patches import patchify
from privlab.release import Update, rounding_deviation
from privlab.threat import Client
from privlab.victims import VictimModel

_COLUMNS = 128  # columns of ∂ℓ/∂W that are solved for at once: they share no matrix, and each needs one of N × N


def rounding_of_embedding(
    model: VictimModel, client: Client, update: Update, sent: Update | None = None
) -> dict[str, Float[Tensor, "..."]]:
    """Return the standard deviation that rounding gives each entry of the embedding's update (`rounding_deviation`).

    Args:
        model: the server's model with θ_0.
        client: the public settings.
        update: −(θ_T − θ_0) of one client, by timm's parameter name.
        sent: what was released, where `update` is a part of it; None where it is all.
    """
    sent = update if sent is None else sent
    return {
        name: rounding_deviation(model.vit.get_parameter(name).detach(), update[name], client, sent[name])
        for name in ("pos_embed", "patch_embed.proj.weight")
    }


def fit_decay(
    model: VictimModel, update: Update, A: Float[Tensor, "n d"], E: Float[Tensor, "n d"], rounds: int = 12
) -> float:
    """Return 1 − c, the share of θ_0 that an unknown decay took: the one with which ∂ℓ/∂W fits ∂ℓ/∂E_pos best.

    With u = −(θ_T − θ_0), decay l = 1 − c and the projection's weights W₀, (u_e − l E)ᵀ X = u_W − l W₀ holds at the
    true l alone. Its residual over X is least there, and Gauss-Newton steps on l find it. They start where the decay
    shows alone: a key's bias adds one number to all logits of a query, so softmax gives it no gradient, and decay
    alone moves it; the rows of the head's gradient add up to zero under softmax, so decay alone moves their sum.

    Args:
        model: the server's model with θ_0.
        update: −(θ_T − θ_0) of one client, by timm's parameter name.
        A: u_e, the rows of the update's position embeddings that belong to patches.
        E: the same rows of θ_0.
        rounds: Gauss-Newton steps.
    """
    # Where no gradient moves a weight, u = l θ_0. The start is the least-squares solution
    # l = ⟨u, θ_0⟩ / ‖θ_0‖² over these entries.
    shown, own = _moved_by_decay_alone(model, update)
    lost = float(shown @ own / own.square().sum().clamp_min(torch.finfo(own.dtype).tiny))
    W = model.vit.get_parameter("patch_embed.proj.weight").detach().flatten(1).double()
    G = update["patch_embed.proj.weight"].flatten(1).double()
    for _ in range(rounds):
        # Without the decay of the last l, the equations are left · X = right, with left of d × n and right of d × k.
        left, right = (A - lost * E).mT, G - lost * W
        inverse = ridge_inverse(left)
        X = inverse @ right
        # The residual is R(l) = (I − left left⁺)(right); of its slope the part within the span of `left` is left out.
        slope = W - E.mT @ X
        slope = slope - left @ (inverse @ slope)
        if not slope.any():  # no decay shows
            break
        # The Gauss-Newton step in one unknown is ⟨R, slope⟩ / ‖slope‖², where slope = −dR/dl.
        lost += float((right - left @ X).flatten() @ slope.flatten() / slope.square().sum())
    return lost


def _moved_by_decay_alone(model: VictimModel, update: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return entries of u = −(θ_T − θ_0) that no gradient moves, and the same entries of θ_0."""
    moved: list[tuple[Tensor, Tensor]] = []
    for name, u in update.items():
        weights = model.vit.get_parameter(name).detach().double()
        # The bias holds queries, keys and values in thirds; the second third is the keys'.
        if name.endswith("attn.qkv.bias"):
            moved.append((u.double().chunk(3)[1], weights.chunk(3)[1]))
        elif name == "head.weight":
            moved.append((u.double().sum(0), weights.sum(0)))
    if not moved:
        zero = model.mean.new_zeros(1, dtype=torch.float64)
        return zero, zero
    shown, own = (torch.cat(parts) for parts in zip(*moved, strict=True))
    return shown, own


def weighted_patches(
    A: Float[Tensor, "n d"],
    G: Float[Tensor, "d k"],
    deviation_A: Float[Tensor, "n d"],
    deviation_G: Float[Tensor, "d k"],
    rounds: int = 2,
) -> Float[Tensor, "n k"]:
    """Return the X that solves Aᵀ X = G best where the entries of A and of G have errors of known, unequal size.

    Entry (d, k) of G − Aᵀ X has the variance Var G_dk + Σ_n Var A_nd x_nk², and is weighed by its inverse; X is the
    last one, at first that of equal weights. No error counts as less than float32's of the matrix as a whole.

    Args:
        A: the gradient of the position embeddings of N patches, as released.
        G: the gradient of the patch projection, as released.
        deviation_A: standard deviations of the errors in A.
        deviation_G: standard deviations of the errors in G.
        rounds: times that the weights are renewed.
    """
    # The variance of float32's rounding, relative to the mean square of the matrix, is the least error of an entry.
    least_A, least_G = (RTOL**2 * M.square().mean().clamp_min(torch.finfo(M.dtype).tiny) for M in (A, G))
    variance_A, variance_G = deviation_A.square() + least_A, deviation_G.square() + least_G
    # The first X gives all equations equal weights.
    X = ridge_inverse(A.mT) @ G
    for _ in range(rounds):
        # The weights are 1 / (Var G_dk + Σ_n Var A_nd x_nk²), d × k: an error in A is
        # multiplied by the pixel, so X counts too.
        weights = 1 / (variance_G + variance_A.mT @ X.square())
        # Column k of X solves (A D_k Aᵀ) x_k = A D_k g_k with D_k = diag(weights of column k), n × n for each k.
        parts = []
        for g, w in zip(G.split(_COLUMNS, 1), weights.split(_COLUMNS, 1), strict=True):
            weighed = A * w.mT[:, None]  # k × n × d
            M = weighed @ A.mT
            sizes = M.diagonal(dim1=1, dim2=2)
            # A small ridge, relative to the trace, keeps M regular where A lacks rank.
            sizes.add_((RTOL**2 * sizes.sum(1, keepdim=True)).clamp_min(torch.finfo(M.dtype).tiny))  # A = 0 gives X = 0
            parts.append(torch.linalg.solve(M, weighed @ g.mT[..., None])[..., 0])
        X = torch.cat(parts).mT
    return X


def patches_of_levels(
    model: VictimModel, A: Float[Tensor, "n d"], G: Float[Tensor, "d k"], weights: Float[Tensor, " d"], levels: int
) -> Float[Tensor, "n k"]:
    """Return normalised patches X, of images whose pixels are 0, 1/L, …, 1, for which Aᵀ X is near G.

    Rounding each entry of the least-squares solution ignores that the errors of a patch go with those of others. Here
    the patches are rounded one after the other, and each one's share is taken off the equations before the next
    (Babai's nearest plane). The patches that the equations determine best are rounded first (Wübben's sorted QR). The
    result is the true X where the errors are small enough, and other grey levels where they are not: check it.

    Args:
        model: the victim, whose preprocessing says what a grey level is after normalisation.
        A: the gradient of the position embeddings of N patches, as released.
        G: the gradient of the patch projection, as released.
        weights: weight of each of the D > N equations of an entry, the inverse of its variance.
        levels: number L of grey levels above black, at least 1; 255 for eight bits.

    Raises:
        PrivlabError: for N ≥ D, where the equations leave patches open and rounding one of them settles no other.

    Source: Babai (Combinatorica 1986), nearest plane; Wübben et al. (Electronics Letters 2001), sorted QR.
    """
    # Grey level j of a pixel is black + j · step after normalisation, for each of the K entries of a patch.
    ends = model.normalise(torch.stack([model.mean.new_full(model.image_shape, pixel) for pixel in (0.0, 1.0)]))
    black, white = patchify(ends, model.patch)[:, 0].double()
    step = (white - black) / levels
    (n, d), root = A.shape, weights.sqrt()[:, None]
    check_range(n < d, "number of patches", f"below the width {d}", n)
    # The weighted equations √w Aᵀ X = √w G are factored as Q R (d × n times n × n) by
    # Gram-Schmidt, with columns in `order`.
    Q, R, order = A.mT * root, A.new_zeros(n, n), torch.arange(n, device=A.device)
    for i in range(n):  # the shortest column beyond the span of those before it is the next
        # The long columns come last, and are the first to be rounded: the equations determine these best.
        swap = [i + int(Q[:, i:].square().sum(0).argmin()), i]
        Q[:, swap[::-1]], R[:, swap[::-1]], order[swap[::-1]] = Q[:, swap], R[:, swap], order[swap]
        R[i, i] = Q[:, i].norm().clamp_min(torch.finfo(A.dtype).tiny)
        # Gram-Schmidt: normalise this column, and take its part off all later columns.
        Q[:, i] /= R[i, i]
        R[i, i + 1 :] = Q[:, i] @ Q[:, i + 1 :]
        Q[:, i + 1 :] -= Q[:, i, None] * R[i, i + 1 :]
    # R X = Qᵀ √w G is solved from the last row up. Each patch is rounded before it
    # enters the equations of those above it.
    right, X = Q.mT @ (G * root), torch.zeros_like(G[:n])
    for i in reversed(range(n)):
        level = ((right[i] - R[i, i + 1 :] @ X[i + 1 :]) / R[i, i] - black) / step
        X[i] = black + step * level.round().clamp(0, levels)
    # Row i belongs to patch order[i]: undo the exchange of columns.
    return torch.empty_like(X).index_copy_(0, order, X)

"""What an update of local training tells of the gradients in it: weight decay fitted, entries weighed by rounding."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers.ridge import RTOL, ridge_inverse
from privlab.release import rounding_deviation
from privlab.threat import Client
from privlab.victims import VictimModel

__all__ = ["fit_decay", "rounding_of_embedding", "weighted_patches"]

_COLUMNS = 128
"""Columns of ∂ℓ/∂W that are solved for at once: they share no matrix, and each needs one of N × N."""


def rounding_of_embedding(
    model: VictimModel,
    client: Client,
    update: Mapping[str, Float[Tensor, "..."]],
    sent: Mapping[str, Float[Tensor, "..."]] | None = None,
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
        name: rounding_deviation(θ := model.vit.get_parameter(name).detach(), θ - update[name], client, sent[name])
        for name in ("pos_embed", "patch_embed.proj.weight")
    }


def fit_decay(
    model: VictimModel,
    update: Mapping[str, Float[Tensor, "..."]],
    A: Float[Tensor, "n d"],
    E: Float[Tensor, "n d"],
    rounds: int = 12,
) -> float:
    """Return 1 − c, the share of θ_0 that an unknown decay took: the one with which ∂ℓ/∂W fits ∂ℓ/∂E_pos best.

    With u = −(θ_T − θ_0), decay l = 1 − c and the projection's weights W₀, (u_e − l E)ᵀ X = u_W − l W₀ holds at the
    true l alone. Its residual over X is least there, and Gauss-Newton steps on l find it. They start where the decay
    shows by itself: a key's bias adds one number to all logits of a query, so softmax gives it no gradient, and decay
    alone moves it; the rows of the head's gradient add up to zero under softmax, so decay alone moves their sum.

    Args:
        model: the server's model with θ_0.
        update: −(θ_T − θ_0) of one client, by timm's parameter name.
        A: u_e, the rows of the update's position embeddings that belong to patches.
        E: the same rows of θ_0.
        rounds: Gauss-Newton steps.
    """
    shown, own = _moved_by_decay_alone(model, update)
    lost = float(shown @ own / own.square().sum().clamp_min(torch.finfo(own.dtype).tiny))
    W = model.vit.get_parameter("patch_embed.proj.weight").detach().flatten(1).double()
    G = update["patch_embed.proj.weight"].flatten(1).double()
    for _ in range(rounds):
        left, right = (A - lost * E).mT, G - lost * W
        inverse = ridge_inverse(left)
        X = inverse @ right
        # The residual is R(l) = (I − left left⁺)(right); of its slope the part within the span of `left` is left out.
        slope = W - E.mT @ X
        slope = slope - left @ (inverse @ slope)
        lost += float((right - left @ X).flatten() @ slope.flatten() / slope.square().sum())
    return lost


def _moved_by_decay_alone(model: VictimModel, update: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return entries of u = −(θ_T − θ_0) that no gradient moves, and the same entries of θ_0."""
    moved: list[tuple[Tensor, Tensor]] = []
    for name, u in update.items():
        weights = model.vit.get_parameter(name).detach().double()
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
    least_A, least_G = (RTOL**2 * M.square().mean().clamp_min(torch.finfo(M.dtype).tiny) for M in (A, G))
    variance_A, variance_G = deviation_A.square() + least_A, deviation_G.square() + least_G
    X = ridge_inverse(A.mT) @ G
    for _ in range(rounds):
        weights = 1 / (variance_G + variance_A.mT @ X.square())
        parts = []
        for g, w in zip(G.split(_COLUMNS, 1), weights.split(_COLUMNS, 1), strict=True):
            weighed = A * w.mT[:, None]  # k × n × d
            M = weighed @ A.mT
            M.diagonal(dim1=1, dim2=2).add_(RTOL**2 * M.diagonal(dim1=1, dim2=2).sum(1, keepdim=True))
            parts.append(torch.linalg.solve(M, weighed @ g.mT[..., None])[..., 0])
        X = torch.cat(parts).mT
    return X

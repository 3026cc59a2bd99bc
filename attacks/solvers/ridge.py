"""The linear solve that the closed-form attacks share."""

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import PrivlabWarning
from privlab.release import effects_of
from privlab.threat import Observation

__all__ = [
    "RTOL",
    "feeds_unknown",
    "hides_places",
    "replacement",
    "ridge_inverse",
    "shares_mask",
    "slot_gradients",
    "too_many",
    "warn_of_limits",
]

RTOL = 2.0**-23
"""Machine epsilon of float32, in which gradients are released: weaker directions carry no information."""


def slot_gradients(seen: Observation) -> Float[Tensor, "b n d"]:
    """Return A = ∂ℓ/∂E_pos without the rows of class and register tokens."""
    height, width = seen.model.grid
    return seen.gradients["pos_embed"].squeeze(1)[:, -height * width :]


def hides_places(seen: Observation) -> bool:
    """Return whether a defense removes the position embeddings of the slots that it shuffles (MJP, Equation 4)."""
    return effects_of(seen.model, seen.defense).pe != "slot"


def shares_mask(seen: Observation) -> bool:
    """Return whether such a defense removes them in the same slots of all images of a release (`per` batch)."""
    return hides_places(seen) and (seen.images_per_release == 1 or effects_of(seen.model, seen.defense).one_order)


def feeds_unknown(seen: Observation) -> bool:
    """Return whether E_unk, and not zero, replaces position embeddings that are removed."""
    return seen.model.unk_embed is not None and effects_of(seen.model, seen.defense).pe != "zero"


def replacement(seen: Observation) -> Float[Tensor, "1 d"]:
    """Return what replaces the position embedding of masked slots: E_unk, or zero, as the defense says."""
    unknown = seen.model.unk_embed
    if unknown is None or not feeds_unknown(seen):
        return seen.model.mean.new_zeros(1, seen.model.vit.embed_dim)
    return unknown.detach()[0]


def ridge_inverse(M: Float[Tensor, "*b d n"], rtol: float = RTOL) -> Float[Tensor, "*b n d"]:
    """Return M⁺ in float64 by Tikhonov's method, iterated twice: P = (Mᵀ M + λ² I)⁻¹ Mᵀ, M⁺ = 2 P − P M P.

    λ = rtol · ‖M‖_F. A direction in which M has the singular value σ is recovered with the factor 1 − (λ² / (σ² +
    λ²))², so directions above the rounding error are almost unchanged. X = M⁺ G solves M X = G: with least error if
    there is no solution, close to least norm if there are many. Zero columns of M give zero rows of X.

    `rtol` must be well above 1e-8, or Mᵀ M + λ² I is not positive in float64; 0 gives the Moore-Penrose inverse, cut
    off at float64's rounding alone: plain least squares.
    """
    if rtol == 0:
        return torch.linalg.pinv(M.double())
    d, n = M.shape[-2:]
    if n > d:
        return ridge_inverse(M.mT, rtol).mT
    M = M.double()
    norm = torch.linalg.matrix_norm(M, keepdim=True)
    λ = rtol * norm.where(norm > 0, 1)  # M = 0 gives 0
    L = torch.linalg.cholesky(M.mT @ M + λ.square() * torch.eye(n, dtype=M.dtype, device=M.device))
    P = torch.cholesky_solve(M.mT, L)
    return (P @ M @ P).neg_().add_(P, alpha=2)


def too_many(seen: Observation) -> str | None:
    """Return a text if N ≥ D: Aᵀ X = ∂ℓ/∂W then does not determine X, because A·1 = 0 and A has rank D − 1 at most."""
    _, n, d = slot_gradients(seen).shape
    return None if n < d else f"N = {n} ≥ D = {d}"


def warn_of_limits(attack: str, A: Float[Tensor, "b n d"], most: int, *, knows_mask: bool = False) -> None:
    """Warn if Aᵀ X = G cannot determine X: there are more than `most` tokens, or masked ones that the attack ignores.

    Args:
        attack: name of the attack, with which the warning begins.
        A: ∂ℓ/∂E_pos of the tokens; a row of zeros is a masked token.
        most: the largest number of tokens that the attack can recover.
        knows_mask: whether the attack treats masked tokens as such, so that they need no warning.

    Warns:
        PrivlabWarning: with the numbers found.
    """
    _, n, d = A.shape
    if n > most:
        warnings.warn(
            f"{attack}: {n} tokens, but gradients of width {d} determine at most {most}. "
            "The solution of least norm is not exact: a low score here is no evidence of privacy.",
            PrivlabWarning,
            stacklevel=3,
        )
    if not knows_mask and bool((A == 0).all(2).any()):
        warnings.warn(
            f"{attack}: some position embeddings received no gradient, as under MJP. The attack takes the zeros "
            "for equations, as in the paper: it does not know the defense, and a low score is no evidence of privacy.",
            PrivlabWarning,
            stacklevel=3,
        )

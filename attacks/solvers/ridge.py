"""The linear solve that the closed-form attacks share."""

import torch
from jaxtyping import Float
from torch import Tensor

RTOL = 2.0**-23
"""Machine epsilon of float32, in which gradients are released: weaker directions carry no information."""


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

"""The linear solve that the closed-form attacks share."""

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.threat import PrivlabWarning

__all__ = ["ridge_solve", "warn_of_limits"]


def ridge_solve(
    A: Float[Tensor, "b n d"], G: Float[Tensor, "b d k"], rtol: float | None = None
) -> Float[Tensor, "b n k"]:
    """Solve Aᵀ X = G in float64: X = argmin ‖Aᵀ X − G‖² + λ² ‖X‖², λ = rtol · ‖A‖_F.

    `rtol` defaults to the machine epsilon of the precision in which A was released: directions of A below its
    rounding error carry no information. The problem is solved by a QR factorisation of [Aᵀ; λI], so the
    condition number of A is not squared, zero rows of A give zero rows of X, and n > d is no special case.
    """
    rtol = torch.finfo(A.dtype).eps if rtol is None else rtol
    A, G = A.double(), G.double()
    b, n, _ = A.shape
    λ = rtol * torch.linalg.matrix_norm(A)
    ridge = λ[:, None, None] * torch.eye(n, dtype=A.dtype, device=A.device)
    Q, R = torch.linalg.qr(torch.cat([A.mT, ridge], 1))
    return torch.linalg.solve_triangular(R, Q[:, : A.shape[2]].mT @ G, upper=True)


def warn_of_limits(attack: str, A: Float[Tensor, "b n d"], most: int) -> None:
    """Warn where Aᵀ X = G cannot determine X: more tokens than `most`, or tokens with no gradient.

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
    if bool((A == 0).all(2).any()):
        warnings.warn(
            f"{attack}: some position embeddings received no gradient, as under MJP. The attack takes the zeros "
            "for equations, as in the paper: it does not know the defense, and a low score is no evidence of privacy.",
            PrivlabWarning,
            stacklevel=3,
        )

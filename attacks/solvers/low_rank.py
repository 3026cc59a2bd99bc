"""The row span of a matrix of low rank, from those of its entries that a filter left exact."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.solvers.prior import conjugate_gradients

__all__ = ["row_span"]

_RIDGE = 1e-13
"""Is added to the normal matrix of each row, relative to its mean diagonal: a row may have few exact entries."""

_FIRST_DAMPING, _LEAST_DAMPING, _RAISED = 1e-3, 1e-16, 6
"""The damping of the first step and the least, relative to the mean curvature, and how often a step raises it."""

_LEAST_GAIN = 1e-3
"""The relative decrease of the misfit below which a rank is done."""


class _Fit(NamedTuple):
    """The best δ for rows T, the residuals G − δ T at exact entries (zero elsewhere), and the factors that gave δ."""

    δ: Float[Tensor, "j r"]
    R: Float[Tensor, "j c"]
    L: Float[Tensor, "j r r"]

    @property
    def misfit(self) -> float:
        return float(self.R.square().sum())


def row_span(
    G: Float[Tensor, "j c"],
    exact: Bool[Tensor, "j c"],
    ranks: Sequence[int],
    rounds: int = 6,
    last_rounds: int = 20,
    steps: int = 60,
) -> Float[Tensor, "r c"]:
    """Return orthonormal rows T that span those of a matrix δ T, which has the exact entries of G.

    Minimise Σ (G − δ T)² over the exact entries. δ is eliminated: given T, each row of it is a least-squares solution
    of its own (variable projection). Levenberg-Marquardt steps on T are left, each solved by conjugate gradients with
    the preconditioner δᵀ δ ⊗ I. Singular values of gradients fall off by six orders of magnitude, and what stands in
    the place of a missing entry hides the small ones. So the rank is raised by and by: at each rank the matrix found
    fills the missing entries, and its leading right singular vectors are the next start.

    Each row of G is divided by the root mean square of its exact entries first, which does not change T.

    Args:
        G: the matrix; entries that are not exact are those of the first start.
        exact: which entries are exact.
        ranks: the ranks in their order, at least one, each in 1 … min(j, c); the last one is that of the matrix.
        rounds: the most steps at each rank but the last.
        last_rounds: the most steps at the last.
        steps: steps of conjugate gradients in each.
    """
    mask = exact.to(G)
    size = ((G * mask).square().sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)).sqrt()
    G = G / size.clamp_min(torch.finfo(G.dtype).tiny)
    full, T = torch.where(size > 0, G, 0), G[:0]
    G = full
    for rank in ranks:
        T = torch.linalg.svd(full, full_matrices=False).Vh[:rank]
        T, fit = _descend(G, mask, T, last_rounds if rank == ranks[-1] else rounds, steps)
        full = torch.where(exact, G, fit.δ @ T)
    return T


def _descend(G: Tensor, mask: Tensor, T: Float[Tensor, "r c"], rounds: int, steps: int) -> tuple[Tensor, _Fit]:
    """Return the rows of least misfit that so many steps from T find, and their fit."""
    fit, damping = _fit(G, mask, T), _FIRST_DAMPING
    for _ in range(rounds):
        for _ in range(_RAISED):
            tried = torch.linalg.qr((T + _step(mask, T, fit, damping, steps)).mT)[0].mT
            found = _fit(G, mask, tried)
            if found.misfit < fit.misfit:
                break
            damping *= 10
        else:
            break
        done = found.misfit > (1 - _LEAST_GAIN) * fit.misfit
        T, fit, damping = tried, found, max(damping / 10, _LEAST_DAMPING)
        if done:
            break
    return T, fit


def _fit(G: Float[Tensor, "j c"], mask: Float[Tensor, "j c"], T: Float[Tensor, "r c"]) -> _Fit:
    M = torch.einsum("jc,nc,mc->jnm", mask, T, T)
    diagonal = M.diagonal(dim1=1, dim2=2)
    least = torch.finfo(G.dtype).tiny
    diagonal.add_((_RIDGE * diagonal.mean(1, keepdim=True)).clamp_min(least**0.5))
    L = torch.linalg.cholesky(M)
    δ = torch.cholesky_solve(((mask * G) @ T.mT)[..., None], L)[..., 0]
    return _Fit(δ, mask * (G - δ @ T), L)


def _step(mask: Tensor, T: Tensor, fit: _Fit, damping: float, steps: int) -> Float[Tensor, "r c"]:
    """Return the damped Gauss-Newton step of T; a change V moves δ V, less what another δ takes up of it."""
    curvature = fit.δ.mT @ fit.δ
    λ, Q = torch.linalg.eigh(curvature)
    damped = damping * curvature.diagonal().mean()

    def product(V: Float[Tensor, "1 r c"]) -> Float[Tensor, "1 r c"]:
        moved = mask * (fit.δ @ V[0])
        moved = moved - mask * (torch.cholesky_solve((moved @ T.mT)[..., None], fit.L)[..., 0] @ T)
        return (fit.δ.mT @ moved)[None] + damped * V

    def precondition(V: Float[Tensor, "1 r c"]) -> Float[Tensor, "1 r c"]:
        return Q @ ((Q.mT @ V) / (λ.clamp_min(0) + damped)[:, None])

    return conjugate_gradients(product, (fit.δ.mT @ fit.R)[None], steps, precondition)[0]

"""Entries that a filter took out of gradients of the embedding or of low rank, found from those that it left exact."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.solvers.prior import conjugate_gradients
from privlab.attacks.solvers.ridge import RTOL, ridge_inverse

__all__ = ["MOST_MISSING", "complete", "row_span"]

MOST_MISSING = 6000
"""The most missing entries of A that are solved for: their preconditioner is a matrix of so many rows, of 288 MB."""

_CONVERGED = 1e-3
"""The relative change of the missing entries below which they are found: each step squares the error."""

_RIDGE = 1e-13
"""Is added to the normal matrix of each row, relative to its mean diagonal: a row may have few exact entries."""

_FIRST_DAMPING, _LEAST_DAMPING, _RAISED = 1e-3, 1e-16, 6
"""The damping of the first step and the least, relative to the mean curvature, and how often a step raises it."""

_LEAST_GAIN = 1e-3
"""The relative decrease of the misfit below which a rank is done."""


def complete(
    A: Float[Tensor, "n d"],
    G: Float[Tensor, "d k"],
    variance_A: Float[Tensor, "n d"],
    variance_G: Float[Tensor, "d k"],
    missing: Bool[Tensor, "n d"],
    rounds: int = 8,
    steps: int = 60,
) -> Float[Tensor, "n d"]:
    """Return A with those missing entries a that, with some X, explain Aᵀ X = G best.

    Minimise Σ_dk (G − Aᵀ X)²_dk / v_dk + Σ (a − ã)² / Var a over a and X, with v_dk = Var G_dk + Σ_n Var A_nd x²_nk
    over the exact entries: a missing entry of G has a large variance, and hardly counts. X is eliminated: for given a
    each column of X is a weighted least-squares solution (variable projection). Gauss-Newton steps on a alone are left,
    each solved by conjugate gradients. With equal weights its matrix is (X Xᵀ) ⊗ P, where P projects onto what no row
    of A spans; on the missing entries this is the preconditioner. The a with the least objective is returned.

    The D K equations less the N K numbers in X, (D − N) K in all, are far more than the missing entries of a filter
    such as NVFlare's at its defaults.

    Args:
        A: the gradient of the position embeddings of N patches as released, with ã in the place of missing entries.
        G: the gradient of the patch projection as released, with an expected value in the place of missing entries.
        variance_A: variances of the errors in A; > 0.
        variance_G: variances of the errors in G; > 0.
        missing: which entries of A are solved for.
        rounds: most Gauss-Newton steps.
        steps: steps of conjugate gradients in each.
    """
    n, d = missing.nonzero().unbind(1)
    prior, weight = A[n, d], 1 / variance_A[n, d]
    known = variance_A.masked_fill(missing, 0)
    X = ridge_inverse(A.mT) @ G
    best, least, converged = A, float("inf"), False
    for _ in range(rounds + 1):
        w = 1 / (variance_G + known.mT @ X.square())
        L = _cholesky(A, w)
        X = _patches(A, w * G, L)
        R, off = G - A.mT @ X, A[n, d] - prior
        objective = float((w * R.square()).sum() - w.log().sum() + (weight * off.square()).sum())
        if objective < least:
            best, least = A, objective
        if converged:
            break
        step = _step(A, X, w, L, (X @ (w * R).mT)[n, d] - weight * off, weight, (n, d), steps)
        A = A.index_put((n, d), A[n, d] + step)
        converged = float(step.norm()) <= _CONVERGED * float(A[n, d].norm())
    return best


def _step(
    A: Tensor,
    X: Tensor,
    w: Tensor,
    L: Tensor,
    slope: Float[Tensor, " m"],
    weight: Float[Tensor, " m"],
    at: tuple[Tensor, Tensor],
    steps: int,
) -> Float[Tensor, " m"]:
    """Return the Gauss-Newton step of the missing entries `at` (n, d), for the weights w of G and those of a prior."""
    n, d = at
    beyond = torch.eye(A.shape[1], dtype=A.dtype, device=A.device) - A.mT @ ridge_inverse(A.mT)
    about = w.median() * (X @ X.mT)[n][:, n] * beyond[d][:, d]
    about.diagonal().add_(weight + RTOL**2 * about.diagonal().mean())
    root, _ = torch.linalg.cholesky_ex(about)

    def product(a: Float[Tensor, "1 m 1"]) -> Float[Tensor, "1 m 1"]:
        moved = w * (torch.zeros_like(A).index_put((n, d), a[0, :, 0]).mT @ X)
        left = moved - w * (A.mT @ _patches(A, moved, L))
        return ((X @ left.mT)[n, d] + weight * a[0, :, 0])[None, :, None]

    return conjugate_gradients(product, slope[None, :, None], steps, lambda r: torch.cholesky_solve(r, root[None]))[
        0, :, 0
    ]


def _cholesky(A: Float[Tensor, "n d"], w: Float[Tensor, "d k"]) -> Float[Tensor, "k n n"]:
    """Return the Cholesky factors of A diag(w_k) Aᵀ for each column k, with the ridge of `weighted_patches`."""
    M = torch.stack([(A * each) @ A.mT for each in w.mT])
    M.diagonal(dim1=1, dim2=2).add_(RTOL**2 * M.diagonal(dim1=1, dim2=2).sum(1, keepdim=True))
    return torch.linalg.cholesky(M)


def _patches(A: Float[Tensor, "n d"], weighed: Float[Tensor, "d k"], L: Float[Tensor, "k n n"]) -> Float[Tensor, "n k"]:
    """Return the X that solves Aᵀ X = G best, by the products of weights and G and the factors of `_cholesky`."""
    return torch.cholesky_solve((A @ weighed).mT[..., None], L)[..., 0].mT


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
            tried = torch.linalg.qr((T + _step_of_span(mask, T, fit, damping, steps)).mT)[0].mT
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


def _step_of_span(mask: Tensor, T: Tensor, fit: _Fit, damping: float, steps: int) -> Float[Tensor, "r c"]:
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

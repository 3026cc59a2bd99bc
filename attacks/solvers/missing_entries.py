"""Entries that a filter took out of the embedding's gradients, or clipped, found from those that it left exact."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.solvers.prior import conjugate_gradients
from privlab.attacks.solvers.ridge import RTOL, ridge_inverse

__all__ = ["MOST_MISSING", "complete"]

MOST_MISSING = 6000
"""The most missing entries of A that are solved for: their preconditioner is a matrix of so many rows, of 288 MB."""

_CONVERGED = 1e-3
"""The relative change of the missing entries below which they are found: each step squares the error."""


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

"""Entries of a gradient that filters took, found from those that they left.

Known are A (N × D) and G (D × K) with Aᵀ X = G, of which a filter set some entries to zero or clipped them. Sought are
the missing entries of A: `complete_entries` solves for them and for X together.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.solvers.linear import RTOL, conjugate_gradients, ridge_inverse

_ROUNDS, _STEPS = 8, 60  # the most Gauss-Newton steps on missing entries, and steps of conjugate gradients in each
_CONVERGED = 1e-3  # the relative change of the missing entries below which they are found: each step squares the error


def complete_entries(
    A: Float[Tensor, "n d"],
    G: Float[Tensor, "d k"],
    variance_A: Float[Tensor, "n d"],
    variance_G: Float[Tensor, "d k"],
    missing: Bool[Tensor, "n d"],
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
        A: the gradient of the position embeddings of N patches, with what the filter left at missing entries.
        G: the gradient of the patch projection.
        variance_A: variances of the errors in A; at missing entries that of the prior ã.
        variance_G: variances of the errors in G, large where an entry is missing.
        missing: the entries of A that are found.
    """
    # The unknowns are the M missing entries a = A[n, d]. What the filter left there is the mean ã of their prior.
    n, d = missing.nonzero().unbind(1)
    prior, weight = A[n, d], 1 / variance_A[n, d]
    # A missing entry is solved for and adds no variance to the equations, so that `known`
    # holds those of exact entries alone.
    known = variance_A.masked_fill(missing, 0)
    X = ridge_inverse(A.mT) @ G
    best, least, converged = A, float("inf"), False
    for _ in range(_ROUNDS + 1):
        # The weights w (D × K) are renewed with the last X. Then X is eliminated: column k of X solves
        # A diag(w_k) Aᵀ x_k = A (w_k ⊙ g_k), so that each column has its Cholesky factor (L is K × N × N).
        w = 1 / (variance_G + known.mT @ X.square())
        L = _cholesky(A, w)
        X = _solve_patches(A, w * G, L)
        R, off = G - A.mT @ X, A[n, d] - prior
        # −Σ log w is the log-determinant of a likelihood whose variances change with X.
        # Without it, large X would seem likelier.
        objective = float((w * R.square()).sum() - w.log().sum() + (weight * off.square()).sum())
        if objective < least:
            best, least = A, objective
        # The point of the last step is evaluated first, and counts if it is the best.
        if converged:
            break
        # Half the negative gradient by a_nd is (X (w ⊙ R)ᵀ)_nd − (a − ã) / Var a. X is at
        # its optimum, and adds nothing to it.
        step = _step_of_entries(A, X, w, L, (X @ (w * R).mT)[n, d] - weight * off, weight, (n, d))
        A = A.index_put((n, d), A[n, d] + step)
        converged = float(step.norm()) <= _CONVERGED * float(A[n, d].norm())
    return best


def _step_of_entries(
    A: Tensor,
    X: Tensor,
    w: Tensor,
    L: Tensor,
    slope: Float[Tensor, " m"],
    weight: Float[Tensor, " m"],
    at: tuple[Tensor, Tensor],
) -> Float[Tensor, " m"]:
    """Return the Gauss-Newton step of the missing entries `at` (n, d), for the weights w of G and those of a prior."""
    n, d = at
    # With equal weights w the matrix of the step is w (X Xᵀ) ⊗ P, with P = I − Aᵀ (Aᵀ)⁺ (D × D): another X takes
    # up a change within the span of the rows of A.
    beyond = torch.eye(A.shape[1], dtype=A.dtype, device=A.device) - A.mT @ ridge_inverse(A.mT)
    # The preconditioner is the M × M part of this matrix at the missing entries, plus the
    # prior's 1 / Var a and a small ridge.
    about = w.median() * (X @ X.mT)[n][:, n] * beyond[d][:, d]
    about.diagonal().add_(weight + RTOL**2 * about.diagonal().mean())
    root, _ = torch.linalg.cholesky_ex(about)

    def product(a: Float[Tensor, "1 m 1"]) -> Float[Tensor, "1 m 1"]:
        # A change δA of the entries moves Aᵀ X by δAᵀ X (D × K). What another X takes up of
        # it is subtracted, both weighed by w.
        moved = w * (torch.zeros_like(A).index_put((n, d), a[0, :, 0]).mT @ X)
        left = moved - w * (A.mT @ _solve_patches(A, moved, L))
        # Back to the entries: the adjoint of δA ↦ δAᵀ X is R ↦ X Rᵀ, taken at (n, d). The prior adds a / Var a.
        return ((X @ left.mT)[n, d] + weight * a[0, :, 0])[None, :, None]

    return conjugate_gradients(product, slope[None, :, None], _STEPS, lambda r: torch.cholesky_solve(r, root[None]))[
        0, :, 0
    ]


def _cholesky(A: Float[Tensor, "n d"], w: Float[Tensor, "d k"]) -> Float[Tensor, "k n n"]:
    """Return the Cholesky factors of A diag(w_k) Aᵀ for each column k, with the ridge of `weighted_patches`."""
    M = torch.stack([(A * each) @ A.mT for each in w.mT])
    M.diagonal(dim1=1, dim2=2).add_(RTOL**2 * M.diagonal(dim1=1, dim2=2).sum(1, keepdim=True))
    return torch.linalg.cholesky(M)


def _solve_patches(A: Tensor, weighed: Float[Tensor, "d k"], L: Float[Tensor, "k n n"]) -> Float[Tensor, "n k"]:
    """Return the X that solves Aᵀ X = G best, by the products of weights and G and the factors of `_cholesky`."""
    return torch.cholesky_solve((A @ weighed).mT[..., None], L)[..., 0].mT

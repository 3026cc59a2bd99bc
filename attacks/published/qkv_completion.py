"""`qkv-completion`: the image from the exact entries of the gradient of the first block's queries, keys and values."""

# Known are the model and ∂ℓ/∂W_qkv of one image, of which a filter left some entries exact. Sought
# are the normalised patches x_n (N × K).
# 1. `_row_span` completes the matrix to the rank N + p from its exact entries, and returns its row span T.
# 2. `_patches` finds the patches whose normalised tokens u_n lie in T, by a linear system.

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.solvers import conjugate_gradients, hides_places, ridge_inverse, token_count
from privlab.attacks.tokens import QKV, normalised_tokens
from privlab.base import AtLeast1, Checked, PrivlabError
from privlab.release import errors_of_filters
from privlab.threat import Capability, Observation
from privlab.victims import VictimModel

_RIDGE = 1e-13
"""Is added to the normal matrix of each row, relative to its mean diagonal: a row may have few exact entries."""

_FIRST_DAMPING, _LEAST_DAMPING, _RAISED = 1e-3, 1e-16, 6
"""The damping of the first step and the least, relative to the mean curvature, and how often a step raises it."""

_LEAST_GAIN = 1e-3  # the relative decrease of the misfit below which a rank is done


@dataclass(frozen=True)
class QkvCompletion(Checked):
    """Complete ∂ℓ/∂W_qkv = Δᵀ U from its exact entries, and solve for the patches whose tokens lie in its row span.

    Idea: A filter cuts or drops some entries of the gradient, but the matrix of the first block's queries, keys and
    values has only as many independent rows as there are tokens. So the missing entries follow from the others. Every
    token must lie in the span of the completed rows, which is a linear equation for each patch.

    Steps: keep the exact entries → complete to rank N + p → solve for each patch in the span

    Algorithm: U has the rows u_n = γ ⊙ (z_n − mean z_n) / σ_n + β, with z_n = W x_n + e_n and e_n the token of a patch
    of zeros: N patches and p prefix tokens, so that the matrix has rank N + p at most, and entries that a filter cut or
    left out follow from the others (`_row_span`). What a filter is known to reveal of these entries, an interval or a
    bound, is not used: on development photographs it led the search astray.

    With Q orthonormal rows that complete the span, Q u_n = 0. Times σ_n this is linear in the patch and in σ_n:
    Q (γ ⊙ (W x_n − mean W x_n)) + σ_n Q β = −Q (γ ⊙ (e_n − mean e_n)), D − N − p equations for K + 1 numbers, slot by
    slot. The gradients of the embedding, which filters with one bound for all parameters cut most, are not read.

    Exact if: K + 1 ≤ D − N − p for N patches of K values and p prefix tokens, the entries that are left determine the
    matrix, and the search finds it.

    Fails if: the completion ends at a wrong matrix: it has no guarantee. Most ViTs have more values in a patch than
    channels, K ≥ D, and are outside of its range. Of an update it takes one step.

    Cost: 25 to 92 s an image, with the load of the cores (`cifar_vit`, 32 pixels).

    Studies: clipping

    Args:
        rank_step: by how much the rank is raised at a time. More is faster, and ends in a wrong completion more often.
        rounds: the most steps at each rank but the last.
        last_rounds: the most steps at the last.
        steps: steps of conjugate gradients in each.
    """

    name: ClassVar[str] = "qkv-completion"
    paper: ClassVar[str] = "ours: the rank of the first block's gradient, against filters that leave entries exact"
    order: ClassVar[int] = 150
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {
            *(Capability.KNOWS_WEIGHTS, Capability.PLAIN_BLOCK, Capability.BATCH_SIZE_ONE),
            *(Capability.KNOWS_DEFENSE, Capability.GRADIENT_DEFENSE),
        }
    )
    knows: ClassVar[frozenset[str]] = frozenset({"percentile-privacy"})
    undefended: ClassVar[str] = "patch-gradient"
    parameters: ClassVar[tuple[str, ...]] = (QKV,)
    effort: ClassVar[str] = "full"
    search: ClassVar[bool] = True

    rank_step: AtLeast1 = 4
    rounds: AtLeast1 = 6
    last_rounds: AtLeast1 = 20
    steps: AtLeast1 = 60

    def beyond(self, seen: Observation) -> str | None:
        """Return which of K + 1 ≤ D − N − p, the number of exact entries, and known places does not hold."""
        vit, rank = seen.model.vit, token_count(seen.model)
        d, k = vit.embed_dim, vit.patch_embed.proj.weight[0].numel()
        rows = len(seen.gradients[QKV][0])
        exact = min(int((of[QKV] == 0).sum()) for of in errors_of_filters(seen, (QKV,)))
        least = rank * (rows + d - rank)
        found = [f"K + 1 = {k + 1} > D − N − p = {d - rank}"] if k + 1 > d - rank else []
        found += [f"{exact} exact entries < {least}"] if exact < least else []
        found += ["the slots of some patches are hidden"] if hides_places(seen) else []
        return " and ".join(found) or None

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed.

        Raises:
            PrivlabError: if the gradient has no exact entry, or as many tokens as channels.
        """
        model, rank, d = seen.model, token_count(seen.model), seen.model.vit.embed_dim
        if rank >= d:
            raise PrivlabError(
                f"{self.name} needs fewer tokens than channels. Found {rank} ≥ {d}. That it does not apply is no "
                "evidence of privacy."
            )
        found = []
        # G is 3D × D. An entry is exact if the filter states no error of it.
        for G, errors in zip(seen.gradients[QKV].double(), errors_of_filters(seen, (QKV,)), strict=True):
            exact = errors[QKV] == 0
            if not (G[exact] != 0).any():
                raise PrivlabError(
                    f"{self.name} needs entries of {QKV} that the filter left exact. Found none but zeros. That it "
                    "does not apply is no evidence of privacy."
                )
            found.append(_patches(model, self._row_span(G, exact, rank)))
        return model.to_images(torch.stack(found))

    def _row_span(self, G: Float[Tensor, "j c"], exact: Bool[Tensor, "j c"], rank: int) -> Float[Tensor, "r c"]:
        """Return orthonormal rows T that span those of a matrix δ T, which has the exact entries of G.

        Minimise Σ (G − δ T)² over the exact entries. δ is eliminated: given T, each row of it is a least-squares
        separate solution (variable projection). Levenberg-Marquardt steps on T are left, each solved by conjugate
        gradients with the preconditioner δᵀ δ ⊗ I. Singular values of gradients fall off by six orders of magnitude,
        and what replaces a missing entry hides the small ones. So the rank is raised by and by: at each
        rank the matrix found fills the missing entries, and its leading right singular vectors are the next start.

        Each row of G is divided by the root mean square of its exact entries first, which does not change T.
        """
        # Divided by the root mean square of its exact entries, each row counts about
        # equally in the misfit. T stays the same.
        mask = exact.to(G)
        size = ((G * mask).square().sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp_min(1)).sqrt()
        G = G / size.clamp_min(torch.finfo(G.dtype).tiny)
        # Missing entries begin as the filter left them, cut or zero.
        full, T = torch.where(size > 0, G, 0), G[:0]
        G = full
        # At each rank: start from the leading right singular vectors of the completed matrix, lower the misfit of
        # exact entries, and fill in the others by δ T.
        for number in (*range(self.rank_step, rank, self.rank_step), rank):
            T = torch.linalg.svd(full, full_matrices=False).Vh[:number]
            T, fit = _descend(G, mask, T, self.last_rounds if number == rank else self.rounds, self.steps)
            full = torch.where(exact, G, fit.δ @ T)
        return T


def _patches(model: VictimModel, T: Float[Tensor, "r d"]) -> Float[Tensor, "n k"]:
    """Return the normalised patches whose tokens, normalised, lie in the span of the orthonormal rows T best."""
    # σ_n u_n = F (x_n, σ_n) + g_n, with F of D × (K + 1). The D − N − p rows Q complete T, and Q u_n = 0.
    F, g, _ = normalised_tokens(model)
    Q = torch.linalg.svd(T).Vh[len(T) :]
    # Q F (x_n, σ_n) = −Q g_n is solved for all N slots by one pseudo-inverse. The last
    # row of the solution holds the σ_n.
    return -(ridge_inverse(Q @ F, rtol=0.0) @ (Q @ g.mT))[:-1].mT


class _Fit(NamedTuple):
    """The best δ for rows T, the residuals G − δ T at exact entries (zero elsewhere), and the factors that gave δ."""

    δ: Float[Tensor, "j r"]
    R: Float[Tensor, "j c"]
    L: Float[Tensor, "j r r"]

    @property
    def misfit(self) -> float:
        return float(self.R.square().sum())


def _descend(G: Tensor, mask: Tensor, T: Float[Tensor, "r c"], rounds: int, steps: int) -> tuple[Tensor, _Fit]:
    """Return the rows of least misfit that so many steps from T find, and their fit."""
    # Levenberg-Marquardt on T: a step that does not lower the misfit is tried again with tenfold damping.
    # After one that does, the damping is a tenth.
    fit, damping = _fit(G, mask, T), _FIRST_DAMPING
    for _ in range(rounds):
        for _ in range(_RAISED):
            # Only the span of T matters, so that each new T is made orthonormal.
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
    # Row j of δ solves M_j δ_j = T (mask_j ⊙ g_j), with M_j = T diag(mask_j) Tᵀ (r × r) of its exact entries alone.
    M = torch.einsum("jc,nc,mc->jnm", mask, T, T)
    diagonal = M.diagonal(dim1=1, dim2=2)
    least = torch.finfo(G.dtype).tiny
    diagonal.add_((_RIDGE * diagonal.mean(1, keepdim=True)).clamp_min(least**0.5))
    L = torch.linalg.cholesky(M)
    δ = torch.cholesky_solve(((mask * G) @ T.mT)[..., None], L)[..., 0]
    return _Fit(δ, mask * (G - δ @ T), L)


def _step_of_span(mask: Tensor, T: Tensor, fit: _Fit, damping: float, steps: int) -> Float[Tensor, "r c"]:
    """Return the damped Gauss-Newton step of T; a change V moves δ V, less what another δ takes up of it."""
    # δᵀ δ ⊗ I is the matrix of the step if all entries are exact and δ stays. Its eigenvectors give the preconditioner.
    curvature = fit.δ.mT @ fit.δ
    λ, Q = torch.linalg.eigh(curvature)
    damped = damping * curvature.diagonal().mean()

    def product(V: Float[Tensor, "1 r c"]) -> Float[Tensor, "1 r c"]:
        # A change V of T moves exact entries by δ V. Of that, the part that another δ can
        # take up is subtracted, row by row.
        moved = mask * (fit.δ @ V[0])
        moved = moved - mask * (torch.cholesky_solve((moved @ T.mT)[..., None], fit.L)[..., 0] @ T)
        return (fit.δ.mT @ moved)[None] + damped * V

    def precondition(V: Float[Tensor, "1 r c"]) -> Float[Tensor, "1 r c"]:
        return Q @ ((Q.mT @ V) / (λ.clamp_min(0) + damped)[:, None])

    # δᵀ R is half the negative gradient of the misfit by T, since δ is already at its optimum.
    return conjugate_gradients(product, (fit.δ.mT @ fit.R)[None], steps, precondition)[0]

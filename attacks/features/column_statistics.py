"""`column-statistics`: the key of permuted columns, from the second moments of the patches' rows alone.

Known are rows with their columns in an unknown order, and tokens of public images; sought is the key c, where entry k
of a released row is entry c(k) of a token. `places` below is the inverse: entry i of a token was sent as entry
places[i].
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.rows import WHITE_BOX, effects, least_cost, reassemble, undone
from privlab.base import Checked, Positive
from privlab.threat import Capability, FeatureObservation, Reconstruction

LEAST_CHANGE = 1e-9  # change of the log-likelihood per row, in nats, below which an exchange is rounding


@dataclass(frozen=True)
class ColumnStatistics(Checked):
    """Find the column order under which the rows are likeliest as rows of public photographs.

    Idea: A permutation of columns keeps the mean and the covariance of the features, in another order. The server knows
    both from public photographs. It looks for the order in which they agree best, by an assignment and then by swaps.

    Steps: moments of the features → match with public moments → place and invert the rows

    Algorithm: Rows z of any image, in any order and with their position embeddings, have the moments m = E z and R = E
    zzᵀ, and public photographs have μ and R₀, with Λ = (R₀ − μμᵀ + noise² I)⁻¹. The key c minimises the Gaussian cost

        f(c) = tr(Λ R_c) − 2 μᵀ Λ m_c,    R_c = R with rows and columns put back by c.

    This is a quadratic assignment problem. The search starts from the assignment of the columns' means and variances,
    repeats an assignment over the columns' products R R₀, and then swaps the two columns that lower f most, until no
    swap lowers it. It needs no class token, no order of rows and no query.

    The columns, rows and images are then restored as in `class-token-key`.

    Exact if: no condition is known: the column order is the best that a local search finds.

    Fails if: the local search ends early: at width 768 it finds 89 to 98 % of the key from four images (random ViT-B).

    Cost: 9 to 25 s a key at width 768.

    Studies: permutation

    Args:
        ridge: is added to the public variances, relative to their mean: how far one batch may be from the public mean.

    Source: [@xu2024permutation]
    """

    name: ClassVar[str] = "column-statistics"
    paper: ClassVar[str] = "ours, against Permutation Equivariance (Xu et al. 2024), Eq. 5"
    order: ClassVar[int] = 300
    knows: ClassVar[frozenset[str]] = frozenset({"column-permutation", "row-permutation", "gaussian-noise"})
    requires: ClassVar[frozenset[Capability]] = WHITE_BOX
    effort: ClassVar[str] = "quick"

    ridge: Positive = 0.1

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Recover the columns, then the rows and the images."""
        # All rows count, whatever their image and slot: the key is the same for all.
        rows = undone(seen).double().flatten(0, 1)
        public = seen.model.embed(seen.public.to(seen.model.mean)).detach().double().flatten(0, 1)
        return reassemble(seen, self.columns(rows, public, effects(seen).noise_std))

    def columns(
        self, rows: Float[Tensor, "r d"], public: Float[Tensor, "m d"], noise: float = 0.0
    ) -> Int[Tensor, " d"]:
        """Return the key c that minimises f: entry k of the rows is entry c(k) of tokens like the public ones.

        Args:
            rows: all rows that were sent, of any image and in any order, in float64.
            public: tokens of public images, embedded and not permuted, in float64.
            noise: standard deviation of the noise on an entry of the rows, ≥ 0.
        """
        m, μ = rows.mean(0), public.mean(0)
        eye = torch.eye(len(m), dtype=m.dtype, device=m.device)
        # Covariances as sent (S) and as in public (S0). The noise adds noise² to each
        # variance and does not depend on the order.
        S, S0 = rows.mT.cov(correction=0), public.mT.cov(correction=0) + noise**2 * eye
        # Start: an assignment by means and variances, then by products of covariances.
        # Both are fast, neither minimises f.
        places = _by_products(m, S, μ, S0, _by_moments(m, S, μ, S0)).argsort()
        # Λ, regularised; then f(p) = tr(Λ R[p, p]) − 2 (Λ μ)ᵀ m[p], with R = S + m mᵀ the second moment.
        precision = torch.linalg.inv(S0 + self.ridge * S0.diagonal().mean() * eye)
        return _by_swaps(precision, precision @ μ, S + m.outer(m), m, places).argsort()


def _by_moments(m: Tensor, S: Tensor, μ: Tensor, S0: Tensor) -> Int[Tensor, " d"]:
    """Assign columns by their means and the logarithms of their variances."""
    tiny = torch.finfo(S.dtype).tiny
    # Each column is a point (mean, log variance). Means are in units of their spread over the columns.
    seen = torch.stack([m / μ.std(correction=0).clamp_min(tiny), S.diagonal().clamp_min(tiny).log()], 1)
    known = torch.stack([μ / μ.std(correction=0).clamp_min(tiny), S0.diagonal().clamp_min(tiny).log()], 1)
    return least_cost(torch.cdist(seen, known).square())[1]


def _by_products(m: Tensor, S: Tensor, μ: Tensor, S0: Tensor, key: Int[Tensor, " d"]) -> Int[Tensor, " d"]:
    """Assign each column by its products with all others under the current assignment, until that is stable."""
    for _ in range(50):
        # Column k fits column j by Σ_l S_kl S0_c(l)j + m_k μ_j: by its products with all
        # others, put where the last key has them.
        before, key = key, least_cost(-(S @ S0[key] + m.outer(μ)))[1]
        if torch.equal(before, key):
            break
    return key


def _by_swaps(A: Tensor, v: Tensor, R: Tensor, m: Tensor, places: Int[Tensor, " d"]) -> Int[Tensor, " d"]:
    """Lower f = tr(A R[p, p]) − 2 vᵀ m[p] by the best swap in p, until no swap lowers it.

    A swap of i and j changes f by (a_ii − a_jj)(b_jj − b_ii) + 2 Σ_{k≠i,j} (a_ik − a_jk)(b_jk − b_ik) − 2 (v_i − v_j)
    (m_j − m_i), with B = R[p, p]. C = A B gives the sums of all pairs at once, and a swap changes C by rank one.
    """
    # All arrays are kept in the order p, so that a swap exchanges entries: B = R[p, p], m = m[p].
    p, B = places.clone(), R[places][:, places]
    a, m, C = A.diagonal(), m[places], A @ B
    while True:
        b, c = B.diagonal(), C.diagonal()
        # Σ_k (a_ik − a_jk)(b_jk − b_ik) = C_ij + C_ji − C_ii − C_jj over all k; then the terms
        # of k = i and of k = j are taken off.
        others = C + C.mT - c - c[:, None] - (a[:, None] - A) * (B - b[:, None]) - (A - a) * (b - B)
        change = (a[:, None] - a) * (b - b[:, None]) + 2 * others - 2 * (v[:, None] - v) * (m - m[:, None])
        # The best of all d² swaps is made, until none lowers f by more than rounding.
        i, j = divmod(int(change.argmin()), len(p))
        if change[i, j] > -LEAST_CHANGE:
            return p
        pair, back = [i, j], [j, i]
        p[pair], m[pair] = p[back], m[back]
        # C = A B: exchange the columns of B and C; after the exchange of B's rows, C
        # changes by (A_i − A_j) (B_i − B_j)ᵀ.
        B[:, pair] = B[:, back]
        C[:, pair] = C[:, back]
        B[pair] = B[back]
        C += (A[:, i] - A[:, j]).outer(B[i] - B[j])

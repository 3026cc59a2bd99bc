"""`qkv-completion`: the image from the exact entries of the gradient of the first block's queries, keys and values."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers import hides_places, ridge_inverse, row_span
from privlab.attacks.tokens import QKV, normalised_tokens
from privlab.base import PrivlabError, check_range
from privlab.release import errors_of_filters
from privlab.threat import Capability, Observation
from privlab.victims import VictimModel

__all__ = ["QkvCompletion"]


@dataclass(frozen=True)
class QkvCompletion:
    """Complete ∂ℓ/∂W_qkv = Δᵀ U from its exact entries, and solve for the patches whose tokens lie in its row span.

    U has the rows u_n = γ ⊙ (z_n − mean z_n) / σ_n + β, with z_n = W x_n + e_n and e_n the token of a patch of zeros: N
    patches and p prefix tokens, so that the matrix has rank N + p at most, and entries that a filter cut or left out
    follow from the others (`row_span`). What a filter is known to tell of these entries, an interval or a bound, is not
    used: on development photographs it led the search astray.

    With Q orthonormal rows that complete the span, Q u_n = 0. Times σ_n this is linear in the patch and in σ_n:
    Q (γ ⊙ (W x_n − mean W x_n)) + σ_n Q β = −Q (γ ⊙ (e_n − mean e_n)), D − N − p equations for K + 1 numbers, slot by
    slot. The gradients of the embedding, which filters with one bound for all parameters cut most, are not read.

    Args:
        rank_step: by how much the rank is raised at a time. More is faster, and ends in a wrong completion more often.
        rounds: the most steps at each rank but the last.
        last_rounds: the most steps at the last.
        steps: steps of conjugate gradients in each.
    """

    name: ClassVar[str] = "qkv-completion"
    paper: ClassVar[str] = "ours: the rank of the first block's gradient, against filters that leave entries exact"
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

    rank_step: int = 4
    rounds: int = 6
    last_rounds: int = 20
    steps: int = 60

    def __post_init__(self) -> None:
        """Raise PrivlabError if a number is below 1."""
        for name in ("rank_step", "rounds", "last_rounds", "steps"):
            check_range(getattr(self, name) >= 1, f"{name} of {self.name}", "at least 1", getattr(self, name))

    def beyond(self, seen: Observation) -> str | None:
        """Return which of K + 1 ≤ D − N − p, the number of exact entries, and known places does not hold."""
        (rank, d), k = _rank_and_width(seen.model), seen.model.vit.patch_embed.proj.weight[0].numel()
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
        model, (rank, d) = seen.model, _rank_and_width(seen.model)
        if rank >= d:
            raise PrivlabError(
                f"{self.name} needs fewer tokens than channels. Found {rank} ≥ {d}. That it does not apply is no "
                "evidence of privacy."
            )
        found = []
        for G, errors in zip(seen.gradients[QKV].double(), errors_of_filters(seen, (QKV,)), strict=True):
            exact = errors[QKV] == 0
            if not (G[exact] != 0).any():
                raise PrivlabError(
                    f"{self.name} needs entries of {QKV} that the filter left exact. Found none but zeros. That it "
                    "does not apply is no evidence of privacy."
                )
            ranks = [*range(self.rank_step, rank, self.rank_step), rank]
            T = row_span(G, exact, ranks, self.rounds, self.last_rounds, self.steps)
            found.append(_patches(model, T))
        return model.to_images(torch.stack(found))


def _rank_and_width(model: VictimModel) -> tuple[int, int]:
    """Return N + p and D."""
    return model.grid[0] * model.grid[1] + model.vit.num_prefix_tokens, model.vit.embed_dim


def _patches(model: VictimModel, T: Float[Tensor, "r d"]) -> Float[Tensor, "n k"]:
    """Return the normalised patches whose tokens, normalised, lie in the span of the orthonormal rows T best."""
    F, g, _ = normalised_tokens(model)
    Q = torch.linalg.svd(T).Vh[len(T) :]
    return -(ridge_inverse(Q @ F, rtol=0.0) @ (Q @ g.mT))[:-1].mT

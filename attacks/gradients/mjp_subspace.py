"""`mjp-subspace`: what MJP's masked gradients determine, and the rest by an image prior.

Known are A = ∂ℓ/∂E_pos, whose rows of masked slots are zero, and G = ∂ℓ/∂W = Σ_n g_n x_nᵀ, in which the g_n of masked
slots are unknown. Sought are all patches x_n.

1. What A cannot explain of G has the span Y of the masked patches for its row space. Beyond Y, G determines the other
   patches (`subspace`). In an update of several steps, slots whose patches moved count as masked (`without_moved`).
2. An image prior chooses the components of the unmasked patches in Y, and then the masked patches
   (`MjpSubspace.complete`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.solvers import (
    ONE_IMAGE,
    RTOL,
    Smoothness,
    hides_places,
    photograph_gradients,
    photograph_windows,
    ridge_inverse,
    slot_gradients,
    slot_rows,
    too_many,
    warn_of_limits,
    zero_rows,
)
from privlab.attacks.solvers.prior import PRIORS
from privlab.base import AtLeast0, AtLeast1, Checked
from privlab.release import undecayed
from privlab.threat import Capability, Observation

_PROJECTION = "patch_embed.proj.weight"


class Subspace(NamedTuple):
    """What one gradient under MJP says of the normalised patches, exactly.

    `masked` marks the slots without a separate gradient. The rows of `Y`, zero beyond their number, are an
    orthonormal basis of the span of their patches; `known` holds the other patches without their component in Y.
    """

    masked: Bool[Tensor, "b n"]
    Y: Float[Tensor, "b m k"]
    known: Float[Tensor, "b n k"]


def subspace(A: Float[Tensor, "b n d"], G: Float[Tensor, "b d k"], rtol: float = RTOL) -> Subspace:
    """Split ∂ℓ/∂W = A_Uᵀ X_U + A_Mᵀ X_M, of which A_U alone is released, into what it determines.

    With Q the projector on the orthogonal complement of the rows of A_U, Q ∂ℓ/∂W = Q A_Mᵀ X_M has the row space Y =
    span{x_m}. And (I − Yᵀ Y) removes X_M: A_Uᵀ X_U (I − Yᵀ Y) = ∂ℓ/∂W (I − Yᵀ Y). Exact for A of rank N, so N < D.

    Args:
        A: ∂ℓ/∂E_pos of the patch slots; a row of zeros marks a masked slot.
        G: ∂ℓ/∂W of the patch embedding, D × K for each image.
        rtol: the ridge of `ridge_inverse`, relative to the norm of A.
    """
    A, G = A.double(), G.double()
    # MJP (Eq. 4) feeds E_unk in masked slots, so that their position embeddings have no gradient.
    masked = zero_rows(A)
    count = masked.sum(1)
    # The N − |masked| first right singular vectors of A span the rows of A_U; the others are set to zero.
    rows = torch.linalg.svd(A, full_matrices=False).Vh
    rows = rows * (torch.arange(rows.shape[1], device=A.device) < (A.shape[1] - count)[:, None])[..., None]
    # R = Q ∂ℓ/∂W = Q A_Mᵀ X_M, with A_Uᵀ X_U removed. Its row space, of |masked| dimensions, is that of the X_M.
    R = G - rows.mT @ (rows @ G)
    Y = torch.linalg.svd(R, full_matrices=False).Vh[:, : max(1, int(count.max()))]  # there may be more than K masked
    Y = Y * (torch.arange(Y.shape[1], device=A.device) < count[:, None])[..., None]
    # Aᵀ X = ∂ℓ/∂W, solved for the rows of X_U, holds beyond Y only, where ∂ℓ/∂W has no component of X_M.
    X = ridge_inverse(A.mT, rtol) @ G  # zero rows of A give zero rows of X
    return Subspace(masked, Y, X - (X @ Y.mT) @ Y)


def without_moved(A: Float[Tensor, "b n d"], G: Float[Tensor, "b d k"]) -> Float[Tensor, "b n d"]:
    """Return A with zeros in the rows of slots that steps with different masks filled with different patches.

    Of T steps A_j = Σ_t g_tj over the steps in which slot j kept its position embedding, and thus its patch, and G =
    Bᵀ X with B_j the sum over all steps of the gradients of the slots where patch j was. A_j = B_j for patches that
    were never moved; they lie in the span of B, which is the column space of G for N < D. Rows outside of it are those
    of patches that were moved while their loss was large; after a step on a photograph it often is small.

    Args:
        A: what moved the position embeddings of the patch slots.
        G: what moved the patch projection, D × K for each image.
    """
    # Σ_t G_t = Bᵀ X: the columns of G (d × k) span the rows of B, N dimensions for patches in general position.
    span = torch.linalg.svd(G, full_matrices=False).U[..., : A.shape[1]]
    # A_j with more than a fifth of its norm outside is not a row of B: in some step its patch was in another slot.
    outside = (A - A @ span @ span.mT).norm(dim=2)
    return A.masked_fill((outside > 0.2 * A.norm(dim=2))[..., None], 0)


def _of_update(seen: Observation) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b d k"]]:
    """Return what gradients moved in updates of position embeddings and projection, in the slots that tell patches."""
    assert seen.client is not None
    # Weight decay moved the parameters too; what is left is the sum of gradients over the steps.
    each = zip(seen.gradients["pos_embed"], seen.gradients[_PROJECTION], strict=True)
    moved = [undecayed(seen.model, {"pos_embed": e, _PROJECTION: W}, seen.client) for e, W in each]
    A = torch.stack([slot_rows(seen.model, of["pos_embed"]) for of in moved])
    G = torch.stack([of[_PROJECTION] for of in moved]).flatten(2)
    return (without_moved(A, G) if hides_places(seen) else A), G


@dataclass(frozen=True)
class MjpSubspace(Checked):
    """Recover unmasked patches exactly, except for their part in the span Y of the masked ones; a prior completes that.

    Idea: MJP hides the gradients of the masked slots, so their patches have no separate equation. The rest of the
    gradient still gives the span of the masked patches, and every other patch except for its part in that span.
    A prior learned from public photographs completes that part.

    Steps: span Y of the masked patches → solve the others outside Y → complete by an image prior

    Algorithm: The unknown coefficients C of X_U = X_known + C Y are those of the likeliest image under a prior learned
    from public photographs (`photograph_windows`), by iteratively reweighted least squares and conjugate gradients. The
    masked slots then take the smoothest patches within Y: each masked patch lies in Y. Without a mask this is
    `patch-gradient`.

    Of an update of several steps of SGD on one image, each with its own mask, the slots count as masked whose
    patches were moved while the loss was large (`without_moved`).

    Exact if: N < D: the unmasked patches are then exact except for their part in the span of the masked ones.

    Fails if: the masked patches matter: an image prior completes the open part of the others, and the masked patches
    become the smoothest ones in their span.

    Cost: 0.6 s of processor time an image at 160 pixels (ViT-Ti), 1.3 s at 224 pixels (DeiT-S).

    Studies: mjp, updates

    Example: privlab attack --model cifar_vit_mjp27 --attack mjp-subspace --setting c

    Args:
        prior: one of `PRIORS`.
        rounds: rounds of reweighting; quadratic priors take none.
        steps: steps of conjugate gradients in each round.
        rtol: the ridge of `ridge_inverse`.

    Source: the subspace identity is ours, at ∂ℓ/∂W = Σ_n g_n x_nᵀ; the masked gradient is that of MJP, Eq. 4.
    [@ren2023mjp]
    """

    name: ClassVar[str] = "mjp-subspace"
    paper: ClassVar[str] = "ours, against MJP (Ren et al. 2023), Eq. 4"
    order: ClassVar[int] = 70
    short: ClassVar[Mapping[str, Any]] = {"rounds": 1, "steps": 1}
    knows: ClassVar[frozenset[str]] = frozenset({"mjp"})
    requires: ClassVar[frozenset[Capability]] = ONE_IMAGE
    effort: ClassVar[str] = "quick"
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed", _PROJECTION)
    updates_of: ClassVar[tuple[str, ...]] = ("sgd",)

    prior: Annotated[str, PRIORS] = "cauchy"
    rounds: AtLeast0 = 12
    steps: AtLeast1 = 10
    rtol: float = RTOL

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition N < D with its numbers if it does not hold."""
        return too_many(seen)

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed."""
        model = seen.model
        # A = ∂ℓ/∂E_pos of the patch slots (N × D) and G = ∂ℓ/∂W (D × K), or their sums over the steps of an update.
        A, G = _of_update(seen) if seen.client is not None else (slot_gradients(seen), seen.gradients[_PROJECTION])
        warn_of_limits(self.name, A, most=A.shape[2] - 1, knows_mask=True)
        found = subspace(A, G.flatten(2), self.rtol)
        # Without a mask Y is empty, and `known` holds the patches themselves.
        if not found.masked.any():
            return model.to_images(found.known)
        return model.to_images(self.complete(found, seen))

    def complete(self, found: Subspace, seen: Observation) -> Float[Tensor, "b n k"]:
        """Return the likeliest patches that agree with what is known, in the precision of the model."""
        model = seen.model
        dtype, masked = model.mean.dtype, found.masked
        known, Y = found.known.to(dtype), found.Y.to(dtype)
        # The unmasked patches are X_known + C Y. Windows that reach into masked slots do not count.
        X = self.likeliest(known, Y, seen, free=~masked, inside=~masked)
        # The masked patches are C Y: their known part is zero. The order of the patches among these slots is unknown,
        # so they become the smoothest continuation of the others.
        smooth = Smoothness(model.image_shape, photograph_gradients(model, seen.photographs))
        return smooth.fill(X, Y, free=masked, inside=torch.ones_like(masked), steps=12 * self.steps)

    def likeliest(
        self,
        X: Float[Tensor, "b n k"],
        Y: Float[Tensor, "b m k"],
        seen: Observation,
        *,
        free: Bool[Tensor, "b n"],
        inside: Bool[Tensor, "b n"],
    ) -> Float[Tensor, "b n k"]:
        """Return the likeliest X + C Y under the prior of this attack, where C is zero in the rows that are not `free`.

        Args:
            X: normalised patches without their unknown component; for rows that are not free, final ones.
            Y: orthonormal rows that span the unknown component; rows of zeros are allowed.
            seen: the observation; its model and its public photographs make the prior.
            free: slots whose patches may change.
            inside: slots whose pixels count; a window counts only if it lies wholly within them.
        """
        # Quadratic priors have a linear solution, and take no rounds of reweighting.
        rounds = self.rounds if self.prior in ("sparse", "cauchy") else 0
        windows = photograph_windows(seen.model, self.prior, seen.photographs)
        return windows.fill(X, Y, free=free, inside=inside, rounds=rounds, steps=self.steps)

"""`row-alignment`: rows with a permutation for each image are aligned with one another, without the embeddings.

Known are the rows of b images, each in an unknown order, with embeddings e_s that all images share; sought are the
images. `__call__` finds the patches' rows, aligns them (1), orders the slots (2), estimates e_s and inverts (3).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.rows import (
    WHITE_BOX,
    effects,
    invert,
    known_tokens,
    patch_law,
    pixels,
    place_rows,
    summed_costs,
    undone,
    warn_of_moves,
)
from privlab.base import AtLeast0, AtLeast1, Checked, PrivlabError
from privlab.reassembly import ROUNDS, assemble
from privlab.threat import Capability, FeatureObservation, Reconstruction, RowOrder


@dataclass(frozen=True)
class RowAlignment(Checked):
    """Line up the rows of b ≥ 2 images by what each slot adds to all of them, then put the slots in place together.

    Idea: The client may keep its position embeddings private, yet it adds the same ones to every image. Over several
    images the attack lines up the rows that share an embedding, as a clustering does. The slots are then put in place
    together, by their borders and by what is public of the embeddings.

    Steps: cluster rows by slot → order slots by borders → subtract e_s, invert W

    Algorithm: The client's position embeddings e_s may be private, or fine-tuned away from the public ones. Still, a
    row of slot s is z = e_s + W x + β in every image. With the signature u_s of each slot:

    1. Assign the rows of each image to signatures by Σ_s z_r(s)ᵀ Σ⁻¹ u_s, set u_s to the mean of the rows assigned,
       less μ, and repeat. The first signatures are the public embeddings if they may be used, else the rows of one
       image. Orders that the whole batch shares need no alignment.
    2. Without u_s, a row is its patch less the mean patch of its slot, and borders still match. The slots are put
       together by their borders, with costs added up over the images (`privlab.reassembly.solver`), and by the
       likelihood of u_s given a public embedding that has drifted, N(e_s, τ² I + Σ/b), if these may be used; τ² is
       estimated.
    3. The client's e_s are estimated as the posterior mean given u_s, and the rows are inverted without them. What the
       images have in common at a slot is taken for the embedding as far as τ² allows: few images lose their mean.

    Class and register tokens are the rows that are the same in all images.

    Exact if: no condition is known: it has no guarantee. It improves with the number of images.

    Fails if: there is only one image, or rows do not stay with their image.

    Studies: permutation

    Args:
        iterations: the most repetitions of step 1, at least 1.
        rounds: rounds of `privlab.reassembly.solver.assemble`, at least 0.

    Source: alignment is k-means under a permutation for each image; the rest is `pe-assignment` and `border-jigsaw`.
    [@xu2024permutation]
    """

    name: ClassVar[str] = "row-alignment"
    paper: ClassVar[str] = "ours, against Permutation Equivariance (Xu et al. 2024), Eq. 2"
    order: ClassVar[int] = 290
    knows: ClassVar[frozenset[str]] = frozenset({"row-permutation", "gaussian-noise"})
    requires: ClassVar[frozenset[Capability]] = WHITE_BOX | {Capability.OWN_ROWS}
    effort: ClassVar[str] = "quick"

    iterations: AtLeast1 = 20
    rounds: AtLeast0 = ROUNDS

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Align the rows, put the slots in place and invert the rows."""
        model, kind, noise = seen.model, effects(seen).rows, effects(seen).noise_std
        warn_of_moves(self.name, seen, rows=True)
        features = undone(seen).double()
        if len(features) < 2:
            raise PrivlabError("row-alignment compares the images of a batch. Found one image: send two or more.")
        if kind == "mixed":
            raise PrivlabError(
                "row-alignment needs rows that stay with their image. Found rows mixed among images: use pe-assignment."
            )
        # (μ, Σ) of W x + β + noise over public patches.
        law = patch_law(model, seen.public, noise)
        prefix, known = known_tokens(model)
        public = known if Capability.POSITION_EMBEDDINGS in seen.grants else None
        # rows: b × N numbers of the patches' rows over the batch. Z: these rows
        # without μ, so that a row is e_s + N(0, Σ).
        rows = _patch_rows(features, len(prefix), kind)
        Z = features.flatten(0, 1)[rows] - law[0]
        # Step 1: after the alignment, row i of all images belongs to one slot, which is not known yet.
        if kind == "own":
            rows = rows.gather(1, self._align(Z, law[1], Z[0] if public is None else public))
            Z = features.flatten(0, 1)[rows] - law[0]
        # The mean over the images is u_s = e'_s + N(0, Σ/b). τ² is how far e'_s is from the public embedding.
        drift = _drift(Z.mean(0), public, law[1] / len(Z))
        # Step 2: one order of the slots for all images.
        if kind != "kept":
            order = self._order(seen, Z, law, public, drift)
            rows, Z = rows[:, order], Z[:, order]
        # Step 3: subtract the estimated embedding, add μ again, and invert.
        pe = _posterior(Z.mean(0), public, law[1] / len(Z), drift)
        return Reconstruction(model.to_images(invert(model, Z + law[0] - pe, seen.public, noise)[0]), rows)

    def _align(
        self, Z: Float[Tensor, "b n d"], covariance: Float[Tensor, "d d"], signatures: Float[Tensor, "n d"]
    ) -> Int[Tensor, "b n"]:
        """Return, for each image, the order of its rows that follows the signatures of the slots."""
        order = torch.zeros(Z.shape[:2], dtype=torch.long, device=Z.device)
        for _ in range(self.iterations):
            # gain[i, r, s] = z_irᵀ Σ⁻¹ u_s: of the log-likelihood of row r in slot s, the
            # part that an assignment depends on.
            gain = Z @ torch.linalg.solve(covariance, signatures.mT)
            before, order = order, place_rows(-gain, "own") % Z.shape[1]
            if torch.equal(order, before):
                break
            # As in k-means: the signature of a slot is the mean of the rows assigned to it, one of each image.
            signatures = Z.gather(1, order[..., None].expand_as(Z)).mean(0)
        return order

    def _order(
        self,
        seen: FeatureObservation,
        Z: Float[Tensor, "b n d"],
        law: tuple[Float[Tensor, " d"], Float[Tensor, "d d"]],
        public: Float[Tensor, "n d"] | None,
        drift: float,
    ) -> Int[Tensor, " n"]:
        """Return which of the aligned rows belongs in which slot, by the borders and the public embeddings."""
        model, noise, u = seen.model, effects(seen).noise_std, Z.mean(0)
        # Without u_s a patch is the mean patch plus its difference from the slot's mean: borders
        # still match, and no embedding is left in it.
        patches, floor = invert(model, Z - u + law[0], seen.public, noise)
        costs = summed_costs(pixels(model, patches), floor)
        places = None
        if public is not None:
            # −log N(u; e_s, τ² I + Σ/b) but for a constant: with L Lᵀ = τ² I + Σ/b, half the
            # squared distance of L⁻¹ u and L⁻¹ e_s.
            L = torch.linalg.cholesky(_spread(law[1] / len(Z), drift))
            near, slots = (torch.linalg.solve_triangular(L, x.mT, upper=False).mT for x in (u, public))
            places = torch.cdist(slots, near).square() / 2
        return assemble(costs, model.grid, places=places, rounds=self.rounds)


def _patch_rows(features: Float[Tensor, "b t d"], p: int, kind: RowOrder) -> Int[Tensor, "b n"]:
    """Return the rows of the batch that differ between images, which those of class and register tokens do not."""
    b, t, _ = features.shape
    if kind == "own":
        apart = torch.cdist(features[:1], features)  # row of the first image × row of each
        # A prefix row has an equal in every image: of the first image's rows, the p with the
        # least summed distances are the prefix.
        same = apart.min(2).values.sum(0).topk(p, largest=False).indices
        fixed = apart[:, same].argmin(2)
    elif kind == "shared":
        # One order for all images: the p places whose rows vary least over the images.
        fixed = features.var(0).sum(1).topk(p, largest=False).indices.expand(b, -1)
    else:
        fixed = torch.arange(p, device=features.device).expand(b, -1)
    # All rows but these, as numbers over the batch, in the order in which they were sent.
    patch = torch.ones(b, t, dtype=torch.bool, device=features.device).scatter_(1, fixed, value=False)
    return patch.flatten().nonzero().view(b, t - p)


def _spread(covariance: Float[Tensor, "d d"], drift: float) -> Float[Tensor, "d d"]:
    return covariance + drift * torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)


def _drift(u: Float[Tensor, "n d"], public: Float[Tensor, "n d"] | None, covariance: Float[Tensor, "d d"]) -> float:
    """Estimate τ², the variance of e'_s − e_s (of e'_s, without public embeddings), from second moments alone.

    Along each eigenvector of Σ/b, with eigenvalue λ, the second moment of the u_s is that of the e_s plus τ² + λ. The
    differences are weighted by 1/(τ² + λ)², the precision of a second moment; this is iterated, because it contains τ².
    """
    # Along eigenvector j: E (Vᵀ u)_j² = E (Vᵀ e)_j² + τ² + λ_j, so `excess` estimates τ² in each direction.
    λ, V = torch.linalg.eigh(covariance)
    known = 0 if public is None else (public @ V).square().mean(0)
    excess = (u @ V).square().mean(0) - known - λ
    drift = excess.mean().clamp_min(0)
    for _ in range(50):
        # The mean of the excess, weighted by 1 / (τ² + λ)²; τ² cannot be negative.
        weight = (drift + λ) ** -2
        drift = ((weight * excess).sum() / weight.sum()).clamp_min(0)
    return float(drift)


def _posterior(
    u: Float[Tensor, "n d"], public: Float[Tensor, "n d"] | None, covariance: Float[Tensor, "d d"], drift: float
) -> Float[Tensor, "n d"]:
    """Return E[e'_s | u_s] with u_s = e'_s + N(0, Σ/b) and e'_s ~ N(e_s, τ² I)."""
    # e_s + τ² (τ² I + Σ/b)⁻¹ (u_s − e_s): near u_s for a large drift, near the public e_s for a small one.
    prior = torch.zeros_like(u) if public is None else public
    return prior + drift * torch.linalg.solve(_spread(covariance, drift), (u - prior).mT).mT

"""`map-inversion`: embedded patches behind noise, by an adversary that knows how strong the noise is.

Known are noisy rows z and the noise's σ; sought are all patches X of an image. Each round replaces the sparse prior by
its quadratic bound at the last X (`Smoothness.curvature`) and minimises the sum by conjugate gradients.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.features.feature_inversion import LeastSquares, rows_as_sent
from privlab.attacks.features.pe_assignment import PEAssignment
from privlab.attacks.rows import WHITE_BOX, effects, known_tokens, undone, warn_of_moves
from privlab.attacks.solvers import Smoothness, colour_gradients, conjugate_gradients, invert_rows
from privlab.base import AtLeast0, AtLeast1, Checked, Positive
from privlab.threat import Capability, FeatureObservation, Reconstruction


@dataclass(frozen=True)
class MapInversion(Checked):
    """Minimise ‖W x + β − z‖² / 2σ² + strength Σ_p √(ε² + δ_pᵀ Γ⁻¹ δ_p) over the patches x of a whole image.

    Idea: Noise on features hides weak textures, and not edges. The attack knows how strong the noise is, and that the
    differences of adjacent pixels of photographs are mostly small and sometimes large. It finds the image that is
    likeliest under both, all of it at once.

    Steps: estimate each patch → weigh differences by their size → solve for the whole image, repeat

    Algorithm: σ is the deviation of the noise that the defense adds to the features z, and δ_p are the differences of
    adjacent pixels, across and down, within patches and between them. Their colour covariance Γ is that of public
    images. The sum is the negative logarithm of a posterior density: where `least-squares` estimates each patch by
    itself, this reads all of an image, and keeps its edges. It begins at `least-squares`, and reweights the sum in each
    round, which solves a linear system by conjugate gradients. Rows that the defense moves are placed as
    `pe-assignment` does.

    Exact if: never: noise stays, and weak textures are lost with it. Without noise it is `least-squares`.

    Fails if: the noise is not white, not known, or not on the embedding's rows. Moved rows need position embeddings.

    Studies: published

    Example: privlab attack --model cifar_vit --attack map-inversion --defense gaussian-noise --limit 8

    Args:
        rounds: how often the sum is reweighted; 0 returns the start.
        steps: steps of conjugate gradients in each round.
        strength: weight of the prior.
        epsilon: ε, in standard deviations of δ.

    Source: ours; the prior is that of `mjp-subspace`. [@dosovitskiy2021vit]
    """

    name: ClassVar[str] = "map-inversion"
    paper: ClassVar[str] = "ours: maximum a posteriori under a sparse image prior, against noise on features"
    order: ClassVar[int] = 340
    knows: ClassVar[frozenset[str]] = frozenset({"gaussian-noise", "row-permutation", "batch-shuffle"})
    undefended: ClassVar[str] = "least-squares"
    requires: ClassVar[frozenset[Capability]] = WHITE_BOX
    effort: ClassVar[str] = "quick"

    rounds: AtLeast0 = 8
    steps: AtLeast1 = 30
    strength: Positive = 0.7
    epsilon: Positive = 0.1

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Reconstruct the images that the client embedded."""
        if effects(seen).noise_std == 0:
            return without_noise(seen)
        warn_of_moves(self.name, seen, rows=_places(seen))
        noisy = NoisyRows.of(seen)
        X, A, pull = noisy.X, noisy.A, noisy.pull
        prior = Smoothness(seen.model.image_shape, colour_gradients(seen.model, seen.public).to(X))
        # The preconditioner takes the prior for a multiple of the identity: one K × K
        # inverse for all patches and rounds.
        scale = 2 * self.strength * float(prior.covariance.diagonal().reciprocal().mean())
        near = torch.linalg.inv(A + scale * torch.eye(len(A), dtype=A.dtype, device=A.device))  # preconditions
        for _ in range(self.rounds):
            H = prior.curvature(X, self.epsilon)
            # −gradient at X; H X is the gradient of the prior there. The V of
            # (A + strength · H) V = −gradient leads to the minimum X + V of the bound.
            downhill = pull - X @ A - self.strength * H(X)
            X = X + conjugate_gradients(
                lambda V, H=H: V @ A + self.strength * H(V), downhill, self.steps, lambda V: V @ near
            )
        return Reconstruction(seen.model.to_images(X), noisy.order)


@dataclass(frozen=True, eq=False)
class NoisyRows:
    """−log p(rows | x) of rows with white noise, by the patches x behind them: ½ xᵀ A x − pullᵀ x + constant.

    `order` numbers the row of each slot, and X is Wiener's estimate of each patch.
    """

    order: Int[Tensor, "b n"]
    X: Float[Tensor, "b n k"]
    A: Float[Tensor, "k k"]
    pull: Float[Tensor, "b n k"]

    @classmethod
    def of(cls, seen: FeatureObservation) -> "NoisyRows":
        """Return the likelihood of a release whose noise is known and not zero."""
        model, σ = seen.model, effects(seen).noise_std
        # The number of the row for each slot; its position embedding is subtracted, and Wiener's estimate is the start.
        order = PEAssignment().rows(seen) if _places(seen) else rows_as_sent(seen)
        rows = (undone(seen).flatten(0, 1)[order] - known_tokens(model)[1]).double()
        X = invert_rows(model, rows, seen.public, noise=σ)
        proj = model.vit.patch_embed.proj
        W = proj.weight.detach().flatten(1).to(X)
        z = rows if proj.bias is None else rows - proj.bias.detach().to(X)
        # The likelihood's gradient by a patch is A x − pull, with A = Wᵀ W / σ² (K × K) and pull = Wᵀ (z − β) / σ².
        return cls(order, X, W.mT @ W / σ**2, z @ W / σ**2)


def without_noise(seen: FeatureObservation) -> Reconstruction:
    """Return the closed form: without noise the likelihood alone determines what W keeps."""
    return (PEAssignment() if _places(seen) else LeastSquares())(seen)


def _places(seen: FeatureObservation) -> bool:
    """Return whether rows have moved, and position embeddings show from where."""
    return effects(seen).rows != "kept" and Capability.POSITION_EMBEDDINGS in seen.grants

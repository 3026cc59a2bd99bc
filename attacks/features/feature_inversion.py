"""`least-squares` and `feature-optimisation`: the embedding inverted by an adversary that knows its weights.

Known are the rows z = W x + β + e of each patch, in their order; sought are the patches. `LeastSquares` inverts each
row in closed form; `FeatureOptimisation` starts there and searches over whole images with a penalty on rough ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.rows import WHITE_BOX, effects, known_tokens, undone, warn_of_moves
from privlab.attacks.solvers import invert_rows
from privlab.attacks.solvers.embedding_inverse import PRIORS
from privlab.base import AtLeast0, Checked, NotNegative
from privlab.patches import patchify, unpatchify
from privlab.threat import Capability, FeatureObservation, Reconstruction

EMBEDDING = "the embedding of ViT (Dosovitskiy et al. 2021), Equation 1"


@dataclass(frozen=True)
class LeastSquares(Checked):
    """Solve z = W x + β + e for each patch x; the rows are taken in the order in which they were sent.

    Idea: A row of features is a linear function of its patch. The attack inverts that function, with the rows in the
    order in which they were sent. What the projection has lost is estimated from the statistics of public patches.

    Steps: subtract e_s and b → Wiener estimate of each patch

    Algorithm: This is exact for a square projection (ViT-B/16). A projection with d < k keeps d of k dimensions:
    `wiener` estimates the others from the statistics of public patches, `ridge` sets them to zero. Noise that a defense
    adds is part of the estimate.

    Exact if: W is square and of full rank, and there is no noise.

    Fails if: rows are permuted: it takes them in the order in which they were sent.

    Studies: permutation

    Args:
        prior: "wiener" or "ridge", as in `invert_rows`.

    Source: [@dosovitskiy2021vit]
    """

    name: ClassVar[str] = "least-squares"
    paper: ClassVar[str] = f"Wiener's estimate for {EMBEDDING}"
    order: ClassVar[int] = 310
    knows: ClassVar[frozenset[str]] = frozenset({"gaussian-noise"})
    requires: ClassVar[frozenset[Capability]] = WHITE_BOX - {Capability.KNOWS_DEFENSE}
    effort: ClassVar[str] = "quick"

    prior: Annotated[str, PRIORS] = "wiener"

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Reconstruct the images that the client embedded."""
        warn_of_moves(self.name, seen)
        return Reconstruction(seen.model.to_images(_patches(seen, self.prior)), rows_as_sent(seen))


@dataclass(frozen=True)
class FeatureOptimisation(Checked):
    """Minimise ‖F₁(x) − z‖² / D + (tv + tv_noise · σ²) TV(x) over images x by Adam; rows are taken in the order sent.

    Idea: The attack guesses an image, and computes the features that the client would send for it. An optimiser changes
    the guess until both agree, with a penalty on rough images. Rows are taken in the order in which they were sent.

    Steps: guess an image → match the features → smooth by total variation

    Algorithm: D is the number of entries in the rows of patches, σ² the variance of the noise if it is known, and TV
    the mean absolute difference of neighbouring pixels. x = sigmoid(u) keeps pixels in [0, 1]; u starts at the linear
    inversion under the ridge prior.

    Exact if: no condition is known: it is a search without a guarantee.

    Fails if: rows are permuted: it takes them in the order in which they were sent.

    Studies: permutation

    Args:
        steps: number of steps of Adam.
        learning_rate: step size of Adam for u.
        tv: weight of the total variation.
        tv_noise: factor of σ² that is added to this weight, because the likelihood weighs the misfit by 1 / σ².

    Source: [@mahendran2015understanding]
    """

    name: ClassVar[str] = "feature-optimisation"
    paper: ClassVar[str] = "Mahendran and Vedaldi (CVPR 2015), Equations 1 and 3"
    order: ClassVar[int] = 360
    short: ClassVar[Mapping[str, Any]] = {"steps": 1}
    knows: ClassVar[frozenset[str]] = frozenset({"gaussian-noise"})
    requires: ClassVar[frozenset[Capability]] = LeastSquares.requires - {Capability.AUXILIARY_IMAGES}
    at_full: ClassVar[Mapping[str, int]] = {"steps": 1000}

    steps: AtLeast0 = 300
    learning_rate: NotNegative = 0.1
    tv: NotNegative = 0.01
    tv_noise: NotNegative = 8.0

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Reconstruct the images that the client embedded."""
        model, prefix = seen.model, seen.model.vit.num_prefix_tokens
        warn_of_moves(self.name, seen)
        # The start is kept away from 0 and 1, where the sigmoid is flat.
        u = model.to_images(_patches(seen, "ridge")).clamp(0.02, 0.98).logit()
        W = (model.vit.patch_embed.proj.weight.detach() / model.std).flatten(1)  # acts on pixels in [0, 1]
        # F₁(x) − F₁(0) is linear in the pixels, so W X is compared with z − F₁(0), and no
        # normalisation is needed in the loop.
        wanted = (seen.features - model.embed(torch.zeros_like(u)))[:, prefix:]  # F₁ is affine
        weight = self.tv + self.tv_noise * _known_noise(seen) ** 2
        adam = torch.optim.Adam([u], lr=self.learning_rate, fused=True)
        for _ in range(self.steps):
            images = u.sigmoid()
            # The gradient by x, then by u: dx/du = x (1 − x) for x = sigmoid(u).
            slope = _slope_of_misfit(images, W, wanted, model.patch) + weight * _slope_of_variation(images)
            u.grad = slope * images * (1 - images)
            adam.step()
        return Reconstruction(u.sigmoid(), rows_as_sent(seen))


def _slope_of_misfit(
    images: Float[Tensor, "b c h w"], W: Float[Tensor, "d k"], wanted: Float[Tensor, "b n d"], patch: int
) -> Float[Tensor, "b c h w"]:
    """Return ∂(‖X Wᵀ − wanted‖² / D)/∂x of each image by two products instead of a convolution's backward pass."""
    _, c, h, w = images.shape
    # Per image: the derivative of ‖r‖² / D with r = X Wᵀ − wanted is 2 r W / D, with D = N · d entries.
    residual = patchify(images, patch) @ W.mT - wanted
    return unpatchify(residual @ W * (2 / residual[0].numel()), (c, h, w))


def _slope_of_variation(images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Return ∂TV/∂x of each image; TV is the mean absolute difference of neighbouring pixels, across and down."""
    slope = torch.zeros_like(images)
    for side in (2, 3):
        # d|x_q − x_p| has the sign of the difference at the later pixel q and the opposite sign at p.
        step = images.diff(dim=side).sign()
        step /= step[0].numel()
        slope.narrow(side, 1, step.shape[side]).add_(step)
        slope.narrow(side, 0, step.shape[side]).sub_(step)
    return slope


def _patches(seen: FeatureObservation, prior: str) -> Float[Tensor, "b n k"]:
    """Return the patches by linear inversion; row i is taken for slot i, and known noise is part of the estimate."""
    prefix, pe = known_tokens(seen.model)
    rows = undone(seen)[:, len(prefix) :] - pe
    return invert_rows(seen.model, rows, seen.public, prior=prior, noise=_known_noise(seen))


def _known_noise(seen: FeatureObservation) -> float:
    """Return the standard deviation of the noise on features; 0 if the attack may not know the defense."""
    return effects(seen).noise_std if Capability.KNOWS_DEFENSE in seen.grants else 0.0


def rows_as_sent(seen: FeatureObservation) -> Int[Tensor, "b n"]:
    """Return the row of each patch slot if no row was moved."""
    b, t, _ = seen.features.shape
    rows = torch.arange(b * t, device=seen.features.device).view(b, t)
    return rows[:, seen.model.vit.num_prefix_tokens :]

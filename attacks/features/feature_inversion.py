"""`least-squares` and `feature-optimisation`: the embedding inverted by an adversary that knows its weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.rows import effects, known_tokens, undone, warn_of_moves
from privlab.attacks.solvers import invert_rows
from privlab.attacks.solvers.embedding_inverse import PRIORS
from privlab.base import check_name, check_range
from privlab.patches import patchify, unpatchify
from privlab.threat import Capability, FeatureObservation, Reconstruction

__all__ = ["FeatureOptimisation", "LeastSquares", "rows_as_sent"]

EMBEDDING = "the embedding of ViT (Dosovitskiy et al. 2021), Equation 1"


@dataclass(frozen=True)
class LeastSquares:
    """Solve z = W x + β + e for each patch x; the rows are taken in the order in which they were sent.

    This is exact for a square projection (ViT-B/16). A projection with d < k keeps d of k dimensions: `wiener`
    estimates the others from the statistics of public patches, `ridge` sets them to zero. Noise that a defense adds is
    part of the estimate.

    Args:
        prior: "wiener" or "ridge", as in `invert_rows`.
    """

    name: ClassVar[str] = "least-squares"
    paper: ClassVar[str] = f"Wiener's estimate for {EMBEDDING}"
    knows: ClassVar[frozenset[str]] = frozenset({"gaussian-noise"})
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.RELEASED_FEATURES,
            Capability.KNOWS_WEIGHTS,
            Capability.AUXILIARY_IMAGES,
            Capability.EMBEDDED_ROWS,
        }
    )
    effort: ClassVar[str] = "quick"

    prior: str = "wiener"

    def __post_init__(self) -> None:
        """Raise PrivlabError if the prior is unknown."""
        check_name("prior", self.prior, PRIORS)

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Reconstruct the images that the client embedded."""
        warn_of_moves(self.name, seen)
        return Reconstruction(seen.model.to_images(_patches(seen, self.prior)), rows_as_sent(seen))


@dataclass(frozen=True)
class FeatureOptimisation:
    """Minimise ‖F₁(x) − z‖² / D + (tv + tv_noise · σ²) TV(x) over images x by Adam; rows are taken in the order sent.

    D is the number of entries in the rows of patches, σ² the variance of the noise if it is known, and TV the mean
    absolute difference of neighbouring pixels. x = sigmoid(u) keeps pixels in [0, 1]; u starts at the linear inversion
    under the ridge prior.

    Args:
        steps: number of steps of Adam.
        learning_rate: step size of Adam for u.
        tv: weight of the total variation.
        tv_noise: factor of σ² that is added to this weight, because the likelihood weighs the misfit by 1 / σ².
    """

    name: ClassVar[str] = "feature-optimisation"
    paper: ClassVar[str] = "Mahendran and Vedaldi (CVPR 2015), Equations 1 and 3"
    knows: ClassVar[frozenset[str]] = frozenset({"gaussian-noise"})
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.RELEASED_FEATURES, Capability.KNOWS_WEIGHTS, Capability.EMBEDDED_ROWS}
    )
    at_full: ClassVar[Mapping[str, int]] = {"steps": 1000}

    steps: int = 300
    learning_rate: float = 0.1
    tv: float = 0.01
    tv_noise: float = 8.0

    def __post_init__(self) -> None:
        """Raise PrivlabError for a negative step count, rate or weight."""
        for name in ("steps", "learning_rate", "tv", "tv_noise"):
            value = getattr(self, name)
            check_range(0 <= value < math.inf, f"{name} of {self.name}", "at least 0 and finite", value)

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Reconstruct the images that the client embedded."""
        model, prefix = seen.model, seen.model.vit.num_prefix_tokens
        warn_of_moves(self.name, seen)
        u = model.to_images(_patches(seen, "ridge")).clamp(0.02, 0.98).logit()
        W = (model.vit.patch_embed.proj.weight.detach() / model.std).flatten(1)  # acts on pixels in [0, 1]
        wanted = (seen.features - model.embed(torch.zeros_like(u)))[:, prefix:]  # F₁ is affine
        weight = self.tv + self.tv_noise * _known_noise(seen) ** 2
        adam = torch.optim.Adam([u], lr=self.learning_rate, fused=True)
        for _ in range(self.steps):
            images = u.sigmoid()
            slope = _slope_of_misfit(images, W, wanted, model.patch) + weight * _slope_of_variation(images)
            u.grad = slope * images * (1 - images)
            adam.step()
        return Reconstruction(u.sigmoid(), rows_as_sent(seen))


def _slope_of_misfit(
    images: Float[Tensor, "b c h w"], W: Float[Tensor, "d k"], wanted: Float[Tensor, "b n d"], patch: int
) -> Float[Tensor, "b c h w"]:
    """Return ∂(‖X Wᵀ − wanted‖² / D)/∂x of each image by two products instead of a convolution's backward pass."""
    _, c, h, w = images.shape
    residual = patchify(images, patch) @ W.mT - wanted
    return unpatchify(residual @ W * (2 / residual[0].numel()), (c, h, w))


def _slope_of_variation(images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Return ∂TV/∂x of each image; TV is the mean absolute difference of neighbouring pixels, across and down."""
    slope = torch.zeros_like(images)
    for side in (2, 3):
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
    """Return the row of each patch slot if no row was moved.

    Args:
        seen: the observation, of which the shape counts.
    """
    b, t, _ = seen.features.shape
    rows = torch.arange(b * t, device=seen.features.device).view(b, t)
    return rows[:, seen.model.vit.num_prefix_tokens :]

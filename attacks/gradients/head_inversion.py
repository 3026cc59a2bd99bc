"""`head-inversion`: images with the features that the head read, which follow from its gradient."""

# Known are the model and the gradients of its head, Σ_i r_i f_iᵀ and Σ_i r_i. Sought are images whose features are f_i.
# 1. `_sums` makes these sums of a gradient or of an update, and `_separated` finds the f_i in them.
# 2. Adam minimises ‖f(x) − f‖² / ‖f‖² + tv · TV(x) from grey, for all images at once.

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from privlab.attacks.solvers import total_variation
from privlab.base import AtLeast0, Checked, NotNegative, PrivlabError, gradients_enabled, warn
from privlab.release import as_gradients, each_release, released_parameters, told_images, undecayed
from privlab.threat import Capability, Observation

_WEIGHT, _BIAS = "head.weight", "head.bias"


@dataclass(frozen=True)
class HeadInversion(Checked):
    """Read the features f of each image from the head, and search for images x that have them.

    Idea: The gradient of the classifier is an outer product, so it reveals the label of an image and the features
    that the classifier read. The attack reads both, and searches for an image with these features. The features are
    exact, and the image is a guess, since many images share them.

    Steps: features f = Gᵀ h / ‖h‖² → search an image that has them → smooth by total variation

    Algorithm:

    1. Of one image ∂ℓ/∂W = h fᵀ and ∂ℓ/∂b = h, so f = (∂ℓ/∂W)ᵀ h / ‖h‖² is exact. So it is for any number of steps of
       SGD where the head alone trains, because f stays the same. Several images of one step are separated by
       `privlab.release.told_images`.
    2. ‖f(x) − f‖² / ‖f‖² + tv · TV(x) is minimised from grey by Adam, whose steps shrink to zero along half a cosine;
       TV is the mean absolute difference of neighbouring pixels, and x = sigmoid(u) keeps pixels in [0, 1].

    Who has photographs can ask which of them has these features. An image whose f is not found is grey.

    Exact if: the gradient is that of one image, after one step or where the head alone trains, or of a batch whose
    images the head's gradient separates: the features are then exact. The search for an image has no guarantee.

    Fails if: the image itself is wanted: many images have these features, and what it finds is not nearer to the
    photograph than one colour.

    Cost: 11 s an image (ViT-Ti, 160 pixels, 300 steps, one core).

    Studies: updates

    Args:
        steps: number of steps of Adam.
        learning_rate: the first step size of Adam, for u.
        tv: weight of the total variation.

    Source: Phong et al. (2018) for f; Mahendran and Vedaldi (CVPR 2015), Equations 1 and 3, for the search.
    [@mahendran2015understanding; @phong2017revisited]
    """

    name: ClassVar[str] = "head-inversion"
    paper: ClassVar[str] = "Mahendran and Vedaldi (CVPR 2015), of the features that the head's gradient reveals"
    order: ClassVar[int] = 210
    short: ClassVar[Mapping[str, Any]] = {"steps": 1}
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.KNOWS_WEIGHTS, Capability.CLASS_LABELS})
    parameters: ClassVar[tuple[str, ...]] = (_WEIGHT, _BIAS)
    effort: ClassVar[str] = "full"
    named_only: ClassVar[bool] = True
    search: ClassVar[bool] = True
    updates_of: ClassVar[tuple[str, ...]] = ("sgd",)

    steps: AtLeast0 = 300
    learning_rate: NotNegative = 0.1
    tv: NotNegative = 10.0

    def beyond(self, seen: Observation) -> str | None:
        """Return that several steps trained more than the head: their features differ, and a mixture is read."""
        client = seen.client
        if client is None or client.gradient_factor is not None:
            return None
        others = (name for name in released_parameters(seen.model) if name not in self.parameters)
        return "several steps train more than the head" if any(map(client.chooses, others)) else None

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed.

        Raises:
            PrivlabError: for the update of several images in several steps, or a head that is not a linear layer.

        Warns:
            PrivlabWarning: if some images of a gradient cannot be separated.
        """
        # Step 1: one row of features for each image. Images that were not separated keep ones, and stay grey.
        f, known = self._features(seen)
        if not bool(known.all()):
            warn(
                f"{self.name}: the head's gradient separates {int(known.sum())} of {len(known)} images. The others "
                "stay grey, which is no evidence of privacy.",
            )
        model, size = seen.model, f.square().sum(1)
        # Step 2: x = sigmoid(u) keeps pixels in [0, 1]; u = 0 is grey.
        u = model.mean.new_zeros(len(f), *model.image_shape)
        adam = torch.optim.Adam([u], lr=self.learning_rate)
        for step in range(self.steps):
            # The rate falls along half a cosine from its first value to zero.
            adam.param_groups[0]["lr"] = self.learning_rate * (1 + math.cos(math.pi * step / self.steps)) / 2
            with gradients_enabled():
                point = u.detach().requires_grad_()
                x = point.sigmoid()
                # The images are independent, so that the slope of the sum is that of each.
                off = (model.features(x) - f).square().sum(1) / size
                (slope,) = torch.autograd.grad((off + self.tv * total_variation(x)).sum(), point)
            u.grad = slope * known[:, None, None, None]
            adam.step()
        return u.sigmoid()

    def _features(self, seen: Observation) -> tuple[Float[Tensor, "b d"], Bool[Tensor, " b"]]:
        """Return the features of each image, and which of them are found; the others have ones."""
        head, B = seen.model.vit.head, seen.images_per_release
        if not isinstance(head, nn.Linear):
            raise PrivlabError(f"{self.name} needs a head that is one linear layer. Found {type(head).__name__}.")
        f = torch.ones(len(seen.gradients[_BIAS]) * B, head.in_features).to(head.weight)
        known = torch.zeros_like(f[:, 0], dtype=torch.bool)
        for i, own in enumerate(self._sums(seen)):
            found = self._separated(head, own, B)
            # Release i has rows i B to (i + 1) B − 1. Those that were found come first.
            rows = slice(i * B, i * B + len(found))
            f[rows], known[rows] = found.to(f), True
        return f, known

    def _sums(self, seen: Observation) -> list[dict[str, Tensor]]:
        """Return Σ_i r_i f_iᵀ and Σ_i r_i of each release, except for a factor."""
        client, B = seen.client, seen.images_per_release
        if client is None:
            return each_release(seen)
        # The update of one whole step is a gradient except for a factor, and may hold several images.
        if client.gradient_factor is not None:
            return each_release(as_gradients(seen))
        if B > 1:
            raise PrivlabError(
                f"{self.name} reads several images from the update of one whole step. Found {B} images and "
                f"client.steps={client.total_steps}. That it does not apply is no evidence of privacy."
            )
        # Several steps of one image: where the head alone trains f is constant, and Σ_s a_s h_s fᵀ is an outer product
        # still. Where more trains, what comes out is a mixture of the features of all steps (`beyond`).
        return [undecayed(seen.model, own, client) for own in each_release(seen)]

    def _separated(self, head: nn.Linear, own: Mapping[str, Tensor], count: int) -> Float[Tensor, "k d"]:
        """Return the features of the images that can be separated from one release."""
        return told_images(head, own, count).f

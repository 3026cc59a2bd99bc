"""`head-inversion`: images that have the features which the head read, as the head's own gradient tells them."""

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from privlab.attacks.solvers import total_variation
from privlab.base import PrivlabError, PrivlabWarning, check_range
from privlab.release import as_gradients, told_images, undecayed
from privlab.threat import Capability, Observation

__all__ = ["HeadInversion"]

_WEIGHT, _BIAS = "head.weight", "head.bias"


@dataclass(frozen=True)
class HeadInversion:
    """Read the features f of each image from the head, and search for images x that have them.

    1. Of one image ∂ℓ/∂W = h fᵀ and ∂ℓ/∂b = h, so f = (∂ℓ/∂W)ᵀ h / ‖h‖² is exact. So it is for any number of steps of
       SGD where the head alone trains, because f stays the same. Several images of one step are told apart by
       `privlab.release.told_images`.
    2. ‖f(x) − f‖² / ‖f‖² + tv · TV(x) is minimised from grey by Adam, whose steps shrink to zero along half a cosine;
       TV is the mean absolute difference of neighbouring pixels, and x = sigmoid(u) keeps pixels in [0, 1].

    f has D numbers, and an image has many more. So the search has no guarantee, and its failure says nothing of f: who
    has photographs can ask which of them has it. An image whose f is not found is grey.

    Args:
        steps: number of steps of Adam.
        learning_rate: the first step size of Adam, for u.
        tv: weight of the total variation.

    Source: Phong et al. (2018) for f; Mahendran and Vedaldi (CVPR 2015), Equations 1 and 3, for the search.
    """

    name: ClassVar[str] = "head-inversion"
    paper: ClassVar[str] = "Mahendran and Vedaldi (CVPR 2015), of the features that the head's gradient gives away"
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.KNOWS_WEIGHTS, Capability.CLASS_LABELS})
    parameters: ClassVar[tuple[str, ...]] = (_WEIGHT, _BIAS)
    effort: ClassVar[str] = "full"
    named_only: ClassVar[bool] = True
    search: ClassVar[bool] = True
    updates_of: ClassVar[tuple[str, ...]] = ("sgd",)

    steps: int = 300
    learning_rate: float = 0.1
    tv: float = 10.0

    def __post_init__(self) -> None:
        """Raise PrivlabError for a negative step count, rate or weight."""
        for name in ("steps", "learning_rate", "tv"):
            value = getattr(self, name)
            check_range(0 <= value < math.inf, f"{name} of {self.name}", "at least 0 and finite", value)

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed.

        Raises:
            PrivlabError: for the update of several images in several steps, or a head that is no linear layer.

        Warns:
            PrivlabWarning: if some images of a gradient cannot be told apart.
        """
        f, known = self._features(seen)
        if not bool(known.all()):
            warnings.warn(
                f"{self.name}: the head's gradient tells {int(known.sum())} of {len(known)} images apart. The others "
                "stay grey, which is no evidence of privacy.",
                PrivlabWarning,
                stacklevel=2,
            )
        model, size = seen.model, f.square().sum(1)
        u = model.mean.new_zeros(len(f), *model.image_shape)
        adam = torch.optim.Adam([u], lr=self.learning_rate)
        for step in range(self.steps):
            adam.param_groups[0]["lr"] = self.learning_rate * (1 + math.cos(math.pi * step / self.steps)) / 2
            with torch.enable_grad():
                point = u.detach().requires_grad_()
                x = point.sigmoid()
                off = (model.features(x) - f).square().sum(1) / size
                (slope,) = torch.autograd.grad((off + self.tv * total_variation(x)).sum(), point)
            u.grad = slope * known[:, None, None, None]
            adam.step()
        return u.sigmoid()

    def _features(self, seen: Observation) -> tuple[Float[Tensor, "b d"], Bool[Tensor, " b"]]:
        """Return the features of each image, and which of them are found; the others have ones."""
        head, B, client = seen.model.vit.head, seen.images_per_release, seen.client
        if not isinstance(head, nn.Linear):
            raise PrivlabError(f"{self.name} needs a head that is one linear layer. Found {type(head).__name__}.")
        if client is not None and client.gradient_factor is not None:
            seen = as_gradients(seen)
        elif client is not None and B > 1:
            raise PrivlabError(
                f"{self.name} reads several images from the update of one whole step. Found {B} images and "
                f"client.steps={client.total_steps}. That it does not apply is no evidence of privacy."
            )
        f = torch.ones(len(seen.gradients[_BIAS]), B, head.in_features, dtype=head.weight.dtype).to(head.weight.device)
        known = torch.zeros_like(f[..., 0], dtype=torch.bool)
        for i in range(len(f)):
            own = {name: seen.gradients[name][i] for name in (_WEIGHT, _BIAS)}
            if client is not None and client.gradient_factor is None:
                own = undecayed(seen.model, own, client)
            found = told_images(head, own, B).f
            f[i, : len(found)], known[i, : len(found)] = found.to(f), True
        return f.flatten(0, 1), known.flatten()

"""What the model of a client was fed, as its update shows it, whatever the client normalises its images by."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks import PatchGradient
from privlab.release import without_decay
from privlab.release.residual import residual
from privlab.threat import Observation

__all__ = ["fed_pixels", "residual_of_pixels"]

_RANGE = 512
"""The normalised pixels that can be held, from −512 to 512: images of 0 to 255 that nobody scaled fit too."""


def fed_pixels(seen: Observation, lost: float) -> Float[Tensor, "1 c h w"]:
    """Return the normalised pixels of one image in float64, by `patch-gradient`, beyond those of an image too.

    Args:
        seen: the update of a client of one image.
        lost: the share of the weights that decay took, which is added again.
    """
    moved = without_decay(seen.model, {name: seen.gradients[name][0] for name in PatchGradient.parameters}, lost)
    mean, std = torch.full_like(seen.model.mean, 0.5).double(), torch.full_like(seen.model.std, 0.5 / _RANGE).double()
    model = seen.model.normalised_by(mean, std)
    found = PatchGradient()(replace(seen, model=model, gradients={name: u[None] for name, u in moved.items()}))
    return model.normalise(found)


def residual_of_pixels(seen: Observation, pixels: Float[Tensor, "1 c h w"], label: int) -> float:
    """Return `residual` of what the model was fed, in place of an image that it normalises.

    Args:
        seen: the update of a client of one image.
        pixels: normalised pixels.
        label: the class index of the private image.
    """
    model = seen.model.normalised_by(torch.zeros_like(seen.model.mean), torch.ones_like(seen.model.std))
    return residual(replace(seen, model=model), pixels.to(model.mean), label)

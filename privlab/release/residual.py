"""Whether an image is the private one, as the gradient that it gives itself shows: no private image is needed."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.base import full_precision
from privlab.release.gradients import per_sample_gradients, released_parameters
from privlab.threat import Feed, Observation

__all__ = ["EXPLAINED_RESIDUAL", "residual", "slots_without_gradient"]

EXPLAINED_RESIDUAL = 0.05
"""The residual below which a released gradient is taken for that of the reconstruction (notes/gradients.md)."""


def residual(seen: Observation, images: Float[Tensor, "1 c h w"], label: int) -> float:
    """Return ‖∇ℓ(image) − G‖ / ‖G‖ over the released gradients G that have a per-image rule; 0 is the client's own.

    Slots whose position embedding has no gradient are fed as MJP feeds them: with E_unk where it has a gradient.

    Args:
        seen: the observation of one release of one image.
        images: the one image to test, such as a reconstruction, in [0, 1].
        label: the class index of the private image.
    """
    model, held = seen.model, seen.gradients
    feed = Feed.undefended(images, model.patch)
    masked = slots_without_gradient(seen)
    if masked.any():
        unknown = "unk_embed" in held and bool(held["unk_embed"].any())
        feed = replace(feed, masked_pe=masked[None], replacement="unknown" if unknown else "zero")
    names = sorted(released_parameters(model) & held.keys())
    with full_precision():
        own = per_sample_gradients(model, feed, torch.tensor([label], device=images.device), names)
    off = sum((own[name] - held[name]).double().square().sum() for name in names)
    return float(torch.as_tensor(off).sqrt() / sum(held[name].double().square().sum() for name in names) ** 0.5)


def slots_without_gradient(seen: Observation) -> Bool[Tensor, " n"]:
    """Return the patch slots whose position embedding has no gradient."""
    height, width = seen.model.grid
    if "pos_embed" not in seen.gradients:
        return torch.zeros(height * width, dtype=torch.bool, device=seen.model.mean.device)
    return (seen.gradients["pos_embed"][0, 0, -height * width :] == 0).all(1)

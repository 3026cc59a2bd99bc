"""Whether an image is the private one, as the gradient or update that it gives shows: no private image is needed."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.base import full_precision
from privlab.release.filtered import exact_entries, scale_of, scales
from privlab.release.gradients import per_sample_gradients, released_parameters
from privlab.release.local_training import update_on, without_decay
from privlab.threat import Feed, Observation, Stack

__all__ = ["EXPLAINED_RESIDUAL", "explained_share", "residual", "slots_without_gradient", "tells_images"]

EXPLAINED_RESIDUAL = 0.05
"""The residual below which a released gradient is taken for that of the reconstruction (notes/gradients.md).

So is an update. Its explained share is then above 0.9975; 0.70 is the most of 1,000 wrong images, crops of other
photographs (tests/release/test_explained.py). Crops of the same photograph came to 0.9885.
"""


def residual(seen: Observation, images: Float[Tensor, "1 c h w"], label: int) -> float:
    """Return ‖∇ℓ(image) − G‖ / ‖G‖ over the released gradients G that have a per-image rule; 0 is the client's own.

    Of an update, G is what the gradients alone moved, −(θ_T − θ_0) − (1 − c) θ_0 with the public share c that decay
    keeps, and ∇ℓ(image) what they move where the client is run again on this image with its public settings, in the
    number format of its weights. Dropout is drawn anew, so that it stays unexplained. Where the training diverges the
    residual is infinite.

    Behind filters both are compared on the entries that these leave exact, and the client's are scaled by the factor s
    that fits best where a filter scales all entries, so that G is −(θ_T − θ_0) s − s (1 − c) θ_0.

    Slots whose position embedding has no gradient are fed as MJP feeds them: with E_unk where it has a gradient.

    Args:
        seen: the observation of one release of one image.
        images: the one image to test, such as a reconstruction, in [0, 1].
        label: the class index of the private image.
    """
    model, held = seen.model, seen.gradients
    if (client := seen.client) is not None:
        one, kept = {name: u[0] for name, u in held.items()}, exact_entries(seen)
        made = update_on(model, client, images, label)
        s = scale_of(made, one, kept) if scales(Stack(tuple(seen.defense)).on_gradients) else 1.0
        lost = s * (1 - client.kept_share) if client.is_linear else 0.0
        own, moved = (without_decay(model, u, lost) for u in ({name: s * made[name].double() for name in one}, one))
        return _relative(*({name: u[name][kept[name]] for name in one} for u in (own, moved)))
    feed = Feed.undefended(images, model.patch)
    masked = slots_without_gradient(seen)
    if masked.any():
        unknown = "unk_embed" in held and bool(held["unk_embed"].any())
        feed = replace(feed, masked_pe=masked[None], replacement="unknown" if unknown else "zero")
    names = sorted(released_parameters(model) & held.keys())
    with full_precision():
        own = per_sample_gradients(model, feed, torch.tensor([label], device=images.device), names)
    return _relative(own, {name: held[name] for name in names})


def tells_images(seen: Observation) -> bool:
    """Return whether a small `residual` says that an image is the private one.

    The head's gradient alone says only that their features are nearly equal: many images have the same D numbers.
    Filters that leave no entry of an update exact, such as noise, leave nothing to compare.

    Args:
        seen: the observation.
    """
    kept = set(seen.gradients)
    if seen.client is not None and Stack(tuple(seen.defense)).on_gradients:
        kept = {name for name, exact in exact_entries(seen).items() if exact.any()}
    return any(not name.startswith("head.") for name in kept)


def explained_share(residual: float) -> float:
    """Return the share of a release that an image explains: max(0, 1 − residual²), in [0, 1]; 1 is the private image's.

    With G what was released (of an update, what the gradients in it moved) and Ĝ what the image gives, it is
    1 − ‖Ĝ − G‖² / ‖G‖²: the coefficient of determination about zero, over all parameters that are looked at.

    Args:
        residual: what `residual` returns; ≥ 0.
    """
    return max(0.0, 1 - residual**2)


def _relative(own: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> float:
    """Return ‖own − held‖ / ‖held‖ over what is held."""
    off = torch.stack([(own[name] - held[name]).double().square().sum() for name in held]).sum().sqrt()
    size = torch.stack([held[name].double().square().sum() for name in held]).sum().sqrt()
    return float((off / size).nan_to_num(math.inf))


def slots_without_gradient(seen: Observation) -> Bool[Tensor, " n"]:
    """Return the patch slots whose position embedding has no gradient."""
    height, width = seen.model.grid
    if "pos_embed" not in seen.gradients:
        return torch.zeros(height * width, dtype=torch.bool, device=seen.model.mean.device)
    return (seen.gradients["pos_embed"][0, 0, -height * width :] == 0).all(1)

"""Whether an image is the private one, as the gradient or update that it gives shows: no private image is needed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.base import full_precision
from privlab.release.gradients import per_sample_gradients, released_parameters
from privlab.release.local_training import undecayed, update_on, without_decay
from privlab.threat import Feed, GradientDefense, Observation, Stack, defense_declarations

__all__ = ["EXPLAINED_RESIDUAL", "explained_share", "residual", "residual_of_clients"]
__all__ += ["errors_of_filters", "exact_entries", "scale_of", "scales", "slots_without_gradient", "tells_images"]

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


def residual_of_clients(seen: Observation, images: Float[Tensor, "k c h w"], labels: Sequence[Sequence[int]]) -> float:
    """Return `residual` of the mean update of K clients of one image each: all K are run again.

    Of the labels of an image, that one counts whose update leaves the least of what the images before it leave. Any
    choice of labels that explains the release will do, so the adversary need not try all combinations. Which client an
    image is of does not matter either.

    Args:
        seen: the observation of one release without filters, with the settings of its clients.
        images: an image for each client, in any order, in [0, 1].
        labels: the classes to try for each image, one or more.
    """
    model, client, held = seen.model, seen.client, {name: u[0] for name, u in seen.gradients.items()}
    assert client is not None
    moved = rest = undecayed(model, held, client)
    for image, of_image in zip(images, labels, strict=True):
        left: list[dict[str, Tensor]] = []
        for label in of_image:
            own = undecayed(model, update_on(model, client, image[None], label), client)
            left.append({name: rest[name] - own[name] / len(images) for name in held})
        rest = min(left, key=_size)
    return _size(rest) / _size(moved)


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


def errors_of_filters(seen: Observation, names: Sequence[str]) -> list[dict[str, Float[Tensor, "..."]]]:
    """Return the variances that filters state of the entries of a release, by release; those of several add up.

    Each states them of these parameters' part of the release alone.

    Args:
        seen: gradients or updates behind filters or none.
        names: the parameters.
    """
    released = {name: seen.gradients[name].double() for name in names}
    total = Stack(tuple(seen.defense)).variance(released)
    return [{name: total[name][i] for name in names} for i in range(len(released[names[0]]))]


def exact_entries(seen: Observation) -> dict[str, Bool[Tensor, "..."]]:
    """Return which entries of the first release its filters leave as they were, but for one factor on all (`scales`).

    Args:
        seen: gradients or updates behind filters or none.
    """
    if not Stack(tuple(seen.defense)).on_gradients:
        return {name: torch.ones_like(g[0], dtype=torch.bool) for name, g in seen.gradients.items()}
    return {name: variance == 0 for name, variance in errors_of_filters(seen, list(seen.gradients))[0].items()}


def scales(filters: Sequence[GradientDefense]) -> bool:
    """Return whether a filter multiplies all entries by a factor that depends on them, as clipping by the norm does.

    Args:
        filters: the defenses of the release, as `Stack.on_gradients` has them.
    """
    return any(defense_declarations(part).expected is not None for part in filters)


def scale_of(
    made: Mapping[str, Float[Tensor, "..."]],
    released: Mapping[str, Float[Tensor, "..."]],
    kept: Mapping[str, Bool[Tensor, "..."]],
) -> float:
    """Return s ≥ 0 of the least ‖s u − r‖ over the kept entries: the factor by which a filter scaled u to r.

    Args:
        made: u, by parameter name.
        released: r, of the parameters that are looked at.
        kept: which of their entries are looked at.
    """
    product = sum(float((made[n].double() * r.double())[kept[n]].sum()) for n, r in released.items())
    size = sum(float(made[n].double().square()[kept[n]].sum()) for n in released)
    return max(product / size, 0.0) if size else 0.0


def _relative(own: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> float:
    """Return ‖own − held‖ / ‖held‖ over what is held."""
    off = torch.stack([(own[name] - held[name]).double().square().sum() for name in held]).sum().sqrt()
    size = torch.stack([held[name].double().square().sum() for name in held]).sum().sqrt()
    return float((off / size).nan_to_num(math.inf))


def _size(u: Mapping[str, Tensor]) -> float:
    """Return the norm of all entries; infinite where one is not finite."""
    return float(torch.stack([each.double().square().sum() for each in u.values()]).sum().sqrt().nan_to_num(math.inf))


def slots_without_gradient(seen: Observation) -> Bool[Tensor, " n"]:
    """Return the patch slots whose position embedding has no gradient."""
    height, width = seen.model.grid
    if "pos_embed" not in seen.gradients:
        return torch.zeros(height * width, dtype=torch.bool, device=seen.model.mean.device)
    return (seen.gradients["pos_embed"][0, 0, -height * width :] == 0).all(1)

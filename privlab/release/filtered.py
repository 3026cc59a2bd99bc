"""What filters leave of an update: the entries that are exact, the factor of the others' scale, and the label."""

import copy
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.base import full_precision
from privlab.threat import GradientDefense, Observation, Stack, defense_declarations
from privlab.victims import VictimModel

__all__ = ["errors_of_filters", "exact_entries", "labels_that_rise", "scale_of", "scales"]

_STEP = 1e-3
"""The share of an update that is applied to see which logits rise: a difference quotient in float64."""


def errors_of_filters(seen: Observation, names: Sequence[str]) -> list[dict[str, Float[Tensor, "..."]]]:
    """Return the variances that filters state of the entries of a release, by release; those of several add up.

    Each states them of these parameters' part of the release alone.

    Args:
        seen: gradients or updates behind filters or none.
        names: the parameters.
    """
    released = {name: seen.gradients[name].double() for name in names}
    stated = [part.variance(released) for part in Stack(tuple(seen.defense)).on_gradients]
    none = {name: torch.zeros_like(g) for name, g in released.items()}
    total = {name: sum((of[name] for of in stated), none[name]) for name in names}
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


@torch.no_grad()
def labels_that_rise(
    model: VictimModel, update: Mapping[str, Float[Tensor, "..."]], image: Float[Tensor, "1 c h w"], most: int
) -> list[int]:
    """Return the classes whose logit of an image rises most along an update, the most first.

    A step along u = Jᵀ(p − y) moves the logits by −J Jᵀ (p − y), which is largest at the label y where classes disturb
    each other less than themselves. So what is released of all layers but the head tells the label too, given the
    image.

    Args:
        model: the server's model with θ_0; it is left as it is.
        update: −(θ_T − θ_0), or a part of it, by timm's parameter name.
        image: the image, or nearly it, in [0, 1].
        most: how many classes are returned.
    """
    before = copy.deepcopy(model).double()
    after = copy.deepcopy(before)
    for name, u in update.items():
        after.vit.get_parameter(name).sub_(_STEP * u.double())
    with full_precision():
        rise = (after(image.double()) - before(image.double()))[0]
    return rise.topk(min(most, len(rise))).indices.tolist()

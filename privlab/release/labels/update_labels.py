"""The labels that the head's update of a client tells, where its signs and sizes are beyond chance."""

import math
from statistics import NormalDist
from typing import NamedTuple

from jaxtyping import Float
from scipy.special import bdtrc
from torch import Tensor

from privlab.base import first
from privlab.release.explained import errors_of_filters
from privlab.release.local_training import rounding_deviation, undecayed
from privlab.release.update_noise import Noise, noise_of_head, noise_of_update
from privlab.threat import Observation, Stack

_BIAS, _WEIGHT = "head.bias", "head.weight"

_CHANCE = 1e-3  # the largest probability with which noise alone may have any class taken for a label

_SIGNS_CHANCE = 1e-2
"""The same where signs are all there is: of ten classes one rises alone with the probability 10 · 2⁻¹⁰."""

_ROUNDINGS = 6.0  # standard deviations of rounding by which a label's bias must rise

_LEAST_RISE = 0.05
"""The least rise of a label's bias under cross-entropy, relative to the largest.

Smoothing by ε lets those of unlikely classes rise by ε / C, 0.011 of a label's at ε = 0.1 and C = 10, and less for more
classes. An unknown decay moves biases by about 1e-4 of it.
"""

_MOST_NOISE = 0.5
"""The share of noise in the head's weight above which its bias counts as noise, if noise is not of one size."""

_MOST_RISING = 0.25  # the most of the classes that may rise as labels where only signs are left, as of Adam

_BINARY = "the loss may be one for each class. Try --set client.loss=binary."


class UpdateLabels(NamedTuple):
    """The labels that an update tells beyond chance, in ascending order, and a remark on them, or None."""

    labels: tuple[int, ...]
    remark: str | None = None


def labels_of_update(seen: Observation) -> UpdateLabels:
    """Return the labels by the head's bias: in each step ∂ℓ/∂b_c = Σ_i (p_ic − y_ic) / B is negative at labels alone.

    So only a label's bias can rise in any number of steps of SGD, Adam or AdamW, once their decay is undone. It counts
    as risen beyond

    - Φ⁻¹(1 − 10⁻³ / C) deviations of the noise that the update shows (`noise_of_update`, `noise_of_head`) or its
      filters state, so that noise alone names any of C classes once in a thousand updates;
    - six deviations of the rounding of weights;
    - under cross-entropy and SGD, a twentieth of the largest rise, since smoothing lets others rise a little.

    Where nothing shows how large the noise is, signs must be beyond chance: noise has k of C biases rise or fewer with
    the probability Σ_{i ≤ k} C(C, i) 2^−C; and of one image ∂ℓ/∂W = δ fᵀ with δ = ∂ℓ/∂b, so that the C signs of a
    column are those of δ, or all the others, which noise has with the probability 2^(1 − C) in each of the D columns.

    Args:
        seen: the update of one client; if its head's bias is not there, or its loss has no labels, none is told.
    """
    client, B = seen.client, seen.images_per_release
    if client is None or not client.has_labels or _BIAS not in seen.gradients:
        return UpdateLabels(())
    u, θ = seen.gradients[_BIAS][0], seen.model.vit.get_parameter(_BIAS).detach()
    rises = -undecayed(seen.model, {_BIAS: u}, client)[_BIAS]
    if not u.any():
        return UpdateLabels(())
    classes = len(rises)
    noise = _noise(seen)
    least = _ROUNDINGS * rounding_deviation(θ, u, client)
    if noise is not None:
        least = least.clamp(min=NormalDist().inv_cdf(1 - _CHANCE / classes) * noise.deviation)
    risen = rises > least
    if client.loss == "cross-entropy" and client.optimiser == "sgd":
        risen = risen & (rises >= _LEAST_RISE * rises.max())
    labels = tuple(risen.nonzero()[:, 0].tolist())
    if not labels or (noise is None and _chance_of_signs(seen, rises, len(labels)) > _SIGNS_CHANCE):
        unstated = "The update of head.bias names no label beyond chance, so no label is stated."
        if client.loss == "cross-entropy" and not bool((rises > 0).any()):
            unstated += f" None of its entries rises, as a label's does under cross-entropy: {_BINARY}"
        return UpdateLabels((), unstated)
    if client.loss != "cross-entropy" or len(labels) <= B:
        return UpdateLabels(labels)
    remark = (
        f"The biases of {len(labels)} classes rise in the head ({first(map(str, labels))}), and cross-entropy raises "
        f"those of its labels alone, {B} at most for client.images={client.images}"
        f"{f', client.clients={client.clients}' if client.clients > 1 else ''}: there are more images, or mixed or "
        f"smoothed labels. Or else {_BINARY}"
    )
    if client.optimiser != "sgd" and len(labels) > max(B, _MOST_RISING * classes):
        return UpdateLabels((), f"{remark} Which of them are labels is not told.")
    return UpdateLabels(labels, remark)


def _noise(seen: Observation) -> Noise | None:
    """Return the noise of the entries of the head's bias; None if nothing shows it."""
    if Stack(tuple(seen.defense)).on_gradients:
        variance = errors_of_filters(seen, (_BIAS,))[0][_BIAS]
        # Filters such as pruning state an error of some entries, and leave the signs of the others as they are.
        return Noise(float(variance.mean().sqrt()), 1.0) if bool((variance > 0).all()) else Noise(0.0, 0.0)
    head, whole = noise_of_head(seen), noise_of_update(seen)
    if head is not None and whole is None and head.share > _MOST_NOISE:
        return Noise(math.inf, 1.0)  # the noise of a weight says nothing of that of its bias, where layers differ
    return min((noise for noise in (head, whole) if noise is not None), key=lambda each: each.deviation, default=None)


def _chance_of_signs(seen: Observation, rises: Float[Tensor, " y"], count: int) -> float:
    """Return the probability of the head's signs where each is that of a fair coin."""
    classes = len(rises)
    chance = sum(math.comb(classes, i) for i in range(count + 1)) / 2**classes
    if _WEIGHT not in seen.gradients or seen.images_per_release > 1:
        return chance
    signs = (seen.gradients[_WEIGHT][0] * rises[:, None]).sign()  # y × d; of δ fᵀ all of a column are equal
    read = signs[:, (signs != 0).all(0)]
    alike = int((read == read[:1]).all(0).sum())
    return min(chance, float(bdtrc(alike - 1, read.shape[1], 2.0 ** (1 - classes))))  # of as many columns or more

"""The labels that the gradient of the head, or its update, reveals; or the gradients of other layers, of an image.

B images whose losses are summed release h_c = Σᵢ pᵢc − n_c for class c in the gradient of the head's bias, with pᵢc ∈
(0, 1) the probability that the model gives class c for image i, and n_c the number of images of that class. The mean of
the losses releases h / B.

The labels of a batch from the gradients of the whole head are exact where its images are separated (`head_images`).
What no image and no sign shows is estimated as in Ma et al. (ICLR 2023, Instance-wise Batch Label Restoration via
Gradients).
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from scipy.special import bdtrc
from torch import Tensor, nn

from privlab.base import PrivlabError, check_range, first, full_precision
from privlab.release.explained import errors_of_filters
from privlab.release.head_images import Head, beyond_chance, find_images, negative_classes
from privlab.release.local_training import Update, rounding_of, undecayed
from privlab.release.noise_estimate import Noise, noise_of_head, noise_of_update
from privlab.threat import Client, Observation, Stack
from privlab.victims import VictimModel

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

_OFF_ZERO = 0.01
"""The share of their size by which the entries of a softmax's head.bias may miss the sum 0: numbers of 16 bits do."""

_BINARY = "the loss may be one for each class. Try --set client.loss=binary."

_TRIED = 3  # the classes that are tried as the label of an image where the head tells none
_STEP = 1e-3  # the share of an update that is applied to see which logits rise: a difference quotient in float64
_ROUNDING_ERROR = 1e-3  # what the difference of stored weights, which an update is, may add to −h_c for each image

_BFLOAT16_ROUNDING = 2.0**-8
"""u, the largest relative error of rounding to bfloat16; those of float16 and float32 are smaller."""


@dataclass(frozen=True)
class Told:
    """The labels of a batch in ascending order, those of them that are certain, and what shows them.

    Their number is that of its images; of an update of several steps they are the classes that the head shows. A label
    is certain if the bias proves it, or an image that was found does (`beyond_chance`). `remark` says what is odd.
    """

    labels: tuple[int, ...]
    certain: tuple[int, ...]
    by: str = "the gradient of the head"
    remark: str | None = None

    @property
    def all_certain(self) -> bool:
        """Return whether no label is a guess."""
        return self.labels == self.certain


def told_labels(head: nn.Module, gradients: Mapping[str, Tensor], batch_size: int) -> Told | None:
    """Return the labels that a gradient of a batch's mean loss shows; None where that of the head's bias is not given.

    Softmax gives no class a negative probability, and rounding changes no sign, so that a negative entry of the bias
    shows a label even where its image is not found.

    Args:
        head: the model's classifier, a linear layer, with the weights of that step.
        gradients: those of one release, by name; without `head.weight` the bias alone is asked.
        batch_size: B.

    Raises:
        PrivlabError: if the batch size is below 1, or the gradient is not finite.
    """
    if _BIAS not in gradients:
        return None
    h = gradients[_BIAS].double() * batch_size
    counts = certain_counts(h, batch_size)
    if batch_size == 1 and bool((h < 0).any()):  # its label alone has h_c = p_c − 1 < 0
        counts = F.one_hot(h.argmin(), len(h))
    if int(counts.sum()) == batch_size:
        return Told(_listed(counts), _listed(counts))
    if int(counts.sum()) > batch_size:  # noise, or another loss: no batch of so many images has such a gradient
        return Told(_listed(_likely(h, counts, batch_size)), ())
    if _WEIGHT not in gradients or not isinstance(head, nn.Linear) or batch_size == 1:
        return Told(_listed(_likely(h, counts, batch_size)), _listed(counts))
    layer = Head.of(head, gradients, batch_size)
    signed = torch.maximum(counts, negative_classes(layer).long())
    if int(signed.sum()) <= batch_size:
        counts = signed
    found = find_images(layer)
    of_images = torch.bincount(found.labels, minlength=len(h))
    if int(torch.maximum(counts, of_images).sum()) > batch_size:  # images contradict what is certain
        found, of_images = found.take(found.labels[:0]), torch.zeros_like(counts)
    proven = found.labels[beyond_chance(found, layer)]
    certain = torch.maximum(counts, torch.bincount(proven, minlength=len(h)))
    missing = (counts - of_images).clamp(min=0)  # of classes that are certain, and have no image
    rest = _estimate(layer, *layer.left(found), missing, batch_size - len(found.labels))
    return Told(_listed(of_images + rest), _listed(certain))


def _likely(h: Float[Tensor, " y"], certain: Int[Tensor, " y"], batch_size: int) -> Int[Tensor, " y"]:
    """Return the counts of the classes of a batch, guessed from those that are certain by the bias alone.

    Each image beyond these goes to the class whose n_c + h_c = Σᵢ pᵢc is then the least. That is exact for a model that
    gives all classes the same probability, as an untrained one nearly does. Where the certain counts exceed the batch,
    as noise makes them, counts of the classes with the largest n_c + h_c are dropped.
    """
    counts, explained = certain.clone(), certain + h
    while (total := int(counts.sum())) != batch_size:
        step = 1 if total < batch_size else -1
        c = int(explained.argmin() if step > 0 else explained.masked_fill(counts == 0, -torch.inf).argmax())
        counts[c] += step
        explained[c] += step
    return counts


def _listed(counts: Int[Tensor, " y"]) -> tuple[int, ...]:
    """Return each class as often as it counts, in ascending order."""
    return tuple(torch.arange(len(counts), device=counts.device).repeat_interleave(counts).tolist())


def _estimate(
    layer: Head, h: Float[Tensor, " y"], G: Float[Tensor, "y d"], least: Int[Tensor, " y"], batch_size: int
) -> Int[Tensor, " y"]:
    """Return the counts of the classes: what is certain, and the rest by Σ_c n_c (p̄_c − e_c) = h, Σ_c n_c = B.

    p̄_c, the mean prediction for images of class c, is that for G_c / h_c.
    """
    if int(least.sum()) >= batch_size:
        return least
    classes = (h < -1e-4 * batch_size).nonzero()[:, 0]
    wanted = torch.zeros_like(h)
    if len(classes):
        equations = (layer(G[classes] / h[classes, None]) - F.one_hot(classes, len(h)).to(h)).T
        equations = torch.cat([equations, torch.ones_like(equations[:1])])
        right = torch.cat([h, h.new_tensor([batch_size])])
        wanted[classes] = torch.linalg.lstsq(equations, right[:, None]).solution[:, 0]
    counts = least.clone()
    for _ in range(batch_size - int(least.sum())):
        counts[(wanted - counts).argmax()] += 1
    return counts


def certain_counts(head_bias_gradient: Float[Tensor, " y"], batch_size: int) -> Int[Tensor, " y"]:
    """Return how many images of each class there are at least: the least n with n (1 + u)ⁿ⁺¹ ≥ −h_c.

    Exactly, n_c = Σᵢ pᵢc − h_c ≥ −h_c. Rounded, h_c is computed from B terms pᵢc / B, and (pᵢc − 1) / B for the n_c
    images of class c. Rounding keeps order: a larger operand never makes a smaller result, wherever rounding takes
    place. A computed pᵢc lies in [0, 1]. So h_c is at least what the same computation makes of all pᵢc = 0. That has
    n_c equal terms that are not zero, and zeros, which are added without an error. Each term is rounded once, so are
    n_c − 1 of the sums and the result, and each rounding multiplies by 1 + u at most: −h_c ≤ n_c (1 + u)^(n_c + 1).
    This grows with n_c, so that n_c is at least the n above. Which precision a client computed in cannot be read from a
    file of float32, so u is that of bfloat16. The gradient is that of the losses' sum, B times that of their mean.

    Raises:
        PrivlabError: if the batch size is below 1, or the gradient is not finite.
    """
    check_range(batch_size >= 1, "batch_size", "a positive number", batch_size)
    if not head_bias_gradient.isfinite().all():
        raise PrivlabError("The gradient of the head's bias must be finite. Found NaN or infinity.")
    h = head_bias_gradient.double()
    n = torch.arange(batch_size + 1, dtype=h.dtype, device=h.device)
    most = n * (1 + _BFLOAT16_ROUNDING) ** (n + 1)  # the largest −h_c of n images, ascending
    return torch.searchsorted(most, -h - _ROUNDING_ERROR * batch_size)  # B + 1 where no batch of B explains it


@torch.no_grad()
def labels_that_rise(model: VictimModel, update: Update, image: Float[Tensor, "1 c h w"]) -> list[int]:
    """Return the three classes whose logit of an image rises most along an update, the most first.

    A step along u = Jᵀ(p − y) moves the logits by −J Jᵀ (p − y), which is largest at the label y where classes disturb
    each other less than themselves. So what is released of all layers but the head shows the label too, given the
    image.

    Args:
        model: the server's model with θ_0; it is left as it is.
        update: −(θ_T − θ_0), or a part of it, by timm's parameter name.
        image: the image, or nearly it, in [0, 1].
    """
    before = copy.deepcopy(model).double()
    after = copy.deepcopy(before)
    for name, u in update.items():
        after.vit.get_parameter(name).sub_(_STEP * u.double())
    with full_precision():
        rise = (after(image.double()) - before(image.double()))[0]
    return rise.topk(min(_TRIED, len(rise))).indices.tolist()


def labels_of_update(seen: Observation) -> Told:
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

    None is known if the head's bias is not there, or the client's loss has no labels.
    """
    client, rises = seen.client, _rises(seen)
    if client is None or rises is None:
        return Told((), ())
    B = client.released_labels
    classes = len(rises)
    noise = _noise(seen)
    least = _ROUNDINGS * rounding_of(seen, _BIAS)
    if noise is not None:
        least = least.clamp(min=NormalDist().inv_cdf(1 - _CHANCE / classes) * noise.deviation)
    risen = rises > least
    if client.is_of_class and client.optimiser == "sgd":
        risen = risen & (rises >= _LEAST_RISE * rises.max())
    labels = tuple(risen.nonzero()[:, 0].tolist())
    if not labels or (noise is None and _chance_of_signs(seen, rises, len(labels)) > _SIGNS_CHANCE):
        unstated = "The update of head.bias names no label beyond chance, so no label is stated."
        if client.is_of_class and not bool((rises > 0).any()):
            unstated += f" None of its entries rises, as a label's does under cross-entropy: {_BINARY}"
        return Told((), (), remark=unstated)
    if client.is_of_class and not _adds_up(seen, rises, noise):
        return Told((), (), remark=_of_another_loss(client, rises, labels))
    if not client.is_of_class or len(labels) <= B:
        return Told(labels, labels)
    remark = (
        f"The biases of {len(labels)} classes rise in the head ({first(map(str, labels))}), and a softmax raises "
        f"those of its labels alone, {B} at most for client.images={client.images}"
        f"{f', client.clients={client.clients}' if client.clients > 1 else ''}: there are more images, or mixed or "
        f"smoothed labels. Or else {_BINARY}"
    )
    if client.optimiser != "sgd" and len(labels) > max(B, _MOST_RISING * classes):
        return Told((), (), remark=f"{remark} Which of them are labels is not known.")
    return Told(labels, labels, remark=remark)


def label_of_update(seen: Observation) -> int | None:
    """Return the class that the update of a client of one image shows; None where its head's bias shows none.

    Nor does the softmax of one class, which is 1.

    In each step ∂ℓ/∂b = p − y is negative at the image's label alone, under label smoothing most negative there; of a
    binary loss per class, p_c is a sigmoid. So is what SGD, Adam and AdamW make of it, once their decay is undone.
    """
    rises = _rises(seen)
    if rises is None or seen.client is None or (seen.client.is_of_class and len(rises) == 1):
        return None
    return int(rises.argmax())


def _adds_up(seen: Observation, rises: Float[Tensor, " y"], noise: Noise | None = None) -> bool:
    """Return whether rises are those of a softmax, as far as they show it: p and y add up to 1, and p − y to 0.

    Adam divides each entry by its own size, so that they need not add up.
    """
    client = seen.client
    if client is None or client.optimiser != "sgd":
        return True
    variance = rounding_of(seen, _BIAS).square().sum()
    if noise is not None:
        variance = variance + len(rises) * noise.deviation**2
    return float(rises.sum().abs()) <= _OFF_ZERO * float(rises.abs().sum()) + _ROUNDINGS * float(variance.sqrt())


def _of_another_loss(client: Client, rises: Float[Tensor, " y"], labels: Sequence[int]) -> str:
    """Return what is said of rises that no softmax gives, and which labels a sigmoid for each class would have."""
    share = float(rises.sum().abs() / rises.abs().sum())
    return (
        f"The update of head.bias adds up to {share:.0%} of its size, and a softmax's to 0: the loss is not "
        f"{client.loss}, or there is a weight decay that is not stated, so no label is stated. With a loss for each "
        f"class (--set client.loss=binary) the labels are {first(map(str, labels), 16)}; with numeric targets (--set "
        "client.loss=regression) there are none."
    )


def check_order(seen: Observation, source: str) -> None:
    """Refuse an update that goes the other way: its label's bias falls and the others rise, so the files are swapped.

    Softmax cross-entropy moves the biases of B labels at most against all others, and their sum stays 0. Smoothing and
    other losses may move them otherwise, and then nothing is said.

    Raises:
        PrivlabError: if at most B biases were moved down, and more than 2 B up by what the gradients alone moved.
    """
    rises = _rises(seen)
    if rises is None or seen.client is None or seen.client.loss != "cross-entropy":
        return
    B = seen.client.released_labels
    raised, lowered = int((rises > 0).sum()), int((rises < 0).sum())
    if lowered <= B and raised > 2 * B and _adds_up(seen, rises):
        raise PrivlabError(
            f"{source} goes up the loss: {raised} of {len(rises)} biases of the head rise, where those of at most {B} "
            "labels can. BEFORE and AFTER are swapped: give the weights before training first. Or the loss is another "
            "one: state it by --set client.loss."
        )


def _rises(seen: Observation) -> Float[Tensor, " y"] | None:
    """Return how far the gradients alone raised the head's bias; None if it is not sent, or its loss has no labels.

    None too where a filter left nothing of it.
    """
    if seen.client is None or not seen.client.has_labels or _BIAS not in seen.gradients:
        return None
    u = seen.gradients[_BIAS][0]
    return -undecayed(seen.model, {_BIAS: u}, seen.client)[_BIAS] if u.any() else None


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

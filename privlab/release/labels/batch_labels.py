"""The labels of a batch from the gradients of the whole head: exact where its images are told apart (`head_images`).

What no image and no sign tells is estimated as in Ma et al. (ICLR 2023, Instance-wise Batch Label Restoration via
Gradients).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from privlab.release.labels.head_images import Head, beyond_chance, find_images, negative_classes
from privlab.release.labels.label_of_bias import certain_counts


@dataclass(frozen=True)
class Told:
    """The labels of a batch in ascending order, those of them that are certain, and what shows them.

    They are as many as it has images; of an update of several steps they are the classes that the head shows. A label
    is certain if the bias proves it, or an image that was found does (`beyond_chance`).
    """

    labels: tuple[int, ...]
    certain: tuple[int, ...]
    by: str = "the gradient of the head"

    @property
    def all_certain(self) -> bool:
        """Return whether no label is a guess."""
        return self.labels == self.certain


def told_labels(head: nn.Module, gradients: Mapping[str, Tensor], batch_size: int) -> Told | None:
    """Return the labels that a gradient of a batch's mean loss tells; None where that of the head's bias is not given.

    Softmax gives no class a negative probability, and rounding changes no sign, so that a negative entry of the bias
    tells a label even where its image is not found.

    Args:
        head: the model's classifier, a linear layer, with the weights of that step.
        gradients: those of one release, by name; without `head.weight` the bias alone is asked.
        batch_size: B.

    Raises:
        PrivlabError: if the batch size is below 1, or the gradient is not finite.
    """
    if "head.bias" not in gradients:
        return None
    h = gradients["head.bias"].double() * batch_size
    counts = certain_counts(h, batch_size)
    if batch_size == 1 and bool((h < 0).any()):  # its label alone has h_c = p_c − 1 < 0
        counts = F.one_hot(h.argmin(), len(h))
    if int(counts.sum()) == batch_size:
        return Told(_listed(counts), _listed(counts))
    if int(counts.sum()) > batch_size:  # noise, or another loss: no batch of so many images has such a gradient
        return Told(_listed(_likely(h, counts, batch_size)), ())
    if "head.weight" not in gradients or not isinstance(head, nn.Linear) or batch_size == 1:
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

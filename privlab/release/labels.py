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

from privlab.release.head_images import Head, find_images, negative_classes
from privlab.release.label_of_bias import certain_counts, labels_of, likely_labels, listed

__all__ = ["Told", "told_labels"]


@dataclass(frozen=True)
class Told:
    """The labels of a batch in ascending order: as many as it has images, of which `certain` are beyond doubt."""

    labels: tuple[int, ...]
    certain: tuple[int, ...]

    @property
    def all_certain(self) -> bool:
        """Return whether no label is a guess."""
        return self.labels == self.certain


def told_labels(head: nn.Module, gradients: Mapping[str, Tensor], batch_size: int) -> Told | None:
    """Return the labels that a gradient of a batch's mean loss tells; None where that of the head's bias is not given.

    Softmax gives no class a negative probability, so that a negative entry of the bias tells a label even where its
    image is not found.

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
    if (alone := labels_of(h, batch_size)) is not None:
        return Told(tuple(alone), tuple(alone))
    if "head.weight" not in gradients or not isinstance(head, nn.Linear) or batch_size == 1:
        return Told(tuple(likely_labels(h, batch_size)), tuple(listed(counts)))
    layer, G = Head.of(head), gradients["head.weight"].double() * batch_size
    signed = torch.maximum(counts, negative_classes(h, G).long())
    if int(signed.sum()) <= batch_size:
        counts = signed
    found = find_images(layer, h, G, batch_size)
    of_images = torch.bincount(found.labels, minlength=len(h))
    counts = torch.maximum(counts, of_images)
    rest = _estimate(layer, *found.left(h, G), counts - of_images, batch_size - len(found.labels))
    return Told(tuple(listed(of_images + rest)), tuple(listed(counts)))


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

"""What a release is still worth, measured without training: a stand-in for utility that every entry gets alike.

Of features it is the share of photographs whose class the victim keeps. Of gradients and updates it is the cosine of
the release with the undefended one, averaged over photographs: 1 says that training is not disturbed, 0 that it learns
nothing from the release. Neither is the accuracy of a model that was trained under the defense: the card states that.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from privlab.base import draw_for
from privlab.evaluation import Specification, victim_of
from privlab.images import open_images
from privlab.release import observe, observe_updates, predictions, released_parameters, send
from privlab.threat import ClientData, Draws, Observation, Stack
from privlab.victims import Victim

__all__ = ["fidelity"]


def fidelity(spec: Specification, defense: Sequence[Any]) -> float:
    """Return what a release is worth, in [0, 1] for features and in [−1, 1] otherwise, on the bundled photographs.

    Args:
        spec: that of the defended case.
        defense: the parts of the defense.
    """
    base = victim_of(spec, torch.device("cpu"))
    shown = [image for image in open_images("samples") if image.pixels]
    images = torch.stack([base.preprocessing(image.pixels) for image in shown if image.pixels]).to(base.model.mean)
    draws = [draw_for(spec.seed, image.sha256, "fidelity") for image in shown]
    stack = Stack(tuple(defense))
    with torch.no_grad():
        labels = base.model(images).argmax(1)
    if spec.features_released:
        feed = stack.feed(images, base.model.patch, draws, key=_key(spec))
        of_batch = Draws(draws, draw_for(spec.seed, "batch", "fidelity"), _key(spec))
        sent = send(base.model, feed, stack, of_batch, spec.cut_layer)
        kept = predictions(base.model, sent, spec.cut_layer).argmax(1) == labels
        return round(float(kept.double().mean()), 4)
    plain, defended = (_released(spec, base, images, labels, each, draws) for each in (Stack(()), stack))
    both = [(_flat(plain, name), _flat(defended, name)) for name in plain.gradients if name in defended.gradients]
    left = [_flat(plain, name) for name in plain.gradients if name not in defended.gradients]
    whole = torch.cat([each for each, _ in both] + left, 1)
    seen = torch.cat([each for _, each in both] + [torch.zeros_like(each) for each in left], 1)
    return round(float(cosine_similarity(whole, seen).mean()), 4)


def _released(
    spec: Specification, base: Victim, images: Tensor, labels: Tensor, stack: Stack, draws: Sequence[torch.Generator]
) -> Observation:
    if (client := spec.local_training) is not None:
        clients = [ClientData(*each) for each in zip(images.split(1), labels.split(1), draws, strict=True)]
        return observe_updates(base.model, client, clients, None, stack.parts)
    feed = stack.feed(images, base.model.patch, draws, key=_key(spec))
    return observe(base.model, feed, labels, sorted(released_parameters(base.model)), stack.parts, draws)


def _key(spec: Specification) -> torch.Generator:
    return draw_for(spec.seed, "model", "fidelity")


def _flat(seen: Observation, name: str) -> Tensor:
    return seen.gradients[name].flatten(1).double()

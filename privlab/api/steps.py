"""Step by step: what clients release, and the scores of what an attack made of it."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor, nn

from privlab.base import PrivlabError
from privlab.defenses import Jigsaw, Mjp
from privlab.evaluation import Automatic, Batch, Clients, batch_of, completed, labelled, score_images
from privlab.evaluation.setup import learned_metric
from privlab.images import NamedImage, open_images
from privlab.images.given import data_of
from privlab.images.targets import checked_targets
from privlab.release.checked import images_for, model_of
from privlab.threat import (
    Client,
    DishonestAttack,
    FeatureObservation,
    Features,
    Gradient,
    Observation,
    Reconstruction,
    Release,
    Stack,
    Update,
)
from privlab.victims import Victim, VictimModel, hash_of
from privlab.victims import victim as make_victim
from privlab.victims.closed_form import check_names

Part = Any
"""An attack or a defense: its name, or an instance of any dataclass that has its method."""


def observe(
    victim: str | nn.Module | Victim,
    images: Any,  # noqa: ANN401
    labels: Any = None,  # noqa: ANN401
    parameters: Iterable[str] | None = None,
    *,
    release: Release | None = None,
    defense: Part | Sequence[Part] = (),
    public: Any = None,  # noqa: ANN401
    server: DishonestAttack | None = None,
    seed: int = 0,
    draw: int = 0,
) -> Observation | FeatureObservation:
    """Return what the adversary sees of clients: what they release, and what the threat model grants.

    Args:
        victim: the clients' model, which is left as it is: a victim or its model, or what `privlab.victim` takes.
        images: b × c × h × w private images in [0, 1], or bytes; or what `attack` takes, all of which is released.
        labels: the class index of each image, its classes, or a soft label (b × y), as in `attack`; for a client whose
            loss is of numbers, b or b × y of these; None for those that the images bring along, and for the model's own
            prediction where there is none.
        parameters: names of the gradients that are kept; None for all. Features have none.
        release: what the clients release; None for the gradient of each image.
        defense: one defense by its name or as an instance, or several, in the order in which they act; none by default.
        public: images of the adversary's own, as `images`; None if it has none.
        server: the attack of a dishonest server, which chooses the weights that the clients get instead of the
            victim's; None for a server that follows the protocol.
        seed: seed of the defense's draws, which depend on each image's content too.
        draw: number of the draw; each gives other random numbers for the same image.

    Raises:
        PrivlabError: if images, labels or the defense do not fit the model or the release, or it is no release.

    Example:
        >>> import torch, privlab
        >>> from privlab.attacks import PatchGradient
        >>> seen = privlab.observe(privlab.victim("cifar_vit"), torch.rand(1, 3, 32, 32))
        >>> PatchGradient()(seen).shape
        torch.Size([1, 3, 32, 32])
    """
    check_names(parameters)
    if not isinstance(victim, Victim | VictimModel):
        victim = make_victim(victim)
    model = model_of(victim)
    release = Gradient() if release is None else release
    if not isinstance(release, Release):
        which = "privlab.Update(client)" if isinstance(release, Client) else "privlab.Gradient()"
        raise PrivlabError(
            f"release must be a Gradient, Features or an Update. Found {type(release).__name__}: take {which}."
        )
    several = isinstance(release, Update) and release.client.takes_several_classes
    predicted = isinstance(labels, str) and labels == "predicted"
    given = given_batch(victim, images, labels, numbers=takes_numbers(release, labels))
    batch = labelled(given, model, predicted=predicted, multi_label=several)
    if batch.failed:
        raise PrivlabError(f"{batch.failed[0].name} cannot be used. {batch.failed[0].problem}")
    if not batch.named:
        raise PrivlabError("A client needs at least one image. Found none.")
    if defense == "auto":
        defense = Automatic(Mjp(), Jigsaw()).of(model, features=isinstance(release, Features))
    named = defense.split("+") if isinstance(defense, str) else defense
    parts = named if isinstance(named, Sequence) else [named]
    stack = Stack(tuple(completed(part, "defense") for part in parts))
    clients = Clients(release, stack, seed, draw, hash_of(model.state_dict()), server)
    own = None if public is None else given_batch(victim, public, what="public images").images.to(model.mean)
    b = len(batch.named)
    if isinstance(release, Gradient) and b % release.batch:
        raise PrivlabError(f"Gradient(batch={release.batch}) needs a multiple of {release.batch} images. Found {b}.")
    return clients.observe(model, batch, None if parameters is None else sorted(parameters), own)


def takes_numbers(release: Release | str | None, labels: Any) -> bool:  # noqa: ANN401
    """Return whether labels are numbers of a client's loss: for losses of numbers, and of a function if not integers.

    Args:
        release: what the clients release.
        labels: those that are given.
    """
    if not isinstance(release, Update) or labels is None or isinstance(labels, str | Path):
        return False
    client = release.client
    return client.is_numeric or (not isinstance(client.loss, str) and np.asarray(labels).dtype.kind == "f")


def given_batch(
    victim: Victim | VictimModel,
    images: Any,  # noqa: ANN401
    labels: Any = None,  # noqa: ANN401
    what: str = "images",
    *,
    numbers: bool = False,
    limit: int | None = None,
) -> Batch:
    """Return images as the victim takes them; tensors have its size already, and are known by the hash of its input.

    Args:
        victim: the victim, which preprocesses files and other images; its model takes tensors alone.
        images: tensors or arrays, b × c × h × w in [0, 1] or bytes, or what `data_of` opens.
        labels: as `data_of` takes them.
        what: what the images are, for the errors.
        numbers: whether labels are numeric targets.
        limit: how many images are taken, of classes in turn; the others are not read. None for all.

    Raises:
        PrivlabError: if they do not fit the model, or are to be read and the victim is only a model.
    """
    first = images[0] if isinstance(images, list | tuple) and images else images
    if not isinstance(first, Tensor | np.ndarray):
        if not isinstance(victim, Victim):
            raise PrivlabError(f"The {what} are read with a victim's preprocessing. Found a model: give the victim.")
        data = data_of(images, labels, numbers=numbers)
        if limit is not None:
            data = data.by_turns()
            data = replace(data, places=data.places[:limit])
        return batch_of(open_images(data, labels=labels) if isinstance(labels, str) else data, victim.preprocessing)
    x = images_for(model_of(victim), images[:limit], what)
    hashes = [hashlib.sha256(image.tobytes()).hexdigest() for image in x.cpu().numpy()]
    named = [NamedImage(f"image-{i}", sha256, None) for i, sha256 in enumerate(hashes)]
    if labels is not None and not isinstance(labels, str):
        targets = checked_targets(labels, len(named), numbers=numbers)
        named = [image.labelled(target, "dataset") for image, target in zip(named, targets, strict=True)]
    return Batch(named, x)


def score(
    found: Reconstruction | Float[Tensor, "b c h w"],
    images: Float[Tensor, "b c h w"],
    metrics: Sequence[str] = ("mse", "psnr", "ssim"),
) -> pd.DataFrame:
    """Return the scores of reconstructions, a row for each image and a column for each metric.

    Args:
        found: what an attack returned.
        images: the private images in [0, 1], in the same order.
        metrics: names of metrics, as `privlab list metrics` shows them.

    Raises:
        PrivlabError: for an unknown metric, other shapes, or weights of LPIPS that cannot be had.

    Example:
        >>> import torch, privlab
        >>> privlab.score(torch.zeros(1, 3, 8, 8), torch.ones(1, 3, 8, 8), ["mse"])
           mse  levels_wrong
        0  1.0         192.0
    """
    shown = Reconstruction.of(found).images
    if shown.shape != images.shape:
        raise PrivlabError(
            f"images must have the shape of what was found, {tuple(shown.shape)}. Found {tuple(images.shape)}."
        )
    learned = {name: learned_metric(name, None, None, shown.device) for name in metrics}
    own = {name: metric for name, metric in learned.items() if metric is not None}
    return pd.DataFrame(score_images(shown, images.to(shown), metrics, own))

"""Makes the parts of a run from its specification: victims, attacks, images and learned metrics, with warnings."""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from privlab.base import PrivlabError, PrivlabWarning, collect_warnings
from privlab.evaluation.applicable import AttackGroup, applicable
from privlab.evaluation.records import Rows
from privlab.evaluation.specification import Specification, defense_of, reassembly_of
from privlab.images import ImageSource, Preprocessing, check_labels, open_images
from privlab.images.datasets import imagenet_classes
from privlab.metrics import Learned, LpipsUnavailable, load_embedding, load_lpips, score
from privlab.victims import Victim, victim

__all__ = ["Subject", "learned_metrics", "public_images", "source_of", "subject_of", "uncached", "victim_of"]


@dataclass(frozen=True, eq=False)
class Subject:
    """What a case is run on: its victim, its attacks by block, and the images of the adversary.

    `refused` holds the reason for each attack that cannot run here.
    """

    base: Victim
    groups: tuple[AttackGroup, ...]
    refused: Mapping[str, str]
    public: Mapping[str, Tensor]

    def rows(self, spec: Specification) -> Rows:
        """Return what the rows of a specification state."""
        return Rows(spec, self.base, tuple(self.public))


def victim_of(spec: Specification, device: torch.device) -> Victim:
    """Return the victim of a specification with one victim; the last two are cached, as cases often share one.

    Raises:
        PrivlabError: if there is no such victim, or its weights do not fit.
    """
    base, messages = _victim(
        spec.models[0], spec.weights, spec.img_size, spec.seed, spec.classes, spec.normalisation, device
    )
    for message in messages:  # what weakens a victim weakens each run on it
        warnings.warn(message, PrivlabWarning, stacklevel=2)
    return base


def subject_of(spec: Specification, device: torch.device, own: Victim | None = None) -> Subject:
    """Return the victim, attacks and public images of a specification with one victim.

    Args:
        spec: what is run.
        device: where the victim and the public images are put.
        own: a victim that is attacked instead of the one that `spec` names; it is on the device.

    Raises:
        PrivlabError: if a part of the specification does not exist or does not fit.
    """
    base = victim_of(spec, device) if own is None else own
    defense_of(spec, base, spec.settings[0])
    reassembly_of(spec, base)
    groups, refused = applicable(spec, base)
    on_device = tuple(AttackGroup(group.victim.to(device), group.attacks) for group in groups)
    return Subject(base, on_device, refused, _public(spec.public, spec.public_limit, base.preprocessing, device))


@lru_cache(maxsize=2)
def _victim(
    name: str,
    weights: str,
    img_size: int | None,
    seed: int,
    classes: int | None,
    normalisation: str | None,
    device: torch.device,
) -> tuple[Victim, tuple[str, ...]]:
    """Return a victim, and the warnings that come with it."""
    messages: list[str] = []
    with collect_warnings(messages):
        own = victim(name, weights=weights, img_size=img_size, seed=seed, classes=classes, normalisation=normalisation)
        made = own.to(device)
    return made, tuple(messages)


@lru_cache(maxsize=2)
def _public(
    public: tuple[str, ...], limit: int, preprocessing: Preprocessing, device: torch.device
) -> Mapping[str, Tensor]:
    return public_images(public, limit, preprocessing, device)


def source_of(spec: Specification, victims: Sequence[Victim], *, check: bool = True) -> ImageSource:
    """Open the images of a run; class folders named by WordNet ids get ImageNet's labels where victims have them.

    Args:
        spec: names the images, how many and which of them are used, and their labels.
        victims: those that the images are fed to. ImageNet's labels need victims of 1000 classes each; labels of a
            manifest must be below the least number of classes.
        check: whether each image of a manifest is compared with the hash that the manifest states.

    Raises:
        PrivlabError: if there are no images, or fewer than make one gradient; if a manifest does not fit them, or has
            labels that the victims do not have.
    """
    wnids = None
    if all(base.model.vit.num_classes == 1000 for base in victims):
        wnids = imagenet_classes()
    images = _one_or_all(spec.images)
    labels = None if spec.labels == "predicted" else spec.labels
    if spec.manifest is not None and spec.labels is None:
        check_labels(Path(spec.manifest), min(base.model.classes or sys.maxsize for base in victims))
    source = open_images(
        images,
        limit=spec.limit,
        every=spec.every,
        offset=spec.offset,
        manifest=spec.manifest,
        split=spec.split,
        labels=labels,
        class_to_index=wnids,
        check=check,
    )
    asked = {"gradient_batch": spec.gradient_batch}
    if spec.local_training is not None:
        K, name = spec.local_training.clients, "client.images"
        asked = {name if K == 1 else f"client.clients times {name}": spec.local_training.released_images}
    for name, size in asked.items():
        if source.count is not None and source.count < size:
            raise PrivlabError(f"{name} must be at most the number of images, {source.count}. Found {size}.")
    return source


def _one_or_all(sources: tuple[str, ...]) -> str | tuple[str, ...]:
    return sources[0] if len(sources) == 1 else sources


def public_images(
    public: tuple[str, ...], limit: int, preprocessing: Preprocessing, device: torch.device
) -> dict[str, Tensor]:
    """Return the public photographs by their hash: negative controls are made of them, and an adversary may have them.

    Args:
        public: sources as `--public` names them, such as "samples" or a folder; files that cannot be read are left out.
        limit: most photographs that are taken, the first ones.
        preprocessing: the victim's, so that they have the size of its input.
        device: where the photographs are kept.

    Raises:
        PrivlabError: if no photograph can be read.
    """
    source = open_images(_one_or_all(public), limit=limit)
    images = {image.sha256: preprocessing(image.pixels).to(device) for image in source if image.pixels}
    if not images:
        raise PrivlabError(f"--public needs one readable image or more. Found none in {', '.join(public)}.")
    return images


@contextmanager
def uncached() -> Iterator[None]:
    """Use no victim, metric or public image that an earlier run loaded, since files change, and keep none after."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for kept in (_victim, _public, learned_for):
        kept.cache_clear()


@lru_cache(maxsize=2)
def learned_for(
    metrics: tuple[str, ...], spec: Specification, device: torch.device, base: Victim
) -> tuple[dict[str, Learned], dict[str, str]]:
    """Return `learned_metrics` for some metrics and one victim, loaded once for all tasks of a case.

    Args:
        metrics: those to load or try; they replace the metrics of `spec`.
        spec: names the files of weights.
        device: where the networks are put.
        base: the victim, at whose resolution the metrics are tried.
    """
    return learned_metrics(replace(spec, metrics=metrics), device, [base])


def learned_metrics(
    spec: Specification, device: torch.device, victims: Sequence[Victim]
) -> tuple[dict[str, Learned], dict[str, str]]:
    """Return the metrics with trained weights by name, and for each metric that cannot be computed here the reason.

    Every metric is tried on a black image of the smallest size that a victim takes.

    Args:
        spec: names the metrics, and the files of weights (`lpips_weights`, `embedding`).
        device: where the networks are put.
        victims: those whose images are scored.

    Raises:
        PrivlabError: if a file of weights does not fit, or none of the metrics can be computed.
    """
    learned: dict[str, Learned] = {}
    missing: dict[str, str] = {}
    weights = None if spec.lpips_weights is None else Path(spec.lpips_weights)
    smallest = min((base.model.image_shape for base in victims), key=lambda shape: shape[1:])
    black = torch.zeros(1, *smallest, device=device)
    for name in spec.metrics:
        if name == "f_sim":
            if spec.embedding is None:
                missing[name] = "no embedding is named: give --embedding timm:NAME@FILE, a network and its weights"
                continue
            learned[name] = load_embedding(spec.embedding, device)
        net = name.removeprefix("lpips_")
        try:
            if net != name:
                learned[name] = load_lpips(net, weights, device)
            score(black, black, [name], learned)
        except LpipsUnavailable as error:
            if weights is not None:
                raise
            missing[name] = str(error)
        except PrivlabError as error:
            if net != name and name not in learned:
                raise  # a file that does not fit is a mistake, not a state of the machine
            missing[name] = str(error)
    if len(missing) == len(spec.metrics):
        reasons = "; ".join(f"{name}: {reason.rstrip('.')}" for name, reason in missing.items())
        raise PrivlabError(f"None of the metrics that are asked for can be computed here. {reasons}.")
    return learned, missing

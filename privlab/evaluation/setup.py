"""Makes the parts of a run from its case: victims, attacks, images and learned metrics, with warnings."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from privlab.base import PrivlabError, collect_warnings, warn
from privlab.evaluation.applicable import AttackGroup, applicable
from privlab.evaluation.case import Case, defense_of
from privlab.images import Data, Others, Preprocessing, open_images, problem_of_label
from privlab.images.datasets import imagenet_classes
from privlab.metrics import METRICS, Learned, LpipsUnavailable, load_embedding, load_lpips, score
from privlab.reassembly import Predicted
from privlab.threat import CLIENT_PRESETS
from privlab.victims import Victim, victim


@dataclass(frozen=True, eq=False)
class Subject:
    """What a case is run on: its victim, its attacks by block, and the images of the adversary.

    `refused` holds the reason for each attack that cannot run here.
    """

    base: Victim
    groups: tuple[AttackGroup, ...]
    refused: Mapping[str, str]
    public: Others


def victim_of(spec: Case, device: torch.device) -> Victim:
    """Return the victim of a case with one victim; the last two are cached, as cases often share one.

    Raises:
        PrivlabError: if there is no such victim, or its weights do not fit.
    """
    base, messages = _victim(spec.victim.models[0], device, **spec.victim.options(spec.seed))
    for message in messages:  # what weakens a victim weakens each run on it
        warn(message)
    return base


def subject_of(spec: Case, device: torch.device, own: Victim | None = None) -> Subject:
    """Return the victim, attacks and public images of a case with one victim.

    Args:
        spec: what is run.
        device: where the victim and the public images are put.
        own: a victim that is attacked instead of the one that `spec` names; it is on the device.

    Raises:
        PrivlabError: if a part of the case does not exist or does not fit.
    """
    base = victim_of(spec, device) if own is None else own
    defense_of(spec, base, spec.settings[0])
    if isinstance(order := spec.adversary.reassembly, Predicted):
        order.predictor(base.model.grid, base.model.patch)
    groups, refused = applicable(spec, base)
    on_device = tuple(AttackGroup(group.victim.to(device), group.attacks) for group in groups)
    return Subject(base, on_device, refused, public_of(spec, base, kept=True))


@lru_cache(maxsize=2)
def _victim(name: str, device: torch.device, **options: Any) -> tuple[Victim, tuple[str, ...]]:  # noqa: ANN401
    """Return a victim, and the warnings that come with it."""
    messages: list[str] = []
    with collect_warnings(messages):
        made = victim(name, **options).to(device)
    return made, tuple(messages)


def source_of(spec: Case, victims: Sequence[Victim], *, check: bool = True) -> Data:
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
    wnids = imagenet_classes() if all(base.model.vit.num_classes == 1000 for base in victims) else None
    data = spec.data
    images, split = _one_or_all(data.images), data.split
    chosen = {name: value for name, value in vars(data).items() if name not in ("images", "split")}
    if isinstance(images, str) and images.startswith("hf:"):
        images, split = _stream(images, split), None
    source = open_images(images, split=split, **chosen, class_to_index=wnids, check=check)
    classes = [base.model.classes for base in victims if base.model.classes]
    for where, target in source.stated if classes and data.labels is None else ():
        if problem := problem_of_label(target, min(classes)):
            raise PrivlabError(f"{where}: {problem}")
    _check_enough(source, spec)
    return source


@lru_cache(maxsize=1)
def _stream(name: str, split: str | None) -> Data:
    """Open a data set of the hub; the last one is kept, since each task would read it from its beginning."""
    return open_images(name, split=split)


def _check_enough(source: Data, spec: Case) -> None:
    """Check that there are enough images for one release.

    Raises:
        PrivlabError: if there are fewer, with what would be right.
    """
    client, count, size = spec.client, source.count, spec.release.images
    if spec.features_released or count is None or count >= size:
        return
    K = 1 if client is None else client.clients
    name = "gradient_batch" if client is None else "client.images" if K == 1 else "client.clients times client.images"
    fewer = f"--gradient-batch {count}" if client is None else f"--set client.images={count // K}"
    fewer = fewer if count >= K else f"--set client.clients={count} --set client.images=1"
    preset = f", by the preset {spec.words.client}" if spec.words.client in CLIENT_PRESETS else ""
    limit = "" if spec.data.limit is None else ", and no smaller --limit"
    raise PrivlabError(
        f"{name} must be at most the number of images, {count}. Found {size}{preset}: give --images with {size} or more"
        f"{limit}, or {fewer}."
    )


def _one_or_all(sources: tuple[str, ...] | Data) -> str | tuple[str, ...] | Data:
    return sources[0] if isinstance(sources, tuple) and len(sources) == 1 else sources


def public_images(
    public: tuple[str, ...] | Data,
    limit: int,
    preprocessing: Preprocessing,
    device: torch.device,
    bit_depth: int | None = None,
) -> Others:
    """Return the public photographs: negative controls are made of them, and an adversary may have them.

    Args:
        public: sources as `--public` names them, such as "samples" or a folder; files that cannot be read are left out.
        limit: most photographs that are taken, the first ones.
        preprocessing: the victim's, so that they have the size of its input.
        device: where the photographs are kept.
        bit_depth: as `open_images` takes it.

    Raises:
        PrivlabError: if no photograph can be read.
    """
    source = open_images(_one_or_all(public), limit=limit, bit_depth=bit_depth)
    images: dict[str, Tensor] = {}
    labels: dict[str, int] = {}
    for image in source:
        if image.pixels is not None:
            images[image.sha256] = preprocessing(image.pixels).to(device)
            labels |= {} if image.label is None else {image.sha256: image.label}
    if not images:
        found = ", ".join(public) if isinstance(public, tuple) else public.description
        raise PrivlabError(f"--public needs one readable image or more. Found none in {found}.")
    return Others(images, labels)


_public = lru_cache(maxsize=2)(public_images)


def public_of(spec: Case, base: Victim, *, kept: bool = False) -> Others:
    """Return the public photographs of the adversary by their hash, as the victim is fed them.

    Args:
        spec: names the sources, and how many photographs are taken.
        base: the victim, on the device where the photographs are kept.
        kept: whether those of an earlier call may be returned.
    """
    read, adversary = _public if kept else public_images, spec.adversary
    device = base.model.mean.device
    return read(adversary.public, adversary.public_limit, base.preprocessing, device, spec.data.bit_depth)


@contextmanager
def uncached() -> Iterator[None]:
    """Use no victim, metric or public image that an earlier run loaded, since files change, and keep none after."""

    def forget() -> None:
        for kept in (_victim, _public, learned_for, _stream):
            kept.cache_clear()

    forget()
    try:
        yield
    finally:
        forget()


@lru_cache(maxsize=2)
def learned_for(
    metrics: tuple[str, ...], spec: Case, device: torch.device, base: Victim
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
    spec: Case, device: torch.device, victims: Sequence[Victim]
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
    if broken := [name for name in spec.metrics if name in METRICS.broken]:
        raise PrivlabError(METRICS.broken[broken[0]])
    learned: dict[str, Learned] = {}
    missing: dict[str, str] = {}
    weights = None if spec.lpips_weights is None else Path(spec.lpips_weights)
    smallest = min((base.model.image_shape for base in victims), key=lambda shape: shape[1:])
    black = torch.zeros(1, *smallest, device=device)
    for name in spec.metrics:
        if name == "f_sim" and spec.embedding is None:
            missing[name] = "no embedding is named: give --embedding timm:NAME@FILE, a network and its weights"
            continue
        try:
            own = learned_metric(name, weights, spec.embedding, device)
        except LpipsUnavailable as error:
            if weights is not None:
                raise
            missing[name] = str(error)
            continue
        learned |= {} if own is None else {name: own}
        try:
            score(black, black, [name], learned)
        except PrivlabError as error:
            missing[name] = str(error)
    if len(missing) == len(spec.metrics):
        reasons = "; ".join(f"{name}: {reason.rstrip('.')}" for name, reason in missing.items())
        raise PrivlabError(f"None of the metrics that are asked for can be computed here. {reasons}.")
    return learned, missing


def learned_metric(name: str, weights: Path | None, embedding: str | None, device: torch.device) -> Learned | None:
    """Return a metric with trained weights by its name; None for another one, and for F-SIM without an embedding.

    Args:
        name: the name of the metric.
        weights: a file or folder of LPIPS backbones; None for those that are found.
        embedding: the file of the embedding that F-SIM compares.
        device: where the metric computes.

    Raises:
        PrivlabError: if there are no weights (`LpipsUnavailable`), or a file does not fit.
    """
    if name.startswith("lpips_"):
        return load_lpips(name.removeprefix("lpips_"), weights, device)
    return load_embedding(embedding, device) if name == "f_sim" and embedding is not None else None

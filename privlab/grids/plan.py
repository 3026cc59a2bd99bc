"""The grid of an experiment: every case with its cells and its images, and what of it a store still lacks.

This is where a killed run goes on: what it has is read from its records, and `missing` plans the rest.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from privlab.base import PrivlabError, PrivlabWarning, collect_warnings
from privlab.evaluation import CONTROLS, Specification, batch_key, source_of, subject_of
from privlab.evaluation.setup import learned_for
from privlab.grids.definition import Experiment
from privlab.grids.lpips_columns import name_lpips
from privlab.grids.tasks import Reference, Task, references
from privlab.images import ImageSource, to_csv
from privlab.metrics import Embedding, Learned, Lpips
from privlab.stores import Store
from privlab.threat import attack_declarations
from privlab.victims import Victim

__all__ = ["Grid", "Job", "Share", "lay_out", "missing"]


@dataclass(frozen=True, eq=False)
class Job:
    """One specification of a case in one setting, with the key of the cell of each attack and control, and its images.

    `metrics` are those that can be computed here; `batches` names the client's batch of each image, where images are
    released together. `one_key` names the attacks that read the releases of all images as one.
    """

    case: int
    spec: Specification
    setting: str
    first: bool
    cells: Mapping[str, str]
    refused: Mapping[str, str]
    images: tuple[Reference, ...]
    batches: tuple[str, ...] | None
    metrics: tuple[str, ...]
    one_key: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Grid:
    """An experiment laid out on this machine. `missing` says why a metric cannot be computed here.

    `learned` states the file and hash of each metric's trained weights. `own` is a victim that is attacked instead of
    those that the experiment names.
    """

    experiment: Experiment
    jobs: tuple[Job, ...]
    sources: tuple[str, ...]
    missing: Mapping[str, str]
    messages: tuple[str, ...]
    learned: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    own: Victim | None = None

    @cached_property
    def image_lists(self) -> dict[tuple[Reference, ...], str]:
        """Return the name of each list of images: cases may have different ones."""
        return {images: str(i) for i, images in enumerate(dict.fromkeys(job.images for job in self.jobs))}

    def manifests(self, path: Path) -> dict[str, str]:
        """Return the text of the manifest of each list of images, by the name of its file in the run directory `path`.

        Raises:
            PrivlabError: if the manifest that chose the images lies there under another name, and would be replaced.
        """
        names = {
            images: "manifest.csv" if name == "0" else f"manifest-{name}.csv"
            for images, name in self.image_lists.items()
        }
        for job in self.jobs:
            given = None if job.spec.manifest is None else Path(job.spec.manifest).resolve()
            if given is not None and given.parent == path.resolve() and given.name != names[job.images]:
                raise PrivlabError(f"'{job.spec.manifest}' would give way to this run's own. Copy it out of '{path}'.")
        return {name: to_csv(image.named for image in images) for images, name in names.items()}

    def facts(self) -> dict[str, Any]:
        """Return what `run.json` states of the experiment, from which its tables are rebuilt."""
        experiment, by_case = self.experiment, groupby(self.jobs, key=lambda job: job.case)
        lists = self.image_lists
        cases = [
            {
                "label": case.label,
                "group": case.group,
                "options": dict(case.options),
                "published": dict(case.published),
                "refused": dict(jobs[0].refused),
                "jobs": [
                    {
                        "specification": asdict(replace(job.spec, settings=(job.setting,))),
                        "cells": dict(job.cells),
                        "images": lists[job.images],
                    }
                    for job in jobs
                ],
            }
            for case, jobs in zip(experiment.cases, (list(jobs) for _, jobs in by_case), strict=True)
        ]
        return {
            "experiment": {
                "name": experiment.name,
                "title": experiment.title,
                "source": experiment.source,
                "conditions": dict(experiment.conditions),
                "layout": asdict(experiment.layout),
                "figures": [asdict(figure) for figure in experiment.figures],
            },
            "cases": cases,
            "image_lists": {name: [image.sha256 or image.name for image in images] for images, name in lists.items()},
            "members": {
                name: {image.sha256 or image.name: image.member for image in images if image.member is not None}
                for images, name in lists.items()
            },
            "images": {
                "source": "; ".join(self.sources),
                "count": len({image.sha256 or image.name for images in lists for image in images}),
            },
            "learned_metrics": dict(self.learned),
            "missing_metrics": dict(self.missing),
        }


@dataclass(frozen=True)
class Share:
    """The part of a grid that one of `count` machines runs: every `count`-th image or client's batch."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 1 <= self.number <= self.count:
            raise PrivlabError(f"--shard must be I/N with 1 ≤ I ≤ N. Found {self.number}/{self.count}.")


def lay_out(
    experiment: Experiment,
    device: torch.device,
    own: Victim | None = None,
    *,
    begun: Mapping[str, Any] = MappingProxyType({}),
) -> Grid:
    """Load and check everything that the cases need, and find their images; nothing is run.

    Args:
        experiment: the cases.
        device: where victims and attacks are put.
        own: a victim that is attacked instead of those that the cases name.
        begun: what `run.json` states of the run so far, whose network of LPIPS is kept.

    Raises:
        PrivlabError: if a part does not exist or does not fit, or an attack can run on no case.
    """
    experiment, told = name_lpips(experiment, begun)
    messages = [] if told is None else [told]
    unavailable: dict[str, str] = {}
    learned: dict[str, dict[str, str]] = {}
    found: dict[tuple[object, ...], tuple[ImageSource, tuple[Reference, ...]]] = {}
    looked_for: dict[tuple[object, ...], tuple[Mapping[str, Learned], Mapping[str, str]]] = {}
    jobs: list[Job] = []
    with collect_warnings(messages):
        for number, case in sorted(enumerate(experiment.cases), key=lambda each: _victim(each[1].runs[0])):
            for spec in case.runs:
                subject = subject_of(spec, device, own)
                setting = case.setting or spec.settings[0]
                chosen = (spec.images, spec.limit, spec.every, spec.offset, spec.manifest, spec.split, spec.labels)
                at = (*chosen, subject.base.model.vit.num_classes)
                if at not in found:
                    source = source_of(spec, [subject.base])
                    found[at] = source, tuple(references(source))
                how = (spec.metrics, spec.lpips_weights, spec.embedding, subject.base.model.image_shape)
                if how not in looked_for:  # without a network this may take seconds
                    looked_for[how] = learned_for(spec.metrics, spec, device, subject.base)
                metrics, lacking = looked_for[how]
                unavailable |= lacking
                learned |= {
                    name: {"file": metric.file, "sha256": metric.sha256}
                    for name, metric in metrics.items()
                    if isinstance(metric, Lpips | Embedding)
                }
                job = Job(
                    number,
                    spec,
                    setting,
                    spec is case.runs[0],
                    subject.rows(spec).cells(setting, subject.groups),
                    subject.refused,
                    found[at][1],
                    _batches(found[at][1], spec),
                    tuple(name for name in spec.metrics if name not in lacking),
                    frozenset(a.name for g in subject.groups for a in g.attacks if attack_declarations(a).one_key),
                )
                jobs.append(job)
    jobs.sort(key=lambda job: job.case)
    _check_attacks(jobs)
    sources = tuple(dict.fromkeys(source.description for source, _ in found.values()))
    messages += [f"{name} is n/a: {reason}" for name, reason in unavailable.items()]
    return Grid(experiment, tuple(jobs), sources, unavailable, tuple(messages), learned, own)


def _check_attacks(jobs: Sequence[Job]) -> None:
    """Refuse an attack that can run on no case: that is a mistake, while it may well be refused on some cases."""
    everywhere = set.intersection(*(set(job.refused) for job in jobs))
    named = [name for name in jobs[0].spec.attacks or () if name in everywhere]
    if named:
        raise PrivlabError(f"'{named[0]}' can run on no case: {jobs[0].refused[named[0]]}")


def _batches(images: Sequence[Reference], spec: Specification) -> tuple[str, ...] | None:
    if (size := spec.together) is None:
        return None
    keys = [batch_key(image.sha256 for image in images[i : i + size]) for i in range(0, len(images), size)]
    return tuple(keys[place // size] for place in range(len(images)))


def missing(
    grid: Grid,
    store: Store | None,
    *,
    size: int = 16,
    share: Share = Share(),  # frozen
    retry_failed: bool = False,
    again: bool = True,
    **options: Any,  # noqa: ANN401
) -> list[Task]:
    """Return the tasks of what a store lacks of a grid, those on the same victim one after the other.

    Args:
        grid: the experiment.
        store: the records so far; None for none.
        size: images of a task; where images are released together, it is rounded down to whole batches, at least one.
            Attacks that read all releases under one key get all images in one task, unless there is a batch_size.
        share: the part of the images that this machine runs.
        retry_failed: whether images that failed are run again; otherwise they count as done.
        again: whether metrics that were added later are scored on kept reconstructions, where there are some, instead
            of running the attacks again.
        options: the other fields of a `Task`: device, batch_size, pictures, strips (of first draws) and keep.
    """
    metrics = sorted({name for job in grid.jobs for name in job.metrics})
    done = _Done(grid, {}) if store is None else _Done.read(store, grid, metrics, retry_failed=retry_failed)
    kept = _kept(store.path) if again and store is not None else {}
    tasks: list[Task] = []
    planned: dict[tuple[str, tuple[Reference, ...]], int] = {}  # cases may share cells: setting a of all γ
    for number, job in enumerate(grid.jobs):
        bits = done.of(number)
        for row, cell in enumerate(job.cells.values()):
            bits[row] |= planned.get((cell, job.images), 0)
            planned[cell, job.images] = planned.get((cell, job.images), 0) | _bits(job.metrics, metrics)
        own = {**options, "own": grid.own, "strips": options.get("strips", 0) if job.first else 0}
        alone = job.one_key if own.get("batch_size") is None and job.batches is None else frozenset[str]()
        for whole in (False, True) if alone else (False,):
            some = [row for row, name in enumerate(job.cells) if (name in alone) == whole]
            part = replace(job, cells={name: cell for name, cell in job.cells.items() if (name in alone) == whole})
            tasks += _tasks(part, bits[some], metrics, size, share, kept, own, whole=whole)
    return sorted(tasks, key=lambda task: _victim(task.spec))


def _victim(spec: Specification) -> tuple[str, ...]:
    """Return what identifies a victim; cases are sorted by it, so that each victim is loaded once."""
    return spec.models[0], spec.weights, str(spec.img_size), str(spec.seed), str(spec.classes)


def _bits(names: Sequence[str], metrics: Sequence[str]) -> int:
    return sum(1 << metrics.index(name) for name in names)


def _tasks(
    job: Job,
    done: np.ndarray,
    metrics: Sequence[str],
    size: int,
    share: Share,
    kept: Mapping[str, str],
    options: Mapping[str, Any],
    *,
    whole: bool = False,
) -> Iterator[Task]:
    """Yield the tasks of one job; images that lack the same cells and metrics share tasks, `whole` jobs have one."""
    wanted = _bits(job.metrics, metrics)
    lacking = wanted & ~done  # cells × images
    unit = None if job.batches is None else job.spec.together
    lacking[:, _others(len(job.images), len(job.images) if whole else unit, share)] = 0
    if unit:  # a client's batch is drawn for, and attacked, as one
        for first in range(0, len(job.images), unit):
            together = lacking[:, first : first + unit]
            together[:] = np.bitwise_or.reduce(together, 1, keepdims=True)
        size = max(1, size // unit) * unit
    size = len(job.images) if whole else size
    names = list(job.cells)
    patterns, which = np.unique(lacking, axis=1, return_inverse=True)
    for i, pattern in enumerate(patterns.T):
        images = [job.images[place] for place in np.flatnonzero(which.reshape(-1) == i)]
        for bits in sorted({int(bit) for bit in pattern} - {0}, reverse=True):
            lack = [name for name, bit in zip(names, pattern.tolist(), strict=True) if bit == bits]
            attacks = tuple(name for name in lack if name not in CONTROLS)
            missing_metrics = tuple(name for name in job.metrics if bits >> metrics.index(name) & 1)
            for start in range(0, len(images), size):
                chunk = tuple(images[start : start + size])
                controls = len(attacks) < len(lack)
                files = _files(job, attacks, chunk, kept) if bits != wanted else ()
                what = (job.case, job.spec, (job.setting,), chunk, attacks, missing_metrics, controls)
                how = {**options, "batch_size": len(chunk)} if whole else options
                yield Task(*what, kept=files, **how)


def _others(count: int, unit: int | None, share: Share) -> np.ndarray:
    """Return which of the images are left to other machines, which take `unit` images at a time."""
    return np.arange(count) // (unit or 1) % share.count != share.number - 1


def _files(job: Job, attacks: Sequence[str], images: Sequence[Reference], kept: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files with the reconstructions of all these images by all these attacks; none if one is missing."""
    keys = [f"{job.cells[attack]}/{image.sha256}" for attack in attacks for image in images]
    return tuple(sorted({kept[key] for key in keys})) if all(key in kept for key in keys) else ()


def _kept(path: Path) -> dict[str, str]:
    """Return the file of each kept reconstruction, by CELL/IMAGE."""
    found: dict[str, str] = {}
    for file in sorted(path.glob("kept/*.safetensors")):
        try:
            with safe_open(file, "np") as tensors:
                names = tensors.keys()
        except (SafetensorError, OSError) as error:
            warnings.warn(f"{file.name} cannot be read ({error}): its attacks run again.", PrivlabWarning, stacklevel=3)
            continue
        found |= {name.removesuffix("/images"): str(file) for name in names if name.endswith("/images")}
    return found


def _check_labels(job: Job, places: np.ndarray, labels: np.ndarray) -> None:
    """Refuse images that were measured with other labels than they have now; −1 is no label (the victim's prediction).

    The key of a cell does not name labels, so that an image that is added later leaves the other images as they are.
    """
    if job.spec.labels == "predicted":
        return
    own = np.array([-1 if image.label is None else image.label for image in job.images])
    for i in np.flatnonzero(own[places] != labels)[:1]:
        there, now = ("none" if label < 0 else str(label) for label in (labels[i], own[places[i]]))
        raise PrivlabError(
            f"The label of '{job.images[places[i]].name}' is {now}, and {there} in the records of this --out. "
            "Give another --out, or the label that it had."
        )


_FAILED = 1 << 62
"""The bit of an image that failed."""


@dataclass(frozen=True, eq=False)
class _Done:
    """Which metrics a store holds of each cell and image, as bits."""

    grid: Grid
    bits: Mapping[tuple[int, str], np.ndarray]

    @classmethod
    def read(cls, store: Store, grid: Grid, metrics: Sequence[str], *, retry_failed: bool) -> "_Done":
        """Read the columns that say what was measured; an image that failed counts as measured by all metrics.

        Strings are compared by their codes in the store's dictionaries, which are small: a million rows are not turned
        into Python strings.
        """
        wanted = ["geometry", "cell", "image_sha256", "image", "batch", "status", "metrics", "label_origin"]
        table, rows = store.read([*wanted, "label"]), slice(None)
        label = table["label"].fill_null(-1).to_numpy()
        table = table.drop_columns("label")
        codes: dict[str, np.ndarray] = {}
        names: dict[str, list[str]] = {}
        for name in wanted:
            column = table[name].unify_dictionaries().combine_chunks()
            table = table.drop_columns(name)  # so that no column is in memory twice
            codes[name], names[name] = column.indices.fill_null(-1).to_numpy()[rows], column.dictionary.to_pylist()
            if name == "geometry":
                rows = np.flatnonzero(np.array([text == "in_place" for text in names[name]] + [False])[codes[name]])
                label = label[rows]
        code_of = {name: {text: code for code, text in enumerate(names[name])} for name in ("cell", "batch")}

        rows = np.argsort(codes["cell"], kind="stable")
        starts = np.searchsorted(codes["cell"][rows], np.arange(len(names["cell"]) + 1))
        unread = np.array([text == "" for text in names["image_sha256"]] + [False])[codes["image_sha256"][rows]]
        image = np.where(unread, len(names["image_sha256"]) + codes["image"][rows], codes["image_sha256"][rows])
        texts = [text.split() for text in names["metrics"]]
        measured = [sum(1 << i for i, name in enumerate(metrics) if name in text) for text in texts]
        bits = np.array([*measured, 0], np.int64)[codes["metrics"][rows]]  # the last one is that of null
        failed = np.array([text != "ok" for text in names["status"]] + [True])[codes["status"][rows]]
        bits[failed] = 0 if retry_failed else _FAILED
        batch = codes["batch"][rows]
        predicted = np.array([text == "predicted" for text in names["label_origin"]] + [False])
        label = np.where(predicted[codes["label_origin"]], -1, label)[rows]

        joined: dict[tuple[int, str], np.ndarray] = {}
        places: dict[int, np.ndarray] = {}
        for number, job in enumerate(grid.jobs):
            if id(job.images) not in places:
                known = {(r.sha256 or r.name): i for i, r in enumerate(job.images)}
                stored = (*names["image_sha256"], *names["image"], None)
                places[id(job.images)] = np.array([known.get(text or "", -1) for text in stored])
            for cell in job.cells.values():
                if (code := code_of["cell"].get(cell)) is None:
                    continue
                own = slice(starts[code], starts[code + 1])
                place = places[id(job.images)][image[own]]
                fine = place >= 0
                if job.batches is not None:
                    of_image = np.array([code_of["batch"].get(name, -2) for name in job.batches])
                    fine &= (of_image[place] == batch[own]) | (batch[own] == -1) | failed[own]  # controls have none
                _check_labels(job, place[fine & ~failed[own]], label[own][fine & ~failed[own]])
                found = np.zeros(len(job.images), np.int64)
                np.bitwise_or.at(found, place[fine], bits[own][fine])
                joined[number, cell] = np.where(found == _FAILED, -1, found)  # a later success counts
        return cls(grid, joined)

    def of(self, number: int) -> np.ndarray:
        """Return the bits of one job: cells × images."""
        job = self.grid.jobs[number]
        none = np.zeros(len(job.images), np.int64)
        bits = np.stack([self.bits.get((number, cell), none) for cell in job.cells.values()])
        attacks = np.array([name not in CONTROLS for name in job.cells])
        if attacks.any():  # an image that could not be read has no controls
            bits[~attacks] |= np.where((bits[attacks] == -1).all(0), -1, 0)
        return bits

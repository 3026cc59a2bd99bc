"""The grid of an experiment: every case with its cells and its images, and what of it a store still lacks.

This is where a killed run goes on: what it has is read from its records, and `missing` plans the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import torch
from safetensors import SafetensorError, safe_open

from privlab.base import PrivlabError, collect_warnings, warn
from privlab.evaluation import CONTROLS, Specification, batch_key, name_of, source_of, subject_of
from privlab.evaluation.setup import learned_for
from privlab.grids.definition import Experiment, name_lpips
from privlab.grids.engine import Engine
from privlab.grids.tasks import Reference, Task, references
from privlab.images import Data, to_csv
from privlab.metrics import Embedding, Learned, Lpips
from privlab.stores import Store, part_frame
from privlab.threat import attack_declarations
from privlab.victims import Victim

if TYPE_CHECKING:
    import pandas as pd  # only a run that goes on needs it


@dataclass(frozen=True, eq=False)
class Job:
    """One specification of a case in one setting, with the key of the cell of each attack and control, and its images.

    `metrics` are those that can be computed here. `one_key` names the attacks that read the releases of all images as
    one.
    """

    case: int
    spec: Specification
    setting: str
    first: bool
    cells: Mapping[str, str]
    refused: Mapping[str, str]
    images: tuple[Reference, ...]
    metrics: tuple[str, ...]
    one_key: frozenset[str] = frozenset()

    @cached_property
    def batches(self) -> tuple[str, ...] | None:
        """Return the key of the client's batch of each image; None where images are not released together."""
        if (size := self.spec.together) is None:
            return None
        chunks = [self.images[i : i + size] for i in range(0, len(self.images), size)]
        keys = [batch_key(image.sha256 for image in chunk) for chunk in chunks]
        return tuple(keys[place // size] for place in range(len(self.images)))


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
        """Return the name of each list of images; cases may have different ones."""
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
        return {name: to_csv(images) for images, name in names.items()}

    def facts(self) -> dict[str, Any]:
        """Return what `run.json` states of the experiment, from which its tables are rebuilt."""
        lists, by_case = self.image_lists, groupby(self.jobs, key=lambda job: job.case)
        experiment = asdict(replace(self.experiment, cases=()))
        del experiment["cases"]
        cases: list[dict[str, Any]] = []
        for case, (_, of_case) in zip(self.experiment.cases, by_case, strict=True):
            jobs = list(of_case)
            cases.append(
                {
                    "label": case.label,
                    "group": case.group,
                    "options": dict(case.options),
                    "published": dict(case.published),
                    "refused": dict(jobs[0].refused),
                    "jobs": [
                        {
                            "specification": replace(job.spec, settings=(job.setting,)).stated(),
                            "released": job.spec.released,
                            "cells": dict(job.cells),
                            "images": lists[job.images],
                        }
                        for job in jobs
                    ],
                }
            )
        keys = {name: [image.sha256 or image.name for image in images] for images, name in lists.items()}
        return {
            "experiment": experiment,
            "cases": cases,
            "image_lists": keys,
            "members": {
                name: {
                    key: image.member for key, image in zip(keys[name], images, strict=True) if image.member is not None
                }
                for images, name in lists.items()
            },
            "images": {"source": "; ".join(self.sources), "count": len({key for of in keys.values() for key in of})},
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


@dataclass(frozen=True)
class Options:
    """Options that change the speed of a run, or what it keeps, but none of its results.

    `chunk` is the number of images of a task. PNGs are kept of the first `pictures` images, and strips of the first
    `strips`. `keep` says whether reconstructions are kept, so that metrics that are added later can be scored.
    """

    engine: Engine = field(default_factory=Engine)
    device: str = "auto"
    batch_size: int | None = None
    chunk: int = 16
    pictures: int = 100
    strips: int = 0
    keep: bool = False
    share: Share = field(default_factory=Share)
    retry_failed: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("chunk", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise PrivlabError(f"--{name.replace('_', '-')} must be a positive number. Found {value}.")


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
    found: dict[tuple[object, ...], tuple[Data, tuple[Reference, ...]]] = {}
    looked_for: dict[tuple[object, ...], tuple[Mapping[str, Learned], Mapping[str, str]]] = {}
    jobs: list[Job] = []
    with collect_warnings(messages):
        for number, case in sorted(enumerate(experiment.cases), key=lambda each: _victim(each[1].runs[0])):
            for spec in case.runs:
                subject = subject_of(spec, device, own)
                setting = case.setting or spec.settings[0]
                chosen = (spec.images, spec.limit, spec.every, spec.offset, spec.manifest, spec.split, spec.labels)
                at = (*chosen, spec.bit_depth, subject.base.model.vit.num_classes)
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
    named = [name for name in map(name_of, jobs[0].spec.attacks or ()) if name in everywhere]
    if named:
        raise PrivlabError(f"'{named[0]}' can run on no case: {jobs[0].refused[named[0]]}")


def _victim(spec: Specification) -> tuple[str, ...]:
    """Return what identifies a victim; cases are sorted by it, so that each victim is loaded once."""
    return spec.models[0], spec.weights, str(spec.img_size), str(spec.seed), str(spec.classes)


def missing(grid: Grid, path: Path, options: Options) -> list[Task]:
    """Return the tasks of what a store lacks of a grid, those on the same victim one after the other.

    Metrics that were added later are scored on kept reconstructions where there are some, and no attack runs again.

    Args:
        grid: the experiment, as `lay_out` returns it.
        path: the run directory, which need not exist yet.
        options: the device, the size of a task, the share of this machine, whether failed images are run again, and
            what is kept. Where images are released together, a task has whole batches, at least one. Attacks that read
            all releases under one key get all images in one task, unless there is a batch_size.
    """
    metrics = sorted({name for job in grid.jobs for name in job.metrics})
    measured: dict[tuple[int, str], np.ndarray] = {}
    kept: dict[str, str] = {}
    if any(path.glob("records/*")):
        measured = _measured(Store(path), grid, metrics, retry_failed=options.retry_failed)
        kept = _kept(path)
    tasks: list[Task] = []
    planned: dict[tuple[str, tuple[Reference, ...]], int] = {}  # cases may share cells: setting a of all γ
    for number, job in enumerate(grid.jobs):
        none = np.zeros(len(job.images), np.int64)
        done = np.stack([measured.get((number, cell), none) for cell in job.cells.values()])
        attacks = np.array([name not in CONTROLS for name in job.cells])
        if attacks.any():  # an image that could not be read has no controls
            done[~attacks] |= np.where((done[attacks] == -1).all(0), -1, 0)
        wanted = _bits(job.metrics, metrics)
        for row, cell in enumerate(job.cells.values()):
            before = planned.get((cell, job.images), 0)
            done[row] |= before
            planned[cell, job.images] = before | wanted
        tasks += _tasks(grid, job, wanted & ~done, metrics, kept, options)
    return sorted(tasks, key=lambda task: _victim(task.spec))


def _bits(names: Sequence[str], metrics: Sequence[str]) -> int:
    """Return the metrics of these names as bits, by their places in `metrics`; other names have no bit."""
    return sum(1 << place for place, name in enumerate(metrics) if name in names)


def _tasks(
    grid: Grid,
    job: Job,
    lacking: np.ndarray,
    metrics: Sequence[str],
    kept: Mapping[str, str],
    options: Options,
) -> Iterator[Task]:
    """Yield the tasks of one job; images that lack the same cells and metrics (the bits of `lacking`) share tasks."""
    count, unit = len(job.images), job.spec.together or 1
    alone = job.one_key if options.batch_size is None and unit == 1 else frozenset[str]()
    for whole in (False, True) if alone else (False,):
        names = [name for name in job.cells if (name in alone) == whole]
        bits_of = lacking[[(name in alone) == whole for name in job.cells]]
        turn = np.arange(count) // (count if whole else unit) % options.share.count
        bits_of[:, turn != options.share.number - 1] = 0
        # A client's batch is drawn for, and attacked, as one.
        of_batches = np.bitwise_or.reduceat(bits_of, np.arange(0, count, unit), axis=1)
        patterns, which = np.unique(of_batches.repeat(unit, axis=1)[:, :count], axis=1, return_inverse=True)
        size = count if whole else max(1, options.chunk // unit) * unit
        for i, pattern in enumerate(patterns.T.tolist()):
            images = [job.images[place] for place in np.flatnonzero(which.reshape(-1) == i)]
            for bits in sorted({*pattern} - {0}, reverse=True):
                lack = [name for name, own in zip(names, pattern, strict=True) if own == bits]
                attacks = tuple(name for name in lack if name not in CONTROLS)
                for start in range(0, len(images), size):
                    chunk = tuple(images[start : start + size])
                    again = bits != _bits(job.metrics, metrics)
                    yield Task(
                        job.case,
                        job.spec,
                        (job.setting,),
                        chunk,
                        attacks,
                        tuple(name for name in job.metrics if bits >> metrics.index(name) & 1),
                        controls=len(attacks) < len(lack),
                        device=options.device,
                        batch_size=len(chunk) if whole else options.batch_size,
                        pictures=options.pictures,
                        strips=options.strips if job.first else 0,
                        keep=options.keep,
                        kept=_files(job, attacks, chunk, kept) if again else (),
                        own=grid.own,
                    )


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
            warn(f"{file.name} cannot be read ({error}): its attacks run again.", 3)
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


_FAILED = 1 << 62  # the bit of an image that failed


def _measured(
    store: Store, grid: Grid, metrics: Sequence[str], *, retry_failed: bool
) -> dict[tuple[int, str], np.ndarray]:
    """Return which metrics a store holds of each image, as bits, by the number of the job and the cell.

    An image that failed counts as measured by all metrics (−1), unless a later row has scores of it.
    """
    names = ["geometry", "cell", "image_sha256", "image", "batch", "status", "metrics", "label_origin", "label"]
    table = store.read(names)
    rows = part_frame(table.filter(pc.equal(table["geometry"].cast("string"), "in_place")))
    rows["failed"] = rows.status != "ok"
    bits = {text: _bits(text.split(), metrics) for text in rows.metrics.dropna().unique()}
    rows["bits"] = rows.metrics.map(bits).fillna(0).astype("int64")
    rows.loc[rows.failed, "bits"] = 0 if retry_failed else _FAILED
    rows["label"] = rows.label.where(rows.label_origin != "predicted").fillna(-1).astype("int64")
    by_cell = dict(iter(rows.groupby("cell")))
    places: dict[int, dict[str, int]] = {}
    found: dict[tuple[int, str], np.ndarray] = {}
    for number, job in enumerate(grid.jobs):
        if id(job.images) not in places:  # jobs share their images, of which there may be many
            places[id(job.images)] = {image.sha256 or image.name: place for place, image in enumerate(job.images)}
        for cell in job.cells.values():
            if cell in by_cell:
                found[number, cell] = _of_images(job, by_cell[cell], places[id(job.images)])
    return found


def _of_images(job: Job, rows: "pd.DataFrame", places: Mapping[str, int]) -> np.ndarray:
    """Return the bits of each image of a job from the rows of one cell."""
    rows = rows.assign(place=rows.image_id.map(places)).dropna(subset="place").astype({"place": int})
    if job.batches is not None:  # the same image in another batch is another release; controls have no batch
        batch = np.array(job.batches, object)[rows.place]
        rows = rows[(rows.batch == batch) | rows.batch.isna() | rows.failed]
    scored = rows[~rows.failed]
    _check_labels(job, scored.place.to_numpy(), scored.label.to_numpy())
    found = np.zeros(len(job.images), np.int64)
    np.bitwise_or.at(found, rows.place, rows.bits)
    return np.where(found == _FAILED, -1, found)

"""The grid of an experiment: every case with its cells and its images, and what of it a store still lacks.

This is where a killed run goes on: what it has is read from its records, and `missing` plans the rest.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.compute as pc
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from privlab.attacks import attacks as installed_attacks
from privlab.base import PrivlabError, collect_warnings, warn
from privlab.defenses import defenses as installed_defenses
from privlab.evaluation import Case, Rows, source_of, subject_of
from privlab.evaluation.case import defense_of
from privlab.evaluation.setup import learned_for
from privlab.grids.definition import Experiment, name_lpips
from privlab.grids.tasks import Options, Task, references
from privlab.images import Data, NamedImage, to_csv
from privlab.metrics import Embedding, Learned, Lpips
from privlab.release import kinds_of
from privlab.stores import Store, part_frame
from privlab.threat import attack_declarations
from privlab.victims import Victim, victim


@dataclass(frozen=True, eq=False)
class Grid:
    """An experiment laid out on this machine: a task with all images for each case and setting of a row.

    `missing` says why a metric cannot be computed here, and `learned` states the file and hash of each metric's trained
    weights. `declared` has what classes that are not installed declare: the defenses that an attack knows, and the
    kinds of effects of a defense, by name.
    """

    experiment: Experiment
    tasks: tuple[Task, ...]
    sources: tuple[str, ...]
    missing: Mapping[str, str]
    messages: tuple[str, ...]
    learned: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    declared: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)

    @cached_property
    def image_lists(self) -> dict[tuple[NamedImage, ...], str]:
        """Return the name of each list of images; cases may have different ones."""
        return {images: str(i) for i, images in enumerate(dict.fromkeys(task.images for task in self.tasks))}

    def manifests(self, path: Path, *, overwrite: bool = False) -> dict[str, str]:
        """Return the text of the manifest of each list of images, by the name of its file in the run directory `path`.

        Raises:
            PrivlabError: if the manifest that chose the images is in `path` and would be replaced.
        """
        names = {
            images: "manifest.csv" if name == "0" else f"manifest-{name}.csv"
            for images, name in self.image_lists.items()
        }
        for task in self.tasks:
            manifest = task.spec.data.manifest
            given = None if manifest is None else Path(manifest).resolve()
            replaced = overwrite or (given is not None and given.name != names[task.images])
            if given is not None and given.parent == path.resolve() and replaced:
                raise PrivlabError(f"'{manifest}' would give way to this run's own. Copy it out of '{path}'.")
        return {name: to_csv(images) for images, name in names.items()}

    def facts(self) -> dict[str, Any]:
        """Return what `run.json` states of the experiment, from which its tables are rebuilt."""
        lists, experiment = self.image_lists, asdict(replace(self.experiment, cases=()))
        del experiment["cases"]
        cases: list[dict[str, Any]] = []
        for number, case in enumerate(self.experiment.cases):
            tasks = [task for task in self.tasks if task.case == number]
            jobs = [
                {
                    "specification": replace(task.spec, settings=task.settings).stated(),
                    "released": task.spec.released,
                    "cells": dict(task.cells),
                    "images": lists[task.images],
                }
                for task in tasks
            ]
            about = {name: getattr(case, name) for name in ("label", "group")}
            about |= {"options": dict(case.options), "published": dict(case.published)}
            cases.append(about | {"refused": dict(tasks[0].refused), "jobs": jobs})
        keys = {name: [image.key for image in images] for images, name in lists.items()}
        members = {
            name: {image.key: image.member for image in images if image.member is not None}
            for images, name in lists.items()
        }
        return {
            "experiment": experiment,
            "cases": cases,
            "image_lists": keys,
            "members": members,
            "images": {"source": "; ".join(self.sources), "count": len({key for of in keys.values() for key in of})},
            "learned_metrics": dict(self.learned),
            "missing_metrics": dict(self.missing),
        } | ({"declared": dict(self.declared)} if self.declared else {})


def lay_out(
    experiment: Experiment,
    device: torch.device,
    own: nn.Module | Victim | None = None,
    *,
    begun: Mapping[str, Any] = MappingProxyType({}),
) -> Grid:
    """Load and check everything that the cases need, and find their images; nothing is run.

    Args:
        experiment: the cases.
        device: where victims and attacks are put.
        own: a timm model, or a victim, that is attacked instead of those that the cases name.
        begun: what `run.json` states of the run so far, whose network of LPIPS is kept.

    Raises:
        PrivlabError: if a part does not exist or does not fit, or an attack can run on no case.
    """
    experiment, told = name_lpips(experiment, begun)
    messages = [] if told is None else [told]
    unavailable: dict[str, str] = {}
    learned: dict[str, dict[str, str]] = {}
    found: dict[tuple[object, ...], tuple[Data, tuple[NamedImage, ...]]] = {}
    looked_for: dict[tuple[object, ...], tuple[Mapping[str, Learned], Mapping[str, str]]] = {}
    tasks: list[Task] = []
    knows: dict[str, list[str]] = {}
    effects: dict[str, list[str]] = {}
    firsts: dict[str, dict[Case, int]] = {}
    with collect_warnings(messages):
        mine = own_victim(own, experiment.cases[0].runs[0], device)
        for number, case in sorted(enumerate(experiment.cases), key=lambda each: _victim(each[1].runs[0])):
            for spec in case.runs:
                subject = subject_of(spec, device, mine)
                setting, public = case.setting or spec.settings[0], subject.public
                at = (spec.data, subject.base.model.vit.num_classes)
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
                attacks = [attack for group in subject.groups for attack in group.attacks]
                for attack in attacks:
                    if attack.name not in installed_attacks():
                        knows[attack.name] = sorted(attack_declarations(attack).knows)
                for part in defense_of(spec, subject.base, setting).parts:
                    if part.name not in installed_defenses() and part.name not in effects:
                        effects[part.name] = sorted(kinds_of(part))  # measured on a stand-in, once for all its options
                of_victim = firsts.setdefault(subject.base.name, {})
                task = Task(
                    number,
                    spec,
                    (setting,),
                    found[at][1],
                    Rows(spec, subject.base, tuple(public.images), bool(public.labels)).cells(setting, subject.groups),
                    tuple(name for name in spec.metrics if name not in lacking),
                    subject.refused,
                    first=spec is case.runs[0],
                    strip=of_victim.setdefault(case.runs[0], len(of_victim)),
                    one_key=frozenset(attack.name for attack in attacks if attack_declarations(attack).one_key),
                    own=mine,
                )
                tasks.append(task)
    tasks.sort(key=lambda task: task.case)
    declared = {"knows": knows, "effects": effects} if knows or effects else {}
    _check_attacks(tasks)
    sources = tuple(dict.fromkeys(source.description for source, _ in found.values()))
    messages += [f"{name} is n/a: {reason}" for name, reason in unavailable.items()]
    return Grid(experiment, tuple(tasks), sources, unavailable, tuple(messages), learned, declared)


def own_victim(own: nn.Module | Victim | None, spec: Case, device: torch.device) -> Victim | None:
    """Return a victim that is given as an object, on the device; None where there is none.

    Args:
        own: a model, which is copied, or a victim.
        spec: states the weights, size, seed and classes of a model.
        device: where the victim is put.
    """
    if own is None or isinstance(own, Victim):
        return own and own.to(device)
    given = spec.victim.options(spec.seed)
    del given["normalisation"]
    return victim(own, **given).to(device)


def _check_attacks(tasks: Sequence[Task]) -> None:
    """Refuse an attack that can run on no case: that is a mistake, while it may well be refused on some cases."""
    everywhere = set.intersection(*(set(task.refused) for task in tasks))
    named = [attack.name for attack in tasks[0].spec.adversary.attacks or () if attack.name in everywhere]
    if named:
        raise PrivlabError(f"'{named[0]}' can run on no case: {tasks[0].refused[named[0]]}")


def _victim(spec: Case) -> tuple[str, ...]:
    """Return what identifies a victim; cases are sorted by it, so that each victim is loaded once."""
    victim = spec.victim
    return victim.models[0], victim.weights, str(victim.img_size), str(spec.seed), str(victim.classes)


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
    measured: dict[tuple[str, str, str | None], tuple[str, int]] = {}
    failed: set[tuple[str, str]] = set()
    kept: dict[str, str] = {}
    if not options.overwrite and any(path.glob("records/*")):
        measured, failed = _measured(Store(path))
        kept = _kept(path)
    if options.retry_failed:
        failed = set()
    names_in = cache(lambda text: frozenset(text.split()))

    def held(task: Task, image: NamedImage, name: str) -> frozenset[str] | None:
        """Return the metrics that the store has of a cell and an image; None if the image failed."""
        cell, batch = task.cells[name], None if task.batches is None else task.batches[image.key]
        found = measured.get((cell, image.key, batch)) or measured.get((cell, image.key, None))
        if found is None:
            return None if (cell, image.key) in failed else frozenset()
        text, label = found
        _check_label(task, image, label)
        return names_in(text)

    planned: dict[tuple[str, tuple[NamedImage, ...]], frozenset[str]] = {}  # cases may share cells: setting a of all γ
    parts: list[Task] = []
    for task in grid.tasks:
        wanted: dict[str, frozenset[str]] = {}
        for name, cell in task.cells.items():
            before = planned.get((cell, task.images), frozenset())
            wanted[name] = frozenset(task.metrics) - before
            planned[cell, task.images] = before.union(task.metrics)
        lacking: list[dict[str, frozenset[str]]] = []
        for image in task.images:
            found = {name: held(task, image, name) for name in task.cells}
            if task.attacks and all(found[name] is None for name in task.attacks):
                found = dict.fromkeys(found)  # an image that could not be read has no controls
            lacking.append(
                {name: wanted[name] - has if has is not None else frozenset() for name, has in found.items()}
            )
        how = options if task.first else replace(options, strips=0)
        parts += _parts(replace(task, options=how), lacking, kept)
    return sorted(parts, key=lambda task: _victim(task.spec))


def _measured(
    store: Store,
) -> tuple[dict[tuple[str, str, str | None], tuple[str, int]], set[tuple[str, str]]]:
    """Return the metrics and the label of each cell, image and client's batch with scores, and what failed.

    The same image in another batch is another release; controls have no batch. No label is −1.
    """
    names = ["geometry", "cell", "image_sha256", "image", "batch", "status", "metrics", "label_origin", "label"]
    table = store.read(names)
    rows = part_frame(table.filter(pc.equal(table["geometry"].cast("string"), "in_place")))
    rows = rows[rows.cell.notna()]  # records of an earlier version have no cells, and no plan takes them as done
    labels = rows.label.where(rows.label_origin != "predicted").fillna(-1).astype("int64")
    batches = rows.batch.astype(object).where(rows.batch.notna(), None)
    columns = (rows.cell, rows.image_id, batches, rows.status, rows.metrics.fillna(""), labels)
    measured: dict[tuple[str, str, str | None], tuple[str, int]] = {}
    failed: set[tuple[str, str]] = set()
    same: dict[str, str] = {}  # equal texts are kept once, since there may be a million rows
    for cell, image, batch, status, metrics, label in zip(*columns, strict=True):
        cell, image = same.setdefault(cell, cell), same.setdefault(image, image)
        if status != "ok":
            failed.add((cell, image))
            continue
        before = measured.get((cell, image, batch))  # metrics may have been added later
        measured[cell, image, batch] = metrics if before is None else f"{before[0]} {metrics}", label
    return measured, failed


def _check_label(task: Task, image: NamedImage, label: int) -> None:
    """Refuse an image that was measured with another label than it has now; −1 is none (the victim's prediction).

    The key of a cell does not name labels, so that an image that is added later leaves the other images as they are.
    """
    own = -1 if image.label is None else image.label
    if label != own and task.spec.data.labels != "predicted":
        there, now = ("none" if value < 0 else str(value) for value in (label, own))
        raise PrivlabError(
            f"The label of '{image.name}' is {now}, and {there} in the records of this --out. "
            "Give another --out, or the label that it had."
        )


def _parts(task: Task, lacking: Sequence[Mapping[str, frozenset[str]]], kept: Mapping[str, str]) -> Iterator[Task]:
    """Yield the parts of a task; images that lack the same metrics of the same cells share parts."""
    options, unit = task.options, task.spec.together or 1
    number, count = options.share
    alone = task.one_key if options.batch_size is None and unit == 1 else frozenset[str]()
    for whole in (False, True) if alone else (False,):
        names = [name for name in task.cells if (name in alone) == whole]
        groups: dict[tuple[frozenset[str], ...], list[NamedImage]] = defaultdict(list)
        for turn, start in enumerate(range(0, len(task.images), unit)):
            if (0 if whole else turn) % count == number - 1:  # a client's batch is drawn for, and attacked, as one
                batch = lacking[start : start + unit]
                pattern = tuple(frozenset[str]().union(*(of_image[name] for of_image in batch)) for name in names)
                groups[pattern] += task.images[start : start + unit]
        for pattern, images in sorted(groups.items(), key=lambda group: [_order(lack) for lack in group[0]]):
            size = len(images) if whole else max(1, options.chunk // unit) * unit
            how = replace(options, batch_size=size) if whole else options
            for metrics in sorted({*pattern} - {frozenset()}, key=_order, reverse=True):
                cells = {name: task.cells[name] for name, own in zip(names, pattern, strict=True) if own == metrics}
                some = tuple(name for name in task.metrics if name in metrics)
                for start in range(0, len(images), size):
                    chunk = tuple(images[start : start + size])
                    part = replace(task, images=chunk, cells=cells, metrics=some, options=how)
                    yield part if some == task.metrics else replace(part, kept=_files(part, kept))


def _order(metrics: frozenset[str]) -> list[str]:
    return sorted(metrics, reverse=True)


def _files(task: Task, kept: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files with the reconstructions of all images by all attacks of a task; none if one is missing."""
    keys = [f"{task.cells[attack]}/{image.sha256}" for attack in task.attacks for image in task.images]
    return tuple(sorted({kept[key] for key in keys})) if all(key in kept for key in keys) else ()


def _kept(path: Path) -> dict[str, str]:
    """Return the file of each kept reconstruction, by CELL/IMAGE."""
    found: dict[str, str] = {}
    for file in sorted(path.glob("kept/*.safetensors")):
        try:
            with safe_open(file, "np") as tensors:
                names = tensors.keys()
        except (SafetensorError, OSError) as error:
            warn(f"{file.name} cannot be read ({error}): its attacks run again.")
            continue
        found |= {name.removesuffix("/images"): str(file) for name in names if name.endswith("/images")}
    return found

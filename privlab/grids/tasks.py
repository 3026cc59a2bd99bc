"""Tasks: images of a case that still have to be run, and how the references of one task become records.

A task names images by their place in a source and their hash, so it is small; a worker reads them itself.
"""

import hashlib
import os
import platform
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import pyarrow as pa
import torch
from safetensors.torch import load_file, save

from privlab.base import PrivlabError, collect_warnings, pick_device
from privlab.evaluation import (
    COLUMNS,
    CONTROLS,
    Case,
    Evaluator,
    Strip,
    batch_key,
    batch_of,
    source_of,
    subject_of,
)
from privlab.evaluation.setup import learned_for
from privlab.grids.engine import IN_PROCESS, Engine
from privlab.images import Data, NamedImage, to_png
from privlab.stores import strip_name, strip_png
from privlab.threat import Reconstruction
from privlab.victims import Victim


@dataclass(frozen=True)
class Options:
    """Options that change the speed of a run, or what it keeps, but none of its results.

    Without an `engine` the number of processes is that of threads, and no more than tasks. `chunk` is the
    number of images of a task. PNGs are kept of the first `pictures` images, and strips of the first `strips`. `keep`
    says whether reconstructions are kept, so that metrics that are added later can be scored. `share` is (I, N): this
    machine runs the I-th of N shares of the images or of the clients' batches. `overwrite` says whether an earlier run
    is replaced.
    """

    engine: Engine | None = IN_PROCESS
    device: str = "auto"
    batch_size: int | None = None
    chunk: int = 16
    pictures: int = 100
    strips: int = 0
    keep: bool = False
    share: tuple[int, int] = (1, 1)
    retry_failed: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("chunk", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise PrivlabError(f"--{name.replace('_', '-')} must be a positive number. Found {value}.")
        number, count = self.share
        if not 1 <= number <= count:
            raise PrivlabError(f"--shard must be I/N with 1 ≤ I ≤ N. Found {number}/{count}.")


@dataclass(frozen=True, eq=False)
class Task:
    """Images of one case of a row, with the key of the cell of each attack and control that they lack.

    A grid has one task for each case and setting, with all of its images, cells and metrics; `missing` cuts
    out of it what a store lacks. `metrics` are those that can be computed here, and `refused` says why attacks cannot
    run. `first` marks the first case of the row, of which strips are kept; `strip` is its number among those
    on the same victim, by which the files of strips differ. `one_key` names the attacks that read the releases of all
    images as one. `kept` names files of earlier reconstructions, which are scored again. `own` is a victim that is
    attacked instead of the one that `spec` names.
    """

    case: int
    spec: Case
    settings: tuple[str, ...]
    images: tuple[NamedImage, ...]
    cells: Mapping[str, str]
    metrics: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    first: bool = True
    strip: int = 0
    one_key: frozenset[str] = frozenset()
    own: Victim | None = None
    options: Options = Options()
    kept: tuple[str, ...] = ()

    @property
    def attacks(self) -> tuple[str, ...]:
        """Return the names of the attacks."""
        return tuple(name for name in self.cells if name not in CONTROLS)

    @property
    def controls(self) -> bool:
        """Return whether controls are scored."""
        return len(self.attacks) < len(self.cells)

    @cached_property
    def batches(self) -> dict[str, str] | None:
        """Return the key of the client's batch by that of its images; None where images are not released together."""
        if (size := self.spec.together) is None:
            return None
        found: dict[str, str] = {}
        for start in range(0, len(self.images), size):
            batch = self.images[start : start + size]
            found |= dict.fromkeys([image.key for image in batch], batch_key(image.sha256 for image in batch))
        return found


@dataclass(frozen=True, eq=False)
class Result:
    """The results of a task: its records, files by their name in the run directory, and warnings."""

    task: Task
    rows: pa.Table
    files: Mapping[str, bytes] = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    seconds: float = 0.0
    worker: str = ""


def joined(tasks: Sequence[Task]) -> list[Task]:
    """Join tasks that differ only in the setting: those of one case, and those of settings b and c.

    Settings b and c release the same, so the release is attacked once.
    """
    found: dict[Hashable, Task] = {}
    for task in tasks:
        alone = task.spec.settings in (("b",), ("c",)) and task.spec.client is None  # it has no setting b
        spec = replace(task.spec, settings=("b", "c")) if alone else task.spec
        what = (spec, task.images, task.attacks, task.controls, task.metrics, task.options)
        key = task if task.kept else what
        other = found.setdefault(key, task)
        if other.settings != task.settings:
            found[key] = replace(other, spec=spec, settings=tuple(sorted({*other.settings, *task.settings})))
    return [*found.values()]


def references(source: Data) -> list[NamedImage]:
    """Return the images of a source without pixels, each content once; files are hashed whole and not decoded."""
    found: dict[str, NamedImage] = {}
    for image in source.without_pixels():
        found[image.key] = found.pop(image.key, image)  # the first one, where the last one stands
    return [*found.values()]


def run_task(task: Task) -> Result:
    """Run the pipeline on the images of a task.

    Raises:
        PrivlabError: if the victim or its attacks cannot be made here.
    """
    messages: list[str] = []
    start = time.perf_counter()
    with collect_warnings(messages):
        device, pictures, strips = pick_device(task.options.device), task.options.pictures, task.options.strips
        evaluator = _evaluator(task, device)
        source = source_of(task.spec, [evaluator.base], check=False)  # `_same` checks each image instead
        rows = [COLUMNS.empty_table()]
        files: dict[str, bytes] = {}
        reconstructions: dict[str, Reconstruction] = {}
        planned = {image.sha256: image for image in task.images}
        for images in _batches(task, source, device):
            records, shown, kept = evaluator(batch_of(images, evaluator.base.preprocessing))
            rows.append(pa.Table.from_pylist(records, schema=COLUMNS))
            reconstructions |= kept
            for sha256, strip in shown.items():
                image = planned[sha256]
                if image.place < pictures:
                    files |= {f"pictures/{sha256[:16]}/{name}.png": png for name, png in _pngs(strip)}
                if image.place < strips:
                    name = strip_name(image.place, image.name, evaluator.base.name, task.strip)
                    files[f"strips/{name}"] = strip_png(strip, sha256)
        if reconstructions:
            name = hashlib.sha256("\n".join(sorted(reconstructions)).encode()).hexdigest()[:24]
            files[f"kept/{name}.safetensors"] = _saved(reconstructions)
    seconds, worker = time.perf_counter() - start, f"{platform.node()}:{os.getpid()}"
    return Result(task, pa.concat_tables(rows), files, tuple(messages), seconds, worker)


def _pngs(strip: Strip) -> Iterator[tuple[str, bytes]]:
    """Yield the PNGs of a strip by name; what is fed is often the private image itself, which is encoded once."""
    done: list[tuple[torch.Tensor, bytes]] = []
    for name, image, _ in (panel for row in strip for panel in row):
        png = next((png for other, png in done if torch.equal(other, image)), None)
        if png is None:
            done.append((image, png := to_png(image)))
        yield name, png


def images_at_a_time(device: torch.device) -> int:
    """Return how many images are attacked at a time where nothing else is asked for."""
    return 64 if device.type == "cuda" else 8


def _batches(task: Task, source: Data, device: torch.device) -> Iterator[list[NamedImage]]:
    """Yield the images that are attacked at a time, with their pixels."""
    size = task.spec.together or task.options.batch_size or images_at_a_time(device)
    places = None if source.names is None else {name: place for place, name in enumerate(source.names)}
    for start in range(0, len(task.images), size):
        wanted = task.images[start : start + size]
        there = [r.place if places is None else places.get(r.name) for r in wanted]  # a deleted file shifts the others
        yield [_planned(source, place, r) for r, place in zip(wanted, there, strict=True)]


def _planned(source: Data, place: int | None, reference: NamedImage) -> NamedImage:
    """Return the image that was planned; if it has changed or gone since then, return it as one that failed."""
    gone = NamedImage(reference.name, "", None, problem="The file has gone since the run was planned.")
    try:
        image = gone if place is None else source[place]
    except IndexError:  # a stream that has become shorter
        image = gone
    if image.sha256 == reference.sha256:
        return image
    problem = image.problem or "The file has changed since the run was planned."
    return replace(image, sha256=reference.sha256, pixels=None, problem=problem)


def _evaluator(task: Task, device: torch.device) -> Evaluator:
    subject = subject_of(task.spec, device, task.own)
    groups = [
        replace(group, attacks=tuple(attack for attack in group.attacks if attack.name in task.attacks))
        for group in subject.groups
    ]
    return Evaluator(
        replace(task.spec, settings=task.settings),
        subject.base,
        [group for group in groups if group.attacks],
        task.metrics,
        learned_for(task.metrics, task.spec, device, subject.base)[0],
        subject.public,
        strips=any(image.place < max(task.options.pictures, task.options.strips) for image in task.images),
        controls=task.controls,
        keep=task.options.keep,
        kept=_kept(task.kept) if task.kept else None,
    )


_PARTS = tuple(field.name for field in fields(Reconstruction))


def _saved(reconstructions: Mapping[str, Reconstruction]) -> bytes:
    return save(
        {
            f"{key}/{part}": value.cpu().clone(memory_format=torch.contiguous_format)
            for key, each in reconstructions.items()
            for part in _PARTS
            if (value := getattr(each, part)) is not None
        }
    )


def _kept(names: Sequence[str]) -> dict[str, Reconstruction]:
    """Read the reconstructions of earlier runs."""
    tensors = {key: tensor for name in names for key, tensor in load_file(name).items()}
    return {
        key: Reconstruction(**{part: tensors[f"{key}/{part}"] for part in _PARTS if f"{key}/{part}" in tensors})
        for path in tensors
        if (key := path.removesuffix("/images")) != path
    }

"""`privlab bench table`: the cost of the whole pipeline, and the scaling of its workers, its store and its page."""

import csv
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from privlab.base import (
    PrivlabError,
    PrivlabWarning,
    Progress,
    core_count,
    full_precision,
    pick_device,
)
from privlab.benchmarks.common import Bench, machine, median_seconds, peak_memory, quiet, time_stage
from privlab.benchmarks.first_paint import find_chromium, first_paint
from privlab.benchmarks.stores import experiment_file, finished_run, photographs
from privlab.evaluation import CONTROLS, GEOMETRIES, batches, source_of, subject_of
from privlab.grids import Engine, Experiment, Options, Result, prepare, read_experiment
from privlab.grids.fill import fill
from privlab.images import open_images
from privlab.release import observe
from privlab.report.page import write_page
from privlab.report.tables import load_results
from privlab.threat import Attack

_RECORDS, _SHOWN = 1_000_000, 1000
_BATCH, _CHUNK, _WORKERS = 8, 2, 2
_RESUMED_IMAGES = 1000
"""Number of images of the grid that is resumed."""

_BARE, _TABLE = "bare observation and attacks", "table run"
_ONE, _TWO, _RAY = "table run, one worker", "table run, two workers", "table run, two workers on Ray"
_OVER_ONE = {_TWO: "two_workers_over_one", _RAY: "ray_two_over_one"}
_TARGETS = {
    "pipeline_over_bare": "≤ 1.25",
    "two_workers_over_one": "≥ 1.7",
    "ray_two_over_one": "≥ 1.5",
    "resume_seconds_1e6": "< 10",
    "resume_rss_gb_1e6": "< 1",
    "imports_rss_gb": "—",
    "report_seconds_1000": "< 60",
    "report_first_paint_seconds": "< 2",
}


def bench_table(
    *,
    model: str,
    n_images: int,
    images_dir: Path | None,
    repeats: int,
    large: bool,
    device: str,
    progress: Progress = lambda done, total: None,
) -> Bench:
    """Time `privlab table` on labelled photographs in setting a, with both closed-form attacks, in `repeats` rounds.

    `pipeline_over_bare`: layout, reading, scoring (MSE, FFT2D, PSNR, SSIM; controls too), PNGs and the store, over the
    observation and the attacks alone, of images in memory; victims are loaded beforehand for both. `…_over_one`: images
    per second with one thread a worker, from when each worker has returned its first result; `start_seconds` says when
    that was. `resume_…_1e6`: reading, laying out and resuming an experiment whose million records exist, by a process
    that has imported everything; and its peak memory, in GiB, next to that of the imports alone. `report_…_1000`: the
    page of 1000 images in two cases, all with PNGs, and its first paint in Chromium. What cannot be measured here is
    named in `absent`, with the reason.

    Args:
        model: name of the victim.
        n_images: number of images that are run.
        images_dir: folder of the images; without it, photographs are made.
        repeats: rounds that are timed; the stages of `pipeline_over_bare` have one more that warms up.
        large: whether the million records and the page are measured too.
        device: "auto", "cpu", "cuda" or "cuda:N".
        progress: is called with the steps done and their number.

    Raises:
        PrivlabError: for a model, a folder or a device that is not there.
    """
    target, steps = pick_device(device), itertools.count(1)
    total = 2 * (repeats + 1) + 3 * repeats + 3 * large

    def step() -> None:
        progress(next(steps), total)

    with tempfile.TemporaryDirectory() as name, quiet():
        folder = Path(name)
        images = images_dir or photographs(folder / "images", n_images)
        labels = _labels(folder / "labels.csv", images, n_images)
        experiment = experiment_file(
            folder / "timed.toml", images, model=model, setting="a", limit=n_images, labels=str(labels)
        )
        seconds = median_seconds(_stages(experiment, folder, target), repeats, target, step)
        figures = {"pipeline_over_bare": seconds[_TABLE] / seconds[_BARE]}
        seconds = {name: each / n_images for name, each in seconds.items()}
        paces, absent = _paces(experiment, folder, repeats, device, step)
        seconds |= {name: pace.per_image for name, pace in paces.items()}
        figures |= {_OVER_ONE[name]: seconds[_ONE] / seconds[name] for name in _OVER_ONE if name in paces}
        if large:
            figures |= _resume(folder, step)
            shown, unseen = _open_page(folder)
            figures, absent = figures | shown, absent | unseen
            step()
    setup = {"model": model, "images": n_images, "batch": _BATCH, "chunk": _CHUNK, "repeats": repeats}
    setup |= {"start_seconds": {name: pace.start for name, pace in paces.items()}, "absent": absent}
    return Bench(figures, {name: _TARGETS[name] for name in figures}, seconds, setup | machine(target))


def _labels(file: Path, images: Path, n: int) -> Path:
    """Write a class for each image, because predicting it would take a forward pass that the attacks alone do not."""
    with file.open("w", newline="", encoding="utf-8") as out:
        names = open_images(images, limit=n).names or ()
        csv.writer(out).writerows([("file", "class_index"), *((name, 0) for name in names)])
    return file


def _stages(experiment: Experiment, folder: Path, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the stages that are timed, each over all images in the same batches: the pipeline, and attacks alone."""
    spec = experiment.cases[0].runs[0]
    subject, numbers = subject_of(spec, device), itertools.count()
    chunks = [
        (chunk.images.to(device), torch.tensor([image.label for image in chunk.named], device=device))
        for chunk in batches(source_of(spec, [subject.base]), subject.base.preprocessing, _BATCH)
    ]
    options = Options(device=str(device), batch_size=_BATCH)

    def bare() -> None:
        for (x, y), group in itertools.product(chunks, subject.groups):
            seen = observe(group.victim.model, x, y, group.parameters)
            with full_precision():
                for attack in group.attacks:
                    assert isinstance(attack, Attack)
                    attack(seen)

    def table() -> None:
        _run(experiment, folder / f"run-{next(numbers)}", options)

    return {_BARE: bare, _TABLE: table}


def _run(experiment: Experiment, path: Path, options: Options) -> list[tuple[float, str, int]]:
    """Run an experiment as `privlab table` does; return the time, the worker and the images of each result."""
    results: list[tuple[float, str, int]] = []

    def note(done: int, total: int, last: Result | None) -> None:
        if last is not None:
            results.append((time.perf_counter(), last.worker, len(last.task.images)))

    fill(*prepare(experiment, path, options), path, options, progress=note)
    return results


@dataclass(frozen=True)
class _Pace:
    """Seconds per image after all workers have returned a result, and the seconds until they had."""

    per_image: float
    start: float

    @classmethod
    def of(cls, begun: float, results: Sequence[tuple[float, str, int]], workers: int) -> "_Pace | None":
        """Take (time, worker, images) of each result; None if a worker returned none, or no result came after that."""
        first = {name: i for i, (_, name, _) in reversed([*enumerate(results)])}
        there = max(first.values(), default=0)
        if len(first) < workers or there + 1 >= len(results):
            return None
        images = sum(count for _, _, count in results[there + 1 :])
        return cls((results[-1][0] - results[there][0]) / images, results[there][0] - begun)


def _paces(
    experiment: Experiment, folder: Path, repeats: int, device: str, step: Callable[[], None]
) -> tuple[dict[str, _Pace], dict[str, str]]:
    """Return the pace of one worker and of two, as medians over the rounds, and the reasons for missing ones."""
    engines = {_ONE: Engine(), _TWO: Engine(workers=_WORKERS), _RAY: Engine("ray", workers=_WORKERS)}
    absent: dict[str, str] = {}
    if not hasattr(psutil.Process, "cpu_affinity"):
        absent |= dict.fromkeys((_TWO, _RAY), "this system cannot give a worker one core")
    elif core_count() < _WORKERS:
        absent |= dict.fromkeys((_TWO, _RAY), f"it needs {_WORKERS} cores")
    elif importlib.util.find_spec("ray") is None:
        absent[_RAY] = "Ray is not installed: pip install 'privlab[ray]'"
    found: dict[str, list[_Pace]] = {}
    for number, (name, engine) in itertools.product(range(repeats), engines.items()):
        if name not in absent:
            pace = _pace(experiment, folder / f"{engine.name}-{engine.workers}-{number}", engine, device)
            if pace is None:
                absent[name] = "too few tasks for all workers to have had some: give more --images"
            else:
                found.setdefault(name, []).append(pace)
        step()
    if _ONE in absent:
        absent |= dict.fromkeys((_TWO, _RAY), absent.pop(_ONE))
    medians = {
        name: _Pace(
            *(statistics.median(values) for values in zip(*((p.per_image, p.start) for p in each), strict=True))
        )
        for name, each in found.items()
        if name not in absent
    }
    return medians, {_OVER_ONE[name]: reason for name, reason in absent.items()}


def _pace(experiment: Experiment, path: Path, engine: Engine, device: str) -> _Pace | None:
    with _a_core_each():
        begun = time.perf_counter()
        results = _run(experiment, path, Options(engine, device, batch_size=_CHUNK, chunk=_CHUNK))
    return _Pace.of(begun, results, engine.workers)


@contextmanager
def _a_core_each() -> Iterator[None]:
    """Give this process one thread, and the workers that it starts one core each."""
    threads, process = torch.get_num_threads(), psutil.Process()
    cores = process.cpu_affinity() if hasattr(process, "cpu_affinity") else None
    torch.set_num_threads(1)
    if cores is not None:
        process.cpu_affinity(sorted(cores)[:_WORKERS])
    try:
        yield
    finally:
        if cores is not None:
            process.cpu_affinity(cores)
        torch.set_num_threads(threads)


def _resume(folder: Path, step: Callable[[], None]) -> dict[str, float]:
    """Make an experiment with all of its records, and resume it in a separate process."""
    cases = -(-_RECORDS // (_RESUMED_IMAGES * (2 * len(GEOMETRIES) + len(CONTROLS))))
    file, path, gammas = folder / "scaled.toml", folder / "scaled", [(i + 1) / (cases + 1) for i in range(cases)]
    images = photographs(folder / "scaled-images", _RESUMED_IMAGES)
    made = experiment_file(file, images, f"[grid]\ngamma = {gammas}", model="vit_ti", img_size=32, setting="c")
    count = finished_run(made, path, Options(device="cpu", pictures=0), real=2)
    assert count >= _RECORDS
    step()
    program = f"from privlab.benchmarks.table import resume_child; resume_child({str(file)!r}, {str(path)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise PrivlabError(f"The run of {count} records was not resumed: {done.stderr.strip().splitlines()[-1]}")
    seconds, peak, imports = json.loads(done.stdout.splitlines()[-1])
    step()
    return {"resume_seconds_1e6": seconds, "resume_rss_gb_1e6": peak / 2**20, "imports_rss_gb": imports / 2**20}


def resume_child(file: str, path: str) -> None:
    """Resume a finished run; print the seconds, the peak memory in kB, and that of the imports alone.

    Raises:
        PrivlabError: if something is missing.
    """
    warnings.simplefilter("ignore", PrivlabWarning)
    imports, start, options = peak_memory(), time.perf_counter(), Options(device="cpu")
    grid, tasks = prepare(read_experiment(Path(file)), Path(path), options)
    if tasks:
        raise PrivlabError(f"{len(tasks)} tasks are missing of a run that is finished.")
    fill(grid, tasks, Path(path), options)
    print(json.dumps([time.perf_counter() - start, peak_memory(), imports]))  # noqa: T201


def _open_page(folder: Path) -> tuple[dict[str, float], dict[str, str]]:
    """Make a run with PNGs for every image, write its page and open it."""
    path, page = folder / "shown", folder / "report.html"
    images = photographs(folder / "shown-images", _SHOWN)
    tables = "".join(f'[[case]]\nlabel = "setting {name}"\nsetting = "{name}"\n' for name in "ac")
    made = experiment_file(folder / "shown.toml", images, tables, model="vit_ti")
    finished_run(made, path, Options(device="cpu", pictures=_SHOWN), real=16)
    seconds = time_stage(lambda: write_page(load_results(path), page), torch.device("cpu"))
    figures = {"report_seconds_1000": seconds}
    if (chromium := find_chromium()) is None:
        return figures, {"report_first_paint_seconds": "there is no Chromium on the path"}
    try:
        return figures | {"report_first_paint_seconds": first_paint(chromium, page)}, {}
    except PrivlabError as error:
        return figures, {"report_first_paint_seconds": str(error).rstrip(".")}

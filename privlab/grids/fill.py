"""Fills the store of an experiment: lays the grid out, finds what the store lacks, and runs it."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from privlab.base import PrivlabError, commit, hardware, pick_device, versions
from privlab.evaluation import CONTROLS
from privlab.grids.definition import Experiment
from privlab.grids.engines import run_tasks
from privlab.grids.plan import Grid, Options, lay_out, missing
from privlab.grids.tasks import Result, Task, joined, run_task
from privlab.stores import RunDirectory

TaskProgress = Callable[[int, int, Result | None], None]
"""It is called with (images done, images in all, last result)."""


def prepare(experiment: Experiment, path: Path, options: Options) -> tuple[Grid, list[Task]]:
    """Return the grid of an experiment, and the tasks of what the store at `path` lacks; nothing is run.

    Args:
        experiment: the cases, as `read_experiment` returns them.
        path: the run directory, which need not exist yet.
        options: the device, the size of a task, the share of this machine, and what is kept.

    Raises:
        PrivlabError: if a part of the experiment does not exist or does not fit.
    """
    grid = lay_out(experiment, pick_device(options.device), begun=RunDirectory(path).begun())
    return grid, missing(grid, path, options)


def fill(
    grid: Grid,
    tasks: Sequence[Task],
    run: RunDirectory,
    options: Options,
    *,
    command: str | None = None,
    stated: Mapping[str, Any] = MappingProxyType({}),
    say: Callable[[str], object] = lambda line: None,
    warn: Callable[[str], object] = lambda message: None,
    progress: TaskProgress = lambda done, total, last: None,
) -> tuple[str, ...]:
    """Run the tasks, write the records and files of each as soon as it is finished, and return the warnings.

    Args:
        grid: the experiment that `run.json` states, and the image lists that the manifests state.
        tasks: those that `prepare` found to be missing; if there are none, a finished run is left as it is.
        run: the run directory; records are added to those of an earlier run.
        options: the engine, and the device and workers that `run.json` states.
        command: the command line, for `run.json`.
        stated: what `run.json` states besides; a run of `privlab attack` has a "specification" and "victims", and only
            one that states the same goes on.
        say: called with each message for the user, such as that a worker has died.
        warn: called with each warning as soon as it is known; those of an earlier part of the run come first.
        progress: called with (images done, images in all, last result); once before the first result, with None.

    Raises:
        PrivlabError: if `run` holds a run of another kind, or of another specification; if it cannot be written, or a
            task not be run. What was finished is kept.
    """
    manifests = grid.manifests(run.path)
    messages, facts = list(grid.messages), {**stated, **grid.facts()}
    earlier = run.begun()
    known = json.loads(json.dumps(facts))
    if earlier and any(earlier.get(name) != known.get(name) for name in ("specification", "victims")):
        table = "holds a run of privlab attack. Give another --out."
        attack = "holds another run. Use --overwrite, or another --out."
        raise PrivlabError(f"'{run.path}' {attack if stated else table}")
    if earlier.get("cases") == known["cases"]:  # the same experiment: its earlier warnings still hold
        messages += [message for message in earlier["warnings"] if message not in messages]
        if not tasks and earlier["status"] == "finished" and earlier | known == earlier:
            return tuple(messages)
    for message in messages:
        warn(message)
    facts |= machine_facts(command, pick_device(options.device))
    facts |= {"engine": options.engine.name, "workers": options.engine.workers}
    tasks = joined(tasks)
    with run.noted(facts, messages), closing(run_tasks(tasks, options.engine, say)) as results:
        run.write_manifests(manifests)  # after run.json, by which another process knows that the directory is a run's
        for result in told(results, tasks, progress):
            for name, content in result.files.items():  # before its record, which says that its image files exist
                run.write_file(name, content)
            run.store.add(result.rows)
            for message in dict.fromkeys(result.messages):
                if message not in messages:
                    messages.append(message)
                    warn(message)
    return tuple(messages)


def told(results: Iterable[Result], tasks: Sequence[Task], progress: TaskProgress) -> Iterator[Result]:
    """Yield the results of tasks, and tell of each as soon as its caller has dealt with it.

    Args:
        results: as they come.
        tasks: all that are run.
        progress: called with (images done, images in all, last result); once before the first result, with None.
    """
    total, done = sum(len(task.images) for task in tasks), 0
    progress(done, total, None)
    for result in results:
        yield result
        done += len(result.task.images)
        progress(done, total, result)


def machine_facts(command: str | None, device: torch.device) -> dict[str, Any]:
    """Return what `run.json` states of the command, the program, the machine and the time."""
    return ({} if command is None else {"command": command}) | {
        "privlab": versions()["privlab"],
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "hardware": hardware(device),
        "commit": commit(),
    }


def costs(grid: Grid, tasks: Sequence[Task], *, measure: bool = False) -> list[dict[str, Any]]:
    """Return a row for each case: its attacks, the refused ones, its images, those that are done, and the seconds left.

    Args:
        grid: the experiment.
        tasks: those that `prepare` found to be missing.
        measure: whether to run a first release (one image, or one client's batch) of each kind of task, and to
            extrapolate the seconds that the rest takes; without it they are None.
    """
    seconds: dict[tuple[object, ...], float] = {}
    for task in tasks if measure else ():
        if (kind := _kind_of(task)) not in seconds:
            one = replace(task, images=task.images[: task.spec.together or 1])
            run_task(one)  # loads the victim
            seconds[kind] = run_task(one).seconds / len(one.images)
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(grid.experiment.cases):
        job = next(job for job in grid.jobs if job.case == number)
        own = [task for task in tasks if task.case == number]
        waiting = {image for task in own for image in task.images}
        rows.append(
            {
                "group": case.group,
                "label": case.label,
                "attacks": [name for name in job.cells if name not in CONTROLS],
                "refused": dict(job.refused),
                "images": len(job.images),
                "done": len(job.images) - len(waiting),
                "seconds": round(sum(seconds[_kind_of(task)] * len(task.images) for task in own), 1)
                if measure
                else None,
            }
        )
    return rows


def _kind_of(task: Task) -> tuple[object, ...]:
    """Return what decides how long a task takes."""
    spec = task.spec
    how = (spec.img_size, spec.features_released, spec.gradient_batch, spec.local_training, spec.block)
    return spec.models, *how, task.attacks, task.metrics, bool(task.kept)

"""Fills the store of an experiment: lays the grid out, finds what the store lacks, and runs it."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from privlab.base import PrivlabError, commit, hardware, pick_device, versions
from privlab.grids.definition import Experiment
from privlab.grids.engine import Engine
from privlab.grids.engines import run_tasks
from privlab.grids.plan import Grid, lay_out, missing
from privlab.grids.tasks import Options, Result, Task, joined, run_task
from privlab.images import Data
from privlab.stores import RunDirectory
from privlab.victims import Victim

TaskProgress = Callable[[int, int, Result | None], None]
"""It is called with (images done, images in all, last result)."""


def prepare(
    experiment: Experiment, path: Path, options: Options, own: nn.Module | Victim | None = None
) -> tuple[Grid, list[Task]]:
    """Return the grid of an experiment, and the tasks of what its run directory lacks, for `fill`; nothing is run.

    Args:
        experiment: the cases.
        path: the run directory, which need not exist yet.
        options: the device, the size of a task, the share of this machine, and what is kept.
        own: a timm model, or a victim, that is attacked instead of those that the cases name.

    Raises:
        PrivlabError: if a part of the experiment does not exist or does not fit, or the directory holds something else.
    """
    run = RunDirectory(path)
    begun = {} if options.overwrite else run.begun()
    grid = lay_out(experiment, pick_device(options.device), own, begun=begun)
    run.check(overwrite=options.overwrite, resume=not options.overwrite)
    return grid, missing(grid, path, options)


def fill(
    grid: Grid,
    tasks: Sequence[Task],
    path: Path,
    options: Options,
    *,
    command: str | None = None,
    stated: Mapping[str, Any] = MappingProxyType({}),
    known: Sequence[str] = (),
    say: Callable[[str], object] = lambda line: None,
    warn: Callable[[str], object] = lambda message: None,
    progress: TaskProgress = lambda done, total, last: None,
) -> None:
    """Run the tasks, and write the records and files of each as soon as it is finished.

    Args:
        grid: the experiment that `run.json` states, and the image lists that the manifests state.
        tasks: those that `prepare` found to be missing; if there are none, a finished run is left as it is.
        path: the run directory; records are added to those of an earlier run.
        options: the engine, and the device and workers that `run.json` states.
        command: the command line, for `run.json`.
        stated: what `run.json` states besides; a run of `privlab attack` has a "specification" and "victims", and only
            one that states the same goes on.
        known: the warnings so far, which come first.
        say: called with each message for the user, such as that a worker has died.
        warn: called with each warning as soon as it is known; those of an earlier part of the run come first.
        progress: called with (images done, images in all, last result); once before the first result, with None.

    Raises:
        PrivlabError: if the directory holds a run of another kind, or of another case; if it cannot be
            written, or a task not be run. What was finished is kept.
    """
    manifests, tasks = grid.manifests(path, overwrite=options.overwrite), joined(tasks)
    run = RunDirectory.create(path, overwrite=options.overwrite, resume=not options.overwrite)
    messages, facts = [*dict.fromkeys([*known, *grid.messages])], {**stated, **grid.facts()}
    earlier, now = run.begun(), json.loads(json.dumps(facts))
    if earlier and any(earlier.get(name) != now.get(name) for name in ("specification", "victims")):
        table = "holds a run of privlab attack. Give another --out."
        attack = "holds another run. Overwrite it (--overwrite) or give another directory."
        raise PrivlabError(f"'{path}' {attack if stated else table}")
    in_python = any(isinstance(task.spec.data.images, Data) for task in grid.tasks)  # no name says which images
    if in_python and earlier and earlier.get("image_lists") != now["image_lists"]:
        raise PrivlabError(f"'{path}' holds a run on other images. Overwrite it (overwrite=True), or give another out.")
    if earlier.get("cases") == now["cases"]:  # the same experiment: its earlier warnings still hold
        messages += [message for message in earlier["warnings"] if message not in messages]
    for message in messages:
        warn(message)
    if not tasks and earlier.get("status") == "finished" and earlier | now == earlier:
        return
    engine = options.engine or Engine(workers=max(1, min(torch.get_num_threads(), len(tasks))))
    facts |= machine_facts(command, pick_device(options.device)) | {"engine": engine.name, "workers": engine.workers}
    total, done = sum(len(task.images) for task in tasks), 0
    with run.noted(facts, messages), closing(run_tasks(tasks, engine, say)) as results:
        run.write_manifests(manifests)  # after run.json, by which another process knows that the directory is a run's
        progress(done, total, None)
        for result in results:
            for name, content in result.files.items():  # before its record, which says that its image files exist
                run.write_file(name, content)
            run.store.add(result.rows)
            for message in joined_warnings(result.messages, result.task.attacks):
                if message not in messages:
                    messages.append(message)
                    warn(message)
            done += len(result.task.images)
            progress(done, total, result)


def joined_warnings(messages: Sequence[str], attacks: Sequence[str]) -> list[str]:
    """Return warnings, each once: one that several attacks give begins with the names of all of them.

    Args:
        messages: the warnings of a task; that of an attack begins with its name and a colon.
        attacks: the names of the attacks.
    """
    names: dict[tuple[bool, str], list[str]] = {}
    for message in dict.fromkeys(messages):
        name, _, text = message.partition(": ")
        of_attack = name in attacks
        names.setdefault((of_attack, text if of_attack else message), []).append(name)
    return [f"{', '.join(named)}: {text}" if of_attack else text for (of_attack, text), named in names.items()]


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
        whole = next(task for task in grid.tasks if task.case == number)
        own = [task for task in tasks if task.case == number]
        waiting = {image for task in own for image in task.images}
        rows.append(
            {
                "group": case.group,
                "label": case.label,
                "attacks": list(whole.attacks),
                "refused": dict(whole.refused),
                "images": len(whole.images),
                "done": len(whole.images) - len(waiting),
                "seconds": round(sum(seconds[_kind_of(task)] * len(task.images) for task in own), 1)
                if measure
                else None,
            }
        )
    return rows


def _kind_of(task: Task) -> tuple[object, ...]:
    """Return what decides how long a task takes."""
    spec = task.spec
    return spec.victim, spec.release, task.attacks, task.metrics, bool(task.kept)

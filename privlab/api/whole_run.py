"""A whole run: observe, attack, score, and keep everything in a directory."""

import itertools
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
from torch import nn

from privlab.api.steps import Part, takes_numbers
from privlab.base import PrivlabError, unknown_name, warn
from privlab.evaluation import Case
from privlab.grids import (
    IN_PROCESS,
    Engine,
    Experiment,
    GridRow,
    Layout,
    Options,
    check_shuffled,
    columns_of,
    prepare,
    specify,
)
from privlab.grids.fill import fill
from privlab.images.given import data_of, is_named
from privlab.report.run import TEMPORARY, Run
from privlab.runs import execute, shown_progress
from privlab.threat import Release
from privlab.victims import Victim, check_plain


def attack(
    victim: str | Sequence[str] | nn.Module | Victim,
    images: Any = "samples",  # noqa: ANN401
    labels: Any = None,  # noqa: ANN401
    *,
    settings: str | Sequence[str] | None = None,
    attacks: Part | Sequence[Part] | None = None,
    defense: Part | Sequence[Part] = "auto",
    release: Release | str | None = None,
    metrics: str | Sequence[str] | None = None,
    workers: int = 1,
    engine: str = "local",
    out: str | Path | None = None,
    progress: bool = True,
    **options: Any,  # noqa: ANN401
) -> Run:
    """Attack what clients release, score the reconstructions, and return the run.

    Args:
        victim: a name, several names, a ViT of timm or transformers of your own, or a `Victim`.
        images: "samples", a folder, files, "torchvision:NAME" or "hf:NAME"; or tensors,
            arrays, Pillow's images, a data set, a loader or a generator of batches.
        labels: the class of each image, its classes, or a share of each class (b × y); "predicted", or a CSV file; None
            for those that the images bring along.
        settings: "a", "b" or "c", or several; by default c where a defense is at work, else a.
        attacks: the attacks; by default all that can run.
        defense: one defense, or several; "auto" is MJP where the victim has E_unk.
        release: what the clients release; by default what the defense and the attacks need.
        metrics: names of metrics; by default all but F-SIM.
        workers: processes, which get classes and images of this one by cloudpickle.
        engine: "local", or "ray" for a cluster.
        out: the directory of the run; an unfinished run in it goes on. None keeps it as long as the result is used.
        progress: whether a bar shows the images that are done, in Jupyter and on a terminal.
        options: limit, seed, draws, effort, public, device, batch_size, overwrite, and the other fields of
            `privlab.evaluation.Case`.

    Raises:
        PrivlabError: if something that is asked for does not exist or does not fit, or an attack lacks a capability.

    Warns:
        PrivlabWarning: for what weakens the verdict.
    """
    speed = {name: options.pop(name) for name in ("device", "batch_size", "overwrite") if name in options}
    own, given = _given(victim, images, labels, release)
    arguments = {"settings": settings, "attacks": attacks, "defense": defense, "release": release, "metrics": metrics}
    spec = _specified(given | arguments | options)
    check_shuffled([spec])
    with run_directory(out) as path, shown_progress(shown=progress) as show:
        execute(spec, path, own=own, engine=_engine(spec, engine, workers), warn=warn, progress=show, **speed)
    return kept_run(path, out)


def grid(
    victim: str | list[str] | nn.Module | Victim,
    images: Any = "samples",  # noqa: ANN401
    labels: Any = None,  # noqa: ANN401
    *,
    workers: int = 1,
    engine: str = "local",
    out: str | Path | None = None,
    progress: bool = True,
    **arguments: Any,  # noqa: ANN401
) -> Run:
    """Run `attack` with each combination of the arguments that are lists, as one run with a case for each.

    Args:
        victim: as in `attack`, or a list of names.
        images: as in `attack`.
        labels: as in `attack`.
        workers: as in `attack`.
        engine: as in `attack`.
        out: as in `attack`; a grid that was killed goes on.
        progress: as in `attack`.
        arguments: the other arguments of `attack`, of which any may be a list; `attacks` and `metrics` are lists of one
            case. A stack of defenses is a tuple.

    Raises:
        PrivlabError: as in `attack`, and for an empty list.
    """
    speed = {name: arguments.pop(name) for name in ("device", "batch_size") if name in arguments}
    axes = {"victim": victim if isinstance(victim, list) else [victim]}
    axes |= {name: value for name, value in arguments.items() if isinstance(value, list) and name not in _LISTS}
    if empty := [name for name, values in axes.items() if not values]:
        raise PrivlabError(f"A list of a grid needs at least one value. Found none in {empty[0]}.")
    if len(axes["victim"]) > 1 and not all(isinstance(name, str) for name in axes["victim"]):
        raise PrivlabError("Several victims of a grid are named. Found an object among them: run one grid for each.")
    release = arguments.get("release")
    release = release[0] if isinstance(release, list) and release else release
    own, given = _given(axes["victim"][0], images, labels, release)
    cases: list[GridRow] = []
    for point in itertools.product(*axes.values()):
        values = dict(zip(axes, point, strict=True))
        name = values.pop("victim")
        spec = _specified(given | arguments | values | ({"victim": name} if own is None else {}))
        options = {key: text for name, value in values.items() for key, text in _said(name, value).items()}
        options |= {"victim": spec.victim.models[0]} if len(axes["victim"]) > 1 else {}
        runs = tuple(replace(spec, draws=1, draw=spec.draw + i) for i in range(spec.draws))
        for setting in spec.settings:
            named = options | ({"setting": setting} if len(spec.settings) > 1 else {})
            cases.append(GridRow(spec.victim.models[0], None, runs, named, setting=setting))
    check_shuffled([run for case in cases for run in case.runs])
    cases = _labelled(cases)
    first = cases[0].runs[0]
    how = Options(_engine(first, engine, workers), strips=sys.maxsize, **speed)
    with run_directory(out) as path, shown_progress(shown=progress) as show:
        experiment = Experiment(path.name, path.name, None, tuple(cases), Layout(columns_of(first.metrics)))
        fill(*prepare(experiment, path, how, own), path, how, warn=warn, progress=show)
    return kept_run(path, out)


_LISTS = ("attacks", "metrics")  # of one case


def _labelled(cases: Sequence[GridRow]) -> list[GridRow]:
    """Return the cases of a grid, labelled by the options in which they differ, if they differ in any."""
    names = dict.fromkeys(name for case in cases for name in case.options)
    differing = [name for name in names if len({str(case.options.get(name)) for case in cases}) > 1]
    labels = [", ".join(f"{name} {case.options[name]}" for name in differing if name in case.options) for case in cases]
    return [replace(case, label=label or case.label) for case, label in zip(cases, labels, strict=True)]


def _given(
    victim: Any,  # noqa: ANN401
    images: Any,  # noqa: ANN401
    labels: Any,  # noqa: ANN401
    release: Any,  # noqa: ANN401
) -> tuple[nn.Module | Victim | None, dict[str, Any]]:
    """Return the victim if it is an object, and victim, images and labels as a case takes them."""
    own = victim if isinstance(victim, nn.Module | Victim) else None
    if own is None and not isinstance(victim, Sequence):
        check_plain(victim)  # it raises what is wrong
    named = {"labels": labels} if isinstance(labels, str | Path) else {}
    if not is_named(images) or (labels is not None and not named):
        images = data_of(images, labels, numbers=takes_numbers(release, labels))
    return own, {"victim": victim if own is None else "own", "images": images, **named}


def _specified(arguments: dict[str, Any]) -> Case:
    """Return the case of a run with these arguments of `attack`."""
    for old, new in (("attack", "attacks"), ("setting", "settings")):
        if old in arguments:
            raise unknown_name("option", old, [new])
    if not is_named(arguments.get("public", "samples")):
        arguments = arguments | {"public": data_of(arguments["public"])}
    named = {"setting": arguments.pop("settings", None), "attack": arguments.pop("attacks", None)}
    return specify(arguments.pop("victim"), **named, **arguments)


@contextmanager
def run_directory(out: str | Path | None) -> Iterator[Path]:
    """Yield the directory of a run; a temporary one is removed if the run fails."""
    path = Path(tempfile.mkdtemp(prefix=TEMPORARY), "run") if out is None else Path(out)
    try:
        yield path
    except BaseException:
        if out is None:
            shutil.rmtree(path.parent, ignore_errors=True)
        raise


def kept_run(path: Path, out: str | Path | None) -> Run:
    """Return the run of a directory; without `out` the directory is removed with the object."""
    run = Run(path)
    for attack, reason in run.failed_attacks.items():
        warn(f"Attack '{attack}' failed on every image: {reason}")
    if out is None:
        weakref.finalize(run, shutil.rmtree, path.parent, ignore_errors=True)
    return run


def _said(name: str, value: Any) -> dict[str, str | float | int]:  # noqa: ANN401
    """Return an argument as options of a case, by which figures find it: of an instance its fields too."""
    if not is_dataclass(value) or isinstance(value, type):
        return {name: value if isinstance(value, int | float) else str(value)}
    own = {f.name: getattr(value, f.name) for f in fields(value)}
    shown = {key: each for key, each in own.items() if isinstance(each, int | float) and not isinstance(each, bool)}
    return {name: getattr(value, "name", type(value).__name__), **shown}


def _engine(spec: Case, name: str, workers: int) -> Engine:
    """Return where tasks run: in this process, with a warning, if other processes cannot have a class or an image."""
    if workers == 1 and name == "local":
        return IN_PROCESS
    try:
        cloudpickle.dumps(spec)
    except Exception as error:  # pickle raises whatever an object's own methods do
        warn(f"workers={workers} needs what can be pickled. Found {error}: it runs in this process.")
        return IN_PROCESS
    return Engine(name, workers)

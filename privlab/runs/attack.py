"""One run: from a case to records and strips, readable at any moment."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from privlab.base import PrivlabError, collect_warnings, pick_device
from privlab.evaluation import AttackGroup, Case, defense_of, plan, uncached, victim_of
from privlab.evaluation.lpips_choice import begun_lpips, named_lpips, with_lpips
from privlab.grids import (
    IN_PROCESS,
    Engine,
    Experiment,
    GridRow,
    Layout,
    Options,
    columns_of,
    images_at_a_time,
    own_victim,
    papers_attack,
    prepare,
)
from privlab.grids.fill import TaskProgress, fill
from privlab.stores import RunDirectory
from privlab.threat import attack_declarations
from privlab.victims import Victim

if TYPE_CHECKING:
    from privlab.report.run import Run


@uncached()
def execute(
    spec: Case,
    out: str | Path,
    *,
    own: nn.Module | Victim | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    overwrite: bool = False,
    strips: bool = True,
    command: str | None = None,
    engine: Engine | None = IN_PROCESS,
    warn: Callable[[str], object] = lambda message: None,
    progress: TaskProgress = lambda done, total, last: None,
) -> "Run":
    """Check everything, run the attacks, and return the run; what is finished is on disk at any moment.

    The run is a grid with a case for each victim and setting. If `out` holds an unfinished run of the same
    specification, it goes on; if it holds a finished one, nothing is run again.

    Args:
        spec: what is run.
        out: the run directory.
        own: a timm model, or a victim, that is attacked instead of those that `spec` names.
        device: "auto", "cpu", "cuda" or "cuda:N".
        batch_size: images at a time, at least 1; by default 8 on a CPU and 64 on a GPU. Images that are released
            together come in batches of their size instead.
        overwrite: whether an earlier run in `out` is replaced.
        strips: whether strips of images are written to `out`, of the first draw.
        command: the command line, for `run.json`.
        engine: where tasks run; None for as many processes as there are threads if attacks search on a CPU.
        warn: called with each warning as soon as it is known.
        progress: called with (images done, images in all, last result), counted over all victims and draws; once before
            the first result, with None.

    Raises:
        PrivlabError: before anything is run, if a part does not exist or does not fit; while it runs, if the run
            directory cannot be written.
    """
    if batch_size is not None and batch_size < 1:
        raise PrivlabError(f"batch_size must be a positive number. Found {batch_size}.")
    path = Path(out)
    spec, message = with_lpips(spec, {} if overwrite else RunDirectory(path).begun())
    messages = [] if message is None else [message]
    place = pick_device(device)
    with collect_warnings(messages):
        mine = own_victim(own, spec, place)
        bases = [mine] if mine else [victim_of(_with_victim(spec, name), place) for name in spec.victim.models]
        groups = [plan(spec, base) for base in bases]
    declared = [attack_declarations(attack) for of_base in groups for group in of_base for attack in group.attacks]
    search = any(attack.search for attack in declared)
    if engine is None:  # searches of several images gain more from the cores than the products within one image
        long = any(attack.named_only or attack.effort == "full" for attack in declared)
        engine = IN_PROCESS if place.type != "cpu" or not search or long else None
    chunk = batch_size or (1 if search else images_at_a_time(place))
    shown = sys.maxsize if strips else 0
    options = Options(engine, device, batch_size, chunk, pictures=0, strips=shown, overwrite=overwrite)
    grid, tasks = prepare(experiment_of(spec, bases, groups, path), path, options, mine)
    fill(
        *(grid, tasks, path, options),
        command=command,
        stated=facts_of(spec, bases, groups),
        known=messages,
        say=warn,
        warn=warn,
        progress=progress,
    )
    from privlab.report.run import Run  # it imports pandas, and the first image need not wait for that

    return Run(path, ran=spec)


def experiment_of(
    spec: Case, bases: Sequence[Victim], groups: Sequence[Sequence[AttackGroup]], path: Path
) -> Experiment:
    """Return a run as an experiment: a case for each victim and setting, a case for each draw.

    Args:
        spec: what is run.
        bases: the victims.
        groups: the attacks that run on each victim, by its block.
        path: the run directory, which names the experiment.
    """
    cases: list[GridRow] = []
    for name, base in zip(spec.victim.models, bases, strict=True):
        one = _with_victim(spec, name)
        runs = tuple(replace(one, draws=1, draw=spec.draw + i) for i in range(spec.draws))
        for setting in spec.settings:
            options = {"victim": base.name, "setting": setting, "defense": defense_of(spec, base, setting).name}
            options |= {} if spec.words.client is None else {"client": spec.words.client}
            options |= {"server": "the server chose the weights"} if spec.chooses_weights else {}
            label = ", ".join(f"setting {value}" if key == "setting" else value for key, value in options.items())
            cases.append(GridRow(label, None, runs, options, setting=setting))
    paper = papers_attack(attack.name for of_base in groups for group in of_base for attack in group.attacks)
    defenses = ", ".join(dict.fromkeys(str(case.options["defense"]) for case in cases)).split(", ")
    defenses = ", ".join(name for name in defenses if name != "none")
    title = ", ".join(dict.fromkeys(base.name for base in bases))
    title += f" with {defenses}" if defenses else ", undefended"
    title += "" if spec.words.client is None else f", updates of clients by {spec.words.client}"
    return Experiment(path.name, title, None, tuple(cases), Layout(columns_of(spec.metrics), paper_attack=paper))


def _with_victim(spec: Case, name: str) -> Case:
    return replace(spec, victim=replace(spec.victim, models=(name,)))


def unfinished(folder: Path, spec: Case) -> Path | None:
    """Return the last run directory in a folder that holds an unfinished run of a case; None if none does."""
    found = [path for path in folder.glob("*/") if status_of(path, spec) in ("running", "interrupted", "failed")]
    return max(found, key=lambda path: (path / "run.json").stat().st_mtime, default=None)


def status_of(path: Path, spec: Case) -> str | None:
    """Return the status of the run of a case that a directory holds; None if it holds none."""
    facts = RunDirectory(path).begun()
    spec = replace(spec, metrics=named_lpips(spec.metrics, begun_lpips(facts)))
    same = facts.get("specification") == json.loads(json.dumps(spec.stated()))
    return facts.get("status") if same and "cases" in facts else None


def facts_of(spec: Case, bases: Sequence[Victim], groups: Sequence[Sequence[AttackGroup]]) -> dict[str, Any]:
    """Return what `run.json` states of a run beyond what it states of every experiment.

    Args:
        spec: what is run.
        bases: the victims.
        groups: the attacks that run on each victim, by its block.
    """
    return {
        "specification": spec.stated(),
        "victims": [
            {"name": base.name, "weights": asdict(base.weights)}
            | base.params()
            | {"attacks": {":".join(filter(None, group.key)): [*map(repr, group.attacks)] for group in of_base}}
            for base, of_base in zip(bases, groups, strict=True)
        ],
        "defenses": {
            f"{base.name}/{setting}": repr(defense_of(spec, base, setting))
            for base in bases
            for setting in spec.settings
        },
        "precision": "the model's (no TF32, no autocast); linear solves and all metrics but LPIPS in float64",
    }

"""One run: from a specification to records and strips, readable at any moment."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from torch import nn

from privlab.attacks import attacks
from privlab.base import PrivlabError, collect_warnings, options_of, pick_device, unknown_name, warn
from privlab.defenses import defenses
from privlab.evaluation import COLUMNS, AttackGroup, Specification, defense_of, plan, uncached, victim_of
from privlab.evaluation.lpips_choice import begun_lpips, named_lpips, with_lpips
from privlab.grids import (
    IN_PROCESS,
    KNOWN,
    Case,
    Engine,
    Experiment,
    Layout,
    Options,
    beside,
    images_at_a_time,
    joined,
    lay_out,
    missing,
    papers_attack,
    run_tasks,
)
from privlab.grids.fill import TaskProgress, fill, told
from privlab.stores import RunDirectory
from privlab.threat import Client, acts_on, attack_declarations
from privlab.victims import Victim, check_plain, victim

if TYPE_CHECKING:
    import pandas as pd

    from privlab.runs.notebook import Records

STRIPS_SHOWN = 3
"""The strips that a notebook shows of a run: each is some hundred kilobytes of the notebook's file."""

Part = Any
"""An attack or a defense: its name, or an instance of its class."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The results of a run.

    `missing` holds the reason for each metric that could not be computed; `failed` names the images without a score.
    `strips` are PNGs of the first images of a run that writes nothing.
    """

    spec: Specification
    records: "pd.DataFrame"
    victims: tuple[Victim, ...]
    warnings: tuple[str, ...]
    missing: Mapping[str, str]
    path: Path | None
    strips: tuple[bytes, ...] = ()

    @property
    def failed(self) -> dict[str, str]:
        """Return the reason of each image that has a failed record."""
        failed = self.records[self.records.status == "failed"]
        return dict(zip(failed.image, failed.reason, strict=True))


def attack(
    model: str | Sequence[str] | nn.Module,
    setting: str | Sequence[str] | None = None,
    *,
    attack: Part | Sequence[Part] | None = None,
    images: str | Path | Sequence[str | Path] = "samples",
    metrics: str | Sequence[str] | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **options: Any,  # noqa: ANN401
) -> "Records":
    """Run attacks on a victim and return one record per image, attack and geometry, as a DataFrame.

    A notebook shows it with the strips of the first images.

    Args:
        model: a victim's name or names, or a ViT of timm of your own, which is left as it is.
        setting: "a", "b" or "c", or several; by default c where a defense is at work, else a.
        attack: the attacks, by name or made with their options, `PatchGradient(rtol=0)`; by default all that can run.
        images: "samples", a folder, files, "torchvision:NAME" or "hf:NAME".
        metrics: names of `privlab.metrics.registry.METRICS`, or "lpips", by AlexNet where it can be had and else by
            SqueezeNet; by default all but F-SIM, and "lpips".
        device: "auto", "cpu", "cuda" or "cuda:N".
        batch_size: images at a time; by default 8 on a CPU and 64 on a GPU. Features are sent in `client_batch`es, and
            `gradient_batch` images make one gradient.
        out: the run directory; without one nothing is written.
        overwrite: whether an earlier run in `out` is replaced.
        progress: whether a bar shows the images that are done, in Jupyter and on a terminal.
        options: the other fields of `privlab.evaluation.specification.Specification`: weights, block, gamma, limit,
            seed …; `client` by name, or `Client(lr=0.1, steps=5)`; `defense` by name, or made with its options,
            `GradientNoise(multiplier=1e-3)`, or several of these, which are stacked.

    Raises:
        PrivlabError: if something that is asked for does not exist, or an attack lacks a capability.

    Warns:
        PrivlabWarning: for everything that weakens the verdict.
    """
    from privlab.runs.notebook import Records, shown_progress  # pandas is slow to import

    own = model if isinstance(model, nn.Module) else None
    if own is None and not isinstance(model, Sequence):
        check_plain(model)
    spec = specify(
        "own" if isinstance(model, nn.Module) else model,
        setting,
        attack=attack,
        images=images,
        metrics=metrics,
        **options,
    )
    with shown_progress(shown=progress) as show:
        done = execute(spec, own=own, device=device, batch_size=batch_size, out=out, overwrite=overwrite, progress=show)
    for message in done.warnings:
        warn(message)
    return Records.of(done.records, done.strips, done.path)


def specify(
    model: str | Sequence[str],
    setting: str | Sequence[str] | None = None,
    *,
    attack: Part | Sequence[Part] | None = None,
    images: str | Path | Sequence[str | Path] = "samples",
    metrics: str | Sequence[str] | None = None,
    **options: Any,  # noqa: ANN401
) -> Specification:
    """Return a specification from names; each argument is one name, several with commas, or a sequence of names.

    An attack or defense may also be an instance of its class: its fields become options of the run.

    Args:
        model: names of victims.
        setting: "a", "b" or "c", or several; by default c where a defense is named or a victim is one of MJP's, else a.
        attack: the attacks; by default all that can run and need not be named.
        images: "samples", a folder, files, "torchvision:NAME" or "hf:NAME".
        metrics: names of `METRICS`, or "lpips"; by default those of `Specification`.
        options: the other fields of `Specification`; `defense` may be one defense or several, which are stacked.

    Raises:
        PrivlabError: for an unknown name or option, or an instance whose class is not installed under its name.
    """
    more: list[str] = []
    if attack is not None:
        attack = _parts(attack, attacks(), more)
    if "defense" in options:
        options["defense"] = "+".join(_parts(options["defense"], defenses(), more))
    if isinstance(client := options.get("client"), Client):
        options["client"] = client.optimiser
        more += options_of(client)
    if more:
        given = options.get("options", ())
        options["options"] = [*([given] if isinstance(given, str) else given), *more]
    models, defense = _names(model), options.get("defense", "auto")
    defended = defense not in ("auto", "none")
    if options.get("client") is None:
        defended |= any(name.endswith("_mjp") for name in models)
    else:  # an update refuses a defense of images by its name
        defended &= all(acts_on(defenses()[name]) == "gradients" for name in defense.split("+") if name in defenses())
    known = set(Specification.__dataclass_fields__) - {"models", "settings", "attacks", "images", "metrics"}
    for name in options:
        if name not in known:
            arguments = ("setting", "attack", "images", "metrics", "device", "batch_size", "out", "overwrite")
            raise unknown_name("option", name, [*known, *arguments])
    given: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    for name in ("options", "public"):
        if name in given:
            several = [given[name]] if name == "public" and isinstance(given[name], str) else given[name]
            given[name] = tuple(str(value) for value in several)
    given |= {"models": models, "settings": _names(setting or ("c" if defended else "a"))}
    given |= {} if attack is None else {"attacks": attack}
    given |= {} if metrics is None else {"metrics": _names(metrics)}
    sources = [images] if isinstance(images, str | Path) else images
    return Specification(**given, images=tuple(str(source) for source in sources))


@uncached()
def execute(
    spec: Specification,
    *,
    own: nn.Module | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    strips: bool = True,
    command: str | None = None,
    engine: Engine | None = IN_PROCESS,
    warn: Callable[[str], object] = lambda message: None,
    progress: TaskProgress = lambda done, total, last: None,
) -> Outcome:
    """Check everything, run the attacks, and return the outcome; with `out`, what is finished is on disk at any moment.

    The run is an experiment with a case for each victim and setting. If `out` holds an unfinished run of the same
    specification, it goes on; if it holds a finished one, nothing is run again.

    Args:
        spec: what is run.
        own: a timm model that is attacked instead of `spec.models`.
        device: "auto", "cpu", "cuda" or "cuda:N".
        batch_size: images at a time, at least 1; by default 8 on a CPU and 64 on a GPU. Images that are released
            together come in batches of their own size instead.
        out: the run directory; without one the records are held in memory, and nothing is written.
        overwrite: whether an earlier run in `out` is replaced.
        strips: whether strips of images are written to `out`, of the first draw; without `out`, those of the first
            images are made.
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
    if overwrite and out and spec.manifest and Path(spec.manifest).resolve().parent == Path(out).resolve():
        raise PrivlabError(f"'{spec.manifest}' lies in the run that gives way. Copy it, or give another --out.")
    path = None if out is None else Path(out)
    spec, message = with_lpips(spec, {} if path is None or overwrite else RunDirectory(path).begun())
    messages = [] if message is None else [message]
    place = pick_device(device)
    with collect_warnings(messages):
        if own is None:
            bases = [victim_of(replace(spec, models=(name,)), place) for name in spec.models]
        else:
            given = {name: getattr(spec, name) for name in ("weights", "img_size", "seed", "classes")}
            bases = [victim(own, **given).to(place)]
        groups = [plan(spec, base) for base in bases]
        grid = lay_out(experiment_of(spec, bases, groups, path), place, bases[0] if own is not None else None)
    messages += [message for message in grid.messages if message not in messages]
    grid = replace(grid, messages=tuple(messages))
    declared = [attack_declarations(attack) for of_base in groups for group in of_base for attack in group.attacks]
    search = any(attack.search for attack in declared)
    chunk = batch_size or (1 if search else images_at_a_time(place))
    wanted = 0 if not strips else STRIPS_SHOWN if path is None else sys.maxsize
    how = Options(device=device, batch_size=batch_size, chunk=chunk, pictures=0, strips=wanted)
    run = None if path is None else RunDirectory.create(path, overwrite=overwrite, resume=not overwrite)
    tasks = joined(missing(grid, path, how))
    if engine is None:  # searches of several images gain more from the cores than the products within one image
        long = any(attack.named_only or attack.effort == "full" for attack in declared)
        alone = place.type != "cpu" or not search or long
        engine = Engine(workers=1 if alone else max(1, min(torch.get_num_threads(), len(tasks))))
    if run is None:
        results = [*told(run_tasks(tasks, engine, print), tasks, progress)]
        messages += [message for result in results for message in result.messages if message not in messages]
        records = pa.concat_tables([COLUMNS.empty_table(), *(result.rows for result in results)]).to_pandas()
        files = {name: png for result in results for name, png in result.files.items()}
        strip_files = tuple(files[name] for name in sorted(files))
        return Outcome(spec, records, tuple(bases), tuple(messages), grid.missing, None, strip_files)
    warned = fill(
        grid,
        tasks,
        run,
        replace(how, engine=engine),
        command=command,
        stated=facts_of(spec, bases, groups),
        say=warn,
        warn=warn,
        progress=progress,
    )
    records = run.store.frame()
    own_cells = {cell for job in grid.jobs for cell in job.cells.values()}
    return Outcome(spec, records.loc[records.cell.isin(own_cells)], tuple(bases), warned, grid.missing, path)


def experiment_of(
    spec: Specification, bases: Sequence[Victim], groups: Sequence[Sequence[AttackGroup]], path: Path | None
) -> Experiment:
    """Return a run as an experiment: a case for each victim and setting, a specification for each draw.

    Args:
        spec: what is run.
        bases: the victims.
        groups: the attacks that run on each victim, by its block.
        path: the run directory, which names the experiment.
    """
    cases: list[Case] = []
    for name, base in zip(spec.models, bases, strict=True):
        runs = tuple(replace(spec, models=(name,), draws=1, draw=spec.draw + i) for i in range(spec.draws))
        for setting in spec.settings:
            at_work = defense_of(spec, base, setting).name
            options = {"victim": base.name, "setting": setting, "defense": at_work}
            options |= {} if spec.client is None else {"client": spec.client}
            label = ", ".join(f"setting {value}" if key == "setting" else value for key, value in options.items())
            cases.append(Case(label, None, runs, options, setting=setting))
    reported = [name for name in spec.metrics if name in KNOWN]
    columns = tuple(name for name in reported if name not in beside(reported)) or spec.metrics
    paper = papers_attack(attack.name for of_base in groups for group in of_base for attack in group.attacks)
    defenses = ", ".join(dict.fromkeys(str(case.options["defense"]) for case in cases)).split(", ")
    defenses = ", ".join(name for name in defenses if name != "none")
    title = ", ".join(dict.fromkeys(base.name for base in bases))
    title += f" with {defenses}" if defenses else ", undefended"
    title += "" if spec.client is None else f", updates of clients by {spec.client}"
    name = "attack" if path is None else path.name
    return Experiment(name, title, None, tuple(cases), Layout(columns, paper_attack=paper))


def unfinished(folder: Path, spec: Specification) -> Path | None:
    """Return the last run directory in a folder that holds an unfinished run of a specification; None if none does."""
    found = [path for path in folder.glob("*/") if status_of(path, spec) in ("running", "interrupted", "failed")]
    return max(found, key=lambda path: (path / "run.json").stat().st_mtime, default=None)


def status_of(path: Path, spec: Specification) -> str | None:
    """Return the status of the run of a specification that a directory holds; None if it holds none."""
    facts = RunDirectory(path).begun()
    spec = replace(spec, metrics=named_lpips(spec.metrics, begun_lpips(facts)))
    same = facts.get("specification") == json.loads(json.dumps(asdict(spec)))
    return facts.get("status") if same and "cases" in facts else None


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Split names at commas, each kept once, in their order."""
    given = names.split(",") if isinstance(names, str) else names
    return tuple(dict.fromkeys(name.strip() for name in given if name.strip()))


def _parts(given: Part | Sequence[Part], kinds: Mapping[str, type[Any]], options: list[str]) -> tuple[str, ...]:
    """Return the names of attacks or defenses; the options of those that are instances are added to `options`."""
    names: list[str] = []
    for part in given if isinstance(given, list | tuple) else (given,):
        if isinstance(part, str):
            names += _names(part)
            continue
        name = getattr(type(part), "name", None)
        if not isinstance(name, str) or kinds.get(name) is not type(part):
            made = f"the class {part.__name__}: make it, {part.__name__}()" if isinstance(part, type) else repr(part)
            raise PrivlabError(
                "An attack or defense is given by its name, or made from a class that is installed as an entry point "
                f"(`privlab list` shows them). Found {made}."
            )
        if name in names:
            raise PrivlabError(f"'{name}' was given twice: one run has one set of options for it.")
        names.append(name)
        options += options_of(part)
    return tuple(dict.fromkeys(names))


def facts_of(spec: Specification, bases: Sequence[Victim], groups: Sequence[Sequence[AttackGroup]]) -> dict[str, Any]:
    """Return what `run.json` states of a run beyond what it states of every experiment.

    Args:
        spec: what is run.
        bases: the victims.
        groups: the attacks that run on each victim, by its block.
    """
    return {
        "specification": asdict(spec),
        "victims": [
            {"name": base.name, "weights": asdict(base.weights)}
            | base.params()
            | {"attacks": {group.victim.block: [repr(attack) for attack in group.attacks] for group in of_base}}
            for base, of_base in zip(bases, groups, strict=True)
        ],
        "defenses": {
            f"{base.name}/{setting}": repr(defense_of(spec, base, setting))
            for base in bases
            for setting in spec.settings
        },
        "precision": "the model's (no TF32, no autocast); linear solves and all metrics but LPIPS in float64",
    }

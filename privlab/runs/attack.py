"""One run: from a specification to records and strips, readable at any moment."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from privlab.attacks import attacks
from privlab.base import PrivlabError, collect_warnings, options_of, pick_device, unknown_name
from privlab.defenses import defenses
from privlab.evaluation import (
    AttackGroup,
    Specification,
    completed,
    defense_kind,
    defense_of,
    name_of,
    plan,
    uncached,
    victim_of,
)
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
)
from privlab.grids.fill import TaskProgress, fill
from privlab.images import Data
from privlab.stores import RunDirectory
from privlab.threat import Client, acts_on, attack_declarations
from privlab.victims import Victim, victim

if TYPE_CHECKING:
    import pandas as pd

Part = Any
"""An attack or a defense: its name, or an instance of its class."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The results of a run.

    `missing` holds the reason for each metric that could not be computed; `failed` names the images without a score.
    """

    spec: Specification
    records: "pd.DataFrame"
    victims: tuple[Victim, ...]
    warnings: tuple[str, ...]
    missing: Mapping[str, str]
    path: Path

    @property
    def failed(self) -> dict[str, str]:
        """Return the reason of each image that has a failed record."""
        failed = self.records[self.records.status == "failed"]
        return dict(zip(failed.image, failed.reason, strict=True))


def specify(
    model: str | Sequence[str],
    setting: str | Sequence[str] | None = None,
    *,
    attack: Part | Sequence[Part] | None = None,
    images: str | Path | Sequence[str | Path] | Data = "samples",
    metrics: str | Sequence[str] | None = None,
    **options: Any,  # noqa: ANN401
) -> Specification:
    """Return a specification from names; each argument is one name, several with commas, or a sequence of names.

    An attack or defense may also be an instance of a dataclass, whose class need not be installed.

    Args:
        model: names of victims.
        setting: "a", "b" or "c", or several; by default c where a defense is named or a victim is one of MJP's, else a.
        attack: the attacks; by default all that can run and need not be named.
        images: "samples", a folder, files, "torchvision:NAME" or "hf:NAME", or an open source.
        metrics: names of `METRICS`, or "lpips"; by default those of `Specification`.
        options: the other fields of `Specification`; `defense` may be one defense or several, which are stacked.

    Raises:
        PrivlabError: for an unknown name or option, or something else than a name or an instance.
    """
    if attack is not None:
        attack = _parts(attack, "attack", attacks())
    named = _parts(options.get("defense", "auto"), "defense", defenses())
    parts = tuple(each for part in named for each in (part.split("+") if isinstance(part, str) else [part]))
    options["defense"] = "+".join(parts) if all(isinstance(part, str) for part in parts) else parts
    if isinstance(client := options.get("client"), Client):
        options["client"] = client.optimiser
        given = options.get("options", ())
        options["options"] = [*([given] if isinstance(given, str) else given), *options_of(client)]
    models = _names(model)
    defended = parts not in (("auto",), ("none",))
    if options.get("client") is None:
        defended |= any(name.endswith("_mjp") for name in models)
    else:  # an update refuses a defense of images by its name
        known = [part for part in parts if not isinstance(part, str) or part in defenses()]
        defended &= all(acts_on(defense_kind(part)) == "gradients" for part in known)
    known = set(Specification.__dataclass_fields__) - {"models", "settings", "attacks", "images", "metrics"}
    for name in options:
        if name not in known:
            arguments = ("settings", "attacks", "images", "metrics", "device", "batch_size", "out", "overwrite")
            raise unknown_name("option", name, [*known, *arguments])
    given: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    for name in ("options", "public"):
        if name in given:
            several = [given[name]] if name == "public" and isinstance(given[name], str) else given[name]
            given[name] = tuple(str(value) for value in several)
    given |= {"models": models, "settings": _names(setting or ("c" if defended else "a"))}
    given |= {} if attack is None else {"attacks": attack}
    given |= {} if metrics is None else {"metrics": _names(metrics)}
    if not isinstance(images, Data):
        images = tuple(str(source) for source in ([images] if isinstance(images, str | Path) else images))
    return Specification(**given, images=images)


@uncached()
def execute(
    spec: Specification,
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
) -> Outcome:
    """Check everything, run the attacks, and return the outcome; what is finished is on disk at any moment.

    The run is an experiment with a case for each victim and setting. If `out` holds an unfinished run of the same
    specification, it goes on; if it holds a finished one, nothing is run again.

    Args:
        spec: what is run.
        out: the run directory.
        own: a timm model, or a victim, that is attacked instead of `spec.models`.
        device: "auto", "cpu", "cuda" or "cuda:N".
        batch_size: images at a time, at least 1; by default 8 on a CPU and 64 on a GPU. Images that are released
            together come in batches of their own size instead.
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
    if overwrite and spec.manifest and Path(spec.manifest).resolve().parent == path.resolve():
        raise PrivlabError(f"'{spec.manifest}' lies in the run that gives way. Copy it, or give another --out.")
    spec, message = with_lpips(spec, {} if overwrite else RunDirectory(path).begun())
    messages = [] if message is None else [message]
    place = pick_device(device)
    with collect_warnings(messages):
        mine = own_victim(own, spec, place)
        bases = [mine] if mine else [victim_of(replace(spec, models=(name,)), place) for name in spec.models]
        groups = [plan(spec, base) for base in bases]
        grid = lay_out(experiment_of(spec, bases, groups, path), place, mine)
    messages += [message for message in grid.messages if message not in messages]
    grid = replace(grid, messages=tuple(messages))
    declared = [attack_declarations(attack) for of_base in groups for group in of_base for attack in group.attacks]
    search = any(attack.search for attack in declared)
    chunk = batch_size or (1 if search else images_at_a_time(place))
    how = Options(device=device, batch_size=batch_size, chunk=chunk, pictures=0, strips=sys.maxsize if strips else 0)
    run = RunDirectory.create(path, overwrite=overwrite, resume=not overwrite)
    tasks = joined(missing(grid, path, how))
    if engine is None:  # searches of several images gain more from the cores than the products within one image
        long = any(attack.named_only or attack.effort == "full" for attack in declared)
        alone = place.type != "cpu" or not search or long
        engine = Engine(workers=1 if alone else max(1, min(torch.get_num_threads(), len(tasks))))
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


def own_victim(own: nn.Module | Victim | None, spec: Specification, device: torch.device) -> Victim | None:
    """Return a victim that is given as an object, on the device; None where there is none.

    Args:
        own: a model, which is copied, or a victim.
        spec: states the weights, size, seed and classes of a model.
        device: where the victim is put.
    """
    if own is None or isinstance(own, Victim):
        return own and own.to(device)
    given = {name: getattr(spec, name) for name in ("weights", "img_size", "seed", "classes")}
    return victim(own, **given).to(device)


def experiment_of(
    spec: Specification, bases: Sequence[Victim], groups: Sequence[Sequence[AttackGroup]], path: Path
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
    return Experiment(path.name, title, None, tuple(cases), Layout(columns, paper_attack=paper))


def unfinished(folder: Path, spec: Specification) -> Path | None:
    """Return the last run directory in a folder that holds an unfinished run of a specification; None if none does."""
    found = [path for path in folder.glob("*/") if status_of(path, spec) in ("running", "interrupted", "failed")]
    return max(found, key=lambda path: (path / "run.json").stat().st_mtime, default=None)


def status_of(path: Path, spec: Specification) -> str | None:
    """Return the status of the run of a specification that a directory holds; None if it holds none."""
    facts = RunDirectory(path).begun()
    spec = replace(spec, metrics=named_lpips(spec.metrics, begun_lpips(facts)))
    same = facts.get("specification") == json.loads(json.dumps(spec.stated()))
    return facts.get("status") if same and "cases" in facts else None


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Split names at commas, each kept once, in their order."""
    given = names.split(",") if isinstance(names, str) else names
    return tuple(dict.fromkeys(name.strip() for name in given if name.strip()))


def _parts(given: Part | Sequence[Part], kind: str, installed: Mapping[str, type[Any]]) -> tuple[Part, ...]:
    """Return attacks or defenses, each by its name or as an instance with all that its protocol asks for."""
    found: list[Part] = []
    for part in given if isinstance(given, list | tuple) else (given,):
        found += _names(part) if isinstance(part, str) else [completed(part, kind)]
    found, names = [*dict.fromkeys(found)], [name_of(part) for part in found]
    for part in (part for part in found if not isinstance(part, str)):
        if names.count(part.name) > 1:
            raise PrivlabError(f"'{part.name}' was given twice: one run has one set of options for it.")
        if part.name in installed and installed[part.name] is not type(part):
            raise PrivlabError(f"'{part.name}' is the name of an installed {kind}. Give your class another `name`.")
    return tuple(found)


def facts_of(spec: Specification, bases: Sequence[Victim], groups: Sequence[Sequence[AttackGroup]]) -> dict[str, Any]:
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

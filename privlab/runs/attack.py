"""One run: from a specification to records and strips, readable at any moment."""

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from privlab.attacks import attacks
from privlab.base import (
    PrivlabError,
    PrivlabWarning,
    Progress,
    collect_warnings,
    commit,
    hardware,
    options_of,
    pick_device,
    unknown_name,
    versions,
)
from privlab.defenses import defenses
from privlab.evaluation import (
    AttackGroup,
    Evaluator,
    Record,
    Scored,
    Specification,
    defense_of,
    learned_metrics,
    plan,
    public_images,
    reassembly_of,
    source_of,
    to_frame,
)
from privlab.images import ImageSource, Picture, batches, to_csv
from privlab.metrics import Embedding, Learned, Lpips
from privlab.stores import RunDirectory, save_strip, strip_name
from privlab.victims import Victim, check_plain, victim

__all__ = ["Outcome", "attack", "execute", "specify"]

Part = Any
"""An attack or a defense: its name, or an instance of its class."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The results of a run.

    `missing` holds the reason for each metric that could not be computed; `failed` names the images without a score.
    """

    spec: Specification
    records: pd.DataFrame
    victims: tuple[Victim, ...]
    warnings: tuple[str, ...]
    missing: Mapping[str, str]
    path: Path | None

    @property
    def failed(self) -> dict[str, str]:
        """Return the reason of each image that has a failed record."""
        failed = self.records[self.records.status == "failed"]
        return dict(zip(failed.image, failed.reason, strict=True))


def attack(
    model: str | Sequence[str] | VisionTransformer,
    setting: str | Sequence[str] | None = None,
    *,
    attack: Part | Sequence[Part] | None = None,
    images: str | Path | Sequence[str | Path] = "samples",
    metrics: str | Sequence[str] | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    **options: Any,  # noqa: ANN401
) -> pd.DataFrame:
    """Run attacks on a victim and return one record per image, attack and geometry.

    Args:
        model: a victim's name or names, or a timm VisionTransformer of your own, which is left as it is.
        setting: "a", "b" or "c", or several; by default c where a defense is at work, else a.
        attack: the attacks, by name or made with their options, `PatchGradient(rtol=0)`; by default all that can run.
        images: "samples", a folder, files, "torchvision:NAME" or "hf:NAME".
        metrics: names of `privlab.metrics.registry.METRICS`; by default all but F-SIM and LPIPS of VGG and SqueezeNet.
        device: "auto", "cpu", "cuda" or "cuda:N".
        batch_size: images at a time; by default 8 on a CPU and 64 on a GPU. Features are sent in `client_batch`es, and
            `gradient_batch` images make one gradient.
        out: the run directory; without one nothing is written.
        overwrite: whether an earlier run in `out` is replaced.
        options: the other fields of `privlab.evaluation.specification.Specification`: weights, block, gamma, limit,
            seed …; `defense` by name, or made with its options, `GradientNoise(multiplier=1e-3)`, or several of these,
            which are stacked.

    Raises:
        PrivlabError: if something that is asked for does not exist, or an attack lacks a capability.

    Warns:
        PrivlabWarning: for everything that weakens the verdict.
    """
    own = model if isinstance(model, VisionTransformer) else None
    if own is None and (isinstance(model, nn.Module) or not isinstance(model, Sequence)):
        check_plain(model)
    spec = specify(
        "own" if isinstance(model, VisionTransformer) else model,
        setting,
        attack=attack,
        images=images,
        metrics=metrics,
        **options,
    )
    done = execute(spec, own=own, device=device, batch_size=batch_size, out=out, overwrite=overwrite)
    for message in done.warnings:
        warnings.warn(message, PrivlabWarning, stacklevel=2)
    return done.records


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
        metrics: names of `METRICS`; by default those of `Specification`.
        options: the other fields of `Specification`; `defense` may be one defense or several, which are stacked.

    Raises:
        PrivlabError: for an unknown name or option, or an instance whose class is not installed under its name.
    """
    more: list[str] = []
    if attack is not None:
        attack = _parts(attack, attacks(), more)
    if "defense" in options:
        options["defense"] = "+".join(_parts(options["defense"], defenses(), more))
    if more:
        given = options.get("options", ())
        options["options"] = [*([given] if isinstance(given, str) else given), *more]
    models, defense = _names(model), options.get("defense", "auto")
    defended = defense not in ("auto", "none") or any(name.endswith("_mjp") for name in models)
    given: dict[str, Any] = {"models": models, "settings": _names(setting or ("c" if defended else "a"))}
    if attack is not None:
        given["attacks"] = attack
    if metrics is not None:
        given["metrics"] = _names(metrics)
    sources = [images] if isinstance(images, str | Path) else images
    if isinstance(public := options.get("public"), str | Path):
        options["public"] = (str(public),)
    known = set(Specification.__dataclass_fields__) - {"models", "settings", "attacks", "images", "metrics"}
    for name in options:
        if name not in known:
            arguments = ("setting", "attack", "images", "metrics", "device", "batch_size", "out", "overwrite")
            raise unknown_name("option", name, [*known, *arguments])
    plain: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    for name in ("options", "public"):
        if name in plain:
            plain[name] = tuple(str(value) for value in plain[name])
    return Specification(**given, images=tuple(str(source) for source in sources), **plain)


def execute(
    spec: Specification,
    *,
    own: VisionTransformer | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    strips: bool = True,
    command: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Outcome:
    """Check everything, run the attacks, and return the outcome; with `out`, what is finished is on disk at any moment.

    Args:
        spec: what is run.
        own: a timm model that is attacked instead of `spec.models`.
        device: "auto", "cpu", "cuda" or "cuda:N".
        batch_size: images at a time, at least 1; by default 8 on a CPU and 64 on a GPU. Images that are released
            together come in batches of their own size instead.
        out: the run directory; without one the records are held in memory, and nothing is written.
        overwrite: whether an earlier run in `out` is replaced.
        strips: whether strips of images are written to `out`, of the first draw.
        command: the command line, for `run.json`.
        progress: called after each batch with (images done, images in all or None), counted over all victims.

    Raises:
        PrivlabError: before anything is run, if a part does not exist or does not fit; while it runs, if the run
            directory cannot be written.
    """
    if batch_size is not None and batch_size < 1:
        raise PrivlabError(f"batch_size must be a positive number. Found {batch_size}.")
    if overwrite and out and spec.manifest and Path(spec.manifest).resolve().parent == Path(out).resolve():
        raise PrivlabError(f"'{spec.manifest}' lies in the run that gives way. Copy it, or give another --out.")
    messages: list[str] = []
    with collect_warnings(messages):
        ready = _prepare(spec, own, pick_device(device))
    messages += [f"{name} is n/a: {reason}" for name, reason in ready.missing.items()]
    run = None if out is None else RunDirectory.create(Path(out), overwrite=overwrite)
    facts = _facts(ready) | ({} if command is None else {"command": command})
    kept: list[Record] = []
    start = time.perf_counter()

    def note(status: str) -> None:
        if run is not None:
            seconds = round(time.perf_counter() - start, 3)
            if ready.met:
                run.write_manifests({"manifest.csv": to_csv(ready.met.values())})
            run.write_run(facts | {"status": status, "seconds": seconds, "warnings": messages})

    note("running")
    try:
        with collect_warnings(messages):
            for scored, first in _score(ready, batch_size, strips and run is not None, progress):
                if run is None:
                    kept += scored.records
                    continue
                run.write_records(scored.records)
                for i, strip in enumerate(scored.strips):
                    run.write_file(f"strips/{strip_name(first + i, strip)}", partial(save_strip, strip))
    except BaseException as error:
        with suppress(PrivlabError):  # the disk may be full, and the first error must not be hidden
            note("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    note("finished")
    records = to_frame(kept) if run is None else run.store.frame()
    path = None if run is None else run.path
    return Outcome(spec, records, tuple(ready.victims), tuple(messages), ready.missing, path)


@dataclass(frozen=True, eq=False)
class _Ready:
    """A run of which everything has been checked. `missing` says why a metric cannot be computed here.

    `met` holds the images that were read so far, by their hash and without their pixels.
    """

    spec: Specification
    device: torch.device
    victims: Sequence[Victim]
    groups: Sequence[Sequence[AttackGroup]]
    learned: Mapping[str, Learned]
    missing: Mapping[str, str]
    source: ImageSource
    met: dict[str, Picture] = field(default_factory=dict)

    def pictures(self) -> ImageSource:
        """Return the images, each noted in `met` when it is read: a stream cannot be read again for a manifest."""

        def noted(picture: Picture) -> Picture:
            self.met.setdefault(picture.sha256, replace(picture, pixels=None))
            return picture

        return self.source.transform(noted)


def _prepare(spec: Specification, own: VisionTransformer | None, device: torch.device) -> _Ready:
    victims = _victims(spec, own)
    groups = [plan(spec, base) for base in victims]
    for base in victims:
        reassembly_of(spec, base)
        for setting in spec.settings:
            defense_of(spec, base, setting)
    learned, missing = learned_metrics(spec, device, victims)
    return _Ready(spec, device, victims, groups, learned, missing, source_of(spec, victims))


def _score(ready: _Ready, batch_size: int | None, strips: bool, progress: Progress) -> Iterator[tuple[Scored, int]]:
    """Yield the results of each chunk and draw, with the number of its first image, one victim after the other."""
    count = ready.source.count
    total, done = None if count is None else count * len(ready.victims), 0
    size = batch_size or (64 if ready.device.type == "cuda" else 8)
    size = ready.spec.together or size  # a client's batch is released as one: its size changes results
    metrics = [name for name in ready.spec.metrics if name not in ready.missing]
    for base, of_base in zip(ready.victims, ready.groups, strict=True):
        groups = [AttackGroup(group.victim.to(ready.device), group.attacks) for group in of_base]
        public = public_images(ready.spec.public, ready.spec.public_limit, base.preprocessing, ready.device)
        specs = [replace(ready.spec, draw=ready.spec.draw + i) for i in range(ready.spec.draws)]
        evaluators = [
            Evaluator(spec, base.to(ready.device), groups, metrics, ready.learned, public, strips and spec is specs[0])
            for spec in specs
        ]
        first = 0
        for chunk in batches(ready.pictures(), base.preprocessing, size):
            scored = [evaluator(chunk) for evaluator in evaluators]
            yield from ((of_draw, first) for of_draw in scored)
            first += scored[0].images
            done += scored[0].images
            progress(done, total)


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    """Split names at commas, each kept once, in their order."""
    given = names.split(",") if isinstance(names, str) else names
    return tuple(dict.fromkeys(name.strip() for name in given if name.strip()))


def _parts(given: Part | Sequence[Part], kinds: Mapping[str, type[Any]], options: list[str]) -> tuple[str, ...]:
    """Return the names of attacks or defenses; the options of those that are instances are added to `options`."""
    if isinstance(given, str):
        return _names(given)
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


def _victims(spec: Specification, own: VisionTransformer | None) -> list[Victim]:
    return [
        victim(model, weights=spec.weights, img_size=spec.img_size, seed=spec.seed, classes=spec.classes)
        for model in (spec.models if own is None else [own])
    ]


def _facts(ready: _Ready) -> dict[str, Any]:
    """Return what `run.json` states of a run."""
    return {
        "privlab": versions()["privlab"],
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "specification": asdict(ready.spec),
        "victims": [
            {"name": base.name, "weights": asdict(base.weights)}
            | base.params()
            | {"attacks": {group.victim.block: [repr(attack) for attack in group.attacks] for group in of_base}}
            for base, of_base in zip(ready.victims, ready.groups, strict=True)
        ],
        "defenses": {
            f"{base.name}/{setting}": repr(defense_of(ready.spec, base, setting))
            for base in ready.victims
            for setting in ready.spec.settings
        },
        "images": {"source": ready.source.description, "count": ready.source.count},
        "learned_metrics": {
            name: {"file": metric.file, "sha256": metric.sha256}
            for name, metric in ready.learned.items()
            if isinstance(metric, Lpips | Embedding)
        },
        "precision": "the model's (no TF32, no autocast); linear solves and all metrics but LPIPS in float64",
        "versions": versions(),
        "hardware": hardware(ready.device),
        "commit": commit(),
        "missing_metrics": dict(ready.missing),
    }

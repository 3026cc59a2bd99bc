"""The case of an audit: one victim, its attacks, and releases whose private images are mostly unknown.

An audit writes the directory that every other run writes, so its records, `run.json` and images are read alike.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.evaluation import (
    CONTROLS,
    AttackGroup,
    Record,
    Rows,
    Specification,
    attempt,
    batch_key,
)
from privlab.grids import Grid, Reference, Task, machine_facts
from privlab.runs.attack import experiment_of, facts_of
from privlab.threat import Attack, FeatureAttack, FeatureObservation, Observation
from privlab.victims import Victim, victim

UNSCORED = "No private image is known, so nothing could be scored: look at the reconstructions."
"""What `run.json` and the page of an audit say where there is no private image to compare with."""

Row = dict[str, Any]
"""What an audit found by one attack, by name."""

Release = tuple[Reference, ...]
"""The images of one release, which are attacked together."""


def unknown_images(name: str, released: bytes, count: int) -> Release:
    """Return the images behind one release: NAME/0, NAME/1, …, with the SHA-256 of name and release.

    Args:
        name: that of the release: the file, or the recorded session and batch.
        released: the bytes of what was released.
        count: the number of images.
    """
    names = [f"{name}/{i}" for i in range(count)]
    digests = (hashlib.sha256(f"{each}\0".encode() + released).hexdigest() for each in names)
    return tuple(
        Reference(each, sha256, None, place=i) for i, (each, sha256) in enumerate(zip(names, digests, strict=True))
    )


def audited_victim(spec: Specification, device: torch.device) -> Victim:
    """Return the one victim of an audit, which is the client's model; it has the stock block where none is named."""
    options = {name: getattr(spec, name) for name in ("weights", "img_size", "seed", "classes", "normalisation")}
    return victim(spec.models[0], block="stock" if spec.block == "auto" else spec.block, **options).to(device)


@dataclass(frozen=True, eq=False)
class Audit:
    """The results of an audit: a row for each attack on each release, the red flags, and the directory of the images.

    A row of an attack has `residual` where the reconstruction could be checked by what it gives, `explained` (None
    where nothing could be checked), `proof` ("gradient" or "update", whichever was released, "grey levels" or None),
    the settings and the label that were `fitted` for it, and scores where there is a reference. `missing` holds the
    reason for each metric that could not be computed. `reference` says how the client preprocessed the reference, if it
    did so otherwise than the victim does. `metrics` are those that were asked for, none without a reference. `what` was
    released, a "gradient", an "update" or "features".

    `leaks` is True where an image is proven, or equals the reference in every grey level; False where nothing at all
    was released; None where it is not known: that attacks fail proves nothing.
    """

    rows: Sequence[Row]
    warnings: Sequence[str]
    path: Path
    flags: Sequence[str] = ()
    labels: Sequence[int] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    reference: str | None = None
    metrics: Sequence[str] = ()
    what: str = "features"
    leaks: bool | None = None


@dataclass(frozen=True, eq=False)
class AuditCase:
    """What an audit runs: the attacks of a group on releases of images, which records name as `releases` does.

    `spec` names one victim and one setting: c, or for the update of a client a. `refused` holds the reason for each
    attack that cannot run. `public` are the hashes of the public photographs. `metrics` are those by which a known
    private image is scored, and `missing` says why others cannot be computed.
    """

    spec: Specification
    group: AttackGroup
    refused: Mapping[str, str]
    releases: Sequence[Release]
    public: Sequence[str] = ()
    metrics: Sequence[str] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    _made: dict[int, Rows] = field(default_factory=dict, init=False)

    def _rows(self, count: int) -> Rows:
        """Return what rows state of releases of so many images: their number is part of what a cell measures."""
        spec = self.spec
        if spec.local_training is None:
            spec = replace(spec, **{"client_batch" if spec.features_released else "gradient_batch": count})
        return self._made.setdefault(count, Rows(spec, self.group.victim, tuple(self.public)))

    def rows(self, attack: Attack | FeatureAttack, release: Release) -> list[Record]:
        """Return the rows of an attack on a release without scores, in place: one for each image."""
        made, alone = self._rows(len(release)), replace(self.group, attacks=(attack,))
        key = batch_key(image.sha256 for image in release)
        own = {} if made.spec.together is None else {"batch": key, "batch_images": len(release)}
        return [made.of(image, self.spec.settings[0], alone)[0] | own | {"metrics": ""} for image in release]

    def control(self, release: Release) -> Record:
        """Return the row of the first image of a release under the mean photograph, without scores."""
        return self._rows(len(release)).control(release[0], self.spec.settings[0], CONTROLS[0])

    def attack(
        self, attack: Attack | FeatureAttack, seen: Observation | FeatureObservation, release: Release
    ) -> tuple[list[Record], Float[Tensor, "r c h w"] | None]:
        """Run an attack on one release; return its rows without scores, and its reconstructions, None if it failed.

        Args:
            attack: one of the group's.
            seen: what was released.
            release: the images behind it, which the rows state.
        """
        made, rows = attempt(attack, seen), self.rows(attack, release)
        rows = [row | {"beyond_range": made.beyond[0]} for row in rows] if made.beyond else rows
        if made.reconstruction is None:
            return failed(rows, made.reason or ""), None
        return [row | {"seconds_attack": made.seconds / len(rows)} for row in rows], made.reconstruction.images

    def facts(self, out: Path, source: str, command: str | None) -> dict[str, Any]:
        """Return what `run.json` states of the audit, as that of any other run does.

        Args:
            out: the run directory, whose name is that of the experiment.
            source: the file or folder of what was released.
            command: the command line.
        """
        spec, group, setting = self.spec, self.group, self.spec.settings[0]
        kept = {*CONTROLS[: bool(self.metrics)], *(attack.name for attack in group.attacks)}
        tasks: list[Task] = []
        for n in sorted({len(release) for release in self.releases}) or [spec.together or 1]:
            made = self._rows(n)
            cells = {name: key for name, key in made.cells(setting, [group]).items() if name in kept}
            images = tuple(image for release in self.releases if len(release) == n for image in release)
            tasks.append(Task(0, made.spec, (setting,), images, cells, tuple(self.metrics), self.refused))
        experiment = experiment_of(spec, [group.victim], [[group]], out)
        experiment = replace(experiment, title=f"Audit of {source}: {experiment.title}")
        return (
            facts_of(spec, [group.victim], [[group]])
            | Grid(experiment, tuple(tasks), (source,), self.missing, ()).facts()
            | machine_facts(command, group.victim.model.mean.device)
        )


def failed(rows: Sequence[Record], reason: str) -> list[Record]:
    """Return rows of an attack that failed."""
    return [row | {"metrics": None, "status": "failed", "reason": reason} for row in rows]

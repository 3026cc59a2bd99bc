"""The case of an audit: one victim, its attacks, and releases whose private images are mostly unknown.

An audit writes the directory that every other run writes, so its records, `run.json` and images are read alike.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from privlab.evaluation import (
    AttackGroup,
    Record,
    Rows,
    Specification,
    as_read,
    attack_batch,
    batch_key,
    beyond_range,
    reason_of,
)
from privlab.grids import Grid, Job, Reference, machine_facts
from privlab.runs.attack import experiment_of, facts_of
from privlab.threat import Attack, FeatureAttack, FeatureObservation, Observation

__all__ = ["UNSCORED", "AuditCase", "Release", "failed", "unknown_images"]

UNSCORED = "No private image is known, so nothing could be scored: look at the reconstructions."
"""What `run.json` and the page of an audit say where there is no private image to compare with."""

Release = tuple[Reference, ...]
"""The images of one release, which are attacked together."""


def unknown_images(name: str, released: bytes, count: int) -> Release:
    """Return the images behind one release: NAME/0, NAME/1, …, each with the SHA-256 of that name and of the release.

    Args:
        name: that of the release: the file, or the recorded session and batch.
        released: the bytes of what was released.
        count: the number of images.
    """
    names = [f"{name}/{i}" for i in range(count)]
    digests = (hashlib.sha256(f"{each}\0".encode() + released).hexdigest() for each in names)
    return tuple(Reference(i, each, sha256) for i, (each, sha256) in enumerate(zip(names, digests, strict=True)))


@dataclass(frozen=True, eq=False)
class AuditCase:
    """What an audit runs: the attacks of a group on releases of images, which records name as `releases` does.

    `spec` names one victim and one setting: c, or for the update of a client a. `refused` holds the reason for each
    attack that cannot run. `public` are the hashes of the public photographs; `metrics` and `controls` are those by
    which a known private image is scored, and `missing` says why the other metrics cannot be computed.
    """

    spec: Specification
    group: AttackGroup
    refused: Mapping[str, str]
    releases: Sequence[Release]
    public: Sequence[str] = ()
    metrics: Sequence[str] = ()
    controls: Sequence[str] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _rows(self) -> Mapping[int, Rows]:
        """Return what rows state, by the number of images of a release: it is part of what a cell measures."""
        if self.spec.local_training is not None:
            size = self.spec.local_training.released_images
            return {size: Rows(self.spec, self.group.victim, tuple(self.public))}
        size = "client_batch" if self.spec.features_released else "gradient_batch"
        sizes = sorted({len(release) for release in self.releases}) or [getattr(self.spec, size)]
        return {n: Rows(replace(self.spec, **{size: n}), self.group.victim, tuple(self.public)) for n in sizes}

    def rows(self, attack: Attack | FeatureAttack, release: Release) -> list[Record]:
        """Return the rows of an attack on a release without scores, in place: one for each image."""
        made, alone = self._rows[len(release)], replace(self.group, attacks=(attack,))
        key = batch_key(image.sha256 for image in release)
        own = {} if made.spec.together is None else {"batch": key, "batch_images": len(release)}
        return [made.of(image.named, self.spec.settings[0], alone)[0] | own | {"metrics": ""} for image in release]

    def control(self, name: str, release: Release) -> Record:
        """Return the row of the first image of a release under a negative control, without scores."""
        return self._rows[len(release)].control(release[0].named, self.spec.settings[0], name)

    def attack(
        self, attack: Attack | FeatureAttack, seen: Observation | FeatureObservation, release: Release
    ) -> tuple[list[Record], Float[Tensor, "r c h w"] | None]:
        """Run an attack on one release; return its rows without scores, and its reconstructions, None if it failed.

        Args:
            attack: one of the group's.
            seen: what was released.
            release: the images behind it, which the rows state.
        """
        rows, start = self.rows(attack, release), time.perf_counter()
        try:
            read = as_read(attack, seen)
            beyond = beyond_range(attack, read)
            rows = [row | {"beyond_range": beyond} for row in rows]
            images = attack_batch(attack, read).images
        except Exception as error:
            return failed(rows, reason_of(attack, error)), None
        seconds = (time.perf_counter() - start) / len(rows)
        return [row | {"seconds_attack": seconds} for row in rows], images

    def facts(self, out: Path, source: str, command: str | None) -> dict[str, Any]:
        """Return what `run.json` states of the audit, as that of any other run does.

        Args:
            out: the run directory, whose name is that of the experiment.
            source: the file or folder of what was released.
            command: the command line.
        """
        spec, group = self.spec, self.group
        kept = {*self.controls, *(attack.name for attack in group.attacks)}
        jobs: list[Job] = []
        for n, made in self._rows.items():
            cells = {name: key for name, key in made.cells(spec.settings[0], [group]).items() if name in kept}
            images = tuple(image for release in self.releases if len(release) == n for image in release)
            of_size = (0, made.spec, spec.settings[0], not jobs, cells, self.refused, images, None, tuple(self.metrics))
            jobs.append(Job(*of_size))
        experiment = experiment_of(spec, [group.victim], [[group]], out)
        experiment = replace(experiment, title=f"Audit of {source}: {experiment.title}")
        return (
            facts_of(spec, [group.victim], [[group]])
            | Grid(experiment, tuple(jobs), (source,), self.missing, ()).facts()
            | machine_facts(command, group.victim.model.mean.device)
        )


def failed(rows: Sequence[Record], reason: str) -> list[Record]:
    """Return rows of an attack that failed."""
    return [row | {"metrics": None, "status": "failed", "reason": reason} for row in rows]

"""What an audit runs: what was released is read from disk, and the private images are mostly unknown.

An audit writes the directory that every other run writes, so its records, `run.json` and images are read the same way.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from privlab.evaluation import CONTROLS, AttackGroup, Case, Record, Rows, attempt, batch_key
from privlab.evaluation.batch import Seen
from privlab.grids import Grid, Task, machine_facts
from privlab.images import NamedImage
from privlab.runs.attack import experiment_of, facts_of
from privlab.threat import Attack, FeatureAttack
from privlab.victims import Victim, victim

if TYPE_CHECKING:
    from privlab.report.run import Run

UNSCORED = "No private image is known, so nothing could be scored: look at the reconstructions."
"""What `run.json` and the page of an audit say where there is no private image to compare with."""

Row = dict[str, Any]
"""What `run.json` and the terminal state of one attack on one release.

Of a gradient or an update it has `residual` where the reconstruction could be checked by what it gives, `explained`
(None where nothing could be checked), `proof` ("gradient" or "update", whichever was released, "grey levels" or None),
the settings and the label that were `fitted` for it, and scores where there is a reference.
"""

Release = tuple[NamedImage, ...]
"""The images of one release, which are attacked together."""


def unknown_images(name: str, released: bytes, count: int) -> Release:
    """Return the images behind one release: NAME/0, NAME/1, …, with the SHA-256 of name and release.

    Args:
        name: that of the release: the file, or the recorded session and batch.
        released: the bytes of what was released.
        count: the number of images.
    """
    names = [f"{name}/{i}" for i in range(count)]
    hashes = [hashlib.sha256(f"{each}\0".encode() + released).hexdigest() for each in names]
    return tuple(NamedImage(names[i], hashes[i], None, place=i) for i in range(count))


def audited_victim(spec: Case, device: torch.device, own: nn.Module | Victim | None = None) -> Victim:
    """Return the one victim of an audit, which is the client's model; it has the stock block where none is named.

    Args:
        spec: names the victim, its block and its weights.
        device: where the victim is put.
        own: a model or a victim in place of the named one; it gets the weights that `spec` names.
    """
    block = "stock" if spec.victim.block == "auto" else spec.victim.block
    options = spec.victim.options(spec.seed)
    if own is None:
        return victim(spec.victim.models[0], block=block, **options).to(device)
    weights, normalisation = options["weights"], options["normalisation"]
    made = own if isinstance(own, Victim) else victim(own, classes=options["classes"])
    made = made if weights == "auto" else made.with_weights(Path(weights))
    made = made if normalisation is None else made.normalised_by(normalisation)
    return made.with_block(block).to(device)


@dataclass(frozen=True, eq=False, kw_only=True)
class Audit:
    """What an audit runs: attacks on releases of images of one victim in one setting, c, or a for a client's update.

    `source` names the file or folder. `refused` holds the reason for each attack that cannot run. `public` are the
    hashes of the public photographs. `metrics` are those by which a known private image is scored, and `missing` says
    why others cannot be computed.
    """

    spec: Case
    base: Victim
    source: str
    attacks: Sequence[Attack | FeatureAttack] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    releases: Sequence[Release] = ()
    public: Sequence[str] = ()
    metrics: Sequence[str] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    _rows: dict[int, Rows] = field(default_factory=dict, init=False)

    def rows(self, count: int) -> Rows:
        """Return what records state of releases of so many images: their number is part of what a cell measures."""
        spec = self.spec
        if spec.client is None:
            spec = replace(spec, release=replace(spec.release, batch=count))
        return self._rows.setdefault(count, Rows(spec, self.base, tuple(self.public)))

    def records(self, attack: Attack | FeatureAttack, release: Release) -> list[Record]:
        """Return the records of an attack on a release without scores, in place: one for each image."""
        rows, alone = self.rows(len(release)), AttackGroup(self.base, (attack,))
        batch: Record = {"metrics": ""}
        if rows.spec.together is not None:
            batch |= {"batch": batch_key(image.sha256 for image in release), "batch_images": len(release)}
        return [rows.of(image, self.spec.settings[0], alone)[0] | batch for image in release]

    def attack(
        self, attack: Attack | FeatureAttack, seen: Seen, release: Release
    ) -> tuple[list[Record], Float[Tensor, "r c h w"] | None]:
        """Run an attack on one release; return its records without scores, and its reconstructions, None if it failed.

        Args:
            attack: one of the case's.
            seen: what was released.
            release: the images behind it.
        """
        (found, how), records = attempt(attack, seen), self.records(attack, release)
        records = [record | {"beyond_range": how.beyond[0]} for record in records] if how.beyond else records
        if found is None:
            return failed(records, how.reason or ""), None
        seconds = how.seconds / len(records)
        return [record | {"seconds_attack": seconds} for record in records], found.images

    def facts(self, out: Path, command: str | None) -> dict[str, Any]:
        """Return what `run.json` states of the audit, as that of any other run does."""
        spec, base, setting = self.spec, self.base, self.spec.settings[0]
        group = AttackGroup(base, tuple(self.attacks))
        absent = CONTROLS[bool(self.metrics) :]
        tasks: list[Task] = []
        for n in sorted({len(release) for release in self.releases}) or [spec.together or 1]:
            cells = self.rows(n).cells(setting, [group])
            cells = {name: key for name, key in cells.items() if name not in absent}
            images = tuple(image for release in self.releases if len(release) == n for image in release)
            tasks.append(Task(0, self.rows(n).spec, (setting,), images, cells, tuple(self.metrics), self.refused))
        experiment = experiment_of(spec, [base], [[group]], out)
        experiment = replace(experiment, title=f"Audit of {self.source}: {experiment.title}")
        return (
            facts_of(spec, [base], [[group]])
            | Grid(experiment, tuple(tasks), (self.source,), self.missing, ()).facts()
            | machine_facts(command, base.model.mean.device)
            | {"victim": {"name": base.name, "weights": asdict(base.weights)} | base.params()}
        )

    def run(self, out: Path) -> "Run":
        """Return the audit that is on disk as a run."""
        from privlab.report.run import Run  # it imports pandas, and the first image need not wait for that

        return Run(out, ran=self.spec)


def failed(records: Sequence[Record], reason: str) -> list[Record]:
    """Return records of an attack that failed."""
    return [record | {"metrics": None, "status": "failed", "reason": reason} for record in records]

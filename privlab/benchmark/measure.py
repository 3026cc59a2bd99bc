"""Runs an entry on the cases of its track, and keeps the columns of the records that the table needs."""

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from privlab.base import PrivlabError
from privlab.benchmark.cards import Card, instances
from privlab.benchmark.tracks import BUNDLED, Track, TrackCase, photographs, write_manifest
from privlab.evaluation import CONTROL, Specification, applicable, victim_of
from privlab.grids import IN_PROCESS, Engine
from privlab.images import open_images
from privlab.metrics import MIRRORED
from privlab.report.tables import DETERMINISTIC
from privlab.report.tables.knowledge import AGGREGATION, undefended_attack
from privlab.runs import execute, specify

__all__ = ["KEPT", "Photographs", "case_label", "measure_defense", "remeasure", "run_with_pictures"]

KEPT = (
    *("case", "victim", "victim_params", "weights", "weights_sha256", "block", "release", "cut_layer", "defense"),
    *("defense_params", "setting", "attack", "attack_params", "effort", "geometry", "image", "image_sha256"),
    *("label_origin", "seed", "draw", "dtype", "status", "reason", "beyond_range", "conditions", "batch"),
    *("batch_images", "external", "schema", "privlab_version"),
)
"""The columns of the records that a result keeps, besides those of metrics."""


PUBLIC_LIMIT = 2000
"""The most photographs that an adversary of an entry has of its own."""


@dataclass(frozen=True)
class Photographs:
    """The photographs of a submission: the parts, the folder of those that are not bundled, and foreign weights.

    `public` is a folder of photographs that the adversary has of its own, such as decoders are trained on; None for the
    bundled ones. Those under attack are taken out of it.
    """

    parts: tuple[str, ...] = ("bundled",)
    folder: str | None = None
    weights: str = "auto"
    public: str | None = None

    def public_sha256(self) -> str | None:
        """Return the SHA-256 of the hashes of the adversary's own photographs, in their order; None for bundled ones.

        Raises:
            PrivlabError: if the folder cannot be read.
        """
        if self.public is None:
            return None
        found = [each.sha256 for each in open_images(self.public, limit=PUBLIC_LIMIT).without_pixels()]
        return hashlib.sha256("/".join(found).encode()).hexdigest()


def case_label(case: TrackCase, setting: str) -> str:
    """Return the name of a case of a result: that of the track's case, and whether the defense is at work."""
    return case.name if setting == "c" else f"{case.name}, undefended"


def specification(card: Card, case: TrackCase, setting: str, attacks: Sequence[Any], how: Photographs) -> Specification:
    """Return the specification of a case of a track under a defense, on the photographs that are given later.

    Args:
        card: that of the defense.
        case: the track's.
        setting: "a", undefended, or "c".
        attacks: the attacks, by name or made with their options.
        how: the weights of a victim that are not in the package.

    Raises:
        PrivlabError: if a part of it does not exist or does not fit.
    """
    own, of = card.of.victim(card.victim_name), card.of
    given: dict[str, Any] = dict(case.given)
    if of.release == "features":
        given["client_batch"] = of.client_batch
    if setting == "c":
        given["defense"] = instances(card)
        if card.clients > 1:
            given["options"] = [*given.get("options", ()), f"client.clients={card.clients}"]
    if of.release != "update":
        given["release"] = of.release
    if how.public is not None:
        given |= {"public": (how.public,), "public_limit": PUBLIC_LIMIT}
    return specify(
        own.name,
        setting,
        attack=list(attacks),
        metrics=of.metrics,
        img_size=own.img_size,
        weights=how.weights,
        effort=of.effort,
        seed=of.seed,
        **given,
    )


def attacks_of(
    card: Card, case: TrackCase, setting: str, how: Photographs, attacks: Sequence[Any] | None = None
) -> list[Any]:
    """Return those of the attacks that can run on a case of the track.

    On the undefended case an attack comes with its counterpart, which is its positive control there.

    Args:
        card: that of the defense.
        case: the track's.
        setting: "a" or "c".
        how: the weights of a victim that is not in the package.
        attacks: made with their options; None for the track's own, by name.

    Raises:
        PrivlabError: if none can, or the victim's weights are not the track's.
    """
    asked = list(card.of.attacks if attacks is None else attacks)
    if setting == "a" and attacks is not None:
        names = [getattr(attack, "name", attack) for attack in attacks]
        asked += [name for name in dict.fromkeys(map(undefended_attack, names)) if name not in names]
    spec = specification(card, case, setting, asked, how)
    base = victim_of(spec, torch.device("cpu"))
    wanted = card.of.victim(card.victim_name).weights_sha256
    if base.weights.sha256 != wanted:
        raise PrivlabError(
            f"The track '{card.track}' has {base.name} with weights {wanted[:12]}…. Found {base.weights.sha256[:12]}…: "
            "give the file by --weights."
        )
    groups, refused = applicable(spec, base)
    found = {attack.name for group in groups for attack in group.attacks}
    if not found:
        raise PrivlabError(f"No attack of the track '{card.track}' can run: {next(iter(refused.values()))}")
    return [attack for attack in asked if getattr(attack, "name", attack) in found]


def draws_of(card: Card) -> int:
    """Return how often a defense is drawn: once where it draws nothing at random."""
    return 1 if {*card.parts} <= DETERMINISTIC else card.of.draws


def measure_defense(
    card: Card,
    how: Photographs,
    out: Path,
    attacks: Sequence[Any] | None = None,
    engine: Engine = IN_PROCESS,
) -> pd.DataFrame:
    """Return the records of a defense on all cases of its track, undefended ones beside them.

    Args:
        card: that of the defense, whose class is installed.
        how: its photographs, and the weights of a victim that is not in the package.
        out: folder of the run directories; what they hold already is not run again.
        attacks: those to run, made with their options; None for the track's own. A case where none of these can run is
            left out, such as the undefended one for an attack on the key of a defense that has no counterpart.
        engine: where the photographs are attacked; it changes no score by more than rounding.

    Raises:
        PrivlabError: if the photographs, the weights or the attacks do not fit, or if no attack runs under the defense.
    """
    found: list[pd.DataFrame] = []
    refused: PrivlabError | None = None
    for case in card.of.cases:
        for setting in ("a",) if card.parts == ("none",) else ("a", "c"):
            try:
                used = attacks_of(card, case, setting, how, attacks)
            except PrivlabError as error:
                if attacks is None:
                    raise
                refused = error
                continue
            for part in how.parts:
                spec = _whole(card, case, setting, used, how)
                found.append(_named(card, case, setting, _run(spec, part, how, out, engine=engine)))
    if refused is not None and not any(rows.setting.eq("c").any() for rows in found):
        raise refused
    return _kept(pd.concat(found, ignore_index=True), card.of)


def _whole(card: Card, case: TrackCase, setting: str, used: Sequence[Any], how: Photographs) -> Specification:
    return replace(specification(card, case, setting, used, how), draws=draws_of(card) if setting == "c" else 1)


def run_with_pictures(
    card: Card,
    row: Mapping[str, Any],
    how: Photographs,
    out: Path,
    attacks: Sequence[Any] | None = None,
    engine: Engine = IN_PROCESS,
) -> Path:
    """Return the run directory whose strips show what one attack made of the bundled photographs in one draw.

    That of the first draw is there where the defense was measured, as runs keep strips of it. Of another draw the
    attack is run once more.

    Args:
        card: that of the defense.
        row: a record of `measure_defense`: its case, setting, attack and draw.
        how: as in `measure_defense`.
        out: folder of the run directories.
        attacks: as in `measure_defense`.
        engine: as in `measure_defense`.
    """
    setting, draw = str(row["setting"]), int(row["draw"])
    (case,) = (each for each in card.of.cases if case_label(each, setting) == row["case"])
    used = attacks_of(card, case, setting, how, attacks)
    spec = _whole(card, case, setting, used, how)
    if draw or not all((out / _digest(spec, name)).exists() for name in _runs(spec, BUNDLED)):
        alone = [each for each in used if getattr(each, "name", each) == row["attack"]]
        spec = replace(specification(card, case, setting, alone, how), draw=draw)
    _run(spec, BUNDLED, how, out, engine=engine)
    (name,) = (name for name, each in _runs(spec, BUNDLED).items() if row["image_sha256"] in each.counted)
    return out.absolute() / _digest(spec, name)


def remeasure(
    card: Card,
    case: TrackCase,
    setting: str,
    draw: int,
    wanted: Sequence[str],
    how: Photographs,
    attacks: Sequence[Any],
) -> pd.DataFrame:
    """Return the records of a few photographs and one draw; nothing is written.

    Args:
        card: that of the defense, whose class is installed.
        case: the track's.
        setting: "a" or "c".
        draw: the number of the draw.
        wanted: the hashes of the photographs, all of one part, as one release had them.
        how: that part alone, and its folder.
        attacks: those to run.
    """
    spec = replace(specification(card, case, setting, attacks, how), draw=draw)
    found = _run(spec, how.parts[0], how, None, wanted)
    return _kept(_named(card, case, setting, found), card.of)


def _named(card: Card, case: TrackCase, setting: str, records: pd.DataFrame) -> pd.DataFrame:
    """Return records with the name of their case, and of secure aggregation, which they have as settings of clients."""
    if setting == "c" and card.clients > 1:
        records = records.assign(defense=AGGREGATION, defense_params=json.dumps(dict(card.parameters)))
    return records.assign(case=case_label(case, setting))


def _run(
    spec: Specification,
    part: str,
    how: Photographs,
    out: Path | None,
    wanted: Sequence[str] | None = None,
    engine: Engine = IN_PROCESS,
) -> pd.DataFrame:
    names, found = photographs(part), []
    for name, each in _runs(spec, part, wanted).items():
        with tempfile.TemporaryDirectory() as temporary:
            path = (Path(temporary) if out is None else out.absolute()) / f"{name}.csv"
            source = write_manifest(part, how.folder, path, each.attacked)
            whole = replace(spec, images=(source,), manifest=str(path))
            directory = None if out is None else out / _digest(spec, name)
            done = execute(whole, out=directory, strips=out is not None and part == BUNDLED, engine=engine)
        found.append(done.records.loc[done.records.image_sha256.isin(each.counted)])
    records = pd.concat(found, ignore_index=True)
    return records.assign(image=[names[sha] for sha in records.image_sha256])


@dataclass(frozen=True)
class _Attacked:
    """The photographs of one run, and those of them whose rows count."""

    attacked: Sequence[str]
    counted: Sequence[str]


def _runs(spec: Specification, part: str, wanted: Sequence[str] | None = None) -> dict[str, _Attacked]:
    """Return the photographs of each run of a part, by the name of the run: one, or two under secure aggregation.

    K clients of one image each make a release. Of photographs that K does not divide, those that are left over are
    released with the ones before them, whose rows count where they were first: no release is of fewer clients.

    Args:
        spec: the specification, which says how many clients there are.
        part: the part of the photographs.
        wanted: the hashes of some of them, in their order; None for all.
    """
    hashes = list(photographs(part)) if wanted is None else list(wanted)
    K = spec.local_training.clients if spec.local_training else 1
    if not (left := len(hashes) % K):
        return {part: _Attacked(hashes, hashes)}
    return {
        part: _Attacked(hashes[:-left], hashes[:-left]),
        f"{part}-left": _Attacked(hashes[-K:], hashes[-left:]),
    }


def _digest(spec: Specification, name: str) -> str:
    text = json.dumps([asdict(spec), name], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _kept(records: pd.DataFrame, of: Track) -> pd.DataFrame:
    """Return the rows and columns that a table needs: no oracle, and the controls of one draw."""
    control = records.attack.str.startswith(CONTROL)
    rows = records.loc[(records.geometry != "oracle") & ~(control & (records.draw > 0))]
    columns = [*KEPT, *of.metrics, *(MIRRORED[name] for name in of.metrics if name in MIRRORED)]
    return rows.reindex(columns=columns).reset_index(drop=True)

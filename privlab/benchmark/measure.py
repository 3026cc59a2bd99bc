"""Runs an entry on the cases of its track, and keeps the columns of the records that the table needs."""

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from privlab.base import PrivlabError
from privlab.benchmark.cards import UNDEFENDED, Card, instances
from privlab.benchmark.tracks import BUNDLED, Track, TrackCase, photographs
from privlab.evaluation import CONTROL, SCHEMA, Case, applicable, victim_of
from privlab.grids import IN_PROCESS, Engine, specify
from privlab.images import Data, open_images
from privlab.metrics import MIRRORED
from privlab.report.tables.knowledge import AGGREGATION, undefended_attack
from privlab.runs import execute

KEPT = (
    *("case", "victim", "victim_params", "weights", "weights_sha256", "block", "release", "cut_layer", "defense"),
    *("defense_params", "setting", "attack", "attack_params", "effort", "geometry", "image", "image_sha256"),
    *("label_origin", "seed", "draw", "dtype", "status", "reason", "beyond_range", "conditions", "batch"),
    *("batch_images", "external", "schema", "privlab_version"),
)
"""The columns of the records that a result keeps, besides those of metrics."""

PUBLIC_LIMIT = 2000
"""The most photographs that an adversary of an entry owns."""


@dataclass(frozen=True)
class Photographs:
    """The photographs of a submission: the parts, the folder of those that are not bundled, and foreign weights.

    `public` is a folder of photographs that the adversary owns, such as decoders are trained on; None for the
    bundled ones. Those under attack are taken out of it.
    """

    parts: tuple[str, ...] = (BUNDLED,)
    folder: str | None = None
    weights: str = "auto"
    public: str | None = None

    def public_sha256(self) -> str | None:
        """Return the SHA-256 of the hashes of the adversary's own photographs in order; None for bundled ones."""
        if self.public is None:
            return None
        found = [each.sha256 for each in open_images(self.public, limit=PUBLIC_LIMIT).without_pixels()]
        return hashlib.sha256("/".join(found).encode()).hexdigest()

    def chosen(self, part: str, wanted: Sequence[str]) -> Data:
        """Return photographs of a part by their hashes, whatever their names are.

        Raises:
            PrivlabError: if one of them is not there.
        """
        if part != BUNDLED and self.folder is None:
            raise PrivlabError(
                f"The {part} photographs are not in the package. Give the folder of ImageNet's samples by "
                "--images FOLDER."
            )
        name = "samples" if part == BUNDLED else str(self.folder)
        source = open_images(name)
        places = {image.sha256: place for place, image in enumerate(source.without_pixels())}
        if lacking := [photographs(part)[each] for each in wanted if each not in places]:
            raise PrivlabError(
                f"'{name}' lacks {len(lacking)} of {len(wanted)} {part} photographs. The first is {lacking[0]}: give "
                "the folder with the original files."
            )
        return source.choose([places[each] for each in wanted])


def case_label(case: TrackCase, setting: str) -> str:
    """Return the name of a case of a result: that of the track's case, and whether the defense is at work."""
    return case.name if setting == "c" else f"{case.name}, undefended"


def score_columns(of: Track) -> tuple[str, ...]:
    """Return the columns of scores: the track's metrics, and those of mirrored images."""
    return (*of.metrics, *(MIRRORED[name] for name in of.metrics if name in MIRRORED))


def as_kept(rows: pd.DataFrame, of: Track) -> pd.DataFrame:
    """Return rows with the columns that a result keeps: `KEPT`, and those of scores."""
    return rows.reindex(columns=[*KEPT, *score_columns(of)])


def row_of(card: Card, image: str, sha256: str) -> dict[str, Any]:
    """Return a record of a defense that no run made, in the first case of its track, without attack and scores.

    Args:
        card: the entry's card.
        image: the name of the image.
        sha256: the hash of the image.
    """
    return {
        "case": card.of.cases[0].name,
        "victim": card.victim_name,
        "release": card.of.release,
        "setting": "c",
        "effort": card.of.effort,
        "geometry": "in_place",
        "image": image,
        "image_sha256": sha256,
        "seed": card.of.seed,
        "draw": 0,
        "status": "ok",
        "schema": SCHEMA,
    }


@dataclass(frozen=True)
class Measurement:
    """A defense that is measured on its track, by the track's attacks or by others.

    `card` is that of the defense, whose class is installed; `how` has its photographs, and the weights of a victim that
    is not in the package. `out` is the folder of the run directories, where what they hold already is not run again;
    without one nothing is written. `attacks` are made with their options; None stands for the track's own, by name.
    `engine` says where the photographs are attacked; it changes no score by more than rounding.
    """

    card: Card
    how: Photographs = Photographs()
    out: Path | None = None
    attacks: Sequence[Any] | None = None
    engine: Engine = IN_PROCESS

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the settings in which a case is measured: undefended, and under the defense if there is one."""
        return ("a",) if self.card.parts == (UNDEFENDED,) else ("a", "c")

    def specification(self, case: TrackCase, setting: str, attacks: Sequence[Any]) -> Case:
        """Return the specification of a case under the defense, or in setting "a" without; photographs come later.

        Args:
            case: the track's.
            setting: "a", undefended, or "c".
            attacks: the attacks, by name or made with their options.
        """
        card, of = self.card, self.card.of
        own = of.victim(card.victim_name)
        given: dict[str, Any] = dict(case.given)
        if of.release == "features":
            given["client_batch"] = of.client_batch
        if setting == "c":
            given["defense"] = instances(card)
            if card.clients > 1:
                given["options"] = [*given.get("options", ()), f"client.clients={card.clients}"]
        if of.release != "update":
            given["release"] = of.release
        if self.how.public is not None:
            given |= {"public": (self.how.public,), "public_limit": PUBLIC_LIMIT}
        return specify(
            own.name,
            setting,
            attack=list(attacks),
            metrics=of.metrics,
            img_size=own.img_size,
            weights=self.how.weights,
            effort=of.effort,
            seed=of.seed,
            **given,
        )

    def attacks_on(self, case: TrackCase, setting: str) -> list[Any]:
        """Return those of the attacks that can run on a case of the track.

        On the undefended case an attack comes with its counterpart, which is its positive control there.

        Raises:
            PrivlabError: if none can, or the victim's weights are not the track's.
        """
        of = self.card.of
        asked = list(of.attacks if self.attacks is None else self.attacks)
        if setting == "a" and self.attacks is not None:
            names = [_name(attack) for attack in self.attacks]
            asked += [name for name in dict.fromkeys(map(undefended_attack, names)) if name not in names]
        spec = self.specification(case, setting, asked)
        base = victim_of(spec, torch.device("cpu"))
        wanted = of.victim(self.card.victim_name).weights_sha256
        if base.weights.sha256 != wanted:
            raise PrivlabError(
                f"The track '{of.name}' has {base.name} with weights {wanted[:12]}…. Found "
                f"{base.weights.sha256[:12]}…: give the file by --weights."
            )
        groups, refused = applicable(spec, base)
        found = {attack.name for group in groups for attack in group.attacks}
        if not found:
            raise PrivlabError(f"No attack of the track '{of.name}' can run: {next(iter(refused.values()))}")
        return [attack for attack in asked if _name(attack) in found]

    def cases(self) -> list[tuple[TrackCase, str]]:
        """Return the cases of the track and the settings in which the defense is measured, undefended ones first.

        A case where none of the attacks that are given can run is left out, such as the undefended one for an attack on
        the key of a defense that has no counterpart.

        Raises:
            PrivlabError: if the weights or the attacks do not fit, or if no attack runs under the defense.
        """
        found: list[tuple[TrackCase, str]] = []
        refused: PrivlabError | None = None
        for case in self.card.of.cases:
            for setting in self.settings:
                try:
                    self.attacks_on(case, setting)
                except PrivlabError as error:
                    if self.attacks is None:
                        raise
                    refused = error
                    continue
                found.append((case, setting))
        if refused is not None and not any(setting == "c" for _, setting in found):
            raise refused
        return found

    def records(self) -> pd.DataFrame:
        """Return the records of the defense in all its `cases`, whose errors this passes on."""
        return pd.concat([self.records_of(*each) for each in self.cases()], ignore_index=True)

    def records_of(self, case: TrackCase, setting: str) -> pd.DataFrame:
        """Return the records of one of the `cases`, of all photographs and draws."""
        spec = self._with_draws(case, setting)
        rows = pd.concat([self._run(case, spec, part) for part in self.how.parts], ignore_index=True)
        return _scored(rows, self.card.of)

    def run_with_pictures(self, row: Mapping[str, Any]) -> Path:
        """Return the run directory whose strips show what one attack made of the bundled photographs in one draw.

        That of the first draw is there where the defense was measured, as runs keep strips of it. Of another draw the
        attack is run once more. `row` is one of `records`: its case, setting, attack and draw.
        """
        setting, draw = str(row["setting"]), int(row["draw"])
        (case,) = (each for each in self.card.of.cases if case_label(each, setting) == row["case"])
        spec = self._with_draws(case, setting)
        if draw or not all(self._directory(spec, name).exists() for name in _runs(spec, BUNDLED)):
            alone = [each for each in spec.words.attacks or () if _name(each) == row["attack"]]
            spec = replace(self.specification(case, setting, alone), draw=draw)
        self._run(case, spec, BUNDLED)
        (name,) = (name for name, (_, counted) in _runs(spec, BUNDLED).items() if row["image_sha256"] in counted)
        return self._directory(spec, name)

    def _with_draws(self, case: TrackCase, setting: str) -> Case:
        spec = self.specification(case, setting, self.attacks_on(case, setting))
        return replace(spec, draws=self.card.draws if setting == "c" else 1)

    def _directory(self, spec: Case, name: str) -> Path:
        """Return the directory of a run, by the hash of all that makes it."""
        assert self.out is not None
        text = json.dumps([spec.stated(), name], sort_keys=True, default=str)
        return self.out.absolute() / hashlib.sha256(text.encode()).hexdigest()[:16]

    def _run(self, case: TrackCase, spec: Case, part: str) -> pd.DataFrame:
        """Return the records of a part of the photographs, with the case and what its clients are."""
        names, found, (setting,) = photographs(part), [], spec.settings
        for name, (attacked, counted) in _runs(spec, part).items():
            whole = replace(spec, data=replace(spec.data, images=self.how.chosen(part, attacked)))
            with tempfile.TemporaryDirectory() as temporary:
                path = Path(temporary, "run") if self.out is None else self._directory(spec, name)
                done = execute(whole, path, strips=self.out is not None and part == BUNDLED, engine=self.engine)
                found.append(done.records.loc[done.records.image_sha256.isin(counted)])  # read while the run is there
        records = pd.concat(found, ignore_index=True).assign(case=case_label(case, setting))
        if setting == "c" and self.card.clients > 1:  # secure aggregation is a setting of the clients
            records = records.assign(defense=AGGREGATION, defense_params=json.dumps(dict(self.card.parameters)))
        return records.assign(image=[names[sha256] for sha256 in records.image_sha256])


def _name(attack: Any) -> str:  # noqa: ANN401
    return getattr(attack, "name", attack)


def _runs(spec: Case, part: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return the photographs of each run of a part, and those whose rows count, by the name of the run.

    There is one run, or two under secure aggregation, where K clients of one image each make a release. Photographs
    that K does not divide are released with the ones before them, so that no release has fewer clients. The rows of
    these count where they were first.
    """
    hashes = list(photographs(part))
    K = 1 if spec.client is None else spec.client.clients
    if not (left := len(hashes) % K):
        return {part: (hashes, hashes)}
    return {
        part: (hashes[:-left], hashes[:-left]),
        f"{part}-left": (hashes[-K:], hashes[-left:]),
    }


def _scored(records: pd.DataFrame, of: Track) -> pd.DataFrame:
    """Return the rows and columns that a table needs: no oracle, and the controls of one draw."""
    control = records.attack.str.startswith(CONTROL)
    rows = records.loc[(records.geometry != "oracle") & ~(control & (records.draw > 0))]
    return as_kept(rows, of).reset_index(drop=True)

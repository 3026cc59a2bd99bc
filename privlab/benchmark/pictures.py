"""The pictures of an entry: which photographs are shown, and whether a picture is what the score of the row is of."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from privlab.benchmark.cards import Card
from privlab.benchmark.judged import Judged
from privlab.benchmark.results import Result
from privlab.benchmark.rule import Standing
from privlab.benchmark.tracks import Track, track
from privlab.evaluation import CONTROL, EXACT_DB
from privlab.images import data_uri
from privlab.metrics import DECIBELS
from privlab.report.tables import load_results, sign_of
from privlab.report.tables.per_image import attack_label
from privlab.stores import pngs

__all__ = ["Picture", "best_rows", "pictures", "pictures_of"]

_APART = 0.011
"""How far the score of a picture may be from that of its row: pictures state two decimals, rows three."""


@dataclass(frozen=True)
class Picture:
    """A photograph of an entry, what an attack makes of it, and what the score of the row is of.

    `what` is "median" or "worst". `score` is that of the picture; `whole` is that of the photograph in the table, which
    the attacks `by` reach. `shown` says that the picture is theirs, and `own` that no other photograph stands in.
    """

    what: str
    private: str
    made: str
    attack: str
    score: float
    whole: float
    by: tuple[str, ...]
    shown: bool
    own: bool


def best_rows(records: pd.DataFrame, of: Track, case: str, image: str) -> pd.DataFrame:
    """Return the rows in which most leaks from a photograph, over all attacks, draws and geometries of a case.

    Args:
        records: all rows of an entry; `attack` has the attack's name alone.
        of: the track, whose first metric decides.
        case: the name of the case.
        image: the hash of the photograph.
    """
    own = records.loc[
        (records.case == case)
        & (records.image_sha256 == image)
        & (records.status == "ok")
        & ~records.attack.str.startswith(CONTROL)
    ]
    leaks = _capped(own[of.lead], of) * sign_of(of.lead)
    return own.loc[leaks == leaks.max()]


def pictures(
    card: Card, judged: Judged, records: pd.DataFrame, run: Callable[[Mapping[str, Any]], Path]
) -> dict[str, dict[str, Any]]:
    """Return PNGs as data URIs, by "median" and "worst": a photograph, and what leaks most of it, as the score counts.

    A picture states its photograph, attack, draw and geometry, and the score that its run has. What no run keeps is
    left out.

    Args:
        card: that of the defense.
        judged: names the two photographs, and the case.
        records: the rows of the attacks whose pictures are kept.
        run: returns the run directory that shows what a row is of.
    """
    found: dict[str, dict[str, Any]] = {}
    for what, image in (("median", judged.median), ("worst", judged.worst_image)):
        for row in best_rows(records, card.of, judged.leakiest, image).head(1).to_dict("records"):
            results = load_results(run(row))
            label = attack_label(row["attack"], row["geometry"])
            places = [place for each in ("private", label) if (place := results.picture(0, image, each))]
            if len(places) == 2:
                private, made = (data_uri("png", pngs([place])[0]) for place in places)
                own = {name: row[name] for name in ("attack", "geometry", "case")} | {"draw": int(row["draw"])}
                again = results.records.assign(case=row["case"])
                for name in ("attack", "geometry", "draw"):
                    again = again.loc[again[name] == row[name]]
                score = f"{best_rows(again, card.of, row['case'], image)[card.of.lead].iloc[0]:.2f}"
                found[what] = {"private": private, "made": made, "image": image, **own, "score": score}
    return found


def _capped(values: Any, of: Track) -> Any:  # noqa: ANN401  # a number, or a column of them
    return values.clip(upper=EXACT_DB) if of.lead in DECIBELS and isinstance(values, pd.Series) else values


def pictures_of(row: Standing) -> list[Picture]:
    """Return the pictures of the median and the worst photograph of a row, from its result and those that entered.

    Of several pictures of a photograph the one that leaks most is taken. Where no result has one of it, the entry's own
    picture stands in, of the photograph that was the median or the worst one before others entered.

    Args:
        row: one of `standings`, with its result.
    """
    assert row.result is not None
    assert row.judged is not None
    of, judged = track(row.track), row.judged
    kept = [each for result in (row.result, *row.entered) for each in _kept(result, row.name)]
    if not kept:
        return []
    own = [each.rows.loc[lambda rows: rows.entry == row.name].drop(columns="entry") for each in row.entered]
    records = pd.concat([row.result.rows, *own], ignore_index=True)
    found = []
    for what, image in (("median", judged.median), ("worst", judged.worst_image)):
        ours = [each for each in kept if each["image"] == image]
        if not (able := ours or [each for each in kept if each["what"] == what]):
            continue
        best = max(able, key=lambda each: sign_of(of.lead) * float(each["score"]))
        if (rows := best_rows(records, of, judged.leakiest, best["image"])).empty:
            continue
        whole = float(_capped(rows[of.lead], of).iloc[0])
        by = tuple(dict.fromkeys(map(attack_label, rows.attack, rows.geometry)))
        score, attack = float(best["score"]), attack_label(best["attack"], best.get("geometry", "in_place"))
        capped = min(score, EXACT_DB) if of.lead in DECIBELS else score
        shown = attack in by and abs(capped - whole) <= _APART
        found.append(Picture(what, best["private"], best["made"], attack, score, whole, by, shown, bool(ours)))
    return found


def _kept(result: Result, entry: str) -> Iterator[Mapping[str, Any]]:
    """Yield the pictures that a result holds of an entry, each with what it is of; older files name no photograph."""
    pictures, judged = result.data.get("pictures", {}), result.data["judged"]
    if result.card.kind == "attack":
        pictures, judged = pictures.get(entry, {}), judged[entry]
    said = Judged.of_json({name: value for name, value in judged.items() if name != "knows"})
    images = {"median": said.median, "worst": said.worst_image}
    for what, each in pictures.items():
        yield {"image": images[what], "what": what, **each}

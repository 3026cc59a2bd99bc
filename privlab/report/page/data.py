"""The data of the page's script: the scores of each attack on each case, image by image."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from privlab.base import plain_data
from privlab.evaluation import CONTROL
from privlab.report.tables import Results, Row, attack_label, case_names, heading
from privlab.report.tables.per_image import CELL, sign_of
from privlab.report.tables.table import decimals


def images_of(records: pd.DataFrame) -> pd.DataFrame:
    """Return `image` (the name) and `image_sha256` of each image, numbered in the order of the records, by its key.

    The key is that of `Scored.images`: the hash, or the name where there is none. The column `number` counts from 0.
    """
    found = records[["image", "image_sha256"]].fillna("").astype(str)
    found = found.set_index(_keys(found).rename("key"))
    found = found.loc[~found.index.duplicated()]
    return found.assign(number=range(len(found)))


def _keys(named: pd.DataFrame) -> pd.Series:
    return named.image_sha256.where(named.image_sha256 != "", "name:" + named.image)


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of one row of the leakage table: `values` has one row per image, indexed by the image's number.

    For the worst case, `by` names the attack that reached each value; `failed` says why an image has no score.
    """

    row: Row
    geometry: str
    values: pd.DataFrame
    by: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)


def scores_of(results: Results, images: pd.DataFrame) -> list[Scores]:
    """Return the scores of all cases in the layout's geometry, and then those of attacks in the other geometries."""
    own = results.layout.geometry
    attacked = results.records[~results.records.attack.str.startswith(CONTROL)]
    others = [str(name) for name in attacked.geometry.dropna().unique() if name != own]
    return [
        scores
        for geometry in (own, *others)
        for scores in _under(results.laid_out(geometry=geometry), images)
        if geometry == own or (scores.row.kind != "control" and len(scores.values))
    ]


def _under(results: Results, images: pd.DataFrame) -> Iterator[Scores]:
    metrics, geometry = results.layout.columns, results.layout.geometry
    found = results.scored.images
    found = found[found.scored & (found.image != "")]
    numbers = found.image.map(images.number)
    values = dict(list(found.set_index(numbers)[list(metrics)].groupby([np.asarray(found[name]) for name in CELL])))
    failed, reached = _failures(results, images), _worst_attacks(results, images)
    nothing = found.iloc[:0][list(metrics)]
    for row in results.rows:
        if row.kind not in ("attack", "control", "worst"):
            continue
        key = (row.case, row.attack, "" if row.kind == "worst" else row.external or "")
        scored = values.get(key, nothing).sort_index()
        by = {}
        if row.kind == "worst":
            by = {name: [reached.get((row.case, name, image)) for image in scored.index] for name in metrics}
        place = "in_place" if row.kind == "control" else geometry
        yield Scores(row, place, scored, by, failed.get((row.case, row.attack or "", place), {}))


def _failures(results: Results, images: pd.DataFrame) -> dict[tuple[int, str, str], dict[int, str]]:
    """Return the reasons of failed images by case, attack and geometry."""
    rows = results.records[results.records.status != "ok"].fillna({"image": "", "image_sha256": "", "reason": ""})
    rows = rows.assign(number=_keys(rows).map(images.number), reason=rows.reason.replace("", "no reason is recorded"))
    cells = rows.groupby(["case", "attack", "geometry"])
    return {key: dict(zip(of.number.tolist(), of.reason, strict=True)) for key, of in cells}


def _worst_attacks(results: Results, images: pd.DataFrame) -> dict[tuple[int, str, int], str]:
    """Return the attack behind each worst case, by case, metric and image; of several that tie, the first by name."""
    found = results.scored.reached.drop_duplicates(["case", "image", "metric"])
    keys = zip(found.case, found.metric, found.image.map(images.number), strict=True)
    return dict(zip(keys, map(attack_label, found.attack, found.geometry), strict=True))


def page_data(
    results: Results, images: pd.DataFrame, scores: Sequence[Scores], *, fed: bool, kept: str
) -> dict[str, Any]:
    """Return what the script of the page reads; an infinite score is "Infinity", one that was not measured null.

    Args:
        results: the cases, and the columns of the table.
        images: the images, as `images_of` returns them; `scores` names them by their numbers.
        scores: the rows of the table, with the scores of each image.
        fed: whether the page holds images of what the client fed.
        kept: the folder in which images are stored, "pictures" or "strips".
    """
    known = results.records.dropna(subset=["setting"]).groupby("case").setting.unique()
    settings = {case: ", ".join(map(str, values)) for case, values in known.items()}
    return {
        "lead": results.lead,
        "geometry": results.layout.geometry,
        "fed": fed,
        "private": "unscored" not in results.facts,
        "kept": kept,
        "metrics": [
            {"name": name, "head": heading(name), "decimals": decimals(results.layout, name), "leaks": sign_of(name)}
            for name in results.layout.columns
        ],
        "cases": [
            {"name": name, "group": case.group, "setting": settings.get(i, "")}
            for i, (case, name) in enumerate(zip(results.cases, case_names(results), strict=True))
        ],
        "images": [[name, sha[:16]] for name, sha in zip(images.image, images.image_sha256, strict=True)],
        "sets": [_set(one, results.layout.columns) for one in scores],
    }


def _set(one: Scores, metrics: Sequence[str]) -> dict[str, Any]:
    """Return one row of the table with its images: `at` lists their numbers, `values` their scores by metric."""
    row = one.row
    found = {name: row.scores[name] for name in metrics}
    return {
        "case": row.case,
        "attack": row.attack,
        "kind": row.kind,
        "geometry": one.geometry,
        "external": row.external,
        "refused": None if row.kind == "worst" else row.refused.get(row.attack or ""),
        "n": row.images,
        "exact": row.exact,
        "failed": sorted(one.failed.items()),
        "means": {name: [_plain(score.mean), _plain(score.low), _plain(score.high)] for name, score in found.items()},
        "at": list(one.values.index),
        "values": {name: [_plain(value) for value in one.values[name]] for name in metrics},
        "by": one.by or None,
    }


def _plain(value: float) -> object:
    """Return a number as JSON can hold it, to 6 digits."""
    return plain_data(float(f"{value:.6g}"))

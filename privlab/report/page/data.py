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


@dataclass(frozen=True, eq=False)
class Images:
    """The images of all records: names and hashes by number; `number` is found by an image's key in `Scored.images`."""

    names: Sequence[str]
    hashes: Sequence[str]
    number: Mapping[str, int]

    @classmethod
    def of(cls, records: pd.DataFrame) -> "Images":
        """Return the images, numbered in the order of the records; an image without a hash goes by its name."""
        found = records[["image", "image_sha256"]].fillna("").astype(str)
        found["key"] = found.image_sha256.where(found.image_sha256 != "", "name:" + found.image)
        found = found.drop_duplicates("key")
        number = {key: i for i, key in enumerate(found.key)}
        return cls(list(found.image), list(found.image_sha256), number)


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


def scores_of(results: Results, images: Images) -> list[Scores]:
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


def _under(results: Results, images: Images) -> Iterator[Scores]:
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


def _failures(results: Results, images: Images) -> dict[tuple[int, str, str], dict[int, str]]:
    """Return the reasons of failed images by case, attack and geometry."""
    reasons: dict[tuple[int, str, str], dict[int, str]] = {}
    rows = results.records[results.records.status != "ok"].fillna({"image": "", "image_sha256": "", "reason": ""})
    for row in rows.itertuples():
        number = images.number[row.image_sha256 or f"name:{row.image}"]
        reasons.setdefault((row.case, row.attack, row.geometry), {})[number] = row.reason or "no reason is recorded"
    return reasons


def _worst_attacks(results: Results, images: Images) -> dict[tuple[int, str, int], str]:
    """Return the attack behind each worst case, by case, metric and image; of several that tie, the first by name."""
    found = results.scored.reached.drop_duplicates(["case", "image", "metric"])
    keys = zip(found.case, found.metric, found.image.map(images.number), strict=True)
    return dict(zip(keys, map(attack_label, found.attack, found.geometry), strict=True))


def page_data(results: Results, images: Images, scores: Sequence[Scores], *, fed: bool, kept: str) -> dict[str, Any]:
    """Return what the script of the page reads; an infinite score is "Infinity", one that was not measured null.

    `fed` says whether the page holds images of what the client fed, and `kept` names the folder in which images are
    stored, "pictures" or "strips".

    Args:
        results: the cases, and the columns of the table.
        images: the images by their numbers, by which `scores` names them.
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
        "images": [[name, sha[:16]] for name, sha in zip(images.names, images.hashes, strict=True)],
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

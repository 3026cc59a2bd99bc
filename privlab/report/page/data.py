"""The data of the page's script: the scores of each attack on each case, image by image."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from privlab.base import plain_data
from privlab.evaluation import CONTROL
from privlab.report.tables import Results, attack_label, case_names, heading
from privlab.report.tables.cells import decimals
from privlab.report.tables.per_image import CELL, sign_of


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


def sets_of(results: Results, images: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the scores of all cases in the layout's geometry, and then those of attacks in the other geometries.

    Each is a row of the leakage table with its images: `at` lists their numbers, `values` their scores by metric, and
    `failed` why others have none. For the worst case, `by` names the attack that reached each value.
    """
    own = results.layout.geometry
    attacked = results.records[~results.records.attack.str.startswith(CONTROL)]
    found = list(_under(results, images))
    for geometry in attacked.geometry.dropna().unique():
        if geometry != own:
            sets = _under(results.laid_out(geometry=geometry), images)
            found += [one for one in sets if one["kind"] != "control" and one["at"]]
    return found


def _under(results: Results, images: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the scores of all cases in the layout's geometry, and the controls of that geometry."""
    metrics, geometry = results.layout.columns, results.layout.geometry
    scored = results.scored.images
    scored = scored[scored.scored & (scored.image != "")]
    scored = scored.assign(number=scored.image.map(images.number)).sort_values("number", kind="stable")
    values = dict(list(scored.groupby(CELL)))
    failed, reached = _failures(results, images), _worst_attacks(results, images)
    for row in results.rows:
        if row.kind not in ("attack", "control", "worst"):
            continue
        is_worst, place = row.kind == "worst", "in_place" if row.kind == "control" else geometry
        of_row = values.get((row.case, row.attack, "" if is_worst else row.external or ""), scored.iloc[:0])
        by = {name: [reached.get((row.case, name, image)) for image in of_row.number] for name in metrics}
        scores = {name: row.scores[name] for name in metrics}
        yield {
            "case": row.case,
            "attack": row.attack,
            "kind": row.kind,
            "geometry": place,
            "external": row.external,
            "refused": None if is_worst else row.refused.get(row.attack or ""),
            "n": row.images,
            "exact": row.exact,
            "failed": sorted(failed.get((row.case, row.attack or "", place), {}).items()),
            "means": {name: _digits([score.mean, score.low, score.high]) for name, score in scores.items()},
            "at": of_row.number.tolist(),
            "values": {name: _digits(of_row[name]) for name in metrics},
            "by": by if is_worst else None,
        }


def _digits(values: Iterable[float]) -> list[float]:
    """Return numbers to 6 digits."""
    return [float(f"{value:.6g}") for value in values]


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
    results: Results, images: pd.DataFrame, sets: Sequence[Mapping[str, Any]], *, fed: bool, kept: str
) -> dict[str, Any]:
    """Return what the script of the page reads; an infinite score is "Infinity", one that was not measured null.

    Args:
        results: the cases, and the columns of the table.
        images: the images, as `images_of` returns them; `sets` names them by their numbers.
        sets: the rows of the table with the scores of each image, as `sets_of` returns them.
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
        "sets": plain_data(sets),
    }

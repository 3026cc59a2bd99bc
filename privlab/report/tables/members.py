"""Images that the victim saw in training, and those that it did not: what was measured on each, apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from privlab.grids import KNOWN
from privlab.report.page import case_names
from privlab.report.tables.per_image import WORST, lead_metric, per_image
from privlab.report.tables.results import Results
from privlab.report.tables.sheet import figure_text

__all__ = ["Apart", "apart", "apart_lines", "apart_of"]

_WORDS = {"seen": "seen in training", "not seen": "not seen", "unknown": "unknown"}


@dataclass(frozen=True)
class Apart:
    """The mean and the standard deviation (n − 1) of one attack over the images of one case and one membership."""

    case: str
    member: str
    attack: str
    metric: str
    images: int
    mean: float
    std: float


def apart(
    records: pd.DataFrame, names: Sequence[str], paper: str | None, metric: str, geometry: str = "in_place"
) -> list[Apart]:
    """Return mean and spread of the paper's attack and of the worst case, on members, on others, and on unknown images.

    Nothing is returned where no membership is known.

    Args:
        records: a row per image, attack and geometry; `case` has the number of its case, `member` the membership.
        names: the names of the cases, by their numbers.
        paper: the name of the paper's attack; without one there is the worst case alone.
        metric: the one that means are taken of.
        geometry: "in_place", "oracle" or "reassembled": in which reconstructions are scored.
    """
    if "member" not in records or records.member.isna().all():
        return []
    known = records.loc[records.image_sha256.fillna("").ne("") & records.member.notna()]
    member = known.drop_duplicates(["case", "image_sha256"]).set_index(["case", "image_sha256"]).member.to_dict()
    images = per_image(records, [metric], geometry)
    images = images[images.scored & images.attack.isin([paper, WORST]) & images.external.eq("") & images.image.ne("")]
    told = [member.get(pair, "unknown") for pair in zip(images.case, images.image, strict=True)]
    groups = dict(list(images.assign(member=told).groupby(["case", "member", "attack"])[metric]))
    return [
        Apart(names[case], word, attack, metric, int(of.count()), float(of.mean()), float(of.std()))
        for case in range(len(names))
        for word in _WORDS
        for attack in dict.fromkeys([paper or WORST, WORST])
        if (of := groups.get((case, word, attack))) is not None
    ]


def apart_of(results: Results) -> list[Apart]:
    """Return `apart` of results, by their lead metric."""
    layout = results.layout
    lead = lead_metric(layout.columns)
    return apart(results.records, case_names(results), layout.paper_attack, lead, layout.geometry)


def apart_lines(rows: Sequence[Apart]) -> list[str]:
    """Return a line for each case; counts in it are of images."""
    several = len({row.case for row in rows}) > 1
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        of_case = [row for row in rows if row.case == case]
        parts = [
            f"{_WORDS[word]}: " + ", ".join(_row_text(row) for row in of_case if row.member == word)
            for word in dict.fromkeys(row.member for row in of_case)
        ]
        where = f"{case}: " if several else ""
        metric = of_case[0].metric.replace("_", " ").upper()
        lines.append(f"members apart, as the manifest states them ({metric}, mean ± standard deviation): {where}")
        lines[-1] += "; ".join(parts)
    return lines


def _row_text(row: Apart) -> str:
    decimals = KNOWN[row.metric].decimals
    spread = f" ± {figure_text(row.std, decimals)}" if math.isfinite(row.std) else ""
    return f"{row.attack} {figure_text(row.mean, decimals)}{spread} ({row.images} image{'s' * (row.images != 1)})"

"""Rows of a table made by hand, and what writes them in each format."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from privlab.grids import Layout
from privlab.report.tables import (
    FORMATS,
    WORST,
    CaseFacts,
    Results,
    Row,
    Score,
    Table,
    leakage_table,
)
from privlab.report.tables.rows import Kind


def laid_out(
    rows: Sequence[Row], layout: Layout, *, title: str = "", source: str | None = None, **options: Any
) -> Table:
    cases = tuple(CaseFacts(str(i)) for i in range(1 + max((row.case for row in rows), default=0)))
    results = Results("t", title, source, cases, layout, (), {}, pd.DataFrame(), {}, Path())
    return leakage_table(results, rows, **options)


def written(form: str, rows: Sequence[Row], layout: Layout, *, standalone: bool = False, **options: Any) -> str:
    return laid_out(rows, layout, **options).render(form, standalone=standalone)


to_latex, to_csv, to_markdown, to_json, to_html = (partial(written, form) for form in FORMATS)

LAYOUT = Layout(columns=("mse", "psnr"), decimals={"psnr": 1}, paper_attack="april")
CAPTION: dict[str, Any] = {
    "title": "Table 5",
    "source": "MJP (2023)",
    "remarks": ("weights: paper: trained / here: random",),
}


def row(kind: Kind, mse: Score, psnr: Score, case: int = 0, attack: str | None = None, **rest: object) -> Row:
    label, group = (("DeiT-S", "(1) a & b"), ("MJP_{γ}", "(2)"))[case]
    return replace(Row(case, label, group, kind, attack, {"mse": mse, "psnr": psnr}), **rest)


def of(mean: float, reach: float = math.nan) -> Score:
    """Return a mean over two images whose interval reaches half as far down as up."""
    return Score(mean, mean - reach / 2, mean + reach, 2)


NAN = Score(math.nan)
BY: Mapping[str, Mapping[str, int]] = {"mse": {"april": 1, "new": 1}, "psnr": {"new": 2}}
ROWS = [
    row("published", Score(0.035), Score(18.94)),
    row("paper", of(0.0625, 0.015625), of(17.5, 0.5), attack="april", images=2, failed=1),
    row("worst", of(1.23e-9, 2e-10), Score(math.inf, 80.0, math.inf, 2), images=2, attack=WORST, leakiest=BY),
    row("paper", NAN, NAN, 1, "april", refused={"april": "no PE"}),
    row("worst", of(0.2), of(7.0), 1, WORST, images=1, leakiest={"mse": {"x": 1}}, refused={"april": "no PE"}),
    row("attack", of(0.2), of(7.0), 1, "x", images=1, external="Fu 2021, Table 2"),
    row("control", of(0.1), of(10.0), 1, "control:mean", images=1),
]

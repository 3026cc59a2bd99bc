"""Claims: what the paper printed, its attack here, and the worst case, as paired bars."""

import math

import matplotlib.figure
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from privlab.base import PrivlabError
from privlab.grids import KNOWN, Figure
from privlab.report.figures.data import control_of, names_of, notes, roles_of, score_of, with_columns
from privlab.report.figures.rows import LINE, FigureRow, height, stack
from privlab.report.figures.style import (
    PUBLISHED,
    SMALL,
    WORST,
    Role,
    Scale,
    axis_title,
    bar_style,
    canvas,
    control_line,
    dress,
    wrap,
)
from privlab.report.tables import Results, Score, figure_text
from privlab.report.tables.table import decimals

_BAR, _GAP = 0.11, 0.06
"""Heights of a bar, and of the gap between cases, in inches."""

_NAMES = 0.95
"""The width to which the names of cases are wrapped, in inches."""


def draw_claim(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw for each case what the paper printed, what its attack reaches here, and the worst case, with intervals.

    The figures stand beside the bars. The attack behind the worst case stands there too, unless it is the same in all
    cases.

    Raises:
        PrivlabError: if no case has a published figure of the metric, or nothing was measured.
    """
    y, cases = figure.y, range(len(results.cases))
    results = with_columns(results, figure, y)
    if all(math.isnan(score_of(results, i, PUBLISHED, y).mean) for i in cases):
        raise PrivlabError(f"The claim '{figure.name}' needs published figures of {y}. Found none in '{results.name}'.")
    roles = [PUBLISHED, *roles_of(results, y)]
    scores = {(i, role): score_of(results, i, role, y) for i in cases for role in roles}
    control = control_of(results, cases, y)
    ends = (v for score in scores.values() for v in (score.mean, score.low, score.high))
    scale = Scale.over([0.0, control, *ends], log=False)
    names = names_of(results, grouped=True)
    rows = []
    for case, name in zip(results.cases, names, strict=True):
        text = wrap([name], _NAMES)
        high = max(len(roles) * _BAR, LINE * (text.count("\n") + 1))
        rows.append(FigureRow(case.group or "", text, high, _GAP))
    picture, ax = canvas()
    middles = stack(ax, rows)
    ax.grid(axis="x")
    behind = _most_often(results, y)
    several = len(set(behind.values())) > 1
    for (case, role), score in scores.items():
        at = middles[case] + (roles.index(role) - (len(roles) - 1) / 2) * _BAR
        _draw_bar(ax, at, role, score, scale)
        beside = _bar_text(results, case, role, y)
        beside += f"  {behind[case]}" if several and role is WORST and case in behind else ""
        ax.text(1.02, at, beside, transform=ax.get_yaxis_transform(), va="center", fontsize=SMALL - 0.5)
    line = control_line(ax, control, scale, upright=True)
    scale.apply(ax, "x")
    ax.set_xlabel(axis_title(y))
    handles = [*(_handle(results, role, set(behind.values())) for role in roles), *line]
    said = notes(results, cases, f"Lines: {results.layout.interval * 100:g} % intervals of the mean.")
    dress(picture, height(rows), handles, said)
    return picture


def _draw_bar(ax: Axes, at: float, role: Role, score: Score, scale: Scale) -> None:
    """Draw a bar and its interval; nothing where there is no score."""
    if math.isnan(score.mean):
        return
    mean, low, high = scale.place([score.mean, score.low, score.high])
    ax.barh(at, mean, 0.86 * _BAR, label=role.name, **bar_style(role))
    if not np.isnan(low):
        ax.plot([low, high], [at, at], color="black", linewidth=0.9, marker="|", markersize=2.5, label="_interval")


def _most_often(results: Results, metric: str) -> dict[int, str]:
    """Return for each case the attack that is the worst case of most images."""
    worst = {row.case: row.leakiest.get(metric, {}) for row in results.rows if row.kind == "worst"}
    return {case: max(sorted(count), key=lambda name: count[name]) for case, count in worst.items() if count}


def _bar_text(results: Results, case: int, role: Role, metric: str) -> str:
    """Return the text beside a bar: its figure, or "cannot run"."""
    score, row = score_of(results, case, role, metric), results.row(case, role.kind)
    if row is not None and row.refused and not row.images and role is not WORST:
        return "cannot run"
    if not KNOWN[metric].arrow:  # in per cent
        return figure_text(score.mean, 1)
    return figure_text(score.mean, decimals(results.layout, metric))


def _handle(results: Results, role: Role, behind: set[str]) -> Patch:
    attack = results.layout.paper_attack if role.kind == "paper" else None
    if role is WORST and len(behind) == 1:
        attack = next(iter(behind))
    name = f"{role.name} ({attack})" if attack else role.name
    return Patch(label=name, **bar_style(role))

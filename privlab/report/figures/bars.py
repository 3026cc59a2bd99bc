"""Claims and distributions: a bar or a box in each of many rows, which stand under headings from top to bottom."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import matplotlib.figure
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import NDArray

from privlab.base import PrivlabError
from privlab.grids import KNOWN, Figure
from privlab.report.figures.data import check_leaks, control_of, names_of, notes, roles_of, score_of, with_columns
from privlab.report.figures.style import (
    OTHER,
    PAPER,
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
from privlab.report.tables import SINGLE, Results, Score, figure_text
from privlab.report.tables import WORST as WORST_CASE
from privlab.report.tables.table import decimals

_BAR, _BAR_GAP = 0.11, 0.06
"""Heights of a bar, and of the gap between cases, in inches."""

_NAMES = 0.95
"""The width to which the names of cases are wrapped, in inches."""


def draw_claim(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw for each case what the paper printed, what its attack reaches here, and the worst case, with intervals.

    The figures stand beside the bars. The attack behind the worst case stands there too, unless it is the same in all
    cases.
    """
    y, cases = figure.y, range(len(results.cases))
    results = with_columns(results, figure, y)
    if all(math.isnan(score_of(results, i, PUBLISHED, y).mean) for i in cases):
        raise PrivlabError(f"The claim '{figure.name}' needs published figures of {y}. Found none in '{results.name}'.")
    roles = [PUBLISHED, *roles_of(results, y)]
    scores = {(i, role): score_of(results, i, role, y) for i in cases for role in roles}
    control = control_of(results, cases)
    ends = (v for score in scores.values() for v in (score.mean, score.low, score.high))
    scale = Scale.over([0.0, control, *ends], log=False)
    names = names_of(results, grouped=True)
    rows = []
    for case, name in zip(results.cases, names, strict=True):
        text = wrap([name], _NAMES)
        high = max(len(roles) * _BAR, _LINE * (text.count("\n") + 1))
        rows.append(_Row(case.group or "", text, high, _BAR_GAP))
    picture, ax = canvas()
    middles = _stack(ax, rows)
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
    dress(picture, _rows_height(rows), handles, said)
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


_ROW, _ROW_GAP = 0.115, 0.02
"""Heights of a row, and of the gap under it, in inches."""

_POINTS = 100
"""Most images that a row shows as dots; of more images it shows as many quantiles, the extremes included."""

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, modulo 1, spread evenly


@dataclass(frozen=True, eq=False)
class _Sample:
    """The scores of all images under one attack of a case."""

    case: int
    name: str
    role: Role
    scores: NDArray[np.float64]


def draw_distribution(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw the scores of all images: a row per case and attack, with quartiles, median, range, and dots for images."""
    check_leaks(figure)
    results = with_columns(results, figure, figure.y)
    samples = list(_samples(results, figure.y))
    names = names_of(results)
    heading = (lambda case: names[case]) if len(results.cases) > 1 else (lambda _: "")
    rows = [_Row(heading(sample.case), sample.name, _ROW, _ROW_GAP) for sample in samples]
    cases = sorted({sample.case for sample in samples})
    control = control_of(results, cases)
    scale = Scale.of(figure.y, [control, *(score for sample in samples for score in sample.scores.tolist())])
    picture, ax = canvas()
    ax.grid(axis="x")
    ax.use_sticky_edges = False  # boxes have no zero to start from
    for sample, at in zip(samples, _stack(ax, rows), strict=True):
        _draw_sample(ax, at, scale.place(sample.scores), sample.role)
    handles: list[Artist] = [
        Patch(label=role.name, **bar_style(role)) for role in dict.fromkeys(sample.role for sample in samples)
    ]
    handles += control_line(ax, control, scale, upright=True)
    scale.apply(ax, "x")
    ax.set_xlabel(axis_title(figure.y))
    dots = f"{_POINTS} quantiles" if max(len(sample.scores) for sample in samples) > _POINTS else "images"
    said = f"Boxes: quartiles and median; lines: range; dots: {dots}."
    dress(picture, _rows_height(rows), handles, notes(results, cases, said))
    return picture


def _samples(results: Results, metric: str) -> Iterator[_Sample]:
    """Yield what was measured, case by case: the paper's attack, the other attacks, the worst case."""
    images, paper = results.scored.images, results.layout.paper_attack
    images = images.loc[
        ~images.control & images[metric].notna() & (images.image != "") & (images.attack != SINGLE)
    ]  # "": a mean, of no known image
    roles = {WORST_CASE: WORST} | ({paper: PAPER} if paper else {})
    cells = {key: rows[metric].to_numpy(np.float64) for key, rows in images.groupby(["case", "attack", "external"])}
    found = [
        _Sample(int(str(case)), attack + (" †" if external else ""), roles.get(attack, OTHER), scores)
        for (case, attack, external), scores in sorted(cells.items())
    ]
    order = [PAPER, OTHER, WORST]
    yield from sorted(found, key=lambda sample: (sample.case, order.index(sample.role)))


def _draw_sample(ax: Axes, at: float, places: NDArray[np.float64], role: Role) -> None:
    """Draw a box from the first to the third quartile, the median, a line over the range, and the points."""
    low, first, median, third, high = np.quantile(places, [0, 0.25, 0.5, 0.75, 1])
    ax.plot([low, high], [at, at], color="black", linewidth=0.6, zorder=2, label="_range")
    ax.barh(at, third - first, 0.5 * _ROW, left=first, zorder=2.2, label=role.name, **bar_style(role))
    ends = [at - 0.42 * _ROW, at + 0.42 * _ROW]
    ax.plot([median, median], ends, color="black", linewidth=1.2, zorder=2.6, label="_median")
    n = min(len(places), _POINTS)
    points = np.quantile(places, np.linspace(0, 1, n), method="nearest") if n > 1 else places
    spread = (np.arange(n) * _GOLDEN % 1 - 0.5) * 0.9 * _ROW
    dots = {"color": "black", "markersize": 1.6, "markeredgewidth": 0, "alpha": 0.55}
    ax.plot(points, at + spread, ".", zorder=2.15, label="_images", **dots)


_HEAD, _LINE = 0.15, 0.1
"""Heights of a heading, and of each further line of one or of a name, in inches."""

_HEADS = 1.6
"""The width to which headings are wrapped, in inches."""


@dataclass(frozen=True)
class _Row:
    """A row of the figure: the heading that it stands under (or none), its name, its height and its gap, in inches."""

    heading: str
    name: str
    height: float
    gap: float


def _stack(ax: Axes, rows: Sequence[_Row]) -> list[float]:
    """Name the rows on the y axis, whose unit is inches from the top, and return the middle of each row."""
    middles, y = [], 0.0
    for heading, under in itertools.groupby(rows, key=lambda row: row.heading):
        if heading:
            inside, high = ax.get_yaxis_transform(), _heading_height(heading)
            text = ax.text(
                *(0.01, y + high / 2, wrap([heading], _HEADS)),
                **{"transform": inside, "fontsize": SMALL + 0.5, "weight": "bold", "va": "center"},
            )
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})  # over grid lines
            y += high
        for row in under:
            middles.append(y + row.height / 2)
            y += row.height + row.gap
    ax.set_ylim(y, -rows[0].gap)
    ax.set_yticks(middles, [row.name for row in rows])
    ax.tick_params(axis="y", length=0)
    return middles


def _rows_height(rows: Sequence[_Row]) -> float:
    """Return the height of all rows and headings, in inches."""
    headings = sum(_heading_height(heading) for heading, _ in itertools.groupby(row.heading for row in rows) if heading)
    return sum(row.height + row.gap for row in rows) + headings


def _heading_height(heading: str) -> float:
    return _HEAD + _LINE * wrap([heading], _HEADS).count("\n")

"""Distributions: the scores of all images, for each case and attack, and for the worst case."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import matplotlib.figure
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import NDArray

from privlab.grids import Figure
from privlab.report.figures.data import check_leaks, control_of, names_of, notes, with_columns
from privlab.report.figures.rows import FigureRow, height, stack
from privlab.report.figures.style import (
    OTHER,
    PAPER,
    WORST,
    Role,
    Scale,
    axis_title,
    bar_style,
    canvas,
    control_line,
    dress,
)
from privlab.report.tables import SINGLE, Results
from privlab.report.tables import WORST as WORST_CASE

_ROW, _GAP = 0.115, 0.02
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
    """Draw the scores of all images: a row per case and attack, with quartiles, median, range, and dots for images.

    Raises:
        PrivlabError: if the metric is one of utility, or nothing was measured.
    """
    check_leaks(figure)
    results = with_columns(results, figure, figure.y)
    samples = list(_samples(results, figure.y))
    names = names_of(results)
    heading = (lambda case: names[case]) if len(results.cases) > 1 else (lambda _: "")
    rows = [FigureRow(heading(sample.case), sample.name, _ROW, _GAP) for sample in samples]
    cases = sorted({sample.case for sample in samples})
    control = control_of(results, cases, figure.y)
    scale = Scale.of(figure.y, [control, *(score for sample in samples for score in sample.scores.tolist())])
    picture, ax = canvas()
    ax.grid(axis="x")
    ax.use_sticky_edges = False  # boxes have no zero to start from
    for sample, at in zip(samples, stack(ax, rows), strict=True):
        _draw_sample(ax, at, scale.place(sample.scores), sample.role)
    handles: list[Artist] = [
        Patch(label=role.name, **bar_style(role)) for role in dict.fromkeys(sample.role for sample in samples)
    ]
    handles += control_line(ax, control, scale, upright=True)
    scale.apply(ax, "x")
    ax.set_xlabel(axis_title(figure.y))
    dots = f"{_POINTS} quantiles" if max(len(sample.scores) for sample in samples) > _POINTS else "images"
    said = f"Boxes: quartiles and median; lines: range; dots: {dots}."
    dress(picture, height(rows), handles, notes(results, cases, said))
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

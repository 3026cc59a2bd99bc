"""Rows under headings, from top to bottom: the y axis of claims and distributions."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from privlab.report.figures.style import SMALL, wrap

_HEAD, LINE = 0.15, 0.1
"""Heights of a heading, and of each further line of one or of a name, in inches."""

_HEADS = 1.6
"""The width to which headings are wrapped, in inches."""


@dataclass(frozen=True)
class FigureRow:
    """A row of the figure: the heading that it stands under (or none), its name, its height and its gap, in inches."""

    heading: str
    name: str
    height: float
    gap: float


def stack(ax: Axes, rows: Sequence[FigureRow]) -> list[float]:
    """Name the rows on the y axis, whose unit is inches from the top, and return the middle of each row."""
    middles, y = [], 0.0
    for heading, under in itertools.groupby(rows, key=lambda row: row.heading):
        if heading:
            inside, high = ax.get_yaxis_transform(), _height(heading)
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


def height(rows: Sequence[FigureRow]) -> float:
    """Return the height of all rows and headings, in inches."""
    headings = sum(_height(heading) for heading, _ in itertools.groupby(row.heading for row in rows) if heading)
    return sum(row.height + row.gap for row in rows) + headings


def _height(heading: str) -> float:
    return _HEAD + LINE * wrap([heading], _HEADS).count("\n")

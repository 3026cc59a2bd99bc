"""Rows under headings: how claims and distributions stand on the paper, from top to bottom."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from privlab.report.figures.style import SMALL

__all__ = ["Row", "height", "stack"]

_HEAD = 0.15
"""Height of a heading, in inches."""


@dataclass(frozen=True)
class Row:
    """A row of the figure: the heading that it stands under (or none), its name, its height and its gap, in inches."""

    heading: str
    name: str
    height: float
    gap: float


def stack(ax: Axes, rows: Sequence[Row]) -> list[float]:
    """Name the rows on the y axis, in inches from the top; return the middle of each row."""
    middles, y = [], 0.0
    for heading, under in itertools.groupby(rows, key=lambda row: row.heading):
        if heading:
            inside = ax.get_yaxis_transform()
            text = ax.text(
                0.01, y + _HEAD / 2, heading, transform=inside, fontsize=SMALL + 0.5, weight="bold", va="center"
            )
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})  # over grid lines
            y += _HEAD
        for row in under:
            middles.append(y + row.height / 2)
            y += row.height + row.gap
    ax.set_ylim(y, -rows[0].gap)
    ax.set_yticks(middles, [row.name for row in rows])
    ax.tick_params(axis="y", length=0)
    return middles


def height(rows: Sequence[Row]) -> float:
    """Return the height of all rows, in inches."""
    headings = sum(bool(heading) for heading, _ in itertools.groupby(row.heading for row in rows))
    return sum(row.height + row.gap for row in rows) + headings * _HEAD

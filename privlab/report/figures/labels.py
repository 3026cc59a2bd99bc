"""Labels of points that keep clear of one another and of all points."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from privlab.report.figures.style import GREY, SMALL

_NEAR, _FAR = (3, 5), (8, 12, 17, 23, 30, 38, 47, 57, 68)
"""Distances of labels from their points, in points (1/72 inch): a thin line leads to the far ones."""

_ANGLES = np.array([0, 8, 4, 12, 2, 14, 6, 10, 1, 15, 7, 9, 3, 13, 5, 11]) * math.pi / 8
"""Directions in the order in which they are tried: right, left, above, below, and between."""

_MARK, _APART = 2.6, 7.0
"""In points: what a mark keeps free on each side, and the distance of near labels from other points."""


def place_labels(
    figure: Figure, ax: Axes, joins: Sequence[NDArray[np.float64]], texts: Sequence[str], *, near: bool = False
) -> bool:
    """Write a text next to the last point of each join, clear of all points and of other texts.

    Each text in turn takes the nearest free place, and a thin line leads to its point where that place is not near.
    Where a text finds none, nothing is written, and False is returned.

    Args:
        figure: the figure of `ax`, in its final size.
        ax: the axes, in their final limits and scales.
        joins: the points of each label, n × 2 in data coordinates, which a line joins.
        texts: one for each join.
        near: whether a text may only be within 5 points (1/72 inch) of its point, must keep 7 from others, and may
            cover no line.
    """
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # this fixes the layout, and so the places of the points
    unit, frame = figure.dpi / 72, ax.get_window_extent()
    paths = [ax.transData.transform(join) for join in joins]
    ends = [path[-1] for path in paths]
    reach, apart = _MARK * unit, _APART * unit
    taken = [Bbox([mark - reach, mark + reach]) for path in paths for mark in path]
    lines = [Path(path) for path in paths]
    labels = [ax.annotate(text, join[-1].tolist(), (0, 0)) for join, text in zip(joins, texts, strict=True)]
    for i, (label, end) in enumerate(zip(labels, ends, strict=True)):
        label.set(fontsize=SMALL, ha="center", va="center", anncoords="offset points", in_layout=False)
        size = np.array(label.get_window_extent(canvas.get_renderer()).size)
        others = [Bbox([other - apart, other + apart]) for k, other in enumerate(ends) if k != i] if near else []
        foreign = [box for box in taken if not box.contains(*end)]
        free = [
            (box, leader)
            for box, leader in _places(end, size, unit, near)
            if frame.contains(*box.min) and frame.contains(*box.max)
            if not box.count_overlaps([*taken, *others]) and not any(_crosses(leader, other) for other in foreign)
        ]
        clear = [place for place in free if not _crosses(lines, place[0])]
        if not clear and (near or not free):
            for written in labels:
                written.remove()
            return False
        box, leader = (clear or free)[0]
        label.set_position(tuple((box.get_points().mean(axis=0) - end) / unit))
        taken.append(box)
        lines += leader
    for leader in lines[len(paths) :]:
        x, y = ax.transData.inverted().transform(leader.vertices).T
        ax.plot(x, y, color=GREY, linewidth=0.4, zorder=1.5, label="_to a label")
    return True


def _places(
    end: NDArray[np.float64], size: NDArray[np.float64], unit: float, near: bool
) -> Iterator[tuple[Bbox, list[Path]]]:
    """Yield the boxes of a label of this size around a point, the nearest first, and the line to it if it is far."""
    for distance in _NEAR if near else _NEAR + _FAR:
        for angle in _ANGLES:
            way = np.array([math.cos(angle), math.sin(angle)])
            centre = end + distance * unit * way + np.clip(1.5 * way, -1, 1) * size / 2
            box = Bbox([centre - size / 2, centre + size / 2])
            yield box, [Path([end, end.clip(box.min, box.max)])] if distance in _FAR else []


def _crosses(lines: Sequence[Path], box: Bbox) -> bool:
    return any(line.intersects_bbox(box, filled=False) for line in lines)

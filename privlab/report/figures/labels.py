"""Labels of points that keep clear of one another, of all points, and of the lines between them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from privlab.report.figures.style import GREY, SMALL

Floats = NDArray[np.float64]

_NEAR_DISTANCES = (3, 5)
"""Distances, in points (1/72 inch), at which it is clear without a line which point a label names."""

_FAR_DISTANCES = (8, 12, 17, 23, 30, 38, 47, 57, 68)
"""Distances of labels from which a thin line leads to their points."""

_ANGLES = np.array([0, 8, 4, 12, 2, 14, 6, 10, 1, 15, 7, 9, 3, 13, 5, 11]) * math.pi / 8
"""Directions in the order in which they are tried: right, left, above, below, and between."""

_MARK, _LINE, _LABEL_GAP = 2.6, 0.4, 7.0
"""In points: what a mark keeps free on each side; what a line does; distance of near labels from other points."""


def place_labels(
    figure: Figure,
    ax: Axes,
    joins: Sequence[Floats],
    texts: Sequence[str],
    *,
    near: bool = False,
    over_lines: bool = False,
) -> bool:
    """Write a text beside the last point of each join, clear of all points, the lines of joins, and other texts.

    Each text in turn takes the nearest free place, and a thin line leads to its point where that place is not near. If
    a text finds none, the texts take their places again in another order. Where no order succeeds, nothing is written,
    and False is returned.

    Args:
        figure: the figure of `ax`, in its final size.
        ax: the axes, in their final limits and scales.
        joins: the points of each label, n × 2 in data coordinates, which a line joins.
        texts: one for each join.
        near: whether a text may only be within 5 points (1/72 inch) of its own point, and must keep 7 from others.
        over_lines: whether texts may lie on the lines of joins.
    """
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # this fixes the layout, and so the places of the points
    unit = figure.dpi / 72
    paths = [ax.transData.transform(join) / unit for join in joins]
    ends = [join[-1].tolist() for join in joins]
    labels = [ax.annotate(text, end, (0, 0), fontsize=SMALL) for text, end in zip(texts, ends, strict=True)]
    for label in labels:
        label.set(ha="center", va="center", in_layout=False, anncoords="offset points")
    sizes = np.array([label.get_window_extent(canvas.get_renderer()).size for label in labels]) / unit
    frame = np.array(ax.get_window_extent().extents) / unit
    points = np.array([path[-1] for path in paths])
    for turns in _turns(points):
        room = _Room(frame, points, _occupied_boxes(paths, lines=not over_lines), near)
        if all(room.take(i, sizes[i]) for i in turns):
            for i, centre in room.centres.items():
                labels[i].set_position(tuple((centre - points[i]).tolist()))
            for line in room.lines:
                x, y = ax.transData.inverted().transform(line * unit).T
                ax.plot(x, y, color=GREY, linewidth=0.4, zorder=1.5, label="_to a label")
            return True
    for label in labels:
        label.remove()
    return False


def _turns(points: Floats) -> Iterator[list[int]]:
    """Yield orders in which labels are placed: as given, and sorted along four directions, ascending and descending."""
    yield list(range(len(points)))
    for way in ((1, 0), (0, 1), (1, 1), (1, -1)):
        order = np.argsort(points @ np.array(way), kind="stable").tolist()
        yield from (order, order[::-1])


def _occupied_boxes(paths: Sequence[Floats], *, lines: bool) -> Floats:
    """Return the boxes (m × 4) that must stay free: around the points of all paths and, with `lines`, between them."""
    taken = [_squares(path, _MARK) for path in paths]
    if lines:
        taken += [_squares(_along(a, b), _LINE) for path in paths for a, b in itertools.pairwise(path)]
    return np.concatenate(taken)


def _squares(centres: Floats, reach: float) -> Floats:
    return np.hstack([centres - reach, centres + reach])


def _along(a: Floats, b: Floats) -> Floats:
    """Return places along a line, at most one point (1/72 inch) apart."""
    return np.linspace(a, b, 2 + int(np.abs(b - a).max()))


@dataclass(eq=False)
class _Room:
    """The frame (x0, y0, x1, y1), the points (n × 2), the boxes that are taken (m × 4), and the labels' centres so far.

    `lines` lead from points to labels that are not near.
    """

    frame: Floats
    points: Floats
    taken: Floats
    near: bool
    centres: dict[int, Floats] = field(default_factory=dict)
    lines: list[Floats] = field(default_factory=list)

    def take(self, i: int, size: Floats) -> bool:
        """Take the nearest free place for the label of point i; return False where there is none."""
        distance, angle = np.array(
            [(d, a) for d in (_NEAR_DISTANCES if self.near else _NEAR_DISTANCES + _FAR_DISTANCES) for a in _ANGLES]
        ).T
        way = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        centres = self.points[i] + distance[:, None] * way + np.clip(1.5 * way, -1, 1) * size / 2
        boxes = np.hstack([centres - size / 2, centres + size / 2])
        for k in np.flatnonzero(self._are_free(boxes, i)):
            line = np.array([self.points[i], np.clip(self.points[i], boxes[k, :2], boxes[k, 2:])])
            is_near = distance[k] <= _NEAR_DISTANCES[-1]
            if is_near or self._is_clear(_along(*line)):
                self.centres[i] = centres[k]
                self.taken = np.vstack([self.taken, boxes[k]])
                if not is_near:
                    self.lines.append(line)
                    self.taken = np.vstack([self.taken, _squares(_along(*line), _LINE)])
                return True
        return False

    def _are_free(self, boxes: Floats, i: int) -> NDArray[np.bool_]:
        """Return which boxes lie in the frame, on nothing that is taken, and, with `near`, away from other points."""
        low, high = boxes[:, None, :2], boxes[:, None, 2:]
        inside = np.all((low >= self.frame[:2]) & (high <= self.frame[2:]), axis=(1, 2))
        apart = np.any((self.taken[:, :2] > high) | (self.taken[:, 2:] < low), axis=2)
        free = np.logical_and(inside, np.all(apart, axis=1))
        if not self.near:
            return free
        others = np.delete(self.points, i, axis=0)
        gaps = np.max(np.abs(others - np.clip(others, low, high)), axis=2)
        return np.logical_and(free, np.all(gaps >= _LABEL_GAP, axis=1))

    def _is_clear(self, line: Floats) -> bool:
        """Return whether a line crosses only the boxes on which it starts."""
        at = line[:, None]
        inside = np.array(np.all((self.taken[:, :2] < at) & (at < self.taken[:, 2:]), axis=2))
        return not inside[:, ~inside[0]].any()

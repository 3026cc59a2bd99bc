"""The style of all figures, readable in grey, and axes that mark the direction that leaks."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib.style
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from privlab.grids import KNOWN
from privlab.report.tables import metric_title

COLUMN, PAGE = 3.3, 6.9
"""Widths of a paper's column and of its page, in inches."""

SMALL = 5.5
"""Size of the smallest text, in points."""

GREY = "0.35"
_CONTROL: dict[str, Any] = {"color": GREY, "linestyle": (0, (1, 1.5)), "linewidth": 0.7}

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7A5C00")
"""Colours that the colour-blind can distinguish (Okabe and Ito 2008), and a brown one."""

MARKERS = ("o", "s", "^", "D", "v", "p", "<", ">")
"""The marker of each colour, for print in grey."""


def figure_style() -> AbstractContextManager[None]:
    """Return the context in which figures are drawn and written; afterwards a user's own settings hold again."""
    return matplotlib.style.context(["default", "privlab.report.figures.paper"])


@dataclass(frozen=True)
class Role:
    """Whose figure a mark shows. Fill, line and hatch distinguish roles even without colour.

    `kind` is the kind of the row in the leakage table.
    """

    kind: Literal["published", "paper", "worst", "attack"]
    name: str
    color: str
    face: str
    fill: Literal["none", "full", "bottom"]
    line: str
    marker: str
    hatch: str


PAPER = Role("paper", "paper's attack", "#0072B2", "#B7D7EA", "none", "-", "o", "/////")
WORST = Role("worst", "worst case", "#D55E00", "#D55E00", "full", "--", "s", "")
PUBLISHED = Role("published", "as published", "#000000", "#FFFFFF", "bottom", "none", "D", "")
OTHER = Role("attack", "other attack", "#000000", "#FFFFFF", "full", "none", ".", "\\\\\\")
MEASURED = Role("worst", "measured here", "#0072B2", "#B7D7EA", "full", "-", "o", "/////")
"""The paper's attack, run here; the worst case; what the paper printed; other attacks; and utility, which no attack
changes."""

_UNITS = {"psnr": "dB", "psnr_affine": "dB", "correct": "%"}
_LEAKS = {"higher leaks": "{}   leakier →", "lower leaks": "{}   ← leakier", "utility": "{}   more useful →"}


def with_unit(metric: str) -> str:
    """Return a metric's name and unit: "PSNR (dB)"."""
    return metric_title(metric) + (f" ({_UNITS[metric]})" if metric in _UNITS else "")


def axis_title(metric: str, beside: str = "") -> str:
    """Return a metric's name, its unit, and an arrow to where it leaks; it turns with the text of an upright axis."""
    return _LEAKS[KNOWN[metric].direction].format(with_unit(metric) + (f", {beside}" if beside else ""))


def canvas() -> tuple[Figure, Axes]:
    """Return an empty figure with one pair of axes, which `dress` gives its size."""
    figure = Figure(layout="constrained")
    return figure, figure.add_subplot()


def dress(figure: Figure, height: float, handles: Sequence[Artist], said: Iterable[str], columns: int = 2) -> None:
    """Put the legend above the axes and notes below them, and give the figure its size: a column wide, 3.3 inches.

    Args:
        figure: one pair of axes, as `canvas` returns it.
        height: height that remains for the axes, in inches.
        handles: what the legend shows, filled column by column.
        said: the notes, each of which starts a line and is wrapped.
        columns: number of columns of the legend.
    """
    figure.legends.clear()
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, handlelength=2.6, columnspacing=1.2)
    text = wrap(said, COLUMN)
    figure.supxlabel(text, fontsize=SMALL, color=GREY, x=0.01, ha="left", linespacing=1.25)
    rows = -(-len(handles) // columns)
    figure.set_size_inches(COLUMN, height + 0.13 * rows + 0.095 * (text.count("\n") + 1) + 0.52)


def wrap(lines: Iterable[str], inches: float) -> str:
    """Return lines in the small size, wrapped to a width in inches."""
    return "\n".join(part for line in lines for part in textwrap.wrap(line, int(inches * 24), break_on_hyphens=False))


@dataclass(frozen=True)
class Scale:
    """Where scores are drawn on an axis: infinite ones at `top`, and zeros of a logarithmic axis at `bottom`.

    Both are infinite where no score needs them. `finite` holds the least and the greatest finite value that is shown.
    """

    log: bool
    finite: tuple[float, float]
    top: float = math.inf
    bottom: float = -math.inf

    @classmethod
    def of(cls, metric: str, values: Iterable[float]) -> "Scale":
        """Return the scale of a metric; that of errors may be logarithmic, as exact attacks have tiny ones."""
        return cls.over(values, log=KNOWN[metric].direction == "lower leaks")

    @classmethod
    def over(cls, values: Iterable[float], *, log: bool) -> "Scale":
        """Return the scale of an axis; it is logarithmic if `log` allows that and values ≥ 0 span over two decades."""
        known = [float(value) for value in values if not math.isnan(value)]
        finite = [value for value in known if math.isfinite(value)] or [0.0, 1.0]
        positive = [value for value in finite if value > 0]
        low, high = min(finite), max(finite)
        log = log and low >= 0 and bool(positive) and high > 100 * min(positive)
        top, bottom = math.inf, -math.inf
        if math.inf in known:
            top = high * 10 if log else high + 0.15 * ((high - low) or abs(high) or 1.0)
        if log:
            bottom = min(positive) / 10 if low == 0 else bottom
            low = min(positive)
        return cls(log, (low, high), top, bottom)

    def place(self, values: Any) -> Any:  # noqa: ANN401
        """Return where a score, or each score of an array, is drawn."""
        return np.clip(np.asarray(values, dtype=float), self.bottom, self.top)

    def apply(self, ax: Axes, which: Literal["x", "y"]) -> None:
        """Give an axis this scale, and label the places of ∞ and 0 besides the ticks of finite values."""
        axis = ax.xaxis if which == "x" else ax.yaxis
        if self.log:
            ax.set(**{f"{which}scale": "log"})
        ends = {place: name for place, name in ((self.bottom, "0"), (self.top, "∞")) if math.isfinite(place)}
        if ends:
            low, high = axis.get_view_interval()
            least = self.finite[0] if self.bottom in ends else low
            ticks = [t for t in axis.get_majorticklocs() if max(low, least) <= t <= min(high, self.finite[1])]
            names = list(axis.get_major_formatter().format_ticks(ticks))
            axis.set_ticks([*ticks, *ends], [*names, *ends.values()])


def control_line(ax: Axes, level: float, scale: Scale, *, upright: bool = False) -> list[Line2D]:
    """Draw a line at `level`, the leakiest control's mean, and return its part of the legend; nothing where it is NaN.

    Args:
        ax: the axes.
        level: the control's mean, in units of the metric; NaN where no control was measured.
        scale: the scale of the metric's axis, by which the line is placed.
        upright: whether the metric is on the x axis, and the line vertical.
    """
    if math.isnan(level):
        return []
    draw = ax.axvline if upright else ax.axhline
    return [draw(scale.place(level).item(), zorder=2.1, label="leakiest control", **_CONTROL)]


def bar_style(role: Role) -> dict[str, Any]:
    """Return matplotlib's keyword arguments for the bars of a role."""
    return {"facecolor": role.face, "hatch": role.hatch, "edgecolor": "black", "linewidth": 0.5}


def look(role: Role, color: str | None = None, marker: str | None = None) -> dict[str, Any]:
    """Return the keyword arguments of `Axes.plot` for the marks of a role.

    Line and fill show the role; the marker of a group of cases, and with it the colour, shows the group.

    Args:
        role: whose figure the marks show.
        color: that of the group; without it the role's own.
        marker: that of the group; without it the role's own.
    """
    return {
        "color": color or role.color,
        "marker": marker or role.marker,
        "linestyle": role.line,
        "fillstyle": role.fill,
        "markerfacecoloralt": "white",
        "markeredgewidth": 0.5 if role.fill == "full" else 0.8,
        "markeredgecolor": "white" if role.fill == "full" else color or role.color,  # marks that overlap stay apart
        "label": role.name,
    }

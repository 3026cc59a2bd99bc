"""Claims and distributions: a bar or a box in each of many rows, which stand under headings from top to bottom."""

import itertools
import math
from collections.abc import Sequence

import matplotlib.figure
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import NDArray

from privlab.base import PrivlabError
from privlab.grids import KNOWN, Figure
from privlab.report.figures import style
from privlab.report.figures.data import ENDS, control_of, names_of, notes, scores_of
from privlab.report.tables import SINGLE, WORST, Results, figure_text
from privlab.report.tables.cells import decimals

_BAR, _BAR_GAP = 0.11, 0.06
"""Heights of a bar, and of the gap between cases, in inches."""

_NAMES = 0.95
"""The width to which the names of cases are wrapped, in inches."""


def draw_claim(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw for each case what the paper printed, what its attack reaches here, and the worst case, with intervals.

    The figures are next to the bars, with the attack behind the worst case, unless it is the same in all
    cases.
    """
    y, cases = figure.y, range(len(results.cases))
    scores = scores_of(results, y)
    if scores.loc[scores.role == style.PUBLISHED, "mean"].isna().all():
        raise PrivlabError(f"The claim '{figure.name}' needs published figures of {y}. Found none in '{results.name}'.")
    roles = [style.PUBLISHED, *(role for role in scores.role.unique() if role is not style.PUBLISHED)]
    scores = scores.assign(place=scores.role.map(roles.index)).sort_values(["case", "place"])
    control = control_of(results, cases)
    scale = style.Scale.over([0.0, control, *scores[ENDS].to_numpy().flat], log=False)
    names = [style.wrap([name], _NAMES) for name in names_of(results, grouped=True)]
    heights = [max(len(roles) * _BAR, _LINE * (name.count("\n") + 1)) for name in names]
    picture, ax = style.canvas()
    middles, height = _stack(ax, [case.group or "" for case in results.cases], names, heights, _BAR_GAP)
    ax.grid(axis="x")
    behind = _most_often(results, y)
    attacks = set(behind.values())
    for row in scores.itertuples():
        at = middles[row.case] + (row.place - (len(roles) - 1) / 2) * _BAR
        if not math.isnan(row.mean):
            mean, low, high = scale.place([row.mean, row.low, row.high])
            ax.barh(at, mean, 0.86 * _BAR, label=row.role.name, **style.bar_style(row.role))
            if not np.isnan(low):
                interval = {"color": "black", "linewidth": 0.9, "marker": "|", "markersize": 2.5, "label": "_interval"}
                ax.plot([low, high], [at, at], **interval)
        beside = _bar_text(results, row.case, row.role, row.mean)
        if row.role is style.WORST and row.case in behind and len(attacks) > 1:
            beside += f"  {behind[row.case]}"
        ax.text(1.02, at, beside, transform=ax.get_yaxis_transform(), va="center", fontsize=style.SMALL - 0.5)
    line = style.control_line(ax, control, scale, upright=True)
    scale.apply(ax, "x")
    ax.set_xlabel(style.axis_title(y))
    by = {style.PAPER: results.layout.paper_attack, style.WORST: next(iter(attacks)) if len(attacks) == 1 else None}
    named = {role: f"{role.name} ({attack})" if (attack := by.get(role)) else role.name for role in roles}
    handles = [*(Patch(label=name, **style.bar_style(role)) for role, name in named.items()), *line]
    said = notes(results, cases, f"Lines: {results.layout.interval * 100:g} % intervals of the mean.")
    style.dress(picture, height, handles, said)
    return picture


def _most_often(results: Results, metric: str) -> dict[int, str]:
    """Return for each case the attack that is the worst case of most images."""
    worst = {row.case: row.leakiest.get(metric, {}) for row in results.rows if row.kind == "worst"}
    return {case: max(sorted(count), key=lambda name: count[name]) for case, count in worst.items() if count}


def _bar_text(results: Results, case: int, role: style.Role, mean: float) -> str:
    """Return the text next to a bar: its figure, or "cannot run"."""
    metric, row = results.layout.columns[0], results.row(case, role.kind)
    if row is not None and row.refused and not row.images and role is not style.WORST:
        return "cannot run"
    in_per_cent = not KNOWN[metric].arrow
    return figure_text(mean, 1 if in_per_cent else decimals(results.layout, metric))


_ROW, _ROW_GAP = 0.115, 0.02
"""Heights of a row, and of the gap under it, in inches."""

_POINTS = 100
"""Most images that a row shows as dots; of more images it shows as many quantiles, the extremes included."""

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, modulo 1, spread evenly


def draw_distribution(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw the scores of all images: a row per case and attack, with quartiles, median, range, and dots for images.

    A case has a row for the paper's attack, then for each other attack, and then for the worst case.
    """
    metric, paper = figure.y, results.layout.paper_attack
    images = results.scored.images
    images = images.loc[~images.control & images[metric].notna() & (images.attack != SINGLE)]
    images = images.loc[images.image != ""]  # "": a mean, of no known image
    place = np.select([images.attack == WORST, images.attack == paper], [2, 0], 1)
    rows = images.assign(place=place).groupby(["case", "place", "attack", "external"])[metric]
    scores = {key: values.to_numpy(np.float64) for key, values in rows}
    roles = {key: (style.PAPER, style.OTHER, style.WORST)[key[1]] for key in scores}
    cases = sorted({key[0] for key in scores})
    control = control_of(results, cases)
    scale = style.Scale.of(metric, [control, *itertools.chain(*(values.tolist() for values in scores.values()))])
    picture, ax = style.canvas()
    ax.grid(axis="x")
    ax.use_sticky_edges = False  # boxes have no zero to start from
    names = names_of(results) if len(results.cases) > 1 else [""]
    attacks = [attack + (" †" if external else "") for _, _, attack, external in scores]
    middles, height = _stack(ax, [names[key[0]] for key in scores], attacks, [_ROW] * len(scores), _ROW_GAP)
    for at, (key, values) in zip(middles, scores.items(), strict=True):
        _draw_box(ax, at, scale.place(values), roles[key])
    handles: list[Artist] = [Patch(label=role.name, **style.bar_style(role)) for role in dict.fromkeys(roles.values())]
    handles += style.control_line(ax, control, scale, upright=True)
    scale.apply(ax, "x")
    ax.set_xlabel(style.axis_title(metric))
    dots = f"{_POINTS} quantiles" if max(map(len, scores.values())) > _POINTS else "images"
    said = f"Boxes: quartiles and median; lines: range; dots: {dots}."
    style.dress(picture, height, handles, notes(results, cases, said))
    return picture


def _draw_box(ax: Axes, at: float, places: NDArray[np.float64], role: style.Role) -> None:
    """Draw a box from the first to the third quartile, the median, a line over the range, and the points."""
    low, first, median, third, high = np.quantile(places, [0, 0.25, 0.5, 0.75, 1])
    ax.plot([low, high], [at, at], color="black", linewidth=0.6, zorder=2, label="_range")
    ax.barh(at, third - first, 0.5 * _ROW, left=first, zorder=2.2, label=role.name, **style.bar_style(role))
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


def _stack(
    ax: Axes, headings: Sequence[str], names: Sequence[str], heights: Sequence[float], gap: float
) -> tuple[list[float], float]:
    """Name the rows on the y axis, whose unit is inches from the top; return each row's middle, and the whole height.

    The heading of a row, if it has one, is written above the first row that it belongs to. The gap is under each row.
    """
    middles, y = list[float](), 0.0
    for heading, rows in itertools.groupby(zip(headings, heights, strict=True), key=lambda row: row[0]):
        if heading:
            text = style.wrap([heading], _HEADS)
            high = _HEAD + _LINE * text.count("\n")
            look = {"fontsize": style.SMALL + 0.5, "weight": "bold", "va": "center"}
            written = ax.text(0.01, y + high / 2, text, transform=ax.get_yaxis_transform(), **look)
            written.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})  # over grid lines
            y += high
        for _, height in rows:
            middles.append(y + height / 2)
            y += height + gap
    ax.set_ylim(y, -gap)
    ax.set_yticks(middles, names)
    ax.tick_params(axis="y", length=0)
    return middles, y

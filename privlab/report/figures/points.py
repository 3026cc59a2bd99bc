"""Curves and trade-offs: a score against an option, such as γ, or against what a defense costs in utility."""

import math
from collections.abc import Iterable, Mapping, Sequence

import matplotlib.figure
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from privlab.base import PrivlabError, check_name
from privlab.defenses import DEFENSES
from privlab.grids import KNOWN, Figure
from privlab.report.figures import style
from privlab.report.figures.data import ENDS, control_of, names_of, notes, scores_of
from privlab.report.figures.labels import place_labels
from privlab.report.tables import CaseFacts, Results

_CURVE_HEIGHT, _TRADE_OFF_HEIGHT = 1.6, 2.0
"""Heights of the axes, in inches."""


def draw_curve(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw a score against an option: for each group of cases a line for the paper's attack and one for the worst case.

    Bands are intervals of the mean; marks without a line are what the paper printed. Cases that differ in more than the
    option form groups; cases without the option are left out.
    """
    points = _points(results, figure.name, figure.x or "")
    marks = scores_of(results, figure.y).merge(points, on="case")
    marks = marks[marks.groupby(["role", "group"], sort=False)["mean"].transform("count") > 0]
    cases = points.case.tolist()
    control = control_of(results, cases)
    scale = style.Scale.of(figure.y, [control, *marks[ENDS].to_numpy().flat])
    picture, ax = style.canvas()
    ax.grid(axis="y")
    # a single group has the colours of the roles; each of several has one colour and marker
    groups = points.group.unique()
    looks = dict(zip(groups, zip(style.PALETTE, style.MARKERS, strict=True), strict=False)) if len(groups) > 1 else {}
    for (role, group), line in marks.groupby(["role", "group"], sort=False):
        line = line.sort_values("x")
        mean, low, high = scale.place(line[ENDS]).T
        color, marker = looks.get(group, (role.color, role.marker))
        if role is not style.PUBLISHED:
            ax.fill_between(line.x, low, high, color=color, alpha=0.14, linewidth=0)
        ax.plot(line.x, mean, **style.look(role, color, marker), zorder=2.5)
        for x, y in zip(line.x[line.external], mean[line.external], strict=True):
            ax.annotate("†", (x, y), (3, 2), textcoords="offset points", fontsize=style.SMALL)
    control_handle = style.control_line(ax, control, scale)
    scale.apply(ax, "y")
    _scale_x(ax, points.x)
    ax.set_xlabel(_title(results.cases[cases[0]], figure.x or ""))
    ax.set_ylabel(style.axis_title(figure.y))
    shown = {group: looks[group] for group in marks.group.unique() if looks}
    handles = _legend(marks.role.unique(), shown, control_handle)
    said = notes(results, cases, f"Bands: {results.layout.interval * 100:g} % intervals of the mean.")
    style.dress(picture, _CURVE_HEIGHT, handles, said)
    return picture


def _scale_x(ax: Axes, x: pd.Series) -> None:
    """Make the x axis logarithmic where values span a factor of ten and their ratios are more even than their steps.

    An axis with a value of zero is linear from there to the smallest other value.
    """
    values = np.unique(x)
    positive = values[values > 0]
    if values[0] < 0 or len(positive) < 2 or positive[-1] < 10 * positive[0]:
        return
    steps, ratios = np.diff(positive), np.diff(np.log(positive))
    if positive[-1] <= 100 * positive[0] and ratios.max() / ratios.min() > steps.max() / steps.min():
        return
    if values[0] > 0:
        ax.set_xscale("log")
    else:
        ax.set_xscale("symlog", linthresh=positive[0])


def _legend(
    roles: Iterable[style.Role], groups: Mapping[str, tuple[str, str]], control: Sequence[Line2D]
) -> list[Line2D]:
    """Return the legend: several groups in a first column, and then the roles, which are grey if there are groups."""
    if not groups:
        return [*(Line2D([], [], **style.look(role)) for role in roles), *control]
    first = [Line2D([], [], color=c, marker=m, linestyle="none", label=group) for group, (c, m) in groups.items()]
    second = [*(Line2D([], [], **style.look(role, style.GREY, style.MARKERS[0])) for role in roles), *control]
    empty = [Line2D([], [], linestyle="none", label=" ") for _ in range(abs(len(first) - len(second)))]
    return [*first, *second, *empty] if len(first) > len(second) else [*first, *empty, *second]


def _points(results: Results, name: str, option: str) -> pd.DataFrame:
    """Return the cases whose option is a number, `x`, with the `group` of what else they differ in."""
    xs = pd.Series([_number(case.options.get(option)) for case in results.cases], dtype=float, name="x")
    points = xs.rename_axis("case").reset_index().dropna()
    if points.empty:
        known = dict.fromkeys(key for case in results.cases for key in case.options)
        check_name("x", option, known)
        found = ", ".join(dict.fromkeys(repr(case.options[option]) for case in results.cases if option in case.options))
        raise PrivlabError(f"The curve '{name}' needs numbers on x. Found {option} = {found}.")
    groups = _group_names([results.cases[case] for case in points.case], points.x.tolist(), option)
    points = points.assign(group=groups)
    if (count := points.group.nunique()) > len(style.MARKERS):
        raise PrivlabError(f"The curve '{name}' can show {len(style.MARKERS)} groups of cases. Found {count}.")
    for (_, x), same in points.groupby(["group", "x"], sort=False):
        if len(same) > 1:
            both = " and ".join(f"'{results.cases[case].label}'" for case in same.case[:2])
            raise PrivlabError(f"The curve '{name}' needs one case for each x and group. Found {both} at {x:g}.")
    return points


def _number(value: str | float | int | None) -> float | None:
    """Return an option as a number, or None; of `set = "std=0.5"` the number is 0.5."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value.rpartition("=")[2] if isinstance(value, str) else value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


_OPTIONS = {
    "gamma": "γ (share of patches shuffled)",
    "std": "standard deviation of the noise",
    "sigma": "σ of the blur (pixels)",
    "radius": "radius kept (cycles per pixel)",
    "share": "share of tokens shuffled",
    "cut_layer": "ℓ (blocks that the client holds)",
}


def _title(case: CaseFacts, option: str) -> str:
    """Return the title of the x axis; for `set = "gaussian-noise.std=0.5"` it is that of std."""
    name, equals, _ = str(case.options[option]).rpartition("=")
    option = name.rpartition(".")[2] if equals else option
    plain = option.replace("_", " ")
    ours = {*str(case.options.get("defense", "auto")).split("+")} <= {*DEFENSES, "auto"}
    return _OPTIONS.get(option, plain) if ours else plain  # another's option may mean something else


def _group_names(cases: Sequence[CaseFacts], xs: Sequence[float], option: str) -> list[str]:
    """Return for each case the values of the other options in which cases differ, and its group if need be."""
    keys = [key for key in dict.fromkeys(key for case in cases for key in case.options) if key != option]
    keys = [key for key in keys if len({str(case.options.get(key)) for case in cases}) > 1]
    names = [", ".join(_value_text(key, case.options[key]) for key in keys if key in case.options) for case in cases]
    if len(set(zip(names, xs, strict=True))) == len(cases):
        return names
    return [", ".join(filter(None, (name, case.group))) for name, case in zip(names, cases, strict=True)]


def _value_text(key: str, value: str | float | int) -> str:
    plain = f"{value:g}" if isinstance(value, float) else f"{value}"
    return plain if key in ("model", "defense", "set") else f"{key.replace('_', ' ')} {plain}"


def draw_trade_off(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw a metric of leakage against one of utility (`correct`, unless x names another): a labelled point per case.

    A line joins the points of the paper's attack and of the worst case. Where no utility was measured, the published
    one is shown, and the axis says so; cases that lack a figure are left out. If names find no room, numbers are at
    the points, with a list beneath.
    """
    x, y = results.layout.columns[1], figure.y
    points, across = scores_of(results, y), scores_of(results, x)
    points, by = points[points.role != style.PUBLISHED], ["kind", "case"]
    utility = None  # whose utility is shown, which no attack changes
    if not KNOWN[x].arrow:
        is_measured = across.loc[across.role == style.MEASURED, "mean"].notna().any()
        utility, by = style.MEASURED if is_measured else style.PUBLISHED, ["case"]
        across = across[across.role == utility]
    across = across[[*by, "mean"]].rename(columns={"mean": "x"})
    points = points.merge(across, on=by).rename(columns={"mean": "y"})
    roles = points.role.unique()
    points = points.dropna(subset=["x", "y"])
    cases = sorted(points.case.unique().tolist())
    if not cases:
        raise PrivlabError(f"The trade-off '{figure.name}' needs cases that have both {x} and {y}. Found none.")
    control = control_of(results, cases)
    scales = style.Scale.of(x, points.x), style.Scale.of(y, [control, *points.y])
    points = points.assign(x=scales[0].place(points.x), y=scales[1].place(points.y))
    picture, ax = style.canvas()
    ax.grid()
    handles: list[Line2D] = []
    for role in roles:
        own = points[points.role == role]
        handles += ax.plot(own.x, own.y, zorder=3, **{**style.look(role), "linestyle": "none"})
    joins = [of_case[["x", "y"]].to_numpy() for _, of_case in points.groupby("case")]
    for join in joins:
        ax.plot(join[:, 0], join[:, 1], color=style.GREY, linewidth=0.5, zorder=1.5, label="_join")
    handles += style.control_line(ax, control, scales[1])
    ax.margins(0.12)
    if not scales[0].log:
        ax.locator_params(axis="x", nbins=6)
    scales[0].apply(ax, "x")
    scales[1].apply(ax, "y")
    ax.set_xlabel(style.axis_title(x, "as published" if utility is style.PUBLISHED else ""))
    ax.set_ylabel(style.axis_title(y))
    said = notes(results, cases, "Means over images.")
    style.dress(picture, _TRADE_OFF_HEIGHT, handles, said, columns=3)
    names = [names_of(results)[case] for case in cases]
    if not place_labels(picture, ax, joins, names, near=True):
        key = "; ".join(f"{n} {name}".replace(" ", "\N{NO-BREAK SPACE}") for n, name in enumerate(names, 1))
        style.dress(picture, _TRADE_OFF_HEIGHT, handles, [f"{key}.", *said], columns=3)
        numbers = [f"{n}" for n in range(1, len(names) + 1)]
        if not place_labels(picture, ax, joins, numbers):
            raise PrivlabError(f"The trade-off '{figure.name}' has {len(names)} cases: more than it has room to name.")
    return picture

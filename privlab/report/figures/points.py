"""Curves and trade-offs: a score against an option, such as γ, or against what a defense costs in utility."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import matplotlib.figure
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from privlab.base import PrivlabError, check_name
from privlab.defenses import DEFENSES
from privlab.grids import KNOWN, Figure
from privlab.report.figures.data import control_of, is_external, names_of, notes, roles_of, score_of, with_columns
from privlab.report.figures.labels import place_labels
from privlab.report.figures.style import (
    GREY,
    MARKERS,
    MEASURED,
    PALETTE,
    PUBLISHED,
    SMALL,
    Role,
    Scale,
    axis_title,
    canvas,
    control_line,
    dress,
    look,
)
from privlab.report.tables import CaseFacts, Results, Score

Groups = Mapping[str, Sequence[tuple[float, int]]]
"""The cases of each group, as (value of the option, number of the case), in ascending order."""

_CURVE_HEIGHT = 1.6
"""Height of the axes, in inches."""


@dataclass(frozen=True)
class _Series:
    """The marks of one role in one group, and which of them were measured elsewhere."""

    role: Role
    group: str
    color: str
    marker: str
    x: Sequence[float]
    scores: Sequence[Score]
    external: Sequence[bool]


def draw_curve(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw a score against an option: for each group of cases a line for the paper's attack and one for the worst case.

    Bands are intervals of the mean; marks without a line are what the paper printed. Cases that differ in more than the
    option form groups; cases without the option are left out.
    """
    option = figure.x or ""
    groups = _groups(results, figure.name, option)
    results = with_columns(results, figure, figure.y)
    cases = [case for points in groups.values() for _, case in points]
    series = list(_series(results, figure.y, groups))
    control = control_of(results, cases)
    scores = [score for one in series for score in one.scores]
    scale = Scale.of(figure.y, [control, *(v for score in scores for v in (score.mean, score.low, score.high))])
    picture, ax = canvas()
    ax.grid(axis="y")
    for one in series:
        _draw_series(ax, one, scale)
    line = control_line(ax, control, scale)
    scale.apply(ax, "y")
    xs = [x for points in groups.values() for x, _ in points]
    if min(xs) > 0 and max(xs) > 100 * min(xs):
        ax.set_xscale("log")
    ax.set_xlabel(_title(results.cases[cases[0]], option))
    ax.set_ylabel(axis_title(figure.y))
    said = notes(results, cases, f"Bands: {results.layout.interval * 100:g} % intervals of the mean.")
    dress(picture, _CURVE_HEIGHT, _handles(series, line), said)
    return picture


def _groups(results: Results, name: str, option: str) -> Groups:
    """Return the cases whose option is a number, grouped by what else they differ in."""
    at = {i: _number(case.options.get(option)) for i, case in enumerate(results.cases)}
    at = {i: x for i, x in at.items() if x is not None}
    if not at:
        known = dict.fromkeys(key for case in results.cases for key in case.options)
        check_name("x", option, known)
        found = ", ".join(dict.fromkeys(repr(case.options[option]) for case in results.cases if option in case.options))
        raise PrivlabError(f"The curve '{name}' needs numbers on x. Found {option} = {found}.")
    groups: dict[str, list[tuple[float, int]]] = {}
    for i, group in zip(at, _group_names([results.cases[i] for i in at], list(at.values()), option), strict=True):
        groups.setdefault(group, []).append((at[i], i))
    if len(groups) > len(MARKERS):
        raise PrivlabError(f"The curve '{name}' can show {len(MARKERS)} groups of cases. Found {len(groups)}.")
    for points in groups.values():
        points.sort()
        for (x, first), (again, second) in itertools.pairwise(points):
            if x == again:
                both = f"'{results.cases[first].label}' and '{results.cases[second].label}'"
                raise PrivlabError(f"The curve '{name}' needs one case for each x and group. Found {both} at {x:g}.")
    return groups


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


def _series(results: Results, metric: str, groups: Groups) -> Iterator[_Series]:
    """Yield what is drawn: a single group takes the colours of the roles, several take one colour and marker each."""
    for role in (*roles_of(results, metric), PUBLISHED):
        for i, (group, points) in enumerate(groups.items()):
            scores = [score_of(results, case, role, metric) for _, case in points]
            if not all(math.isnan(score.mean) for score in scores):
                color, marker = (role.color, role.marker) if len(groups) == 1 else (PALETTE[i], MARKERS[i])
                external = [is_external(results.row(case, role.kind)) for _, case in points]
                yield _Series(role, group, color, marker, [x for x, _ in points], scores, external)


def _draw_series(ax: Axes, one: _Series, scale: Scale) -> None:
    if one.role is not PUBLISHED:
        low, high = (scale.place([getattr(score, end) for score in one.scores]) for end in ("low", "high"))
        ax.fill_between(one.x, low, high, color=one.color, alpha=0.14, linewidth=0)
    means = scale.place([score.mean for score in one.scores])
    ax.plot(one.x, means, **look(one.role, one.color, one.marker), zorder=2.5)
    for x, y, external in zip(one.x, means.tolist(), one.external, strict=True):
        if external:
            ax.annotate("†", (x, y), (3, 2), textcoords="offset points", fontsize=SMALL)


def _handles(series: Sequence[_Series], control: Sequence[Line2D]) -> list[Line2D]:
    """Return the legend: the groups in a first column, if there are several, and then the roles, in grey."""
    roles = {one.role: (one.color, one.marker) for one in series}
    groups = {one.group: (one.color, one.marker) for one in series}
    if len(groups) == 1:
        return [*(Line2D([], [], **look(role, *of_role)) for role, of_role in roles.items()), *control]
    first = [Line2D([], [], color=c, marker=m, linestyle="none", label=group) for group, (c, m) in groups.items()]
    second = [*(Line2D([], [], **look(role, GREY, MARKERS[0])) for role in roles), *control]
    empty = [Line2D([], [], linestyle="none", label=" ") for _ in range(abs(len(first) - len(second)))]
    return [*first, *second, *empty] if len(first) > len(second) else [*first, *empty, *second]


_Place = tuple[float, float]

_TRADE_OFF_HEIGHT = 2.0
"""Height of the axes, in inches."""


def draw_trade_off(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw a metric of leakage against one of utility (`correct`, unless x names another): a labelled point per case.

    A line joins the points of the paper's attack and of the worst case. Where no utility was measured, the published
    one is shown, and the axis says so; cases that lack a figure are left out. If labels find no room beside their
    points, numbers stand there, with a list beneath.
    """
    x, y = figure.x or "correct", figure.y
    check_name("metric of a trade-off", x, KNOWN)
    results = with_columns(results, figure, y, x)
    utility = _whose(results, x)
    points = {role: _points(results, (utility or role, x), (role, y)) for role in roles_of(results, y)}
    cases = sorted({case for of_role in points.values() for case in of_role})
    if not cases:
        raise PrivlabError(f"The trade-off '{figure.name}' needs cases that have both {x} and {y}. Found none.")
    control = control_of(results, cases)
    every = [point for of_role in points.values() for point in of_role.values()]
    scales = Scale.of(x, (p[0] for p in every)), Scale.of(y, [control, *(p[1] for p in every)])
    picture, ax = canvas()
    ax.grid()
    joins = _draw_points(ax, points, scales)
    handles = [line for line in ax.get_lines() if line.get_linestyle() == "None"]
    handles += control_line(ax, control, scales[1])
    ax.margins(0.12)
    if not scales[0].log:
        ax.locator_params(axis="x", nbins=6)
    scales[0].apply(ax, "x")
    scales[1].apply(ax, "y")
    ax.set_xlabel(axis_title(x, "as published" if utility is PUBLISHED else ""))
    ax.set_ylabel(axis_title(y))
    said = notes(results, cases, "Means over images.")
    dress(picture, _TRADE_OFF_HEIGHT, handles, said, columns=3)
    names = [names_of(results)[case] for case in cases]
    if not place_labels(picture, ax, joins, names, near=True):
        key = "; ".join(f"{n} {name}".replace(" ", "\N{NO-BREAK SPACE}") for n, name in enumerate(names, 1))
        dress(picture, _TRADE_OFF_HEIGHT, handles, [f"{key}.", *said], columns=3)
        numbers = [f"{n}" for n in range(1, len(names) + 1)]
        if not any(place_labels(picture, ax, joins, numbers, over_lines=over) for over in (False, True)):
            raise PrivlabError(f"The trade-off '{figure.name}' has {len(names)} cases: more than it has room to name.")
    return picture


def _whose(results: Results, x: str) -> Role | None:
    """Return whose utility is shown: the measured one, or else the paper's; None where x is a metric of leakage."""
    if KNOWN[x].arrow:
        return None
    cases = range(len(results.cases))
    return PUBLISHED if all(math.isnan(score_of(results, i, MEASURED, x).mean) for i in cases) else MEASURED


def _points(results: Results, x: tuple[Role, str], y: tuple[Role, str]) -> dict[int, _Place]:
    """Return the places of the cases that have both figures."""
    cases = range(len(results.cases))
    found = {i: (score_of(results, i, *x).mean, score_of(results, i, *y).mean) for i in cases}
    return {i: point for i, point in found.items() if not any(math.isnan(value) for value in point)}


def _draw_points(
    ax: Axes, points: Mapping[Role, Mapping[int, _Place]], scales: tuple[Scale, Scale]
) -> list[NDArray[np.float64]]:
    """Draw the points of all roles, joined within a case, and return the points of each case."""
    places: dict[int, list[_Place]] = {}
    for role, of_role in points.items():
        for case, (x, y) in of_role.items():
            places.setdefault(case, []).append((scales[0].at(x), scales[1].at(y)))
        drawn = np.array([places[case][-1] for case in of_role]).reshape(-1, 2)
        ax.plot(drawn[:, 0], drawn[:, 1], zorder=3, **{**look(role), "linestyle": "none"})
    joins = [np.array(places[case]) for case in sorted(places)]
    for join in joins:
        ax.plot(join[:, 0], join[:, 1], color=GREY, linewidth=0.5, zorder=1.5, label="_join")
    return joins

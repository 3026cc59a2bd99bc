"""Curves: a score against an option, such as γ, the noise or the fraction kept."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import matplotlib.figure
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from privlab.base import PrivlabError, check_name
from privlab.grids import Figure
from privlab.report.figures.data import control_of, is_external, notes, roles_of, score_of, with_columns
from privlab.report.figures.style import (
    GREY,
    MARKERS,
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
    option_title,
)
from privlab.report.tables import CaseFacts, Results, Score

Groups = Mapping[str, Sequence[tuple[float, int]]]
"""The cases of each group, as (value of the option, number of the case), in ascending order."""

_HEIGHT = 1.6
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

    Raises:
        PrivlabError: where the option is no number, two cases of a group share its value, there are more groups than
            markers, or nothing was measured.
    """
    option = figure.x or ""
    groups = _groups(results, figure.name, option)
    results = with_columns(results, figure, figure.y)
    cases = [case for points in groups.values() for _, case in points]
    series = list(_series(results, figure.y, groups))
    control = control_of(results, cases, figure.y)
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
    dress(picture, _HEIGHT, _handles(series, line), said)
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


def _title(case: CaseFacts, option: str) -> str:
    """Return the title of the x axis; for `set = "gaussian-noise.std=0.5"` it is that of std."""
    name, equals, _ = str(case.options[option]).rpartition("=")
    return option_title(name.rpartition(".")[2] if equals else option)


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
                external = [is_external(results, case, role) for _, case in points]
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

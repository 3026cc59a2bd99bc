"""Trade-offs: what a defense costs in utility, against what still leaks."""

import math
from collections.abc import Mapping

import matplotlib.figure
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from privlab.base import PrivlabError, check_name
from privlab.grids import KNOWN, Figure
from privlab.report.figures.data import control_of, names_of, notes, roles_of, score_of, with_columns
from privlab.report.figures.labels import place_labels
from privlab.report.figures.style import (
    GREY,
    MEASURED,
    PUBLISHED,
    Role,
    Scale,
    axis_title,
    canvas,
    control_line,
    dress,
    look,
)
from privlab.report.tables import Results

_Place = tuple[float, float]

_HEIGHT = 2.0
"""Height of the axes, in inches."""


def draw_trade_off(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw a metric of leakage against one of utility (`correct`, unless x names another): a labelled point per case.

    A line joins the points of the paper's attack and of the worst case. Where no utility was measured, the published
    one is shown, and the axis says so; cases that lack a figure are left out. If labels find no room beside their
    points, numbers stand there, with a list beneath.

    Raises:
        PrivlabError: if x is no metric, no case has both figures, or even numbers find no room.
    """
    x, y = figure.x or "correct", figure.y
    check_name("metric of a trade-off", x, KNOWN)
    results = with_columns(results, figure, y, x)
    utility = _whose(results, x)
    points = {role: _points(results, (utility or role, x), (role, y)) for role in roles_of(results, y)}
    cases = sorted({case for of_role in points.values() for case in of_role})
    if not cases:
        raise PrivlabError(f"The trade-off '{figure.name}' needs cases that have both {x} and {y}. Found none.")
    control = control_of(results, cases, y)
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
    dress(picture, _HEIGHT, handles, said, columns=3)
    names = [names_of(results)[case] for case in cases]
    if not place_labels(picture, ax, joins, names, near=True):
        key = "; ".join(f"{n} {name}".replace(" ", "\N{NO-BREAK SPACE}") for n, name in enumerate(names, 1))
        dress(picture, _HEIGHT, handles, [f"{key}.", *said], columns=3)
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

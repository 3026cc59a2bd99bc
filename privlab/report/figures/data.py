"""What figures show of the results: means with intervals by case and role, and the notes below a figure."""

import math
from collections.abc import Iterable, Sequence

from privlab.base import PrivlabError
from privlab.grids import KNOWN, Figure
from privlab.report.figures.style import MEASURED, PAPER, PUBLISHED, WORST, Role
from privlab.report.tables import Results, Row, Score, case_names
from privlab.report.tables.table import some


def score_of(results: Results, case: int, role: Role, metric: str) -> Score:
    """Return the mean of a metric over the images of a case, with its interval; a metric of utility is in per cent.

    Args:
        results: the results, with the metric as a column.
        case: the number of the case, from 0.
        role: which row of the case is read, such as the paper's attack or the worst case.
        metric: a name in `KNOWN`.
    """
    score = results.score(case, role.kind, metric)
    if KNOWN[metric].direction != "utility" or (role is PUBLISHED and score.mean > 1):
        return score  # papers print a share as such, or in per cent
    return Score(score.mean * 100, score.low * 100, score.high * 100, score.images)


def is_external(row: Row | None) -> bool:
    """Return whether a row, or an attack behind it, was measured elsewhere."""
    return row is not None and row.external is not None


def roles_of(results: Results, metric: str) -> list[Role]:
    """Return what is measured here: paper's attack and worst case; or utility alone, which no attack changes."""
    if not KNOWN[metric].arrow:
        return [MEASURED]
    return [PAPER, WORST] if results.layout.paper_attack else [WORST]


def control_of(results: Results, cases: Iterable[int]) -> float:
    """Return the mean of the first column over the cases of the leakiest control; NaN if there is none."""
    metric = results.layout.columns[0]
    if not KNOWN[metric].arrow:
        return math.nan
    of: dict[str | None, list[float]] = {}
    for row in results.rows:
        if row.kind == "control" and row.case in set(cases) and not math.isnan(row.scores[metric].mean):
            of.setdefault(row.attack, []).append(row.scores[metric].mean)
    leakiest = max if KNOWN[metric].direction == "higher leaks" else min
    return leakiest((sum(means) / len(means) for means in of.values()), default=math.nan)


def with_columns(results: Results, figure: Figure, *metrics: str) -> Results:
    """Return the results with these metrics as columns; some case must have a figure for the first one."""
    results, metric = results.laid_out(columns=metrics), metrics[0]
    roles = [*roles_of(results, metric), PUBLISHED]
    cases = range(len(results.cases))
    if all(math.isnan(score_of(results, case, role, metric).mean) for case in cases for role in roles):
        raise PrivlabError(f"The figure '{figure.name}' needs values of {metric}. Found none in '{results.name}'.")
    return results


def check_leaks(figure: Figure) -> None:
    """Check that the figure's metric is one of leakage: utility has no worst case."""
    if not KNOWN[figure.y].arrow:
        leaky = ", ".join(name for name, metric in KNOWN.items() if metric.arrow)
        raise PrivlabError(f"A {figure.kind} shows what leaks. Found y = {figure.y}. Choose from: {leaky}.")


def names_of(results: Results, *, grouped: bool = False) -> list[str]:
    """Return a name for each case, with † where it is external; without a group if cases are `grouped` in a figure."""
    names = [case.label for case in results.cases] if grouped else case_names(results)
    external = [any(is_external(results.row(i, role.kind)) for role in (PAPER, WORST)) for i in range(len(names))]
    return [name + " †" * outside for name, outside in zip(names, external, strict=True)]


_GEOMETRIES = {
    "oracle": "Moved patches are put where they fit best, alike for attacks and controls (oracle geometry).",
    "reassembled": "Shuffled patches are put in order by the adversary (reassembled geometry).",
}


def notes(results: Results, cases: Sequence[int], *said: str) -> list[str]:
    """Return the notes below a figure: number of images, geometry, failures, and what was measured elsewhere."""
    rows = [row for row in results.rows if row.case in set(cases)]
    first = list(said)
    if images := sorted({row.images for row in rows if row.kind == "worst" and row.images}):
        least = f"{images[0]} to " if len(images) > 1 else ""
        first.insert(0, f"{least}{some(images[-1], 'image')}.")
    if geometry := _GEOMETRIES.get(results.layout.geometry):
        first.append(geometry)
    lines = [" ".join(first)]
    if failed := sum(row.failed for row in rows if row.kind == "attack"):
        lines.append(f"Failed, and left out: {some(failed, 'reconstruction')}.")
    if refused := sorted({attack for row in rows if row.kind == "worst" for attack in row.refused}):
        lines.append(f"Cannot run in some cases: {', '.join(refused)}.")
    external = dict.fromkeys(row.external for row in rows if row.kind == "attack" and row.external)
    return [*lines, *(f"† measured elsewhere: {reference}" for reference in external)]

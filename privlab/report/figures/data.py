"""What figures show of the results: means with intervals by case and role, and the notes below a figure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from privlab.base import PrivlabError
from privlab.grids import KNOWN, Figure
from privlab.report.figures.style import MEASURED, PAPER, PUBLISHED, WORST, Role
from privlab.report.tables import Results, Row, Score, case_names
from privlab.report.tables.leakage import NO_SCORE


@dataclass(frozen=True)
class Levels:
    """The results that a figure is drawn from, with the metrics of its axes as columns."""

    results: Results

    def row(self, case: int, role: Role) -> Row | None:
        """Return the row of a case that a role is drawn from."""
        return next((row for row in self.results.rows if row.case == case and row.kind == role.kind), None)

    def score(self, case: int, role: Role, metric: str) -> Score:
        """Return the mean of a metric over the images of a case, with its interval; NaN where it was not measured.

        A metric of utility is returned in per cent.

        Args:
            case: the number of the case, from 0.
            role: which row of the case is read, such as the paper's attack or the worst case.
            metric: a name in `KNOWN`.
        """
        row = self.row(case, role)
        score = NO_SCORE if row is None else row.scores.get(metric, NO_SCORE)
        if KNOWN[metric].direction != "utility" or (role is PUBLISHED and score.mean > 1):
            return score  # papers print a share as such, or in per cent
        return Score(score.mean * 100, score.low * 100, score.high * 100, score.images)

    def external(self, case: int, role: Role) -> bool:
        """Return whether the row of a role, or an attack behind it, was measured elsewhere."""
        row = self.row(case, role)
        return row is not None and row.external is not None

    def roles(self, metric: str) -> list[Role]:
        """Return what is measured here: paper's attack and worst case; or utility alone, which no attack changes."""
        if not KNOWN[metric].arrow:
            return [MEASURED]
        return [PAPER, WORST] if self.results.layout.paper_attack else [WORST]

    def control(self, cases: Iterable[int], metric: str) -> float:
        """Return the mean over the cases of the leakiest control, which an attack must beat; NaN if there is none."""
        if not KNOWN[metric].arrow:
            return math.nan
        of: dict[str | None, list[float]] = {}
        for row in self.results.rows:
            if row.kind == "control" and row.case in set(cases) and not math.isnan(row.scores[metric].mean):
                of.setdefault(row.attack, []).append(row.scores[metric].mean)
        leakiest = max if KNOWN[metric].direction == "higher leaks" else min
        return leakiest((sum(means) / len(means) for means in of.values()), default=math.nan)

    def attacks(self, cases: Iterable[int], metric: str) -> dict[int, str]:
        """Return for each case the attack that is the worst case of most images."""
        worst = {case: self.row(case, WORST) for case in cases}
        counts = {case: row.leakiest.get(metric, {}) for case, row in worst.items() if row}
        return {case: max(sorted(count), key=lambda name: count[name]) for case, count in counts.items() if count}


def read_levels(results: Results, figure: Figure, *metrics: str) -> Levels:
    """Return the rows of the leakage table with these metrics.

    Raises:
        PrivlabError: if a name is no metric, or no case of the results has a figure for the first one.
    """
    levels = Levels(results.laid_out(columns=tuple(metrics)))
    cases = range(len(results.cases))
    roles = [*levels.roles(metrics[0]), PUBLISHED]
    if all(math.isnan(levels.score(case, role, metrics[0]).mean) for case in cases for role in roles):
        raise PrivlabError(f"The figure '{figure.name}' needs values of {metrics[0]}. Found none in '{results.name}'.")
    return levels


def check_leaks(figure: Figure) -> None:
    """Check that the figure's metric is one of leakage: utility has no worst case.

    Raises:
        PrivlabError: if it is a metric of utility.
    """
    if not KNOWN[figure.y].arrow:
        leaky = ", ".join(name for name, metric in KNOWN.items() if metric.arrow)
        raise PrivlabError(f"A {figure.kind} shows what leaks. Found y = {figure.y}. Choose from: {leaky}.")


def names_of(levels: Levels, *, grouped: bool = False) -> list[str]:
    """Return a name for each case, with † where it is external; without a group if cases are `grouped` in a figure."""
    results = levels.results
    names = [case.label for case in results.cases] if grouped else case_names(results)
    external = [any(levels.external(i, role) for role in (PAPER, WORST)) for i in range(len(names))]
    return [name + " †" * outside for name, outside in zip(names, external, strict=True)]


_GEOMETRIES = {
    "oracle": "Moved patches are put where they fit best, alike for attacks and controls (oracle geometry).",
    "reassembled": "Shuffled patches are put in order by the adversary (reassembled geometry).",
}


def notes(levels: Levels, cases: Sequence[int], *said: str) -> list[str]:
    """Return the notes below a figure: number of images, geometry, failures, and what was measured elsewhere."""
    rows = [row for row in levels.results.rows if row.case in set(cases)]
    images = sorted({row.images for row in rows if row.kind == "worst" and row.images})
    counted = (
        [f"{' to '.join(f'{n}' for n in dict.fromkeys((images[0], images[-1])))} image{'s' * (images[-1] > 1)}."]
        if images
        else []
    )
    geometry = _GEOMETRIES.get(levels.results.layout.geometry)
    failed = sum(row.failed for row in rows if row.kind == "attack")
    external = dict.fromkeys(row.external for row in rows if row.kind == "attack" and row.external)
    lines = [" ".join((*counted, *said, *([geometry] if geometry else [])))]
    if failed:
        lines.append(f"Failed, and left out: {failed} reconstruction{'s' if failed > 1 else ''}.")
    if refused := sorted({attack for row in rows if row.kind == "worst" for attack in row.refused}):
        lines.append(f"Cannot run in some cases: {', '.join(refused)}.")
    return [*lines, *(f"† measured elsewhere: {reference}" for reference in external)]

"""What figures show of the results: means by role and case, and the notes below a figure."""

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from privlab.grids import KNOWN
from privlab.report.figures.style import MEASURED, PAPER, PUBLISHED, WORST
from privlab.report.tables import Results, case_names
from privlab.report.tables.cells import some

ENDS = ["mean", "low", "high"]
"""The columns of `scores_of` that an axis must show."""


def scores_of(results: Results, metric: str) -> pd.DataFrame:
    """Return what was measured of a metric, and then what was published: a row for each role and case.

    Columns: role, kind (that of the role), case, mean, low, high (the ends of its interval), and external: whether the
    row, or an attack behind it, was measured elsewhere. Leakage is that of the paper's attack and of the worst case.
    Utility is in per cent, and has one role, as no attack changes it.
    """
    is_utility = not KNOWN[metric].arrow
    attacks = [PAPER, WORST] if results.layout.paper_attack else [WORST]
    rows = []
    for role in (*([MEASURED] if is_utility else attacks), PUBLISHED):
        for case in range(len(results.cases)):
            row, score = results.row(case, role.kind), results.score(case, role.kind, metric)
            is_per_cent = role is PUBLISHED and score.mean > 1  # papers print a share as such, or in per cent
            factor = 100 if is_utility and not is_per_cent else 1
            ends = [factor * end for end in (score.mean, score.low, score.high)]
            rows.append((role, role.kind, case, *ends, row is not None and row.external is not None))
    return pd.DataFrame(rows, columns=["role", "kind", "case", *ENDS, "external"])


def control_of(results: Results, cases: Iterable[int]) -> float:
    """Return the mean of the first column over the cases of the leakiest control; NaN if there is none."""
    metric, wanted = results.layout.columns[0], set(cases)
    if not KNOWN[metric].arrow:
        return math.nan
    controls = [row for row in results.rows if row.kind == "control" and row.case in wanted]
    scores = pd.Series({(row.attack, row.case): row.scores[metric].mean for row in controls}, dtype=float)
    means = scores.dropna().groupby(level=0).mean()
    return float(means.max() if KNOWN[metric].direction == "higher leaks" else means.min())


def names_of(results: Results, *, grouped: bool = False) -> list[str]:
    """Return a name for each case, with † where it is external; without a group if cases are `grouped` in a figure."""
    names = [case.label for case in results.cases] if grouped else case_names(results)
    external = {row.case for row in results.rows if row.kind in ("paper", "worst") and row.external}
    return [name + " †" * (case in external) for case, name in enumerate(names)]


_GEOMETRIES = {
    "oracle": "Moved patches are put where they fit best, for attacks and controls (oracle geometry).",
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

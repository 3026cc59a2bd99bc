"""The verdict of the page: the paper's attack beside the worst case, and everything that weakens either of them."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from privlab.grids import KNOWN
from privlab.report.tables import (
    Facts,
    Flag,
    Results,
    Row,
    Score,
    case_names,
    conditions_that_differ,
    figure_text,
    heading,
    headline,
    metric_title,
    red_flags,
)
from privlab.report.tables.leakage import NO_SCORE
from privlab.report.tables.per_image import sign_of
from privlab.report.tables.table import decimals, some

_LEFT, _RIGHT, _EXACT = 8.0, 184.0, 194.0
"""The start and the end of the scale in a plot of 200 units, and the place of infinite values."""


def verdict(results: Results, metric: str) -> dict[str, Any]:
    """Return the page's table of one metric: the figures of the paper, of its attack and of the worst case, by case.

    It is what the template reads: `groups` holds the lines, each group with its heading. The metric is one of leakage.
    """
    cases = _cases(results, metric)
    means = [case.score(kind).mean for case in cases for kind in ("published", "paper", "worst", "control")]
    finite = sorted(mean for mean in means if math.isfinite(mean))
    low, high = (finite[0], finite[-1]) if finite else (0.0, 1.0)
    ends = (low, high) if sign_of(metric) > 0 else (high, low)
    n = decimals(results.layout, metric)
    lines = [(facts.group, case.line(facts.label, n, ends)) for facts, case in zip(results.cases, cases, strict=True)]
    return {
        "name": metric,
        "head": heading(metric),
        "about": f"{KNOWN[metric].source}. {'A higher' if sign_of(metric) > 0 else 'A lower'} value is a worse leak.",
        "axis": f"{' to '.join(figure_text(end, n) for end in ends)}, leaks more →" if finite else "",
        "groups": [(group, [line for _, line in found]) for group, found in groupby(lines, lambda pair: pair[0])],
    }


@dataclass(frozen=True)
class _Case:
    """What was printed and measured for one case by one metric: its headline rows and its leakiest control, by kind."""

    number: int
    metric: str
    rows: Mapping[str, Row]

    def score(self, kind: str) -> Score:
        return self.rows[kind].scores.get(self.metric, NO_SCORE) if kind in self.rows else NO_SCORE

    @property
    def beaten(self) -> bool:
        """Return whether the worst case is no better than a control."""
        sign = sign_of(self.metric)
        return sign * self.score("worst").mean <= sign * self.score("control").mean

    @property
    def understated(self) -> bool:
        """Return whether the worst case leaks more than the paper's attack."""
        sign = sign_of(self.metric)
        return sign * self.score("worst").mean > sign * self.score("paper").mean

    @property
    def apart(self) -> bool:
        """Return whether the worst case leaks more than the paper's attack and their intervals do not meet."""
        claim, worst = self.score("paper"), self.score("worst")
        return claim.high < worst.low if sign_of(self.metric) > 0 else worst.high < claim.low

    def line(self, label: str, n: int, ends: tuple[float, float]) -> dict[str, Any]:
        """Return the case as text; `at` gives the places of its marks in the plot, between the `ends` of its scale."""
        worst, control, single = self.rows["worst"], self.rows.get("control"), self.rows.get("single")
        elsewhere = (row.external for kind, row in self.rows.items() if row.external and kind != "control")
        names = "".join(single.leakiest.get(self.metric, ())) if single else ""
        published = self.score("published").mean
        marks = {"published": "published", "claim": "paper", "worst": "worst", "control": "control"}
        return {
            "label": label,
            "external": "; ".join(dict.fromkeys(one for text in elsewhere for one in text.split("; "))),
            "published": "—" if math.isnan(published) else figure_text(published, n),
            "claim": self._with_interval("paper", n),
            "worst": self._with_interval("worst", n),
            "by": _most(worst.leakiest.get(self.metric, {}), self.score("worst").images),
            "single": f"{names} {figure_text(self.score('single').mean, n)}" if names else "",
            "exact": f"exact {worst.exact} of {self.score('worst').images}" if worst.exact else "",
            "control": figure_text(self.score("control").mean, n),
            "control_name": (control.attack or "").removeprefix("control:") if control else "",
            "beaten": self.beaten,
            "at": {mark: _place(self.score(kind).mean, ends) for mark, kind in marks.items()},
        }

    def _with_interval(self, kind: str, n: int) -> tuple[str, str]:
        """Return a mean and the text beside it: its interval, or "refused" if an attack was refused and has no mean."""
        score = self.score(kind)
        mean, low, high = (figure_text(value, n) for value in (score.mean, score.low, score.high))
        if not math.isnan(score.low) and not math.isnan(score.high):
            return mean, f"[{low}, {high}]"
        refused = kind in self.rows and self.rows[kind].refused
        return mean, "refused" if refused and math.isnan(score.mean) else ""


def _cases(results: Results, metric: str) -> list[_Case]:
    cases = []
    for number in range(len(results.cases)):
        own = [row for row in results.rows if row.case == number]
        found = {row.kind: row for row in headline(own)}
        controls = [row for row in own if row.kind == "control" and not math.isnan(row.scores[metric].mean)]
        if controls:
            found["control"] = max(controls, key=lambda row: sign_of(metric) * row.scores[metric].mean)
        cases.append(_Case(number, metric, found))
    return cases


def _most(leakiest: Mapping[str, int], images: int) -> str:
    """Return the attacks behind a worst case, the most frequent first, with the images of each if there are several."""
    first = Counter(leakiest).most_common(2)
    if len(leakiest) < 2:
        return "".join(name for name, _ in first)
    more = f" and {len(leakiest) - 2} more" if len(leakiest) > 2 else ""
    return ", ".join(f"{name} {count}" for name, count in first) + f"{more} of {images}"


def _place(mean: float, ends: tuple[float, float]) -> float | None:
    """Return the place of a mean between the ends of the plot; infinity stands beyond the right end."""
    if math.isnan(mean):
        return None
    if math.isinf(mean):
        return _EXACT
    share = (mean - ends[0]) / (ends[1] - ends[0]) if ends[0] != ends[1] else 0.5
    return round(_LEFT + share * (_RIGHT - _LEFT), 1)


def lead_text(results: Results) -> list[str]:
    """Return the verdict in a few sentences: on how many cases the worst case leaks more than the paper's attack.

    They judge by the lead metric. Other sentences count the cases that are no better than a control, and those without
    a score.
    """
    cases = _cases(results, results.lead)
    scored = [case for case in cases if not math.isnan(case.score("worst").mean)]
    name, attack, of_scored = metric_title(results.lead), results.layout.paper_attack, some(len(scored), "case")
    if not scored:
        return [
            results.facts.get("unscored") or "Nothing has been scored yet: no attack on any case has left a number."
        ]
    both = [case for case in scored if not math.isnan(case.score("paper").mean)]
    lines = []
    if attack is None:
        lines.append(f"No paper's attack is named: {of_scored} {'has' if len(scored) == 1 else 'have'} a worst case.")
    elif not both:
        lines.append(f"The paper's attack, {attack}, was scored on no case: only the worst case is known.")
    elif more := sum(case.understated for case in both):
        of = "the only case" if len(both) == 1 else f"{more} of {len(both)} cases"
        apart = sum(case.apart for case in both)
        beyond = "" if not apart else ", beyond the intervals" + ("" if apart == more else f" on {apart}")
        lines.append(f"By {name}, the worst case leaks more than the paper's attack, {attack}, on {of}{beyond}.")
    else:
        lines.append(f"By {name}, no attack leaks more than the paper's own, {attack}.")
    beaten = [case.number for case in scored if case.beaten]
    structure = Facts.of(results).structure if beaten else {}
    if found := [number for number in beaten if structure.get(number)]:
        lines.append(
            f"{len(found)} of {of_scored} {_is(len(found))} by {name} no better than an image that no attack made, but "
            "structure leaks there, without its scale."
        )
    if shown_nothing := len(beaten) - len(found):
        lines.append(
            f"{shown_nothing} of {of_scored} {_is(shown_nothing)} no better than an image that no attack made: "
            "nothing was shown there, which is no evidence of privacy."
        )
    if missing := len(cases) - len(scored):
        lines.append(f"{some(missing, 'case').capitalize()} {'has' if missing == 1 else 'have'} no number.")
    return lines


def _is(n: int) -> str:
    return "is" if n == 1 else "are"


def flags(results: Results) -> list[Flag]:
    """Return everything that weakens the verdict, under common headings; headings without an item are left out."""
    status = results.facts.get("status", "finished")
    found = [
        Flag("Not finished", [f"the run's status is {status}"] if status != "finished" else []),
        Flag("What was released", results.facts.get("flags") or []),
        Flag("The reference", [said] if (said := results.facts.get("reference")) else []),
        *red_flags(Facts.of(results)),
        Flag("No score", _unscored_cases(results)),
        Flag("Other conditions than the paper's", _conditions(results)),
        Flag("Refused", _refusals(results)),
        Flag("Measured elsewhere", _external(results)),
        Flag("Warnings of the run", [str(message) for message in results.facts.get("warnings") or ()]),
    ]
    return [flag for flag in found if flag.items]


def _unscored_cases(results: Results) -> list[str]:
    worst = {row.case: row.scores[results.lead] for row in results.rows if row.kind == "worst"}
    return [name for i, name in enumerate(case_names(results)) if math.isnan(worst[i].mean)]


def _conditions(results: Results) -> list[str]:
    refused = "attack on "  # what was refused has a heading of its own
    return [line for line in conditions_that_differ(results) if not line.startswith(refused)]


def _refusals(results: Results) -> list[str]:
    names: dict[tuple[str, str], list[str]] = {}
    for case, name in zip(results.cases, case_names(results), strict=True):
        for attack, reason in case.refused.items():
            names.setdefault((attack, reason), []).append(name)
    every = len(results.cases)
    return [
        f"{attack} on {'every case' if len(on) == every > 1 else '; '.join(on)}: {reason}"
        for (attack, reason), on in names.items()
    ]


def _external(results: Results) -> list[str]:
    names = case_names(results)
    return [
        f"{names[row.case]}, {row.attack}: {row.external}"
        for row in results.rows
        if row.kind == "attack" and row.external
    ]

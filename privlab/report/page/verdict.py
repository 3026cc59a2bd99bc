"""The verdict of the page: the paper's attack beside the worst case, and everything that weakens either of them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from privlab.grids import KNOWN
from privlab.report.page.data import case_names, title
from privlab.report.tables import Flag, Results, Row, Score, conditions_that_differ, flags_of, structure_cases
from privlab.report.tables.per_image import sign_of
from privlab.report.tables.sheet import decimals, some

__all__ = ["Verdict", "flags", "lead_text", "verdict"]

_LEFT, _RIGHT, _EXACT = 8.0, 184.0, 194.0
"""The start and the end of the scale in a plot of 200 units, and the place of infinite values."""


@dataclass(frozen=True)
class Line:
    """One case in the table of the verdict, as text; `at` gives the places of its marks in the plot."""

    label: str
    external: str | None
    published: str
    claim: tuple[str, str]
    worst: tuple[str, str]
    by: str
    single: str
    exact: str
    control: str
    control_name: str
    beaten: bool
    at: Mapping[str, float | None]


@dataclass(frozen=True)
class Verdict:
    """The table of the verdict for one metric; `groups` holds its lines, each group with its heading."""

    name: str
    head: str
    about: str
    axis: str
    groups: Sequence[tuple[str | None, Sequence[Line]]]


def verdict(results: Results, rows: Sequence[Row], metric: str) -> Verdict:
    """Return the page's table of one metric: the figures of the paper, of its attack and of the worst case, by case.

    Args:
        results: the names of the cases and their groups, and the decimals of the metric.
        rows: all rows of `leakage(results)`.
        metric: one of leakage, which the rows have.
    """
    cases = [_Case.of(rows, i, metric) for i in range(len(results.cases))]
    means = [score.mean for case in cases for score in (case.published, case.claim, case.worst, case.control)]
    finite = sorted(mean for mean in means if math.isfinite(mean)) or [0.0, 1.0]
    ends = (finite[0], finite[-1]) if sign_of(metric) > 0 else (finite[-1], finite[0])
    n = decimals(results.layout, metric)
    lines = [(facts.group, case.line(facts.label, n, ends)) for facts, case in zip(results.cases, cases, strict=True)]
    return Verdict(
        name=metric,
        head=title(metric),
        about=f"{KNOWN[metric].source}. {'A higher' if sign_of(metric) > 0 else 'A lower'} value is a worse leak.",
        axis=f"{' to '.join(number_text(end, n) for end in ends)}, leaks more →"
        if any(map(math.isfinite, means))
        else "",
        groups=[(group, [line for _, line in found]) for group, found in groupby(lines, lambda pair: pair[0])],
    )


def number_text(value: float, n: int) -> str:
    """Return a number with n decimals; one that they would round to zero has two digits and a power of ten."""
    if math.isnan(value):
        return "n/a"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.{n}f}" if abs(value) >= 10**-n or value == 0 else f"{value:.1e}".replace("e-0", "e-")
    return text.replace("-", "−")


@dataclass(frozen=True)
class _Case:
    """What was printed and measured for one case by one metric."""

    number: int
    metric: str
    published: Score
    claim: Score
    worst: Score
    leakiest: Mapping[str, int]
    single: tuple[str, Score] | None
    exact: int
    refused: int
    claim_refused: bool
    external: str | None
    control: Score
    control_name: str

    @classmethod
    def of(cls, rows: Sequence[Row], case: int, metric: str) -> "_Case":
        own = [row for row in rows if row.case == case]
        found = {row.kind: row for row in own if row.kind in ("published", "paper", "worst", "single")}
        scores = {kind: row.scores.get(metric, _NO_SCORE) for kind, row in found.items()}
        controls = [row for row in own if row.kind == "control" and not math.isnan(row.scores[metric].mean)]
        best = max(controls, key=lambda row: sign_of(metric) * row.scores[metric].mean, default=None)
        worst = found["worst"]
        elsewhere = (one for row in found.values() if row.external for one in row.external.split("; "))
        return cls(
            case,
            metric,
            *(scores.get(kind, _NO_SCORE) for kind in ("published", "paper", "worst")),
            leakiest=worst.leakiest.get(metric, {}),
            single=("".join(found["single"].leakiest.get(metric, ())), scores["single"]) if "single" in found else None,
            exact=worst.exact or 0,
            refused=len(worst.refused),
            claim_refused="paper" in found and bool(found["paper"].refused),
            external="; ".join(dict.fromkeys(elsewhere)) or None,
            control=best.scores[metric] if best else _NO_SCORE,
            control_name=(best.attack or "").removeprefix("control:") if best else "",
        )

    @property
    def beaten(self) -> bool:
        """Return whether the worst case is no better than a control."""
        return sign_of(self.metric) * self.worst.mean <= sign_of(self.metric) * self.control.mean

    @property
    def understated(self) -> bool:
        """Return whether the worst case leaks more than the paper's attack."""
        return sign_of(self.metric) * self.worst.mean > sign_of(self.metric) * self.claim.mean

    @property
    def apart(self) -> bool:
        """Return whether the worst case leaks more than the paper's attack and their intervals do not meet."""
        first, second = (self.claim, self.worst) if sign_of(self.metric) > 0 else (self.worst, self.claim)
        return first.high < second.low

    def line(self, label: str, n: int, ends: tuple[float, float]) -> Line:
        marks = {"published": self.published, "claim": self.claim, "worst": self.worst, "control": self.control}
        return Line(
            label=label,
            external=self.external,
            published=number_text(self.published.mean, n) if not math.isnan(self.published.mean) else "—",
            claim=_with_interval(self.claim, n, refused=self.claim_refused),
            worst=_with_interval(self.worst, n, refused=self.refused > 0),
            by=_most(self.leakiest, self.worst.images),
            single=f"{self.single[0]} {number_text(self.single[1].mean, n)}" if self.single and self.single[0] else "",
            exact=f"exact {self.exact} of {self.worst.images}" if self.exact else "",
            control=number_text(self.control.mean, n),
            control_name=self.control_name,
            beaten=self.beaten,
            at={name: _place(score.mean, ends) for name, score in marks.items()},
        )


_NO_SCORE = Score(math.nan)


def _with_interval(score: Score, n: int, *, refused: bool) -> tuple[str, str]:
    """Return a mean and the text beside it: its interval, or "refused" if an attack was refused and has no mean."""
    if math.isnan(score.low) or math.isnan(score.high):
        return number_text(score.mean, n), "refused" if refused and math.isnan(score.mean) else ""
    return number_text(score.mean, n), f"[{number_text(score.low, n)}, {number_text(score.high, n)}]"


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


def lead_text(results: Results, rows: Sequence[Row], metric: str) -> list[str]:
    """Return the verdict in a few sentences: on how many cases the worst case leaks more than the paper's attack.

    Other sentences count the cases that are no better than a control, and those without a score.

    Args:
        results: the cases, and the name of the paper's attack.
        rows: all rows of `leakage(results)`.
        metric: one of leakage, by which the sentences judge.
    """
    cases = [_Case.of(rows, i, metric) for i in range(len(results.cases))]
    scored = [case for case in cases if not math.isnan(case.worst.mean)]
    name, attack = title(metric).removesuffix(KNOWN[metric].arrow).strip(), results.layout.paper_attack
    if not scored:
        return [
            results.facts.get("unscored") or "Nothing has been scored yet: no attack on any case has left a number."
        ]
    both = [case for case in scored if not math.isnan(case.claim.mean)]
    lines = []
    if attack is None:
        have = "has" if len(scored) == 1 else "have"
        lines.append(f"No paper's attack is named: {some(len(scored), 'case')} {have} a worst case.")
    elif not both:
        lines.append(f"The paper's attack, {attack}, was scored on no case: only the worst case is known.")
    else:
        more = sum(case.understated for case in both)
        of = "the only case" if len(both) == 1 else f"{more} of {len(both)} cases"
        apart = sum(case.apart for case in both)
        beyond = "" if not apart else ", beyond the intervals" + ("" if apart == more else f" on {apart}")
        lines.append(
            f"By {name}, the worst case leaks more than the paper's attack, {attack}, on {of}{beyond}."
            if more
            else f"By {name}, no attack leaks more than the paper's own, {attack}."
        )
    beaten = [case.number for case in scored if case.beaten]
    structured = structure_cases(results) if beaten else set[int]()
    if found := [number for number in beaten if number in structured]:
        lines.append(
            f"{len(found)} of {some(len(scored), 'case')} {'is' if len(found) == 1 else 'are'} by {name} no better "
            "than an image that no attack made, but structure leaks there, without its scale."
        )
    if shown_nothing := len(beaten) - len(found):
        verb = "is" if shown_nothing == 1 else "are"
        lines.append(
            f"{shown_nothing} of {some(len(scored), 'case')} {verb} no better than an image that no attack made: "
            "nothing was shown there, which is no evidence of privacy."
        )
    if missing := len(cases) - len(scored):
        lines.append(f"{some(missing, 'case').capitalize()} {'has' if missing == 1 else 'have'} no number.")
    return lines


def flags(results: Results, rows: Sequence[Row], metric: str) -> list[Flag]:
    """Return everything that weakens the verdict, under common headings; headings without an item are left out.

    Args:
        results: the records with their red flags, the warnings of the run, and the paper's conditions.
        rows: all rows of `leakage(results)`.
        metric: the one by whose worst case a case counts as having no score.
    """
    status = results.facts.get("status", "finished")
    found = [
        Flag("Not finished", [f"the run's status is {status}"] if status != "finished" else []),
        Flag("What was released", results.facts.get("flags") or []),
        Flag("The reference", [said] if (said := results.facts.get("reference")) else []),
        *flags_of(results),
        Flag("No score", _unscored_cases(results, rows, metric)),
        Flag("Other conditions than the paper's", _conditions(results)),
        Flag("Refused", _refusals(results)),
        Flag("Measured elsewhere", _external(results, rows)),
        Flag("Warnings of the run", [str(message) for message in results.facts.get("warnings") or ()]),
    ]
    return [flag for flag in found if flag.items]


def _unscored_cases(results: Results, rows: Sequence[Row], metric: str) -> list[str]:
    names = case_names(results)
    return [names[i] for i in range(len(names)) if math.isnan(_Case.of(rows, i, metric).worst.mean)]


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


def _external(results: Results, rows: Sequence[Row]) -> list[str]:
    names = case_names(results)
    return [f"{names[row.case]}, {row.attack}: {row.external}" for row in rows if row.kind == "attack" and row.external]

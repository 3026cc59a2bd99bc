"""The verdict of the page: the paper's attack beside the worst case, and everything that weakens either of them."""

import math
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from privlab.evaluation import CONTROL
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
    cases = range(len(results.cases))
    scores = [results.score(case, kind, metric) for case in cases for kind in ("published", "paper", "worst")]
    scores += [control.scores[metric] for case in cases if (control := _best_control(results, case, metric))]
    finite = sorted(score.mean for score in scores if math.isfinite(score.mean))
    low, high = (finite[0], finite[-1]) if finite else (0.0, 1.0)
    ends = (low, high) if sign_of(metric) > 0 else (high, low)
    n = decimals(results.layout, metric)
    groups = groupby(cases, lambda case: results.cases[case].group)
    return {
        "name": metric,
        "head": heading(metric),
        "about": f"{KNOWN[metric].source}. {'A higher' if sign_of(metric) > 0 else 'A lower'} value is a worse leak.",
        "axis": f"{' to '.join(figure_text(end, n) for end in ends)}, leaks more →" if finite else "",
        "groups": [(group, [_line(results, case, metric, ends) for case in found]) for group, found in groups],
    }


def _best_control(results: Results, case: int, metric: str) -> Row | None:
    """Return the control of a case that leaks most by a metric."""
    of_case = [row for row in results.rows if row.case == case and row.kind == "control"]
    known = [row for row in of_case if not math.isnan(row.scores[metric].mean)]
    return max(known, key=lambda row: sign_of(metric) * row.scores[metric].mean, default=None)


def _is_beaten(results: Results, case: int, metric: str) -> bool:
    """Return whether the worst case is no better than a control."""
    control = _best_control(results, case, metric)
    if control is None:
        return False
    sign = sign_of(metric)
    return sign * results.score(case, "worst", metric).mean <= sign * control.scores[metric].mean


def _line(results: Results, case: int, metric: str, ends: tuple[float, float]) -> dict[str, Any]:
    """Return a case as text; `at` gives the places of its marks in the plot, between the `ends` of its scale."""
    n, control = decimals(results.layout, metric), _best_control(results, case, metric)
    rows = {row.kind: row for row in headline([row for row in results.rows if row.case == case])}
    worst, single = rows["worst"], rows.get("single")
    scores = {kind: results.score(case, kind, metric) for kind in ("published", "paper", "worst", "single")}
    scores["control"] = NO_SCORE if control is None else control.scores[metric]
    elsewhere = (row.external for row in rows.values() if row.external)
    names = "".join(single.leakiest.get(metric, ())) if single else ""
    published, images = scores["published"].mean, scores["worst"].images
    marks = {"published": "published", "claim": "paper", "worst": "worst", "control": "control"}
    return {
        "label": results.cases[case].label,
        "external": "; ".join(dict.fromkeys(one for text in elsewhere for one in text.split("; "))),
        "published": "—" if math.isnan(published) else figure_text(published, n),
        "claim": _with_interval(rows.get("paper"), scores["paper"], n),
        "worst": _with_interval(worst, scores["worst"], n),
        "by": _most(worst.leakiest.get(metric, {}), images),
        "single": f"{names} {figure_text(scores['single'].mean, n)}" if names else "",
        "exact": f"exact {worst.exact} of {images}" if worst.exact else "",
        "control": figure_text(scores["control"].mean, n),
        "control_name": (control.attack or "").removeprefix(CONTROL) if control else "",
        "beaten": _is_beaten(results, case, metric),
        "at": {mark: _place(scores[kind].mean, ends) for mark, kind in marks.items()},
    }


def _with_interval(row: Row | None, score: Score, n: int) -> tuple[str, str]:
    """Return a mean and the text beside it: its interval, or "refused" if an attack was refused and has no mean."""
    mean, low, high = (figure_text(value, n) for value in (score.mean, score.low, score.high))
    if not math.isnan(score.low) and not math.isnan(score.high):
        return mean, f"[{low}, {high}]"
    return mean, "refused" if row and row.refused and math.isnan(score.mean) else ""


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
    lead, cases = results.lead, range(len(results.cases))
    worst, paper = ([results.score(case, kind, lead) for case in cases] for kind in ("worst", "paper"))
    scored = [case for case in cases if not math.isnan(worst[case].mean)]
    name, attack, of_scored = metric_title(lead), results.layout.paper_attack, some(len(scored), "case")
    if not scored:
        return [
            results.facts.get("unscored") or "Nothing has been scored yet: no attack on any case has left a number."
        ]
    pairs = [(paper[case], worst[case]) for case in scored if not math.isnan(paper[case].mean)]
    up = sign_of(lead) > 0
    lines = []
    if attack is None:
        lines.append(f"No paper's attack is named: {of_scored} {'has' if len(scored) == 1 else 'have'} a worst case.")
    elif not pairs:
        lines.append(f"The paper's attack, {attack}, was scored on no case: only the worst case is known.")
    elif more := sum(here.mean > claim.mean if up else here.mean < claim.mean for claim, here in pairs):
        of = "the only case" if len(pairs) == 1 else f"{more} of {len(pairs)} cases"
        apart = sum(claim.high < here.low if up else here.high < claim.low for claim, here in pairs)
        beyond = "" if not apart else ", beyond the intervals" + ("" if apart == more else f" on {apart}")
        lines.append(f"By {name}, the worst case leaks more than the paper's attack, {attack}, on {of}{beyond}.")
    else:
        lines.append(f"By {name}, no attack leaks more than the paper's own, {attack}.")
    beaten = [case for case in scored if _is_beaten(results, case, lead)]
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
    unscored = [
        name
        for case, name in enumerate(case_names(results))
        if math.isnan(results.score(case, "worst", results.lead).mean)
    ]
    conditions = [line for line in conditions_that_differ(results) if not line.startswith("attack on ")]  # as refused
    found = [
        Flag("Not finished", [f"the run's status is {status}"] if status != "finished" else []),
        Flag("What was released", results.facts.get("flags") or []),
        Flag("The reference", [said] if (said := results.facts.get("reference")) else []),
        *red_flags(Facts.of(results)),
        Flag("No score", unscored),
        Flag("Other conditions than the paper's", conditions),
        Flag("Refused", _refusals(results)),
        Flag("Measured elsewhere", _external(results)),
        Flag("Warnings of the run", [str(message) for message in results.facts.get("warnings") or ()]),
    ]
    return [flag for flag in found if flag.items]


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

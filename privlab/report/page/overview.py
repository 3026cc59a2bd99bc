"""The verdict of the page: the paper's attack and the worst case, and everything that weakens either of them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from privlab.grids import KNOWN
from privlab.report.page.pictures import Album
from privlab.report.tables import (
    Facts,
    Flag,
    Results,
    case_names,
    conditions_that_differ,
    figure_text,
    heading,
    headline,
    metric_title,
    red_flags,
)
from privlab.report.tables.case_verdicts import CaseVerdict
from privlab.report.tables.cells import decimals, some, unit_of
from privlab.report.tables.per_image import sign_of
from privlab.report.tables.rows import NO_SCORE, Kind

_LEFT, _RIGHT, _EXACT = 8.0, 184.0, 194.0
"""The start and the end of the scale in a plot of 200 units, and the place of infinite values."""

_MARKS = ("published", "paper", "worst", "control")
"""The rows of a case that have a mark in its plot."""


def verdict(results: Results, metric: str) -> dict[str, Any]:
    """Return the page's table of one metric: the figures of the paper, of its attack and of the worst case, by case.

    It is what the template reads: `groups` holds the lines, each group with its heading. The metric is one of leakage.
    """
    lines = [_line(results, case, metric) for case in range(len(results.cases))]
    means = [line["scores"][kind].mean for line in lines for kind in _MARKS]
    finite = sorted(mean for mean in means if math.isfinite(mean))
    low, high = (finite[0], finite[-1]) if finite else (0.0, 1.0)
    ends = (low, high) if sign_of(metric) > 0 else (high, low)
    n = decimals(results.layout, metric)
    for line in lines:
        line["at"] = {kind: _place(line["scores"][kind].mean, ends) for kind in _MARKS}
    return {
        "name": metric,
        "head": heading(metric),
        "about": f"{KNOWN[metric].source}. {'A higher' if sign_of(metric) > 0 else 'A lower'} value is a worse leak.",
        "axis": f"{' to '.join(figure_text(end, n) for end in ends)}, leaks more →" if finite else "",
        "decimals": n,
        "groups": [(group, [*own]) for group, own in groupby(lines, lambda line: line["group"])],
    }


def _line(results: Results, case: int, metric: str) -> dict[str, Any]:
    """Return a case with its rows and their scores by kind; `control` is the one that leaks most.

    `beaten` says whether the worst case is no better than that control.
    """
    own, sign = [row for row in results.rows if row.case == case], sign_of(metric)
    rows = shown = {row.kind: row for row in headline(own)}
    if controls := [row for row in own if row.kind == "control" and not math.isnan(row.scores[metric].mean)]:
        shown = rows | {"control": max(controls, key=lambda row: sign * row.scores[metric].mean)}
    scores = dict.fromkeys((*_MARKS, "single"), NO_SCORE)
    scores |= {kind: row.scores.get(metric, NO_SCORE) for kind, row in shown.items()}
    elsewhere = (row.external for row in rows.values() if row.external)
    return {
        "label": results.cases[case].label,
        "group": results.cases[case].group,
        "external": "; ".join(dict.fromkeys(one for text in elsewhere for one in text.split("; "))),
        "rows": shown,
        "scores": scores,
        "leakiest": {kind: Counter(row.leakiest.get(metric, {})).most_common() for kind, row in rows.items()},
        "beaten": sign * scores["worst"].mean <= sign * scores["control"].mean,
    }


def _place(mean: float, ends: tuple[float, float]) -> float | None:
    """Return the place of a mean between the ends of the plot; infinity stands beyond the right end."""
    if math.isnan(mean):
        return None
    if math.isinf(mean):
        return _EXACT
    share = (mean - ends[0]) / (ends[1] - ends[0]) if ends[0] != ends[1] else 0.5
    return round(_LEFT + share * (_RIGHT - _LEFT), 1)


def opening_case(facts: Facts, verdicts: Sequence[CaseVerdict]) -> int:
    """Return the case that the page opens on: a defended one, if possible one that leaks."""
    cases = range(len(verdicts))
    return min(cases, key=lambda case: (not facts.defenses.get(case), verdicts[case].word not in ("broken", "leaks")))


def answer(verdict: CaseVerdict) -> str:
    """Return the answer to "Can someone rebuild the private images?" in one sentence, from the verdict on a case."""
    word = {"broken": "Yes", "leaks": "Yes", "holds": "Not by the attacks that were run"}.get(verdict.word)
    return f"{word or 'This run does not show it'}. {verdict.label}: {verdict}."


def opening_pictures(results: Results, case: int, held: Mapping[str, Album]) -> list[tuple[str, str]]:
    """Return images of one private image of a case, with captions: itself, what was fed, and what attacks made of it.

    The attacks are the paper's and the best single one; the image is the first of which the best one was kept.

    Args:
        results: the results.
        case: the number of the case.
        held: the pictures of each image, by its hash.
    """
    lead, titles = results.lead, {"private": "the private image", "fed": "what the client fed"}
    kinds: dict[Kind, str] = {"paper": "the paper's attack", "single": "the best attack"}
    for kind, title in kinds.items():
        if (row := results.row(case, kind)) is not None:
            name = row.attack if kind == "paper" else "".join(row.leakiest.get(lead, ()))
            titles[name or ""] = f"{title}, {name}"
    best, rows = [*titles][-1], results.records[results.records.case == case]
    for sha256, album in held.items():
        at = {what: album.of[key] for what in titles if (key := f"{case}/{what}") in album.of}
        if not {"private", best} <= at.keys():
            continue
        if at.get("fed") == at["private"]:
            del at["fed"]
        scores = rows[(rows.image_sha256 == sha256) & (rows.geometry == results.layout.geometry)].groupby("attack")[
            lead
        ]
        means, places = scores.mean().to_dict(), decimals(results.layout, lead)
        shown = {what: f": {figure_text(means[what], places)} {unit_of(lead)}" for what in at if what in means}
        return [(titles[what] + shown.get(what, ""), album.full[n] or album.small[n]) for what, n in at.items()]
    return []


def lead_text(results: Results) -> list[str]:
    """Return the verdict in a few sentences: on how many cases the worst case leaks more than a named paper's attack.

    They judge by the lead metric. Other sentences count the cases that are no better than a control, and those without
    a score.
    """
    lead, cases = results.lead, range(len(results.cases))
    of_case = [_line(results, case, lead) for case in cases]
    worst, paper = ([line["scores"][kind] for line in of_case] for kind in ("worst", "paper"))
    scored = [case for case in cases if not math.isnan(worst[case].mean)]
    name, attack, of_scored = metric_title(lead), results.layout.paper_attack, some(len(scored), "case")
    if not scored:
        return [
            results.facts.get("unscored") or "Nothing has been scored yet: no attack on any case has left a number."
        ]
    pairs = [(paper[case], worst[case]) for case in scored if not math.isnan(paper[case].mean)]
    up = sign_of(lead) > 0
    lines = []
    if attack is not None and not pairs:
        lines.append(f"The paper's attack, {attack}, was scored on no case: only the worst case is known.")
    elif more := sum(here.mean > claim.mean if up else here.mean < claim.mean for claim, here in pairs):
        of = f"{more} of {len(pairs)} cases"
        if len(pairs) == 1:
            of = "the only case" if len(scored) == 1 else "the only case that has it"
        apart = sum(claim.high < here.low if up else here.high < claim.low for claim, here in pairs)
        beyond = "" if not apart else ", beyond the intervals" + ("" if apart == more else f" on {apart}")
        lines.append(f"By {name}, the worst case leaks more than the paper's attack, {attack}, on {of}{beyond}.")
    elif attack is not None:
        lines.append(f"By {name}, no attack leaks more than the paper's own, {attack}.")
    beaten = [case for case in scored if of_case[case]["beaten"]]
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
    status, names = results.facts.get("status", "finished"), case_names(results)
    scores = [results.score(case, "worst", results.lead) for case in range(len(names))]
    unscored = [name for name, score in zip(names, scores, strict=True) if math.isnan(score.mean)]
    others = [row for row in results.rows if row.kind == "attack" and row.external]
    external = [f"{names[row.case]}, {row.attack}: {row.external}" for row in others]
    conditions = [line for line in conditions_that_differ(results) if not line.startswith("attack on ")]  # as refused
    found = [
        Flag("Not finished", [f"the run's status is {status}"] if status != "finished" else []),
        Flag("What was released", results.facts.get("flags") or []),
        Flag("The reference", [said] if (said := results.facts.get("reference")) else []),
        *red_flags(Facts.of(results)),
        Flag("No score", unscored),
        Flag("Other conditions than the paper's", conditions),
        Flag("Refused", _refusals(results)),
        Flag("Measured elsewhere", external),
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

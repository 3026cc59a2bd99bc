"""The rows of a leakage table: what a paper printed, its attack here, the best single attack, and the worst case."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from privlab.base import first
from privlab.evaluation import CONTROL, CONTROLS
from privlab.grids import KNOWN, PAPERS_ATTACKS
from privlab.report.intervals import mean_interval
from privlab.report.tables.per_image import (
    CELL,
    SINGLE,
    WORST,
    Segments,
    attack_label,
    groups,
)

if TYPE_CHECKING:
    from privlab.report.tables.results import Results

Kind = Literal["published", "paper", "worst", "single", "attack", "control"]


@dataclass(frozen=True)
class Score:
    """A mean over `images`, with the confidence interval [low, high]; NaN is not known, and never zero."""

    mean: float
    low: float = float("nan")
    high: float = float("nan")
    images: int = 0


NO_SCORE = Score(float("nan"))
"""What was not measured."""

_FEWEST_WITH_INTERVAL = 3
"""The fewest images whose mean is shown with an interval: that of two is some ten times as wide as their difference."""


@dataclass(frozen=True)
class Row:
    """One row of a leakage table, or of what was measured for an attack, which no case is named for yet.

    `images` is the number of images with a score. `failed` counts the images with a failed record, in any draw; for the
    worst case, under any attack. For the worst case, `leakiest` says by metric on how many images each attack reached
    it, and all attacks that tie count; for the best single attack it names that attack. An attack there is written
    "april (reassembled)" if it is not scored as it is. `exact` counts the images with every grey level right; it is
    None where that was not measured. `refused` says why attacks cannot run here; `external` is the reference of what
    was measured elsewhere.
    """

    case: int
    label: str
    group: str | None
    kind: Kind
    attack: str | None
    scores: Mapping[str, Score]
    images: int = 0
    failed: int = 0
    leakiest: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    external: str | None = None
    exact: int | None = None


def leakage(results: "Results") -> list[Row]:
    """Return the rows of all cases, in their order.

    A case has its published figures (if there are any), the paper's attack (if the layout names one), the worst case,
    the best single attack by the lead metric, every attack that ran or was refused, and the controls. Scores are
    averaged over the draws of an image, then over the images; the worst case takes each image's leakiest score over
    attacks, draws and the geometries that an adversary can make, by each metric's own direction. The interval is
    Student's (`mean_interval`): the same records, in any order, give the same rows.
    """
    layout, scored = results.layout, results.scored
    counts = scored.reached.groupby(["case", "metric", "attack", "geometry"], sort=True).size().reset_index()
    leakiest: dict[int, dict[str, dict[str, int]]] = {}
    for case, metric, attack, geometry, count in counts.to_numpy().tolist():
        leakiest.setdefault(case, {}).setdefault(metric, {})[attack_label(attack, geometry)] = count
    measured: dict[int, dict[tuple[str, str], Row]] = {}
    for (case, attack, external), row in measure(scored.images, layout.columns, layout.interval).items():
        measured.setdefault(case, {})[attack, external] = row
    return [
        row
        for case in range(len(results.cases))
        for row in _rows(results, case, measured.get(case, {}), leakiest.get(case, {}), scored.single.get(case))
    ]


def headline(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that a paper's table shows: published, the paper's attack, the worst case, the best attack."""
    return [row for row in rows if row.kind in ("published", "paper", "worst", "single")]


def conditions_that_differ(results: "Results") -> list[str]:
    """Return a line for each of the paper's conditions that is not met here, as "weights: paper: … / here: …".

    The paper's conditions are free text, so a line is left out only if what was run is certain to be the same.
    """
    lines = []
    for name, paper in results.conditions.items():
        here, same = _here(results, name, paper)
        if not same:
            lines.append(f"{name}: paper: {paper} / here: {here}")
    if results.layout.geometry != "in_place" and "geometry" not in results.conditions:
        lines.append(f"geometry: paper: in_place / here: {results.layout.geometry}")
    attack = results.layout.paper_attack
    lines += [
        f"attack on {case.label}: paper: {attack} / here: refused: {reason}"
        for case in results.cases
        for name, reason in case.refused.items()
        if name == attack
    ]
    return [*lines, *_other_lpips(results)]


def _other_lpips(results: "Results") -> list[str]:
    """Return a line where the paper printed LPIPS by AlexNet, and the table has it by another network alone."""
    printed = [
        f"{case.label} {case.published['lpips_alex']:g}" for case in results.cases if "lpips_alex" in case.published
    ]
    here = [name for name in results.layout.columns if name.startswith("lpips_")]
    if not printed or not here or "lpips_alex" in here:
        return []
    return [
        f"LPIPS: paper: by AlexNet, {first(printed, 12)} / here: {', '.join(here)}, another distance, with which the "
        "paper's figures do not stand"
    ]


_COLUMN_OF = {"labels": "label_origin", "model": "victim", "models": "victim", "victims": "victim"}
_TRUE_LABELS = {"folder", "file", "dataset"}


def _here(results: "Results", name: str, paper: str) -> tuple[str, bool]:
    """Return the condition as it was here, and whether it is certain to be the paper's."""
    records, said = results.records, paper.casefold().replace("_", "-")
    own = records if "external" not in records else records.loc[records.external.isna()]
    if name == "images":
        source = (results.facts.get("images") or {}).get("source")
        counts = own.loc[own.status == "ok"].groupby("case").image_sha256.nunique()
        least, most = int(counts.min() if len(counts) else 0), int(counts.max() if len(counts) else 0)
        here = (f"{least}" if least == most else f"{least} to {most}") + (f" of {source}" if source else "")
        return here, here.casefold() == paper.casefold()
    if name == "attack":
        attack = results.layout.paper_attack
        return attack or "none is named", attack is not None and attack in said
    if name == "geometry":
        return results.layout.geometry, results.layout.geometry.replace("_", "-") in said.replace(" ", "-")
    column = _COLUMN_OF.get(name, name)
    if name == "block" and results.layout.paper_attack is not None:
        own = own.loc[own.attack == results.layout.paper_attack]
    if column in own:
        found = sorted(map(str, own[column].dropna().unique()))
    else:
        found = list(dict.fromkeys(str(case.options[name]) for case in results.cases if name in case.options))
    if not found:
        return "not recorded", False
    trained = name == "weights" and said == "trained" and all(v.startswith(("pretrained:", "file:")) for v in found)
    truth = name == "labels" and said in ("true", "ground truth") and set(found) <= _TRUE_LABELS
    return ", ".join(found), trained or truth or [value.casefold().replace("_", "-") for value in found] == [said]


def measure(
    images: pd.DataFrame, metrics: Sequence[str], level: float, *, differences: bool = False
) -> dict[tuple[int, str, str], Row]:
    """Return a row for each attack on each case, by (case, attack, external); it has neither a label nor a group.

    Args:
        images: a table like `Scored.images`, one row per case, attack and image; it need not have the column `exact`.
        metrics: the columns of the table whose means are taken.
        level: confidence level of their intervals, in (0, 1).
        differences: whether the columns hold differences, which may leave the range of their metric. Intervals of
            scores are cut to that range.
    """
    group, keys = groups(images, CELL)
    known = images.loc[images.image != ""]
    counts = known.groupby(CELL)[["scored", "failed"]].sum().astype(int)
    exact = known.groupby(CELL).exact.sum(min_count=1).dropna().to_dict() if "exact" in images else {}
    scores: dict[str, dict[int, Score]] = {}
    for name in metrics:
        of = Segments.of(images[name].to_numpy(), group, ascending=False)
        least, most = (-np.inf, np.inf) if differences else KNOWN[name].range
        few = np.logical_and(not differences, of.sizes < _FEWEST_WITH_INTERVAL)
        ends = (np.where(few, np.nan, end).clip(least, most) for end in mean_interval(of, level))
        columns = (of.group, of.means(), *ends, of.sizes)
        cells = zip(*(column.tolist() for column in columns), strict=True)
        scores[name] = {cell: Score(mean, low, high, n) for cell, mean, low, high, n in cells}
    rows: dict[tuple[int, str, str], Row] = {}
    for i, key in enumerate(keys.itertuples(index=False, name=None)):
        case, attack, external = key
        scored, failed = counts.loc[key].tolist() if key in counts.index else (0, 0)
        rows[key] = Row(
            *(case, "", None, "control" if attack.startswith(CONTROL) else "attack", attack),
            scores={name: scores[name].get(i, NO_SCORE) for name in metrics},
            images=scored,
            failed=failed,
            external=external or None,
            exact=int(exact[key]) if key in exact else None,
        )
    return rows


def _papers_attack(results: "Results", case: int) -> str | None:
    """Return the attack that the paper of a case's defense reports.

    An experiment names it for all its cases. A run has it where nothing is defended, and for the defenses of its paper:
    `april` does not belong to a paper on a defense of your own.
    """
    attack = results.layout.paper_attack
    defense = str(results.cases[case].options.get("defense", "none"))
    reported = PAPERS_ATTACKS.get(attack or "", {defense})
    if "specification" in results.facts and not {*reported} & {*defense.split("+")}:
        return None
    return attack


def _rows(
    results: "Results",
    case: int,
    measured: Mapping[tuple[str, str], Row],
    leakiest: Mapping[str, Mapping[str, int]],
    single: tuple[str, str] | None,
) -> Iterator[Row]:
    """Yield the rows of one case from what was measured on it, by (attack, external)."""
    facts, layout = results.cases[case], results.layout
    nothing = Row(case, facts.label, facts.group, "attack", None, dict.fromkeys(layout.columns, NO_SCORE))
    measured = {key: replace(row, label=facts.label, group=facts.group) for key, row in measured.items()}
    if facts.published:
        printed = dict.fromkeys(layout.columns, NO_SCORE)
        for name, value in facts.published.items():
            in_per_cent = KNOWN[name].direction == "utility" and value > 1
            printed[name] = Score(value / 100 if in_per_cent else value)
        yield replace(nothing, kind="published", scores=printed)
    attacks = [key for key, row in measured.items() if row.kind == "attack" and key[0] not in (WORST, SINGLE)]
    attacks.sort(key=lambda key: (key[0] != layout.paper_attack, key))
    if (paper := _papers_attack(results, case)) is not None:
        key = next((key for key in attacks if key[0] == paper), (paper, ""))
        refused = {paper: facts.refused[paper]} if paper in facts.refused and key not in measured else {}
        yield replace(measured.get(key, nothing), kind="paper", attack=paper, refused=refused)
    taken = (key[1] for key in attacks if key[1] and measured[key].images)  # figures of no image are in no worst case
    elsewhere = "; ".join(dict.fromkeys(taken)) or None
    worst = replace(measured.get((WORST, ""), nothing), kind="worst", attack=WORST)
    yield replace(worst, external=elsewhere, refused=facts.refused, leakiest=leakiest)
    if single is not None:
        row = measured[SINGLE, ""]
        by = {name: {single[0]: score.images} for name, score in row.scores.items() if score.images}
        yield replace(row, kind="single", external=single[1] or None, leakiest=by)
    yield from (measured[key] for key in attacks)
    for attack, reason in sorted(facts.refused.items()):
        if attack not in {name for name, _ in attacks}:
            yield replace(nothing, attack=attack, refused={attack: reason})
    controls = [key for key, row in measured.items() if row.kind == "control"]
    for key in sorted(controls, key=lambda key: (CONTROLS.index(key[0]) if key[0] in CONTROLS else len(CONTROLS), key)):
        yield measured[key]

"""What the records of an entry say: its worst case, its verdict, its flags, and the attacks that know it."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import pandas as pd

from privlab.base import PrivlabError
from privlab.benchmark.cards import Card
from privlab.benchmark.entries import defense_entries
from privlab.benchmark.results import Result
from privlab.benchmark.tracks import BUNDLED, Track, photographs
from privlab.benchmark.weights import known_by as known_by_keys
from privlab.evaluation import EXACT_DB
from privlab.metrics import DECIBELS
from privlab.report.tables import Facts, red_flags, sign_of
from privlab.report.tables.case_verdicts import WORDS, verdicts_of
from privlab.report.tables.knowledge import declared_defenses, knows
from privlab.report.tables.leakage import measure
from privlab.report.tables.per_image import WORST, Scored

LEVEL = 0.95
"""The confidence level of all intervals."""

NO_ADAPTIVE = "No adaptive attack"
"""The red flag of a case in which no attack knows the defense."""

ELSEWHERE = "No adaptive attack in another case"
"""What it is called if one does in the case that leaks most: the score, which is of that case, stands."""

OF_ROWS = ("worst", "leakiest", "by", "images", "median", "worst_image")
"""What the rows of a result say by themselves."""

OF_CLASSES = ("known_by", "verdict", "flags", "knows")
"""What they say with what the classes of the entry declare; `knows` is of an attack on a defense."""

_APART = 0.01
"""How far two scores of the same rows may be apart."""


class Worst(TypedDict):
    """The mean over `images` of the worst case of each, with its interval; None is not known."""

    mean: float | None
    low: float | None
    high: float | None
    images: int


class Judged(TypedDict):
    """What the records of an entry say, as the field `judged` of a result file has it.

    `worst` is the worst case of each case by the track's first metric, and `leakiest` the case that leaks most, of
    which the score is. `known_by` are the attacks that ran there and know every part of the defense, `by` the attacks
    behind its worst case with the photographs of each, `median` and `worst_image` the hashes of two photographs there.
    `knows` says of an attack that was run on a defense whether it knows it.
    """

    known_by: list[str]
    worst: dict[str, Worst]
    leakiest: str
    by: dict[str, int]
    verdict: str
    why: str
    flags: list[str]
    images: int
    median: str
    worst_image: str
    knows: NotRequired[bool]


def score_of(judged: Judged) -> Worst:
    """Return the worst case of the leakiest case."""
    return judged["worst"].get(judged["leakiest"], NOTHING)


def shown_images(judged: Judged) -> dict[str, str]:
    """Return the hashes of the two photographs that are shown, by what they are."""
    return {"median": judged["median"], "worst": judged["worst_image"]}


NOTHING: Worst = {"mean": None, "low": None, "high": None, "images": 0}
"""A worst case that was not measured."""


def highest(of: Track) -> float:
    """Return the highest score that a track counts: 100 dB for exact images, and no bound for a share."""
    return EXACT_DB if of.lead in DECIBELS else math.inf


def judge(records: pd.DataFrame, of: Track, knowing: frozenset[str] = frozenset()) -> Judged:
    """Return the worst case, the verdict, the flags and the attacks that know a defense, from its records.

    The listed photographs count, which every entry and every attack that entered was run on.

    Args:
        records: all rows of a defense; `case` has the names of its cases.
        of: its track.
        knowing: attacks that know every part of the defense, though a class is not installed here that would say so.
    """
    numbered, names = _numbered(records, of, hidden=False)
    scored, facts = Scored(numbered, of.metrics), Facts(numbered, names, of.metrics, knowing=knowing)
    defended, images = _defended(names), numbered.groupby("case").image_sha256.nunique()
    worst = _worst(scored, names, of)
    leakiest = leakiest_of(worst, of)
    case = names.index(leakiest) if leakiest else -1  # a number that no case has
    verdicts = [verdict for verdict in verdicts_of(facts) if verdict.label in defended]
    verdict = min(verdicts, key=lambda each: WORDS.index(each.word))
    known_by = [name for name in facts.attacks(case) if facts.defenses[case] and facts.knows(name, case)]
    reached = scored.reached.loc[(scored.reached.metric == of.lead) & (scored.reached.case == case)]
    flags: list[str] = []
    for flag in red_flags(facts):
        head = ELSEWHERE if known_by and flag.head == NO_ADAPTIVE else flag.head
        flags.append(f"{head}: {'; '.join(flag.items)}")
    median, worst_image = _extremes(scored, case, of)
    return Judged(
        known_by=sorted(known_by),
        worst=worst,
        leakiest=leakiest,
        by={str(name): int(count) for name, count in reached.attack.value_counts().items()},
        verdict=verdict.word,
        why=str(verdict),
        flags=flags,
        images=min(int(images[names.index(name)]) for name in defended),
        median=median,
        worst_image=worst_image,
    )


def worst_cases(records: pd.DataFrame, of: Track, *, hidden: bool = False) -> dict[str, Worst]:
    """Return the worst case of each defended case, as `judge` has them.

    Args:
        records: all rows of a defense; `case` has the names of its cases.
        of: its track.
        hidden: whether the photographs of the hidden half count, and not the listed ones.
    """
    numbered, names = _numbered(records, of, hidden=hidden)
    return _worst(Scored(numbered, of.metrics), names, of)


def _numbered(records: pd.DataFrame, of: Track, *, hidden: bool) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows of one half of the photographs, numbered by case, and the names of the cases."""
    records = records.loc[records.image_sha256.isin(photographs("hidden")) == hidden]
    empty = {name: object for name in records if records[name].isna().all()}  # texts that nothing states
    records = records.astype(empty)
    # one exact photograph would make the mean of all infinite
    records = records.assign(**{of.lead: records[of.lead].clip(upper=highest(of))})
    names = list(dict.fromkeys(records.case))
    return records.assign(case=records.case.map({name: i for i, name in enumerate(names)})), names


def _defended(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.endswith(", undefended")] or [*names]


def _worst(scored: Scored, names: Sequence[str], of: Track) -> dict[str, Worst]:
    """Return the worst case of each defended case by the lead metric; above 100 dB only rounding is measured."""
    worst: dict[str, Worst] = {}
    for (case, attack, _), found in measure(scored.images, [of.lead], LEVEL).items():
        if attack == WORST and names[case] in _defended(names):
            score = found.scores[of.lead]
            mean, low, high = (
                None if math.isnan(value) else min(value, highest(of)) for value in (score.mean, score.low, score.high)
            )
            worst[names[case]] = {"mean": mean, "low": low, "high": high, "images": score.images}
    return worst


def leakiest_of(worst: Mapping[str, Worst], of: Track) -> str:
    """Return the name of the case that leaks most; an empty one where no case has a score."""
    means = {name: score["mean"] for name, score in worst.items() if score["mean"] is not None}
    return max(means, key=lambda name: sign_of(of.lead) * means[name], default="")


def _extremes(scored: Scored, case: int, of: Track) -> tuple[str, str]:
    """Return the bundled photographs with the median and the worst worst case; others may not be shown."""
    images = scored.images
    own = images.loc[(images.case == case) & (images.attack == WORST) & images.image.isin(photographs(BUNDLED))]
    order = own.sort_values(of.lead, ascending=sign_of(of.lead) < 0, kind="stable").image.tolist()
    return (order[len(order) // 2], order[0]) if order else ("", "")


def conclude(card: Card, rows: pd.DataFrame) -> Judged | dict[str, Judged]:
    """Return what the rows of a result say, as its field `judged` has it: of a defense one, of an attack one by entry.

    The rows are as the result file has them, so that anybody who reads the file concludes the same.
    """
    if card.kind == "attack":
        found: dict[str, Judged] = {}
        for target in defense_entries(card.track, [str(name) for name in rows.entry.unique()]):
            found[target.name] = judge(rows.loc[rows.entry == target.name].drop(columns="entry"), card.of)
            by_class = knows(declared_defenses(card.parts[0]), target.parts, {})
            found[target.name]["knows"] = bool(card.reconstructions) or by_class
        return found
    judged = judge(rows, card.of)
    if card.track == "weights":  # written against keys, which declare no class
        judged["known_by"] = [known_by_keys(card)]
        judged["flags"] = [flag for flag in judged["flags"] if not flag.startswith(NO_ADAPTIVE)]
    return judged


def check_concluded(result: Result, found: Mapping[str, Any], names: Sequence[str] = (*OF_ROWS, *OF_CLASSES)) -> None:
    """Raise PrivlabError if a file does not conclude what its rows say, which `conclude` found, in the named parts.

    Args:
        result: the file.
        found: what `conclude` gives of its rows.
        names: the parts of it that are compared.
    """
    for entry, judged in result.concluding(found).judged.items():
        said, own = _with_heads(result.judged.get(entry, {})), _with_heads(judged)
        for name in names:
            if name in own and not _alike(said.get(name), own[name]):
                raise PrivlabError(
                    f"{result.path} was edited, or is of another version: by its rows, {name} is "
                    f"{_short(own[name])}, and it says {_short(said.get(name))}. Submit the entry again."
                )


def _with_heads(judged: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is concluded with the heads of flags: after the colon are attacks, which later ones join."""
    flags = judged.get("flags")
    heads = [str(flag).partition(":")[0] for flag in flags] if isinstance(flags, list) else flags
    return {**judged, "flags": heads}


def _alike(said: Any, found: Any) -> bool:  # noqa: ANN401
    """Return whether two parts of JSON are the same; numbers, which rounding changes, may be 0.01 apart."""
    if isinstance(found, Mapping):
        same = isinstance(said, Mapping) and said.keys() == found.keys()
        return same and all(_alike(said[name], found[name]) for name in found)
    if isinstance(found, int | float) and isinstance(said, int | float):
        return abs(said - found) <= _APART
    return said == found


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:99]}…"

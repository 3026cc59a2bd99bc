"""What the records of an entry say: its worst case, its verdict, its flags, and the attacks that know it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from privlab.base import PrivlabError
from privlab.benchmark.cards import Card
from privlab.benchmark.entries import defense_entries
from privlab.benchmark.results import Result
from privlab.benchmark.standing import with_tuples
from privlab.benchmark.tracks import Track, photographs
from privlab.benchmark.weights import known_by as known_by_keys
from privlab.evaluation import CONTROL, EXACT_DB
from privlab.metrics import DECIBELS
from privlab.report.tables import Facts, Score, red_flags, sign_of
from privlab.report.tables.case_verdicts import WORDS, verdicts_of
from privlab.report.tables.knowledge import declared_defenses, kinds_in, knows, undone
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


@dataclass(frozen=True)
class Judged:
    """What the records of an entry say.

    `worst` is the worst case of each case by the track's first metric, and `leakiest` the case that leaks most, of
    which the score is. `known_by` are the attacks that ran there and know every part of the defense, `by` the attacks
    behind its worst case with the photographs of each, `median` and `worst_image` the hashes of two photographs there.
    """

    known_by: tuple[str, ...]
    worst: Mapping[str, Score]
    leakiest: str
    by: Mapping[str, int]
    verdict: str
    why: str
    flags: tuple[str, ...]
    images: int
    median: str = ""
    worst_image: str = ""

    @property
    def shown(self) -> Mapping[str, str]:
        """Return the hashes of the two photographs, by what they are."""
        return {"median": self.median, "worst": self.worst_image}

    @property
    def score(self) -> Score:
        """Return the worst case of the leakiest case."""
        return self.worst.get(self.leakiest, Score(math.nan))

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON; a score of infinity is 100 dB, above which only rounding is measured."""
        worst = {
            name: {key: number(getattr(each, key)) for key in ("mean", "low", "high")} | {"images": each.images}
            for name, each in self.worst.items()
        }
        return asdict(self) | {"known_by": list(self.known_by), "worst": worst, "flags": list(self.flags)}

    @classmethod
    def of_json(cls, given: Mapping[str, Any]) -> "Judged":
        """Return what `as_json` gave."""
        worst: dict[str, Score] = {}
        for name, each in given["worst"].items():
            numbers: dict[str, Any] = {key: math.nan if value is None else value for key, value in each.items()}
            worst[name] = Score(**numbers)
        return cls(**{**with_tuples(given), "worst": worst})


def number(value: float) -> float | None:
    """Return a score as JSON has it: None for NaN, and 100 dB for infinity, above which only rounding is measured."""
    return None if math.isnan(value) else max(-EXACT_DB, min(EXACT_DB, value))


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
    defended = _defended(names)
    scored, facts = Scored(numbered, of.metrics), Facts(numbered, names, of.metrics, knowing=knowing)
    found = _worst(scored, names, of)
    leakiest = _leakiest(found, of)
    own = {name: numbered.loc[numbered.case == names.index(name)] for name in defended}
    words = dict(zip(names, verdicts_of(facts), strict=True))
    word = min((words[name] for name in defended), key=lambda each: WORDS.index(each.word))
    best, middle = _extremes(scored, names.index(leakiest), of) if leakiest else ("", "")
    reached = scored.reached.loc[scored.reached.metric == of.lead]
    by = reached.loc[reached.case == names.index(leakiest)].attack.value_counts() if leakiest else pd.Series(dtype=int)
    known = known_by(own[leakiest], knowing) if leakiest in own else frozenset[str]()
    return Judged(
        known_by=tuple(sorted(known)),
        worst=found,
        leakiest=leakiest,
        by={str(name): int(count) for name, count in by.items()},
        verdict=word.word,
        why=str(word),
        flags=tuple(
            f"{ELSEWHERE if known and flag.head == NO_ADAPTIVE else flag.head}: {'; '.join(flag.items)}"
            for flag in red_flags(facts)
        ),
        images=min((rows.image_sha256.nunique() for rows in own.values()), default=0),
        median=middle,
        worst_image=best,
    )


def worst_cases(records: pd.DataFrame, of: Track, *, hidden: bool = False) -> tuple[Mapping[str, Score], Score]:
    """Return the worst case of each defended case, and that of the leakiest one, as `judge` has them.

    Args:
        records: all rows of a defense; `case` has the names of its cases.
        of: its track.
        hidden: whether the photographs of the hidden half count, and not the listed ones.
    """
    numbered, names = _numbered(records, of, hidden=hidden)
    found = _worst(Scored(numbered, of.metrics), names, of)
    return found, found.get(_leakiest(found, of), Score(math.nan))


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


def _worst(scored: Scored, names: Sequence[str], of: Track) -> dict[str, Score]:
    """Return the worst case of each defended case by the lead metric."""
    defended = _defended(names)
    return {
        names[case]: found.scores[of.lead]
        for (case, attack, _), found in measure(scored.images, [of.lead], LEVEL)
        if attack == WORST and names[case] in defended
    }


def _leakiest(found: Mapping[str, Score], of: Track) -> str:
    """Return the name of the case that leaks most; an empty one where no case has a score."""
    sign = sign_of(of.lead)
    return max((name for name in found if found[name].images), key=lambda n: sign * found[n].mean, default="")


def conclude(card: Card, rows: pd.DataFrame) -> dict[str, Any]:
    """Return what the rows of a result say, as its field `judged` has it: of a defense one, of an attack one by entry.

    The rows are as the result file has them, so that anybody who reads the file concludes the same.
    """
    if card.kind == "attack":
        known = frozenset(card.against) if card.reconstructions else declared_defenses(card.parts[0])
        found = {str(name): rows.loc[rows.entry == name].drop(columns="entry") for name in rows.entry.unique()}
        parts = {each.name: each.parts for each in defense_entries(card.track, [*found])}
        return {
            name: judge(own, card.of).as_json() | {"knows": bool(card.reconstructions) or knows(known, parts[name], {})}
            for name, own in found.items()
        }
    judged = judge(rows, card.of)
    if card.track == "weights":  # written against keys, which declare no class
        kept = tuple(flag for flag in judged.flags if not flag.startswith(NO_ADAPTIVE))
        judged = replace(judged, known_by=(known_by_keys(card),), flags=kept)
    return judged.as_json()


def check_concluded(result: Result, found: Mapping[str, Any], names: Sequence[str] = (*OF_ROWS, *OF_CLASSES)) -> None:
    """Raise PrivlabError if a file does not conclude what its rows say, which `conclude` found, in the named parts.

    Args:
        result: the file.
        found: what `conclude` gives of its rows.
        names: the parts of it that are compared.
    """
    judged = result.data["judged"]
    pairs = [(judged, found)] if "verdict" in found else [(judged.get(name, {}), own) for name, own in found.items()]
    for said, own in pairs:
        for name in (each for each in names if each in own):
            if not _alike(*(_heads(of) if name == "flags" else of for of in (said.get(name), own[name]))):
                raise PrivlabError(
                    f"{result.path} was edited, or is of another version: by its rows, {name} is "
                    f"{_short(own[name])}, and it says {_short(said.get(name))}. Submit the entry again."
                )


def _heads(flags: Any) -> Any:  # noqa: ANN401
    """Return the heads of flags: after the colon some name every attack of the package, which later ones join."""
    return [str(flag).partition(":")[0] for flag in flags] if isinstance(flags, list | tuple) else flags


def _alike(said: Any, found: Any) -> bool:  # noqa: ANN401
    """Return whether two parts of JSON are the same; numbers, which rounding changes, may be 0.01 apart."""
    if isinstance(found, Mapping):
        return (
            isinstance(said, Mapping) and said.keys() == found.keys() and all(_alike(said[k], found[k]) for k in found)
        )
    if isinstance(found, int | float) and isinstance(said, int | float):
        return abs(said - found) <= _APART
    return said == (list(found) if isinstance(found, tuple) else found)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:99]}…"


def known_by(rows: pd.DataFrame, knowing: frozenset[str]) -> frozenset[str]:
    """Return the attacks that ran on one case and know every part of its defense, or undo it by ordering patches.

    `knowing` names attacks that do, whatever is installed here.
    """
    parts = frozenset("+".join(rows.defense.dropna().unique()).split("+")) - {"none", ""}
    attacks = [str(name) for name in rows.attack[rows.status == "ok"].unique() if not str(name).startswith(CONTROL)]
    kinds = kinds_in(rows, parts)
    return frozenset(
        name for name in attacks if parts and (name in knowing or knows(undone(name, rows, "in_place"), parts, kinds))
    )


def _extremes(scored: Scored, case: int, of: Track) -> tuple[str, str]:
    """Return the bundled photographs with the worst and the median worst case; others may not be shown."""
    images = scored.images
    own = images.loc[(images.case == case) & (images.attack == WORST) & images.image.isin(photographs("bundled"))]
    order = own.sort_values(of.lead, ascending=sign_of(of.lead) < 0, kind="stable").image.tolist()
    return (order[0], order[len(order) // 2]) if order else ("", "")

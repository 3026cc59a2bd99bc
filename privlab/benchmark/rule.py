"""The rule: the score of a defense is its worst case by image over every attack that ever entered.

A defense has a rank only if some attack knows every part of it in the case that leaks most, all photographs of the
public half were attacked, and nothing makes the entry unreliable. The score is of that case; an attack that knows the
defense in another one could only raise it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pandas as pd

from privlab.benchmark.cards import Card
from privlab.benchmark.results import Result
from privlab.benchmark.tracks import Track, photographs
from privlab.defenses import DEFENSES
from privlab.evaluation import CONTROL, EXACT_DB
from privlab.metrics import DECIBELS
from privlab.report.tables import Score, red_flags, sign_of
from privlab.report.tables.knowledge import kinds_in, knows, undone
from privlab.report.tables.leakage import measure
from privlab.report.tables.per_image import WORST, Scored
from privlab.report.tables.power import power

__all__ = ["Judged", "Standing", "judge", "rank", "standings"]

LEVEL = 0.95
"""The confidence level of all intervals."""

NO_ADAPTIVE = "No adaptive attack"
"""The red flag of a case in which no attack knows the defense."""

ELSEWHERE = "No adaptive attack in another case"
"""What it is called if one does in the case that leaks most: the score, which is of that case, stands."""

UNRELIABLE = frozenset(
    {
        *("No attack ran", "Outside its stated range", "Low effort", NO_ADAPTIVE, "Adaptive attack weaker"),
        *("More budget, less leakage", "One draw", "Nothing released", "Failed", "Random weights", "Untrained E_unk"),
    }
)
"""The red flags that make an entry unreliable. Few photographs have a reason of their own."""

FEW = "few photographs"
"""The reason of an entry that was not measured on all photographs of its track."""

_WORDS = ("broken", "holds", "no evidence", "no defense")


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
    def score(self) -> Score:
        """Return the worst case of the leakiest case."""
        return self.worst.get(self.leakiest, Score(math.nan))

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON; a score of infinity is 100 dB, above which only rounding is measured."""
        worst = {
            name: {
                "mean": _number(each.mean),
                "low": _number(each.low),
                "high": _number(each.high),
                "images": each.images,
            }
            for name, each in self.worst.items()
        }
        return asdict(self) | {"known_by": list(self.known_by), "worst": worst, "flags": list(self.flags)}

    @classmethod
    def of_json(cls, given: Mapping[str, Any]) -> "Judged":
        """Return what `as_json` gave."""
        worst = {name: _score(each) for name, each in given["worst"].items()}
        told = {"known_by": tuple(given["known_by"]), "worst": worst, "flags": tuple(given["flags"])}
        return cls(**{**given, **told})


def _score(given: Mapping[str, Any]) -> Score:
    mean, low, high = (math.nan if given[key] is None else given[key] for key in ("mean", "low", "high"))
    return Score(mean, low, high, given["images"])


def _number(value: float) -> float | None:
    return None if math.isnan(value) else max(-EXACT_DB, min(EXACT_DB, value))


def judge(records: pd.DataFrame, of: Track) -> Judged:
    """Return the worst case, the verdict, the flags and the attacks that know a defense, from its records.

    Args:
        records: all rows of a defense; `case` has the names of its cases.
        of: its track.
    """
    empty = {name: object for name in records if records[name].isna().all()}  # texts that nothing states
    records = records.astype(empty)
    if of.lead in DECIBELS:  # one exact photograph would make the mean of all infinite
        records = records.assign(**{of.lead: records[of.lead].clip(upper=EXACT_DB)})
    names = list(dict.fromkeys(records.case))
    numbered = records.assign(case=records.case.map({name: i for i, name in enumerate(names)}))
    defended = [name for name in names if not name.endswith(", undefended")] or names
    scored = Scored.of(numbered, list(of.metrics), "in_place")
    found = {
        names[case]: scores[of.lead]
        for (case, attack, _), (scores, *_) in measure(scored.images, [of.lead], LEVEL)
        if attack == WORST and names[case] in defended
    }
    sign = sign_of(of.lead)
    leakiest = max((name for name in found if found[name].images), key=lambda n: sign * found[n].mean, default="")
    own = {name: numbered.loc[numbered.case == names.index(name)] for name in defended}
    words = dict(zip(names, power(numbered, names, list(of.metrics)), strict=True))
    word = min((words[name] for name in defended), key=lambda each: _WORDS.index(each.word))
    best, middle = _extremes(scored, names.index(leakiest), of) if leakiest else ("", "")
    reached = scored.reached.loc[scored.reached.metric == of.lead]
    by = reached.loc[reached.case == names.index(leakiest)].attack.value_counts() if leakiest else pd.Series(dtype=int)
    known = known_by(own[leakiest]) if leakiest in own else frozenset[str]()
    return Judged(
        known_by=tuple(sorted(known)),
        worst=found,
        leakiest=leakiest,
        by={str(name): int(count) for name, count in by.items()},
        verdict=word.word,
        why=str(word),
        flags=tuple(
            f"{ELSEWHERE if known and flag.head == NO_ADAPTIVE else flag.head}: {'; '.join(flag.items)}"
            for flag in red_flags(numbered, names, of.lead)
        ),
        images=min((rows.image_sha256.nunique() for rows in own.values()), default=0),
        median=middle,
        worst_image=best,
    )


def known_by(rows: pd.DataFrame) -> frozenset[str]:
    """Return the attacks that ran on one case and know every part of its defense, or undo it by ordering patches."""
    parts = frozenset("+".join(rows.defense.dropna().unique()).split("+")) - {"none", ""}
    attacks = [str(name) for name in rows.attack[rows.status == "ok"].unique() if not str(name).startswith(CONTROL)]
    kinds = kinds_in(rows, parts)
    return frozenset(name for name in attacks if parts and knows(undone(name, rows, "in_place"), parts, kinds))


def _extremes(scored: Scored, case: int, of: Track) -> tuple[str, str]:
    """Return the bundled photographs with the worst and the median worst case; others may not be shown."""
    images = scored.images
    own = images.loc[(images.case == case) & (images.attack == WORST) & images.image.isin(photographs("bundled"))]
    order = own.sort_values(of.lead, ascending=sign_of(of.lead) < 0, kind="stable").image.tolist()
    return (order[0], order[len(order) // 2]) if order else ("", "")


@dataclass(frozen=True)
class Standing:
    """A row of the table. `rank` is None for an entry without one; `unreliable` holds the reasons.

    `result` is the entry's, and `entered` those of the attacks that it was scored anew with.
    """

    track: str
    name: str
    paper: str
    victim: str
    known_by: tuple[str, ...]
    worst_case: float | None
    interval: tuple[float | None, float | None]
    ours: float | None
    external: float | None
    external_by: tuple[str, ...]
    reported: str
    verdict: str
    why: str
    unreliable: tuple[str, ...]
    utility: str
    measured_utility: float | None
    epsilon: str
    secret_bits: float | None
    photographs: int
    draws: int
    signer: str | None
    photograph_parts: tuple[str, ...] = ()
    rank: int | None = None
    dominated: bool = False
    result: Result | None = field(default=None, repr=False, compare=False)
    entered: Sequence[Result] = field(default=(), repr=False, compare=False)
    judged: Judged | None = field(default=None, repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON."""
        row = asdict(replace(self, result=None, judged=None, entered=()))
        return {name: value for name, value in row.items() if name not in ("result", "judged", "entered")}


def standings(results: Iterable[Result]) -> list[Standing]:
    """Return the rows of all tracks: by track, those with a rank first, and the least leakage first.

    Args:
        results: those of defenses and of attacks; a defense that a new attack was run on is judged anew.
    """
    given = list(results)
    attacks = [result for result in given if result.card.kind == "attack"]
    rows = [_standing(result, attacks) for result in given if result.card.kind == "defense"]
    ranked = rank(rows)
    return sorted(ranked, key=lambda row: (row.track, row.rank is None, row.rank or 0, row.worst_case or 0, row.name))


def _standing(result: Result, attacks: Sequence[Result]) -> Standing:
    card, of = result.card, result.card.of
    own = Judged.of_json(result.data["judged"])
    theirs = [each for each in attacks if card.name in each.data["judged"] and each.card.track == card.track]
    whole, external = own, None
    if theirs:
        more = [each.rows.loc[lambda rows: rows.entry == card.name].drop(columns="entry") for each in theirs]
        whole = _judged_anew(own, pd.concat([result.rows, *more], ignore_index=True), of, card, theirs)
        external = judge(pd.concat(more, ignore_index=True), of).score.mean
    listed = sum(len(photographs(part)) for part in of.photographs)
    few = [f"{FEW}: {whole.images} of {listed}"] if whole.images < listed else []
    knowing = [each for each in theirs if each.data["judged"][card.name].get("knows")]
    if knowing and not own.known_by and not few:  # the score rests on those that entered
        covered = max(each.rows.loc[each.rows.entry == card.name, "image_sha256"].nunique() for each in knowing)
        few = [f"{FEW}: {covered} of {listed} by an attack that knows the defense"] if covered < listed else []
    flags = [flag for flag in whole.flags if flag.partition(":")[0] in UNRELIABLE]
    flags += [f"admission: {each['name']}, {each['text']}" for each in result.data["admission"] if not each["passed"]]
    if whole.verdict == "no evidence":
        flags.append(whole.why)
    score, reported, utility = whole.score, card.reported, card.utility
    return Standing(
        track=card.track,
        name=card.name,
        paper=card.paper,
        victim=card.victim_name,
        known_by=whole.known_by,
        worst_case=_number(score.mean),
        interval=(_number(score.low), _number(score.high)),
        ours=_number(own.score.mean),
        external=None if external is None else _number(external),
        external_by=tuple(each.card.name for each in theirs),
        reported="" if reported is None else reported.claim,
        verdict=whole.verdict,
        why=whole.why,
        unreliable=tuple(dict.fromkeys([*flags, *few])),
        utility="" if utility is None else _told(utility.measure, utility.value, utility.how),
        measured_utility=result.data.get("utility"),
        epsilon=str(card.epsilon),
        secret_bits=card.secret_bits,
        photographs=whole.images,
        draws=int(result.data.get("draws", 1)),
        signer=result.signer,
        photograph_parts=tuple(result.data["photographs"]),
        result=result,
        entered=theirs,
        judged=whole,
    )


def _told(measure: str, value: float | None, how: str) -> str:
    return f"{measure}: {'—' if value is None else f'{value:g}'} ({how})"


def _judged_anew(own: Judged, records: pd.DataFrame, of: Track, card: Card, theirs: Sequence[Result]) -> Judged:
    """Judge a defense with the rows of new attacks; of a plug-in, which is not installed here, what was known stays."""
    found = judge(records, of)
    knowing = {each.card.parts[0] for each in theirs if each.data["judged"][card.name].get("knows")}
    known = tuple(sorted({*own.known_by, *found.known_by, *knowing}))
    if {*card.parts} <= DEFENSES.keys() or found.verdict == "broken":
        wrong = (NO_ADAPTIVE, "Adaptive attack weaker") if knowing else ()  # a new one is not installed here
        flags = tuple(flag for flag in found.flags if not flag.startswith(wrong))
        return replace(found, known_by=known, flags=flags)
    return replace(found, known_by=known, verdict=own.verdict, why=own.why, flags=own.flags)


def rank(rows: Sequence[Standing]) -> list[Standing]:
    """Return the rows with their ranks within each track, and marked where another one is better in both respects.

    Args:
        rows: those of all tracks.
    """
    able = [row for row in rows if row.known_by and not row.unreliable and row.worst_case is not None]
    done = []
    for row in rows:
        place = None
        if row in able:
            place = 1 + sum(_of(other) < _of(row) for other in able if other.track == row.track)
        done.append(replace(row, rank=place, dominated=any(_dominates(other, row) for other in rows)))
    return done


def _of(row: Standing) -> float:
    return math.inf if row.worst_case is None else row.worst_case


def _dominates(other: Standing, row: Standing) -> bool:
    """Return whether another entry of the track leaks no more and keeps no less utility, and is better in one."""
    if other.track != row.track or other.victim != row.victim or None in (other.measured_utility, row.measured_utility):
        return False
    leak = (_of(row), _of(other))
    worth = (float(other.measured_utility or 0), float(row.measured_utility or 0))
    return leak[1] <= leak[0] and worth[0] >= worth[1] and (leak[1] < leak[0] or worth[0] > worth[1])

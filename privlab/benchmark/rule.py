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
from privlab.benchmark.entries import PACKAGE, Told, told
from privlab.benchmark.judged import FROM_ROWS, NO_ADAPTIVE, Judged, check_concluded, conclude, judge, number
from privlab.benchmark.results import Result
from privlab.benchmark.tracks import Track, photographs
from privlab.defenses import DEFENSES
from privlab.evaluation import CONTROL
from privlab.report.tables import Score

__all__ = ["FEW", "HIDDEN", "Standing", "rank", "standings"]

UNRELIABLE = frozenset(
    {
        *("No attack ran", "Outside its stated range", "Low effort", NO_ADAPTIVE, "Adaptive attack weaker"),
        *("More budget, less leakage", "One draw", "Nothing released", "Failed", "Random weights", "Untrained E_unk"),
    }
)
"""The red flags that make an entry unreliable. Few photographs have a reason of their own."""

FEW = "few photographs"
"""The reason of an entry that was not measured on all photographs of its track."""

HIDDEN = "the hidden half leaks more"
"""The reason of an entry that leaks less on the photographs which anybody can look up than on the others."""


@dataclass(frozen=True)
class Standing:
    """A row of the table. `rank` is None for an entry without one; `unreliable` holds the reasons.

    `result` is the entry's, and `entered` those of the attacks that it was scored anew with. `identity` says whether
    the photograph is told among candidates, of entries of this package where that was measured. `listed_half` and
    `hidden_half` are the scores of the track's attacks on the photographs that it lists and on the hidden ones, where
    both were attacked; the score is of the listed ones alone.
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
    external_photographs: int
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
    identity: Told | None = None
    listed_half: float | None = None
    hidden_half: float | None = None
    rank: int | None = None
    dominated: bool = False
    result: Result | None = field(default=None, repr=False, compare=False)
    entered: Sequence[Result] = field(default=(), repr=False, compare=False)
    judged: Judged | None = field(default=None, repr=False, compare=False)

    @property
    def concluded(self) -> str:
        """Return the verdict, and where it holds in how many cases the photograph is told among candidates."""
        if self.verdict != "holds" or self.identity is None or not self.identity.above_control:
            return self.verdict
        return f"{self.verdict}, the photograph is told in {100 * self.identity.rate:.0f} %"

    @property
    def best_known_by(self) -> str | None:
        """Return the attack that knows the defense and leaks most of the most photographs; None without any."""
        by = self.judged.by if self.judged else {}
        return max(self.known_by, key=lambda name: by.get(name, 0), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON."""
        row = asdict(replace(self, result=None, judged=None, entered=()))
        return {name: value for name, value in row.items() if name not in ("result", "judged", "entered")}


def standings(results: Iterable[Result]) -> list[Standing]:
    """Return the rows of all tracks: by track, those with a rank first, and the least leakage first.

    Args:
        results: those of defenses and of attacks; a defense that a new attack was run on is judged anew.

    Raises:
        PrivlabError: if a result from elsewhere has other scores than its rows.
    """
    given = [_as_its_rows_say(result) for result in results]
    attacks = [result for result in given if result.card.kind == "attack"]
    identity = told()
    rows = [_standing(result, attacks, identity) for result in given if result.card.kind == "defense"]
    ranked = rank(rows)
    return sorted(ranked, key=lambda row: (row.track, row.rank is None, row.rank or 0, row.worst_case or 0, row.name))


def _as_its_rows_say(result: Result) -> Result:
    """Return a result with what its rows say; of a plug-in, whose class is not here, with the words of its file.

    Results of this package are as they are: a test concludes from their rows.
    """
    if result.path.is_relative_to(PACKAGE):
        return result
    card = result.card
    if not result.data["plugin"]:
        found = conclude(card, result.rows)
        check_concluded(result, found, FROM_ROWS)
        return replace(result, data={**result.data, "judged": found})
    rows = result.rows.assign(entry=card.name) if card.kind == "defense" else result.rows
    by_entry = {str(name): judge(own.drop(columns="entry"), card.of).as_json() for name, own in rows.groupby("entry")}
    check_concluded(result, by_entry[card.name] if card.kind == "defense" else by_entry, FROM_ROWS)
    return result


def _standing(result: Result, attacks: Sequence[Result], identity: Mapping[tuple[str, str], Told]) -> Standing:
    card, of = result.card, result.card.of
    own = Judged.of_json(result.data["judged"])
    theirs = [each for each in attacks if card.name in each.data["judged"] and each.card.track == card.track]
    whole, external, seen = own, None, 0
    if theirs:
        more = [_rows_on(card.name, each) for each in theirs]
        whole = _judged_anew(own, pd.concat([result.rows, *more], ignore_index=True), of, card, theirs)
        external = judge(pd.concat(more, ignore_index=True), of).score.mean
        seen = pd.concat(more).image_sha256.nunique()
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
    halves = _halves(result.rows, of, own.leakiest)
    flags += _hidden_leaks(*halves)
    score, reported, utility = whole.score, card.reported, card.utility
    return Standing(
        track=card.track,
        name=card.name,
        paper=card.paper,
        victim=card.victim_name,
        known_by=whole.known_by,
        worst_case=number(score.mean),
        interval=(number(score.low), number(score.high)),
        ours=number(own.score.mean),
        external=None if external is None else number(external),
        external_by=tuple(each.card.name for each in theirs),
        external_photographs=seen,
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
        identity=identity.get((card.track, card.name)) if result.path.is_relative_to(PACKAGE) else None,
        listed_half=number(halves[0].mean),
        hidden_half=number(halves[1].mean),
        result=result,
        entered=theirs,
        judged=whole,
    )


def _rows_on(name: str, attack: Result) -> pd.DataFrame:
    """Return the rows of an attack that entered against an entry.

    Controls of an adversary with images of its own get its name. Under one name the mean of several controls counts.
    """
    rows = attack.rows.loc[attack.rows.entry == name].drop(columns="entry")
    if not attack.data.get("public_sha256"):
        return rows
    control = rows.attack.str.startswith(CONTROL)
    return rows.assign(attack=rows.attack.mask(control, rows.attack + f" of {attack.card.name}"))


def _halves(rows: pd.DataFrame, of: Track, case: str) -> tuple[Score, Score]:
    """Return the worst case of the listed photographs and of the hidden ones, in one case, over the track's attacks.

    Both are NaN where no hidden photograph was attacked.
    """
    if not rows.image_sha256.isin(photographs("hidden")).any():
        return Score(math.nan), Score(math.nan)
    listed, unlisted = (judge(rows, of, hidden=half).worst.get(case, Score(math.nan)) for half in (False, True))
    return listed, unlisted


def _hidden_leaks(listed: Score, hidden: Score) -> list[str]:
    """Return the reason of an entry whose hidden photographs leak more, beyond both intervals."""
    if not hidden.low > listed.high:  # NaN compares as no difference
        return []
    return [f"{HIDDEN}: {hidden.mean:.1f} [{hidden.low:.1f}, {hidden.high:.1f}], the listed one {listed.mean:.1f}"]


def _told(measure: str, value: float | None, how: str) -> str:
    return f"{measure}: {'—' if value is None else f'{value:g}'} ({how})"


def _judged_anew(own: Judged, records: pd.DataFrame, of: Track, card: Card, theirs: Sequence[Result]) -> Judged:
    """Judge a defense by the rows of all attacks; which one knows it, the files say of classes that are not here."""
    knowing = {name for each in theirs if each.data["judged"][card.name].get("knows") for name in _attacks_of(each)}
    if not {*card.parts} <= DEFENSES.keys():
        knowing |= {*own.known_by}
    return judge(records, of, frozenset(knowing))


def _attacks_of(result: Result) -> set[str]:
    """Return the names by which the rows of a result have its attack; undefended ones may be of its counterpart."""
    names = result.rows.attack[result.rows.setting != "a"].unique()
    return {name for name in names if not name.startswith(CONTROL)}


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
    """Return whether another entry, on as many photographs, leaks no more and keeps no less, and is better in one."""
    alike = (other.track, other.victim, other.photographs) == (row.track, row.victim, row.photographs)
    if not alike or None in (other.measured_utility, row.measured_utility):
        return False
    leak = (_of(row), _of(other))
    worth = (float(other.measured_utility or 0), float(row.measured_utility or 0))
    return leak[1] <= leak[0] and worth[0] >= worth[1] and (leak[1] < leak[0] or worth[0] > worth[1])

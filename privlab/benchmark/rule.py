"""The rule: the score of a defense is its worst case by image over every attack that ever entered.

A defense has a rank only if some attack knows every part of it in the case that leaks most, all photographs of the
public half were attacked, and nothing makes the entry unreliable. The score is of that case; an attack that knows the
defense in another one could only raise it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from privlab.benchmark.cards import Card
from privlab.benchmark.entries import of_package
from privlab.benchmark.judged import NO_ADAPTIVE, OF_ROWS, Judged, check_concluded, conclude, judge, number, worst_cases
from privlab.benchmark.results import Result
from privlab.benchmark.standing import PACKAGE, Standing, Told, concluded_rows, told_of_package
from privlab.benchmark.tracks import Track, photographs
from privlab.defenses import DEFENSES
from privlab.evaluation import CONTROL
from privlab.report.tables import Score

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


def standings(results: Iterable[Result], *, again: bool = False) -> list[Standing]:
    """Return the rows of all tracks: by track, those with a rank first, and the least leakage first.

    Args:
        results: those of defenses and of attacks; a defense that a new attack was run on is judged again.
        again: whether the rows that are kept of this package's entries are concluded again too.

    Raises:
        PrivlabError: if a result from elsewhere has other scores than its rows.
    """
    given = [_as_its_rows_say(result) for result in results]
    attacks = [result for result in given if result.card.kind == "attack"]
    identity = told_of_package()
    kept = {} if again else {(row.track, row.name): (row, judged) for row, judged in concluded_rows()}
    rows = []
    for result in given:
        card = result.card
        if card.kind == "attack":
            continue
        entered = [each for each in attacks if card.name in each.data["judged"] and each.card.track == card.track]
        row, judged = kept.get((card.track, card.name), (None, {}))
        if row is not None and _rests_on(row, [result, *entered]):
            rows.append(replace(row, result=result, entered=entered, judged=Judged.of_json(judged)))
        else:
            rows.append(_standing(result, entered, identity))
    ranked = rank(rows)
    return sorted(ranked, key=lambda row: (row.track, row.rank is None, row.rank or 0, row.worst_case or 0, row.name))


def _rests_on(row: Standing, results: Sequence[Result]) -> bool:
    """Return whether a kept row was concluded from these results, the entry's and those of the attacks that entered."""
    known = of_package()
    own = all(any(each is one for one in known) for each in results)
    return own and row.external_by == tuple(each.card.name for each in results[1:])


def _as_its_rows_say(result: Result) -> Result:
    """Return a result with what its rows say; of a plug-in, whose class is not here, with the words of its file.

    Results of this package are as they are: a test concludes from their rows.
    """
    if result.path.is_relative_to(PACKAGE):
        return result
    card = result.card
    if not result.data["plugin"]:
        found = conclude(card, result.rows)
        check_concluded(result, found, OF_ROWS)
        return replace(result, data={**result.data, "judged": found})
    rows = result.rows.assign(entry=card.name) if card.kind == "defense" else result.rows
    by_entry = {str(name): judge(own.drop(columns="entry"), card.of).as_json() for name, own in rows.groupby("entry")}
    check_concluded(result, by_entry[card.name] if card.kind == "defense" else by_entry, OF_ROWS)
    return result


def _standing(result: Result, theirs: Sequence[Result], identity: Mapping[tuple[str, str], Told]) -> Standing:
    card, of = result.card, result.card.of
    own = Judged.of_json(result.data["judged"])
    whole, external, seen = own, None, 0
    if theirs:
        more = [_rows_on(card.name, each) for each in theirs]
        whole = _judged_anew(own, pd.concat([result.rows, *more], ignore_index=True), of, card, theirs)
        external = worst_cases(pd.concat(more, ignore_index=True), of)[1].mean
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
    half, hidden = _halves(result.rows, of, own.leakiest)
    if hidden.low > half.high:  # beyond both intervals; NaN compares as no difference
        theirs_leak = f"{hidden.mean:.1f} [{hidden.low:.1f}, {hidden.high:.1f}]"
        flags.append(f"{HIDDEN}: {theirs_leak}, the listed one {half.mean:.1f}")
    score, utility = whole.score, ""
    if stated := card.utility:
        value = f"{stated['value']:g}" if "value" in stated else "—"
        utility = f"{stated['measure']}: {value} ({stated['how']})"
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
        reported=card.reported.get("claim", ""),
        verdict=whole.verdict,
        why=whole.why,
        unreliable=tuple(dict.fromkeys([*flags, *few])),
        utility=utility,
        measured_utility=result.data.get("utility"),
        epsilon=str(card.epsilon),
        secret_bits=card.secret_bits,
        photographs=whole.images,
        draws=int(result.data.get("draws", 1)),
        signer=result.signer,
        photograph_parts=tuple(result.data["photographs"]),
        identity=identity.get((card.track, card.name)) if result.path.is_relative_to(PACKAGE) else None,
        listed_half=number(half.mean),
        hidden_half=number(hidden.mean),
        by=whole.by,
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
    listed, unlisted = (worst_cases(rows, of, hidden=half)[0].get(case, Score(math.nan)) for half in (False, True))
    return listed, unlisted


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
    """Return the rows with their ranks within each track, and marked where another one is better in both respects."""
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
    own, theirs = ((-_of(each), float(each.measured_utility or 0)) for each in (row, other))
    return theirs != own and theirs[0] >= own[0] and theirs[1] >= own[1]

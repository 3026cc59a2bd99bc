"""The rule: the score of a defense is its worst case by image over every attack that ever entered.

A defense has a rank only if some attack knows every part of it in the case that leaks most, all photographs of the
public half were attacked, and nothing makes the entry unreliable. The score is of that case; an attack that knows the
defense in another one could only raise it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pandas as pd

from privlab.benchmark.cards import Card
from privlab.benchmark.entries import of_package
from privlab.benchmark.judged import (
    NO_ADAPTIVE,
    NOTHING,
    OF_ROWS,
    Judged,
    Worst,
    check_concluded,
    conclude,
    judge,
    leakiest_of,
    score_of,
    worst_cases,
)
from privlab.benchmark.results import Result
from privlab.benchmark.standing import PACKAGE, Standing, concluded_rows, recognised_of_package
from privlab.benchmark.tracks import Track, photographs
from privlab.defenses import DEFENSES
from privlab.evaluation import CONTROL

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
    kept = {} if again else {(row.track, row.name): row for row in concluded_rows()}
    rows: list[Standing] = []
    for result in given:
        card = result.card
        if card.kind == "attack":
            continue
        entered = [
            each
            for each in given
            if each.card.kind == "attack" and each.card.track == card.track and card.name in each.judged
        ]
        row = kept.get((card.track, card.name))
        if row is not None and row.external_by == _names(entered) and {result, *entered} <= {*of_package()}:
            rows.append(replace(row, result=result, entered=entered))
        else:
            rows.append(_standing(result, entered))
    ranked = rank(rows)
    return sorted(ranked, key=lambda row: (row.track, row.rank is None, row.rank or 0, row.worst_case or 0, row.name))


def _names(results: Sequence[Result]) -> tuple[str, ...]:
    return tuple(result.card.name for result in results)


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
        return result.concluding(found)
    names = dict.fromkeys(result.rows.get("entry", [card.name]))
    found = {str(name): judge(result.rows_on(str(name)), card.of) for name in names}
    check_concluded(result, found if card.kind == "attack" else found[card.name], OF_ROWS)
    return result


def _standing(result: Result, theirs: Sequence[Result]) -> Standing:
    """Return the row of a defense by its own result and those of the attacks that entered."""
    card, of, own = result.card, result.card.of, result.judged[result.card.name]
    whole, external, seen = own, None, 0
    if theirs:
        more = pd.concat([_rows_on(card.name, each) for each in theirs], ignore_index=True)
        records = pd.concat([result.rows, more], ignore_index=True)
        whole = _judged_anew(own, records, card, theirs)
        worst = worst_cases(more, of)
        external = worst.get(leakiest_of(worst, of), NOTHING)["mean"]
        seen = more.image_sha256.nunique()
    flags = [flag for flag in whole["flags"] if flag.partition(":")[0] in UNRELIABLE]
    flags += [f"admission: {each['name']}, {each['text']}" for each in result.data["admission"] if not each["passed"]]
    if whole["verdict"] == "no evidence":
        flags.append(whole["why"])
    listed, hidden = _halves(result.rows, of, own["leakiest"])
    low, high = hidden["low"], listed["high"]
    if low is not None and high is not None and low > high:  # beyond both intervals
        unlisted = f"{hidden['mean']:.1f} [{low:.1f}, {hidden['high']:.1f}]"
        flags.append(f"{HIDDEN}: {unlisted}, the listed one {listed['mean']:.1f}")
    listed_photographs = sum(len(photographs(part)) for part in of.photographs)
    knowing, few = _knowing(theirs, card), ""
    if whole["images"] < listed_photographs:
        few = f"{whole['images']} of {listed_photographs}"
    elif knowing and not own["known_by"]:  # the score rests on those that entered
        covered = max(each.rows_on(card.name).image_sha256.nunique() for each in knowing)
        if covered < listed_photographs:
            few = f"{covered} of {listed_photographs} by an attack that knows the defense"
    flags += [f"{FEW}: {few}"] if few else []
    utility = ""
    if stated := card.utility:
        value = f"{stated['value']:g}" if "value" in stated else "—"
        utility = f"{stated['measure']}: {value} ({stated['how']})"
    score, identity = score_of(whole), None
    if result.path.is_relative_to(PACKAGE):
        identity = recognised_of_package().get((card.track, card.name))
    return Standing(
        track=card.track,
        name=card.name,
        paper=card.paper,
        victim=card.victim_name,
        known_by=tuple(whole["known_by"]),
        worst_case=score["mean"],
        interval=(score["low"], score["high"]),
        ours=score_of(own)["mean"],
        external=external,
        external_by=_names(theirs),
        external_photographs=seen,
        reported=card.reported.get("claim", ""),
        verdict=whole["verdict"],
        why=whole["why"],
        unreliable=tuple(dict.fromkeys(flags)),
        utility=utility,
        measured_utility=result.data.get("utility"),
        epsilon=str(card.epsilon),
        secret_bits=card.secret_bits,
        photographs=whole["images"],
        draws=int(result.data.get("draws", 1)),
        signer=result.signer,
        photograph_parts=tuple(result.data["photographs"]),
        identity=identity,
        listed_half=listed["mean"],
        hidden_half=hidden["mean"],
        judged=whole,
        result=result,
        entered=theirs,
    )


def _knowing(attacks: Sequence[Result], card: Card) -> list[Result]:
    """Return those of the attacks that know a defense, as their files say."""
    return [each for each in attacks if each.judged[card.name].get("knows")]


def _rows_on(name: str, attack: Result) -> pd.DataFrame:
    """Return the rows of an attack that entered against an entry.

    Controls of an adversary with images of its own get its name. Under one name the mean of several controls counts.
    """
    rows = attack.rows_on(name)
    if not attack.data.get("public_sha256"):
        return rows
    control = rows.attack.str.startswith(CONTROL)
    return rows.assign(attack=rows.attack.mask(control, rows.attack + f" of {attack.card.name}"))


def _halves(rows: pd.DataFrame, of: Track, case: str) -> tuple[Worst, Worst]:
    """Return the worst case of the listed photographs and of the hidden ones, in one case, over the track's attacks."""
    if not rows.image_sha256.isin(photographs("hidden")).any():
        return NOTHING, NOTHING
    listed, hidden = (worst_cases(rows, of, hidden=half).get(case, NOTHING) for half in (False, True))
    return listed, hidden


def _judged_anew(own: Judged, records: pd.DataFrame, card: Card, theirs: Sequence[Result]) -> Judged:
    """Judge a defense by the rows of all attacks; which one knows it, the files say of classes that are not here.

    Undefended rows of an attack may be of its counterpart, which does not know the defense.
    """
    knowing: set[str] = set()
    for each in _knowing(theirs, card):
        knowing.update(each.rows.attack[each.rows.setting != "a"])
    if not {*card.parts} <= DEFENSES.keys():
        knowing.update(own["known_by"])
    return judge(records, card.of, frozenset(name for name in knowing if not name.startswith(CONTROL)))


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

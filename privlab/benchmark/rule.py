"""The rule: a defense is ranked by the best single attack that ever entered, in the mean over photographs and draws.

Its worst case, the leakiest score of each photograph over all attacks and draws, is shown next to this score. No
adversary can choose as the worst case does, and more draws raise it by chance: it ranks nothing. The score is that of
the first case of the track within a tenth of a decibel of the highest one. A defense has a rank only if some attack
knows every part of it there, all photographs of the public half were attacked, and nothing makes the entry unreliable.
An attack knowing the defense in another case could hardly lower the score.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pandas as pd

from privlab.base import PrivlabError, one_line
from privlab.benchmark.cards import CHECKED, Card
from privlab.benchmark.form import Judged, Worst
from privlab.benchmark.results import Result, defense_entries, of_package, warn_left_out
from privlab.benchmark.standing import PACKAGE, Standing, concluded_rows, recognised_of_package
from privlab.benchmark.tracks import BUNDLED, Track, photographs
from privlab.benchmark.weights import known_by as known_by_keys
from privlab.defenses import DEFENSES
from privlab.evaluation import CONTROL
from privlab.metrics import DECIBELS, EXACT_DB
from privlab.report.tables import Facts, red_flags, sign_of
from privlab.report.tables.case_verdicts import WORDS, verdicts_of
from privlab.report.tables.knowledge import declared_defenses, knows, undefended_attack
from privlab.report.tables.per_image import SINGLE, WORST, Scored
from privlab.report.tables.rows import measure

LEVEL = 0.95
"""The confidence level of all intervals."""

NO_ADAPTIVE = "No adaptive attack"
"""The red flag of a case in which no attack knows the defense."""

ELSEWHERE = "No adaptive attack in another case"
"""What it is called if one does in the case that leaks most: the score, which is that of this case, holds."""

ONE_DRAW = "One draw"
"""The red flag of a random defense that was drawn once: each client of a check draws once."""

OF_ROWS = ("worst", "leakiest", "by", "images", "median", "worst_image")
"""What the rows of a result say by themselves."""

OF_CLASSES = ("known_by", "verdict", "flags", "knows")
"""What they say with what the classes of the entry declare; `knows` belongs to an attack on a defense."""

_APART = 0.01
"""How far two scores of the same rows may differ."""


def worst_of(judged: Judged) -> Worst:
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
    worst = _means(scored, names, of, WORST)
    leakiest = leakiest_of(_means(scored, names, of, SINGLE), of)
    case = names.index(leakiest) if leakiest else -1  # a number that no case has
    verdicts = [verdict for verdict in verdicts_of(facts) if verdict.label in defended]
    verdict = min(verdicts, key=lambda each: WORDS.index(each.word))
    known_by = [name for name in facts.attacks(case) if facts.defenses[case] and facts.knows(name, case)]
    reached = scored.reached.loc[(scored.reached.metric == of.lead) & (scored.reached.case == case)]
    heads = {NO_ADAPTIVE: ELSEWHERE} if known_by else {}
    flags = [f"{heads.get(flag.head, flag.head)}: {'; '.join(flag.items)}" for flag in red_flags(facts)]
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
    return _means(Scored(numbered, of.metrics), names, of, WORST)


def best_single(records: pd.DataFrame, of: Track, case: str) -> tuple[str, Worst]:
    """Return the attack with the leakiest mean over the listed photographs, and this mean, averaged over draws.

    An attack counts that was scored on at least half as many photographs as any other one.

    Args:
        records: all rows of a defense; `case` has the names of its cases.
        of: its track.
        case: the name of the case; an empty name stands for an attack without a name and no score.
    """
    numbered, names = _numbered(records, of, hidden=False)
    scored = Scored(numbered, of.metrics)
    attacks = {names[number]: attack for number, (attack, _) in scored.single.items()}
    return attacks.get(case, ""), _means(scored, names, of, SINGLE).get(case, NOTHING)


def knowing(records: pd.DataFrame, of: Track) -> frozenset[str]:
    """Return the attacks that know every part of the defense in some case, and the ones they are without a defense."""
    numbered, names = _numbered(records, of, hidden=False)
    facts = Facts(numbered, names, of.metrics)
    known = {attack for case in facts.defended for attack in facts.attacks(case) if facts.knows(attack, case)}
    return frozenset(known.union(map(undefended_attack, known)))


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


def _means(scored: Scored, names: Sequence[str], of: Track, which: str) -> dict[str, Worst]:
    """Return the mean of each defended case by the lead metric, of the worst case or of the best single attack.

    Above 100 dB only rounding is measured. `which` is `WORST` or `SINGLE`.
    """
    means: dict[str, Worst] = {}
    for (case, attack, _), found in measure(scored.images, [of.lead], LEVEL).items():
        if attack == which and names[case] in _defended(names):
            score = found.scores[of.lead]
            mean, low, high = (
                None if math.isnan(value) else min(value, highest(of)) for value in (score.mean, score.low, score.high)
            )
            means[names[case]] = {"mean": mean, "low": low, "high": high, "images": score.images}
    return means


def leakiest_of(means: Mapping[str, Worst], of: Track) -> str:
    """Return the name of the case that leaks most; an empty one where no case has a score.

    It is the first of those within a tenth of a decibel of the highest score, as their order may differ by rounding.
    """
    leaks = {name: sign_of(of.lead) * each["mean"] for name, each in means.items() if each["mean"] is not None}
    return next((name for name, leak in leaks.items() if leak >= max(leaks.values()) - 0.1), "")


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
    if card.track == CHECKED:  # the server knows the check, and sends what passes and leaks most
        judged = judge(rows, card.of, frozenset(card.of.attacks))
        judged["flags"] = [flag for flag in judged["flags"] if not flag.startswith(ONE_DRAW)]
        return judged
    judged = judge(rows, card.of)
    if card.track == "weights":  # written against keys, which declare no class
        judged["known_by"] = [known_by_keys(card)]
        judged["flags"] = [flag for flag in judged["flags"] if not flag.startswith(NO_ADAPTIVE)]
    return judged


@contextmanager
def concluding(result: Result) -> Iterator[None]:
    """Raise PrivlabError where nothing can be concluded: who wrote the rows may have put anything into a column."""
    try:
        yield
    except PrivlabError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        said = one_line(error)
        raise PrivlabError(f"'{result.path}' has rows from which nothing can be concluded: {said}.") from None


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
                    f"{result.path} was edited, or another version wrote it: by its rows, {name} is "
                    f"{_short(own[name])}, and it says {_short(said.get(name))}. Submit the entry again."
                )


def _with_heads(judged: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is concluded with the heads of flags: after the colon are attacks, which later ones join."""
    flags = judged.get("flags")
    heads = [str(flag).partition(":")[0] for flag in flags] if isinstance(flags, list) else flags
    return {**judged, "flags": heads}


def _alike(said: Any, found: Any) -> bool:  # noqa: ANN401
    """Return whether two parts of JSON are the same; numbers, which rounding changes, may differ by 0.01."""
    if isinstance(found, Mapping):
        same = isinstance(said, Mapping) and said.keys() == found.keys()
        return same and all(_alike(said[name], found[name]) for name in found)
    if isinstance(found, int | float) and isinstance(said, int | float):
        return abs(said - found) <= _APART
    return said == found


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:99]}…"


UNRELIABLE = frozenset(
    {
        *("No attack ran", "Outside its stated range", "Low effort", NO_ADAPTIVE, "Adaptive attack weaker"),
        *("More budget, less leakage", ONE_DRAW, "Nothing released", "Failed", "Random weights", "Untrained E_unk"),
    }
)
"""The red flags that make an entry unreliable. Few photographs have another reason."""

COST = "costs honest rounds too much"
"""The reason of an entry that keeps less of honest releases than its track asks for."""

FEW = "few photographs"
"""The reason of an entry that was not measured on all photographs of its track."""

HIDDEN = "the hidden half leaks more"
"""The reason of an entry that leaks less on the photographs which anybody can look up than on the others."""


def standings(results: Iterable[Result], *, again: bool = False) -> list[Standing]:
    """Return the rows of all tracks: by track, those with a rank first, and the least leakage first.

    A defense that a new attack was run on is judged again; `again` judges the kept rows of this package's entries too.

    A result from elsewhere whose rows say something else, or nothing, is left out with a warning; the package's own of
    the same entry, which it was to replace, stays.
    """
    given: list[Result] = []
    for result in results:
        try:
            with concluding(result):
                given.append(_as_its_rows_say(result))
            continue
        except PrivlabError as error:
            warn_left_out(result.path, error)
        given.extend(own for own in of_package() if own.entry == result.entry and own.path != result.path)
    kept = {} if again else {(row.track, row.name): row for row in concluded_rows()}
    attacks = [each for each in given if each.card.kind == "attack"]
    rows: list[Standing] = []
    for result in given:
        card = result.card
        if card.kind == "attack":
            continue
        entered = [each for each in attacks if each.card.track == card.track and card.name in each.judged]
        row = kept.get((card.track, card.name))
        if row is not None and row.external_by == _names(entered) and {result, *entered} <= {*of_package()}:
            rows.append(replace(row, result=result, entered=entered))
        else:
            rows.append(_standing(result, entered))
    ranked = rank(rows)
    return sorted(ranked, key=lambda row: (row.track, row.rank is None, row.rank or 0, row.score or 0, row.name))


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
    return result.concluding({name: result.judged[name] for name in found}) if card.kind == "attack" else result


def _standing(result: Result, theirs: Sequence[Result]) -> Standing:
    """Return the row of a defense by its own result and those of the attacks that entered."""
    card, of, own = result.card, result.card.of, result.judged[result.card.name]
    whole, external, seen, records = own, None, 0, result.rows
    if theirs:
        more = pd.concat([_rows_on(card.name, each).assign(file=each.card.name) for each in theirs], ignore_index=True)
        records = _named_by_file(pd.concat([result.rows.assign(file="the track"), more], ignore_index=True), of)
        whole = _judged_anew(own, records, card, theirs)
        worst = worst_cases(more, of)
        external = worst.get(leakiest_of(worst, of), NOTHING)["mean"]
        seen = more.image_sha256.nunique()
    flags = [flag for flag in whole["flags"] if flag.partition(":")[0] in UNRELIABLE]
    flags += [f"admission: {each['name']}, {each['text']}" for each in result.data["admission"] if not each["passed"]]
    if whole["verdict"] == "no evidence":
        flags.append(whole["why"])
    worth = result.data.get("utility")
    if worth is not None and worth < of.least_kept:
        flags.append(f"{COST}: {worth:.3f} is kept, and a rank needs {of.least_kept:g}")
    listed, hidden = halves(result.rows, of, own["leakiest"])
    if leaks_more(listed, hidden):
        unlisted = f"{hidden['mean']:.1f} [{hidden['low']:.1f}, {hidden['high']:.1f}]"
        flags.append(f"{HIDDEN}: {unlisted}, the listed one {listed['mean']:.1f}")
    on_list = {sha256 for part in of.photographs for sha256 in photographs(part)}
    knowing, few = _knowing(theirs, card), ""
    if whole["images"] < len(on_list):
        few = f"{whole['images']} of {len(on_list)}"
    elif knowing and not own["known_by"]:  # the score rests on those that entered
        seen_by = [each.rows_on(card.name).query("setting != 'a' and status == 'ok'") for each in knowing]
        covered = max(len(on_list & {*rows.image_sha256[~_controls(rows)]}) for rows in seen_by)
        if covered < len(on_list):
            few = f"{covered} of {len(on_list)} by an attack that knows the defense"
    flags += [f"{FEW}: {few}"] if few else []
    utility = ""
    if stated := card.utility:
        value = f"{stated['value']:g}" if "value" in stated else "—"
        utility = f"{stated['measure']}: {value} ({stated['how']})"
    worst_case, is_own = worst_of(whole), result.path.is_relative_to(PACKAGE)
    best_attack, score = best_single(records, of, whole["leakiest"])
    return Standing(
        track=card.track,
        name=card.name,
        paper=card.paper,
        victim=card.victim_name,
        known_by=tuple(whole["known_by"]),
        score=score["mean"],
        score_interval=(score["low"], score["high"]),
        best_attack=best_attack,
        worst_case=worst_case["mean"],
        interval=(worst_case["low"], worst_case["high"]),
        ours=worst_of(own)["mean"],
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
        photograph_parts=result.parts,
        identity=recognised_of_package().get((card.track, card.name)) if is_own else None,
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

    Controls of an adversary with public images get its name. Under one name the mean of several controls counts.
    """
    rows = attack.rows_on(name)
    if not attack.data.get("public_sha256"):
        return rows
    return rows.assign(attack=rows.attack.mask(_controls(rows), rows.attack + f" of {attack.card.name}"))


def _controls(rows: pd.DataFrame) -> pd.Series:
    return rows.attack.str.startswith(CONTROL)


def _named_by_file(records: pd.DataFrame, of: Track) -> pd.DataFrame:
    """Return rows in which, of each case, an attack has its name only in the file in which it leaks most.

    In another file it counts as another attack: in one mean with it, an entry of a weak budget would lower the score
    that a stronger one reached. Files count in which it was run on as many photographs as in any other.
    """
    leaks = sign_of(of.lead) * records[of.lead].clip(upper=highest(of))
    attacked = (records.setting != "a") & ~_controls(records)
    is_listed = ~records.image_sha256.isin(photographs("hidden"))
    runs = records.assign(leaks=leaks).loc[attacked & is_listed].groupby(["case", "attack", "file"])
    runs = runs.agg(mean=("leaks", "mean"), images=("image_sha256", "nunique"))
    whole = runs.loc[runs.images == runs.groupby(["case", "attack"]).images.transform("max")]
    most = whole.sort_values("mean").groupby(["case", "attack"]).tail(1).index
    weaker = attacked & ~pd.MultiIndex.from_frame(records[["case", "attack", "file"]]).isin(most)
    named = records.attack.mask(weaker, records.attack + " of " + records.file)
    return records.assign(attack=named).drop(columns="file")


def leaks_more(listed: Worst, hidden: Worst) -> bool:
    """Return whether the hidden half leaks more than the listed one, beyond both intervals."""
    return hidden["low"] is not None and listed["high"] is not None and hidden["low"] > listed["high"]


def halves(rows: pd.DataFrame, of: Track, case: str) -> tuple[Worst, Worst]:
    """Return the worst case of the listed photographs and of the hidden ones, in one case, over the track's attacks.

    Args:
        rows: those of a defense by the attacks of its track.
        of: its track.
        case: the name of the case.
    """
    if not rows.image_sha256.isin(photographs("hidden")).any():
        return NOTHING, NOTHING
    return worst_cases(rows, of).get(case, NOTHING), worst_cases(rows, of, hidden=True).get(case, NOTHING)


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
    able = [row for row in rows if row.known_by and not row.unreliable and row.score is not None]
    ranked = []
    for row in rows:
        less = sum(_of(other) < _of(row) for other in able if other.track == row.track)
        dominated = any(_dominates(other, row) for other in rows)
        ranked.append(replace(row, rank=1 + less if row in able else None, dominated=dominated))
    return ranked


def _of(row: Standing) -> float:
    return math.inf if row.score is None else row.score


def _dominates(other: Standing, row: Standing) -> bool:
    """Return whether another entry, on as many photographs, leaks no more and keeps no less, and is better in one."""
    alike = (other.track, other.victim, other.photographs) == (row.track, row.victim, row.photographs)
    if not alike or None in (other.measured_utility, row.measured_utility):
        return False
    own, theirs = ((-_of(each), float(each.measured_utility or 0)) for each in (row, other))
    return theirs != own and theirs[0] >= own[0] and theirs[1] >= own[1]

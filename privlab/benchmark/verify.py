"""Verification: a result's signature and versions, what its rows give, and rows that are measured again."""

import json
import math
import random
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from privlab.base import PrivlabError, collect_warnings, parse_object
from privlab.benchmark.cards import CHECKED, Card, instances
from privlab.benchmark.form import Judged
from privlab.benchmark.measure import Measurement, Photographs, case_label, score_columns
from privlab.benchmark.plugins import check_source, installed
from privlab.benchmark.results import Result, defense_entries, from_rows, read_result, to_rows
from privlab.benchmark.rule import UNRELIABLE, check_concluded, conclude, concluding, halves, knowing, leaks_more
from privlab.benchmark.server import measure_checks
from privlab.benchmark.submit import checks_of, worth_of
from privlab.benchmark.tracks import BUNDLED, photographs
from privlab.benchmark.weights import measure_keys
from privlab.evaluation import CONTROL
from privlab.metrics import DECIBELS, MIRRORED
from privlab.report.tables import sign_of

_COMPARED_DB = 60.0
"""PSNR in dB above which two scores count as the same: they measure rounding, which differs between machines."""

_APART = 0.02
"""How far what a release keeps, or a metric that does not rank, may differ from the file by rounding."""

_AGREE = 0.9
"""The least share of the rows measured again that must agree one by one: a few end at rounding, and may move more."""

_ABOVE_SHARE = 0.1
"""How far the mean of an attack that is not the leakiest may be off, as a share of what that has above controls."""

_STANDARD_ERRORS, _TOLERANCES = 2.0, 2.0
"""By how many standard errors of the difference a mean may be off, and how many tolerances that is at most."""

_LEAKIEST = " of the leakiest attack"

_PLACE = ["case", "attack", "geometry", "image_sha256"]
"""What a row measures, besides the draw."""

_STATED = (
    *("victim", "victim_params", "weights_sha256", "block", "release", "cut_layer", "defense", "defense_params"),
    *("setting", "attack_params", "effort", "image", "label_origin", "seed", "dtype", "batch", "batch_images"),
    *("conditions", "external", "status"),
)
"""What a row says of a measurement, from which the rule concludes too."""

_ADDED = frozenset({"prompts", "fusion"})
"""The settings of a client that a result may lack, as it was measured before they were added."""

_SOURCE = re.compile(r'(, )?"source_sha256": "[0-9a-f]*"')
"""What options say of the source of a class that does not come with privlab, or did not when it was measured."""


@dataclass(frozen=True)
class Verified:
    """What was measured again of a result.

    `rows` is the number of its rows, `measured` how many of these were measured again, `confirmed` how many of those
    agree within `tolerance`, one by one, and `share` the share of all rows that is confirmed. `difference` is the
    largest of a mean worst case, over the cases, and `allowed` how large that one may be. `photographs` are the parts,
    and `seed` is that of the checks of admission. `signer` is the key whose signature was checked, or None. `plugin`
    says whether code of the file was run.
    """

    name: str
    track: str
    rows: int
    measured: int
    confirmed: int
    share: float
    difference: float
    allowed: float
    tolerance: float
    photographs: tuple[str, ...]
    seed: int
    signer: str | None
    plugin: bool


def verify(
    path: Path, *, seed: int | None = None, folder: str | None = None, weights: str = "auto", public: str | None = None
) -> Verified:
    """Check a result file, conclude from its rows again, measure all cases and draws again, and compare.

    What the file concludes (`judged`, the checks of admission, what the release is worth, the draws) is derived again:
    a file whose conclusions were edited fails, whatever its hash says.

    Args:
        path: the result file.
        seed: seeds admission; None, as it should be, for a random one.
        folder: the photographs that are not bundled, so that all parts of the result are measured; None for no others.
        weights: the file of a victim that is not in the package.
        public: the folder of the adversary's own photographs, where the result was submitted with one.

    Raises:
        PrivlabError: if the file was edited, does not fit this package, or says something else than is found now.
    """
    seed = secrets.randbits(32) if seed is None else seed
    result = read_result(path)
    card, source = result.card, result.data["plugin"]
    if source is not None:
        check_source(source, f"{path}, its plug-in")
    parts = (BUNDLED,) if folder is None else result.parts
    how = Photographs(parts, folder, weights, public)
    chance = random.Random(seed)
    with installed(card, source), collect_warnings([]):
        with concluding(result):
            check_concluded(result, conclude(card, result.rows))
        admission_last = source is not None and chance.random() < 0.5  # so that a plug-in cannot know which calls count
        if not admission_last:
            _check_stated(result, card, how, chance)
        if card.track == "weights":
            again = measure_keys(card)
            _check_draws(result, result.rows, again)
        elif card.track == CHECKED:
            again, worth, refused = measure_checks(card, how)
            whole = parts == result.parts  # each is sent to one client, and fewer photographs have fewer clients
            _check_same(result, "utility", worth, least=card.of.least_kept if whole else -1.0)
            _check_same(result, "refused", refused if whole else result.data.get("refused"))
            _check_draws(result, result.rows, again)
        elif card.reconstructions or card.releases:
            what = "reconstructions" if card.reconstructions else "recorded releases"
            raise PrivlabError(f"{path}: {what} cannot be measured again. The hash and the versions are right.")
        else:
            own = "The adversary's own photographs are others: give their folder by --public."
            _check_same(result, "public_sha256", how.public_sha256(), own)
            again = pd.concat(_measured_again(result, card, how), ignore_index=True)
        if admission_last:
            _check_stated(result, card, how, chance)
        return _compared(result, again, card, parts, seed)


def _check_stated(result: Result, card: Card, how: Photographs, chance: random.Random) -> None:
    """Raise PrivlabError if the checks of admission, the worth or the draws of an entry are not those of its file."""
    said = {each["name"] for each in result.data["admission"] if not each["passed"]}
    failed = {each.name for each in checks_of(card, how.weights, chance) if not each.passed}
    if said != failed:
        stated, found = (", ".join(sorted(each)) or "none" for each in (said, failed))
        raise PrivlabError(f"{result.path}: the checks of admission that fail are {found}, but the file says {stated}.")
    if card.kind == "defense" and not card.releases:
        _check_same(result, "draws", card.draws)
        if card.track != CHECKED:  # where this is measured with the rows
            _check_same(result, "utility", worth_of(card, replace(how, public=None)))


def _check_same(result: Result, name: str, now: Any, hint: str = "", *, least: float = -1.0) -> None:  # noqa: ANN401
    """Raise PrivlabError if a result says something else; a number may be close, on the same side of `least`."""
    said = result.data.get(name)
    same = said == now
    if isinstance(said, int | float) and isinstance(now, float):
        same = math.isclose(said, now, abs_tol=_APART) and (said < least) == (now < least)
    if not same:
        raise PrivlabError(f"{result.path}: {name} is {now} now, and the file says {said}. {hint}".rstrip())


def _measured_again(result: Result, card: Card, how: Photographs) -> Iterator[pd.DataFrame]:
    """Yield the records of each case: of the entry, or of each defense that an attack was run on."""
    if card.kind == "defense":
        yield from _all_draws(result, Measurement(card, how), result.rows)
        return
    with tempfile.TemporaryDirectory() as runs:  # where what is undefended is measured once for all defenses
        for target in defense_entries(card.track, sorted(result.data["judged"])):
            own = Measurement(target, how, Path(runs), instances(card))
            for rows in _all_draws(result, own, result.rows_on(target.name)):
                yield rows.assign(entry=target.name)


def _all_draws(result: Result, own: Measurement, before: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield the records of each case of a defense; one draw that is made up would decide which case leaks most."""
    cases = {case_label(*each): each for each in own.cases()}
    if wrong := sorted({*cases} ^ {*map(str, before.case)}):
        raise PrivlabError(f"{result.path}: the cases of the entry are {[*cases]}. Found a difference in {wrong}.")
    for label, each in cases.items():
        rows = own.records_of(*each)
        _check_draws(result, before.loc[before.case == label], rows)
        yield rows


def _check_draws(result: Result, before: pd.DataFrame, again: pd.DataFrame) -> None:
    """Raise PrivlabError if a case lacks a row of an attack or a control, or has another one.

    Every photograph of the file's parts has the attacks, the geometries and the draws that one has which was measured.
    """
    expected = again[[*_PLACE, "draw"]]
    if result.card.of.photographs:
        images = {*again.image_sha256}.union(*map(photographs, result.parts))
        expected = expected.drop(columns="image_sha256").drop_duplicates()
        expected = expected.merge(pd.DataFrame({"image_sha256": sorted(images)}), how="cross")[[*_PLACE, "draw"]]
    needed, found = ({*rows[[*_PLACE, "draw"]].itertuples(index=False, name=None)} for rows in (expected, before))
    if needed != found or len(before) != len(found):
        raise PrivlabError(
            f"{result.path}: the case '{again.case.iloc[0]}' must have {len(needed)} scores by attack, geometry, "
            f"photograph and draw. It has {len(before)}, lacks {len(needed - found)}, and has {len(found - needed)} "
            "others."
        )


def _beside(again: pd.DataFrame, before: pd.DataFrame, card: Card) -> pd.DataFrame:
    """Return rows that were measured again, with what they leak `now`, what it `was`, and whether that `agrees`.

    Values of the file are in columns that end with "_was".
    """
    lead, again = card.of.lead, from_rows(to_rows(again))
    again, before = (
        rows.assign(attack_params=rows.attack_params.astype(object).str.replace(_SOURCE, "", regex=True))
        for rows in (again, before)
    )
    place = [*(["entry"] if "entry" in again else []), *_PLACE, "draw"]
    both = again.merge(before.reindex(columns=again.columns), on=place, how="left", suffixes=("", "_was"))
    both["conditions"] = [*map(_conditions, both.conditions, both.conditions_was)]
    both["now"], both["was"] = _leaks(both, lead), _leaks(both, f"{lead}_was")
    same_score = (both.now - both.was).abs().le(card.of.tolerance_db) | (both.now.isna() & both.was.isna())
    return both.assign(agrees=same_score & (both.status == both.status_was))


@cache
def _conditions(now: str | None, was: str | None) -> str | None:
    """Return the conditions of a row, without those that later versions added, where the file does not state them."""
    found, said = (parse_object(text or "{}", "conditions of a row") for text in (now, was))
    if isinstance(client := found.get("client"), dict) and isinstance(said.get("client"), dict):
        found["client"] = {name: client[name] for name in client if name in said["client"] or name not in _ADDED}
    return json.dumps(found) if now else None


def _leaks(both: pd.DataFrame, name: str) -> pd.Series:
    """Return a column of scores so that more leaks, in dB up to `_COMPARED_DB`, or a share in per cent."""
    metric, of = _metric(name), both[name].astype("float64")
    return of.clip(upper=_COMPARED_DB) if metric in DECIBELS else 100.0 * sign_of(metric) * of


def _metric(column: str) -> str:
    """Return the metric of a column, which may be that of the file, and against the mirrored photograph."""
    column = column.removesuffix("_was")
    return next((metric for metric, mirrored in MIRRORED.items() if mirrored == column), column)


def _means(both: pd.DataFrame, card: Card, singly: frozenset[str] = frozenset()) -> pd.DataFrame:
    """Return the mean leakage of each case `now` and in the file (`was`), their `difference`, and what is `allowed`.

    In a single draw, a difference within two standard errors (`error`, photograph by photograph) is none, up to twice
    the track's tolerance. The rows are the mean worst case, over attacks and draws as the table has it, and by each
    metric the mean of the leakiest attack: by the lead metric this is the score, and all of them make the verdict.
    Controls have separate rows, and so has each attack that `singly` names.
    """
    control = both.attack.str.startswith(CONTROL).rename("control")
    both = both.assign(case=both.case.mask(both.image_sha256.isin(photographs("hidden")), both.case + ", hidden half"))
    case = [*(both[name] for name in ("entry", "case") if name in both), control]
    levels = [*range(len(case))]
    worst = both[["now", "was"]].groupby([*case, both.image_sha256], dropna=False).max()
    found, allowed = {"worst case": _mean(worst, levels)}, {"worst case": card.of.tolerance_db}
    for name in score_columns(card.of):
        scores = pd.DataFrame({"now": _leaks(both, name), "was": _leaks(both, f"{name}_was")})
        scores = scores.groupby([*case, both.attack, both.geometry, both.image_sha256], dropna=False).mean()
        means = _mean(scores, [*levels, "attack", "geometry"]).sort_values("now", na_position="first")
        attacks = {f"{name} of {attack}": means.xs(attack, level="attack") for attack in singly & {*both.attack}}
        for what, of in (attacks | {name + _LEAKIEST: means}).items():
            found[what] = of.groupby(level=levels).agg({"now": "max", "was": "max", "error": "last"})
            allowed[what] = card.of.tolerance_db if _metric(name) in (card.of.lead, *DECIBELS) else 100 * _APART
    means = pd.concat(found, names=["what"]).reorder_levels([*(level + 1 for level in levels), 0]).sort_index()
    difference = (means.now - means.was).abs().fillna(0.0).mask(means.now.isna() != means.was.isna(), math.inf)
    tolerance = means.index.get_level_values("what").map(allowed).to_series(index=means.index)
    drawn = means.index.droplevel(["control", "what"]).map(both.groupby(case[:-1], dropna=False).draw.nunique())
    by_error = (_STANDARD_ERRORS * means.error).where(drawn == 1).fillna(0.0).clip(tolerance, _TOLERANCES * tolerance)
    return means.assign(difference=difference, allowed=by_error)


def _singly(result: Result) -> frozenset[str]:
    """Return the attacks from whose means something follows: those that know a defense, and what each is without."""
    single = result.card.kind == "attack" or result.card.track == CHECKED
    return frozenset(result.rows.attack) if single else knowing(result.rows, result.card.of)


def _mean(scores: pd.DataFrame, levels: list[Any]) -> pd.DataFrame:
    """Return means over photographs, `now` and in the file (`was`), and the standard `error` of their difference."""
    groups = scores.assign(error=scores.now - scores.was).groupby(level=levels, dropna=False)
    return groups.agg({"now": "mean", "was": "mean", "error": "sem"})


def _relaxed(means: pd.DataFrame, before: pd.DataFrame, card: Card) -> pd.DataFrame:
    """Return means, of which those of attacks that do not leak most may be off by a share of what the leakiest leaks.

    Where such an attack finds an image, its search may end elsewhere on another machine. In files with the hidden half
    the tolerance stays.
    """
    if card.of.lead not in DECIBELS or before.image_sha256.isin(photographs("hidden")).any():
        return means
    for at in means.index:
        *where, control, what = at
        leader = what.partition(" of ")[0] + _LEAKIEST
        if not control and what not in ("worst case", leader):
            above = means.now[(*where, False, leader)] - means.now.get((*where, True, leader), math.inf)
            means.loc[at, "allowed"] = max(means.allowed[at], _ABOVE_SHARE * above)
    return means


def _check_alike(result: Result, again: pd.DataFrame) -> None:
    """Raise PrivlabError if rows that are measured now let the rule conclude otherwise, or rows of an attack differ."""
    before, by = result.rows, [name for name in ("entry", "case", "attack") if name in again]
    settings = [name for name in _STATED if name not in ("image", "batch", "batch_images", "label_origin", "status")]
    rows = before[[*by, *settings]].assign(beyond_range=before.beyond_range.notna())
    if several := [name for name, most in rows.groupby(by).nunique(dropna=False).max().items() if most > 1]:
        raise PrivlabError(f"{result.path}: rows of one attack in one case state several values of {several[0]}.")
    now = from_rows(to_rows(again))
    was = before.merge(now[[*_PLACE, "draw", *by[:-2]]])
    found, said = (_decisive(result.concluding(conclude(result.card, rows)).judged) for rows in (now, was))
    if result.card.kind == "defense":
        case = result.judged[result.card.name]["leakiest"]
        for each, rows in ((found, now), (said, was)):
            each["whether the hidden half leaks more"] = leaks_more(*halves(rows, result.card.of, case))
    for name in (name for name in said if said[name] != found[name]):
        raise PrivlabError(f"{result.path}: {name} is {found[name]} by rows measured now, {said[name]} by the file's.")


def _decisive(judged: Mapping[str, Judged]) -> dict[str, Any]:
    """Return what ranks depend on besides scores: of each entry who knows it, the verdict, and grave flags."""
    found: dict[str, Any] = {}
    for entry, each in judged.items():
        found |= {f"{name} of {entry}": each[name] for name in ("known_by", "verdict")}
        found[f"flags of {entry}"] = sorted(UNRELIABLE.intersection(flag.partition(":")[0] for flag in each["flags"]))
    return found


def _compared(result: Result, again: pd.DataFrame, card: Card, parts: tuple[str, ...], seed: int) -> Verified:
    """Compare rows with those of the result, one by one and by the mean worst case of each case, which the rule reads.

    A single attack on a single photograph may move by more: where it ends at rounding, the size of its batch counts.
    """
    tolerance, before = card.of.tolerance_db, result.rows
    both = _beside(again, before, card)
    agree = int(both.agrees.sum())
    if agree < _AGREE * len(both):
        raise PrivlabError(
            f"{result.path}: {agree} of {len(both)} rows measured again agree within {tolerance:g}. {_AGREE:.0%} must."
        )
    for name in (*_STATED, "beyond_range", *score_columns(card.of)):
        now, was = (both[each] if name in _STATED else both[each].notna() for each in (name, f"{name}_was"))
        if (other := ~((now == was) | (now.isna() & was.isna()))).any():
            said, found = was[other].iloc[0], now[other].iloc[0]
            raise PrivlabError(
                f"{result.path}: {name} is {str(found)[:100]!r} in rows that were measured again, and the result says "
                f"{str(said)[:100]!r}."
            )
    _check_alike(result, again)
    means = _relaxed(_means(both, card, _singly(result)), before, card)
    spread, most = _STANDARD_ERRORS * means.error, _TOLERANCES * means.allowed
    off = (means.difference - means.allowed).clip(lower=spread - most)
    if (off > 0).any():
        *at, is_control, what = at_most = off.idxmax()
        now, was, allowed = means.loc[at_most, ["now", "was", "allowed"]]
        raise PrivlabError(
            f"{result.path}: the mean {what} in {', '.join(map(str, at))}{' (controls)' if is_control else ''} is "
            f"{now:.3f} now, and the result says {was:.3f}. They may differ by {allowed:g}, and photograph by "
            f"photograph by {most[at_most]:g} in two standard errors, which are {spread[at_most]:.3f}."
        )
    worst = means.xs("worst case", level="what").nlargest(1, "difference").iloc[0]
    return Verified(
        name=card.name,
        track=card.track,
        rows=len(before),
        measured=len(both),
        confirmed=agree,
        share=round(agree / len(before), 4),
        difference=round(float(worst.difference), 4),
        allowed=round(float(worst.allowed), 4),
        tolerance=tolerance,
        photographs=parts if card.of.photographs else (),
        seed=seed,
        signer=result.signer,
        plugin=bool(result.data["plugin"]),
    )

"""Verification: the signature of a result, its versions, and a part of it that is measured again."""

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from privlab.base import PrivlabError, check_range, collect_warnings
from privlab.benchmark.cards import Card, instances
from privlab.benchmark.measure import Measurement, Photographs, case_label
from privlab.benchmark.plugins import check_source, installed
from privlab.benchmark.results import Result, defense_entries, read_result
from privlab.benchmark.rule import check_concluded, conclude
from privlab.benchmark.submit import checks_of, worth_of
from privlab.benchmark.tracks import BUNDLED, TrackCase, photographs
from privlab.benchmark.weights import measure_keys
from privlab.evaluation import CONTROL
from privlab.report.tables import sign_of
from privlab.threat import attack_declarations

_COMPARED_DB = 60.0
"""PSNR in dB above which two scores count as the same: they measure rounding, which differs between machines."""

_APART = 0.02
"""How far what a release is worth may be from the first time: rounding may turn the class of a photograph or so."""

_KEY = ["case", "attack", "geometry", "image_sha256", "draw"]


@dataclass(frozen=True)
class Verified:
    """What was measured again: how many scores, how far their mean worst case is apart, of which images and draw."""

    name: str
    track: str
    scores: int
    apart: float
    tolerance: float
    images: tuple[str, ...]
    draw: int
    signer: str | None


def verify(path: Path, *, images: int = 2, weights: str = "auto", public: str | None = None) -> Verified:
    """Check a result file, conclude from its rows again, measure some of its bundled photographs again, and compare.

    What the file concludes (`judged`, the checks of admission, what the release is worth, the draws) is derived again:
    a file whose conclusions were edited fails, whatever its hash says.

    The case, the draw and the photographs are drawn by the result's own hash, which nobody chooses without changing
    the result.

    Args:
        path: the result file.
        images: how many photographs are measured again, in whole batches where several are released together.
        weights: the file of a victim that is not in the package.
        public: the folder of the adversary's own photographs, where the result was submitted with one.

    Raises:
        PrivlabError: if the file was edited or does not fit this package, if its rows do not give what it concludes, if
            the adversary had other photographs, or if a score is another one.
    """
    check_range(images >= 1, "images", "a positive number", images)
    result = read_result(path)
    card, source = result.card, result.data["plugin"]
    if source is not None:
        check_source(source, f"{path}, its plug-in")
    how = Photographs(weights=weights, public=public)
    with installed(card, source), collect_warnings([]):
        check_concluded(result, conclude(card, result.rows))
        _check_stated(result, card, how)
        if card.track == "weights":
            return _compared(result, measure_keys(card).assign(draw=0), result.rows.assign(draw=0), card)
        if card.reconstructions or card.releases:
            what = "reconstructions" if card.reconstructions else "recorded releases"
            raise PrivlabError(f"{path}: {what} cannot be measured again. The signature and the versions are right.")
        _check_public(result, how)
        again = _measured_again(result, card, images, how)
    return _compared(result, again, result.rows, card)


def _check_stated(result: Result, card: Card, how: Photographs) -> None:
    """Raise PrivlabError if the checks of admission, the worth or the draws of an entry are not those of its file."""
    said = {each["name"] for each in result.data["admission"] if not each["passed"]}
    failed = {each.name for each in checks_of(card, how.weights) if not each.passed}
    if said != failed:
        stated, found = (", ".join(sorted(each)) or "none" for each in (said, failed))
        raise PrivlabError(f"{result.path}: the checks of admission that fail are {found}, but the file says {stated}.")
    if card.kind == "attack" or card.track == "weights" or card.releases:
        return
    for name, now in (("draws", card.draws), ("utility", worth_of(card, replace(how, public=None)))):
        if not math.isclose(result.data[name], now, abs_tol=_APART):
            raise PrivlabError(f"{result.path}: {name} is {now:g} now, and the file says {result.data[name]:g}.")


def _check_public(result: Result, how: Photographs) -> None:
    """Raise PrivlabError if the adversary's own photographs are not those that the result was measured with."""
    digests = (result.data.get("public_sha256"), how.public_sha256())
    had, given = ("the bundled ones" if sha is None else f"those of SHA-256 {sha[:12]}…" for sha in digests)
    if len({*digests}) > 1:
        raise PrivlabError(
            f"{result.path}: the adversary's own photographs were {had}. Found {given}: give their folder by --public."
        )


def _measured_again(result: Result, card: Card, images: int, how: Photographs) -> pd.DataFrame:
    chance = random.Random(result.data["signature"]["sha256"])
    if card.kind == "attack":
        target = chance.choice(defense_entries(card.track, sorted(result.data["judged"])))
        rows = _drawn(chance, Measurement(target, how, attacks=instances(card)), images, result)
        return rows.assign(entry=target.name)
    return _drawn(chance, Measurement(card, how), images, result)


def _drawn(chance: random.Random, own: Measurement, images: int, result: Result) -> pd.DataFrame:
    """Return the records of a case, a draw and whole releases of photographs that are drawn."""
    card, measured, setting = own.card, {*result.rows.case}, own.settings[-1]
    case: TrackCase = chance.choice([each for each in card.of.cases if case_label(each, setting) in measured])
    draw = chance.randrange(int(result.data.get("draws", 1)))
    hashes = list(photographs(BUNDLED))
    one_key = any(attack_declarations(attack).one_key for attack in own.attacks or ())
    size = len(hashes) if one_key else max(card.of.client_batch, card.clients)
    whole = len(hashes) - len(hashes) % card.clients  # those left over are released with photographs of other releases
    batches = [hashes[i : i + size] for i in range(0, whole, size)]
    wanted = [sha for batch in chance.sample(batches, -(-images // size)) for sha in batch]
    return own.again(case, setting, draw, wanted)


def _compared(result: Result, again: pd.DataFrame, before: pd.DataFrame, card: Card) -> Verified:
    """Return how far the mean worst case of the photographs is apart, which is what the rule reads.

    A single attack on a single photograph may move by more: where it ends at rounding, the size of its batch counts.

    Raises:
        PrivlabError: if a score is missing, or that mean is further apart than the track's tolerance.
    """
    lead, key = card.of.lead, [*(["entry"] if "entry" in before else []), *_KEY]
    own = again.loc[~again.attack.str.startswith(CONTROL)]
    both = own.merge(before[[*key, lead]], on=key, how="left", suffixes=("", "_before"))
    if lacking := int((both[f"{lead}_before"].isna() & both[lead].notna()).sum()):
        raise PrivlabError(f"{result.path} lacks {lacking} of {len(both)} scores that its entry gives now.")
    scale = (1.0 if lead == "psnr" else 100.0) * sign_of(lead)  # a share in per cent
    leaks = both[[lead, f"{lead}_before"]].clip(upper=_COMPARED_DB / abs(scale)) * scale
    worst = leaks.groupby([both[name] for name in key if name not in ("attack", "geometry")]).max()
    now, then = (float(worst[name].mean()) / scale for name in (lead, f"{lead}_before"))
    apart = abs(now - then) * abs(scale)
    if apart > card.of.tolerance_db:
        raise PrivlabError(
            f"{result.path}: the worst case of {len(worst)} photographs is {now:.3f} now, on average, and the result "
            f"says {then:.3f}. They may differ by {card.of.tolerance_db:g}."
        )
    return Verified(
        name=card.name,
        track=card.track,
        scores=len(both),
        apart=round(apart, 4),
        tolerance=card.of.tolerance_db,
        images=tuple(dict.fromkeys(own.image)),
        draw=int(own.draw.max()) if len(own) else 0,
        signer=result.signer,
    )

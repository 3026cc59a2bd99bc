"""The verdict on each case: one rule, whose states are a table, by which every page, table and ranking is judged.

A leak is shown by an image that is reconstructed exactly, by a certificate (a reconstruction from which the client's
training gives the released update), or, on 20 images or more, by a metric of privlab's own in which an attack leaks
more than the leakiest control, beyond the interval of their difference. A case with a leak "leaks"; where a defense is
at work and there are 20 images or more, that defense is "broken". It "holds" only with a positive control: an attack
that knows the defense, in its stated range, must leak on the undefended release of the same images, with the same
batch, precision and conditions, and it must leak more there than the interval leaves open under the defense. Every
other case is "no evidence", with the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

from privlab.base import parse_object
from privlab.evaluation import CONTROL
from privlab.metrics import METRICS, MIRRORED, OF_WEIGHTS, STRUCTURE
from privlab.release import EXPLAINED_RESIDUAL
from privlab.report.intervals import FEWEST_IMAGES
from privlab.report.tables.cells import some
from privlab.report.tables.facts import SHARED_COLUMNS, Facts
from privlab.report.tables.knowledge import undefended_attack
from privlab.report.tables.measure import Measure, exact_images, measure
from privlab.report.tables.per_image import Scored, attack_label

Word = Literal["broken", "leaks", "holds", "no evidence"]

WORDS: tuple[Word, ...] = ("broken", "leaks", "holds", "no evidence")
"""The words of a verdict, the worst first."""

_RANGE_SCHEMA = 4
"""The first version of the records that states whether an attack was beyond its range."""


@dataclass(frozen=True)
class CaseVerdict:
    """The verdict on one case: a word, the reason, what leaks most, and the positive control if the defense holds.

    `state` is the name of the one of `STATES` that the case is in.
    """

    case: int
    label: str
    word: Word
    why: str
    state: str
    measure: Measure | None = None
    positive: Measure | None = None

    def __str__(self) -> str:
        """Return the cell of a table."""
        return f"{self.word}{self.why}"


@dataclass(frozen=True)
class Evidence:
    """What is known of a case, from which alone its state and the word of its verdict follow.

    `tried` counts the attacks that were run, `scored` those that did not fail on every image. `images` is the number
    of images with a score that is a number. `exact` and `certified` count the images that
    some attack reconstructs exactly, or with a certificate. `measured` says whether a metric of privlab's own can be
    compared with a control; `beyond` whether one shows a leak beyond its interval, `plugin` whether a metric of another
    package does. `gap` is what is missing for the verdict that a defense holds; None if nothing is.
    """

    tried: int = 1
    scored: int = 1
    images: int = FEWEST_IMAGES
    exact: int = 0
    certified: int = 0
    measured: bool = True
    beyond: bool = False
    plugin: bool = False
    defended: bool = True
    gap: str | None = None


STATES: tuple[tuple[str, Callable[[Evidence], bool], Word], ...] = (
    ("not run", lambda e: e.tried == 0, "no evidence"),
    ("failed", lambda e: e.scored == 0, "no evidence"),
    ("not a number", lambda e: e.images == 0, "no evidence"),
    ("exact", lambda e: e.exact > 0, "leaks"),
    ("certified", lambda e: e.certified > 0, "leaks"),
    ("few images", lambda e: e.images < FEWEST_IMAGES, "no evidence"),
    ("beyond the control", lambda e: e.beyond, "leaks"),
    ("by a plug-in metric alone", lambda e: e.plugin, "no evidence"),
    ("no control", lambda e: not e.measured, "no evidence"),
    ("nothing defended", lambda e: not e.defended, "no evidence"),
    ("not shown to hold", lambda e: e.gap is not None, "no evidence"),
    ("holds", lambda e: True, "holds"),
)
"""The states of a case: the name, when it applies, and the word of the verdict; the first one that applies is its own.

"leaks" becomes "broken" where a defense is at work and there are at least `FEWEST_IMAGES` images.
"""


def state_of(evidence: Evidence) -> tuple[str, Word]:
    """Return the name of the state that a case is in, and the word of its verdict."""
    state, _, word = next(one for one in STATES if one[1](evidence))
    if word == "leaks" and evidence.defended and evidence.images >= FEWEST_IMAGES:
        return state, "broken"
    return state, word


def certified(records: pd.DataFrame) -> pd.Series:
    """Return which rows have a certificate: training on the reconstruction explains the released update."""
    shares = records.reindex(columns=["explained"]).explained.astype("float64")
    return (shares > 1 - EXPLAINED_RESIDUAL**2) & (records.status == "ok")


def scope(records: pd.DataFrame) -> str:
    """Return one text on the threat model of every verdict on these records, and on what is outside it."""
    kinds = {*records.reindex(columns=["release"]).release.dropna()}
    seen = " or ".join(sorted(kinds)) or "what is released"
    images = ", owns public images" if "features" in kinds else ""
    client = ", knows the settings of the client's training" if "update" in kinds else ""
    texts = records.conditions.dropna().unique() if "conditions" in records else []
    chosen = any("chooses_weights" in parse_object(text, "conditions of a record") for text in texts)
    server, outside = "an honest-but-curious server that knows the weights", "a server that changes the weights, "
    if chosen:
        server, outside = "a dishonest server that chose the weights which the clients got (chooses_weights)", ""
    return (
        f"Threat model: {server}, sees the {seen} of one release of each "
        f"image{images}{client}, and knows the defense's algorithm and options, but not its draws or keys. Outside it: "
        f"{outside}several rounds of one image, and what else it may know of the image."
    )


def verdicts_of(facts: Facts) -> list[CaseVerdict]:
    """Return the verdict on each case, from records alone.

    A leak is shown by any metric of leakage of privlab's own among the columns of the table and `STRUCTURE`
    (`Facts.leaky`); the latter see what PSNR does not, and without them no defense is said to hold. Of m attacks and
    metrics tried, the interval of each difference has the level 1 − (1 − level) / m, as the best of many is ahead by
    chance (Bonferroni). A metric of another package shows no leak alone, but nothing holds where it sees one.
    """
    return [_verdict(facts, case) for case in range(len(facts.names))]


def _verdict(facts: Facts, case: int) -> CaseVerdict:
    rows, parts = facts.cases.get(case, facts.rows.iloc[:0]), facts.defenses.get(case, frozenset[str]())
    own = rows.loc[~rows.attack.astype(str).str.startswith(CONTROL)]
    if own.empty:
        state, word = state_of(Evidence(tried=0))
        return CaseVerdict(case, facts.names[case], word, ": no attack was run", state)
    images = _images(facts, rows)
    scored = images.loc[images.scored & ~images.control.astype(bool)]
    attacks = scored.attack.drop_duplicates().tolist()
    numbers = scored.loc[scored.reindex(columns=[*facts.leaky, "exact"]).notna().any(axis=1)]
    level = 1 - (1 - facts.level) / max(len(attacks) * len(facts.leaky), 1)  # Bonferroni
    measures = {
        name: [found for found in measure(images, attacks, name, level) if found is not None] for name in facts.leaky
    }
    builtin = [found for name, found in measures.items() if found and name not in METRICS.added]
    plugin = [one for name, found in measures.items() if name in METRICS.added for one in found if one.beyond]
    reconstructed = exact_images(images)
    exact = {name: len(reconstructed.get(name, ())) for name in attacks}
    certificates = own.loc[certified(own)].groupby("attack", sort=False).image_sha256.nunique().to_dict()
    evidence = Evidence(
        tried=own.attack.nunique(),
        scored=len(attacks),
        images=numbers.image.nunique(),
        exact=max(exact.values(), default=0),
        certified=max(certificates.values(), default=0),
        measured=bool(builtin),
        beyond=any(one.beyond for found in builtin for one in found),
        plugin=bool(plugin),
        defended=bool(parts),
    )
    best, positive = max(builtin[0], key=_most) if builtin else None, None
    state, word = state_of(evidence)
    gap = None
    if state == "holds":  # unless something is missing for that
        gap, best, positive = _held(facts, case, builtin[0])
        state, word = state_of(replace(evidence, gap=gap))
    nearest = f"; the best is {best.attack} ({best})" if best else ""
    failures = [*own.reason.dropna().value_counts().index, "no reason is recorded"]
    unmeasured = ", as no metric of leakage of privlab's own was measured"
    if any(name not in METRICS.added for name in facts.leaky):
        unmeasured = ""
    reasons = {
        "failed": f"no attack was scored; {failures[0].rstrip('.')}",
        "not a number": f"no attack has a score that is a number{unmeasured}",
        "few images": f"{some(evidence.images, 'image')}; {FEWEST_IMAGES} are needed{nearest}{_flat(images)}",
        "by a plug-in metric alone": "only a metric of another package shows a leak, by "
        + "".join(f"{one.attack} ({one})" for one in plugin[:1]),
        "no control": f"no negative control was scored{unmeasured}",
        "nothing defended": f"no defense is at work, and no attack is seen to leak{nearest}{_flat(images)}",
        "not shown to hold": gap,
    }
    if best and positive and word == "holds":
        as_named = "" if positive.attack == best.attack else f", as {positive.attack},"
        why = f" against {best.attack} ({best}), which leaks{as_named} without the defense ({positive})"
    elif word == "no evidence":
        why = f": {reasons[state]}"
    else:
        shown = (max(ones, key=_most) for found in builtin if (ones := [one for one in found if one.leaks]))
        leak = next(shown, None)
        by, figures = _of_leak(leak, exact, certificates, some(evidence.images, "image"))
        shuffled = " of the shuffled image" if parts and (rows.setting == "b").all() else ""
        where = dict(zip(images.attack, images.geometry, strict=True))
        undefended = "" if parts else "; no defense is at work"
        best, why = leak or best, f" by {attack_label(by, where[by])} ({figures}{shuffled}){undefended}"
    return CaseVerdict(case, facts.names[case], word, why, state, best, positive)


def _images(facts: Facts, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the scores of each attack, control and image; an attack's come from the geometry where it leaks most.

    Its column `geometry` names that.
    """
    metrics = facts.leaky or ("psnr",)
    best = Scored(rows, metrics, facts.geometry).leakiest_geometries.drop_duplicates("attack")
    where = dict(zip(best.attack, best.geometry, strict=True))
    found = {name: Scored(rows, metrics, name).measured for name in dict.fromkeys((facts.geometry, *where.values()))}
    own = [
        each.loc[[where.get(attack, facts.geometry) == name for attack in each.attack]].assign(geometry=name)
        for name, each in found.items()
    ]
    images = pd.concat(own, ignore_index=True)
    return images.loc[images.image != ""]


def _held(facts: Facts, case: int, found: Sequence[Measure]) -> tuple[str | None, Measure, Measure | None]:
    """Return what is missing for the verdict that a defense holds, the measure that decides, and its positive control.

    `found` is what the attacks on the case leak, by one metric.
    """
    rows = facts.cases[case]
    own = {m.attack: rows.loc[rows.attack == m.attack] for m in found}
    best = max(found, key=_most)
    beyond = "; ".join(f"{name}: {why}" for name, each in own.items() for why in each.beyond_range.dropna().unique())
    positive = {m.attack: _positive(facts, m, own[m.attack]) for m in found}
    told = "; ".join(f"{m.attack}: {m}" for m in positive.values() if m)
    steps: tuple[tuple[str, Callable[[Measure], bool]], ...] = (
        ("no attack that was scored knows the defense", lambda m: facts.knows(m.attack, case)),
        (
            "no record says whether an attack was in its range: run it again",
            lambda m: bool((own[m.attack].schema.fillna(0) >= _RANGE_SCHEMA).all()),
        ),
        (
            f"every attack that knows the defense is outside its stated range ({beyond})",
            lambda m: bool(own[m.attack].beyond_range.isna().all()),
        ),
        (
            f"structure without its scale ({', '.join(STRUCTURE)}) was not compared with the mirrored image",
            lambda m: (
                m.metric in OF_WEIGHTS  # which is not that of an image
                or bool(own[m.attack].reindex(columns=list(MIRRORED.values())).notna().any(axis=None))
            ),
        ),
        ("attacks that know the defense failed", lambda m: bool((own[m.attack].status == "ok").all())),
        (f"attacks that know the defense have fewer than {FEWEST_IMAGES} images", lambda m: m.enough),
        (
            "no positive control; the same attack on the undefended release of the same images, all else equal, is "
            "added by --setting a,c, or by a case of setting a",
            lambda m: positive[m.attack] is not None,
        ),
        (
            f"the positive control does not leak ({told})",
            lambda m: (control := positive[m.attack]) is not None and control.leaks,
        ),
        (
            f"what may leak is no less than what leaks undefended ({told})",
            lambda m: _gain_low(positive[m.attack]) > m.gain.high,
        ),
    )
    for reason, holds in steps:
        found = [measure for measure in found if holds(measure)]
        if not found:
            return reason, best, None
    first = max(found, key=lambda m: _gain_low(positive[m.attack]))
    return None, first, positive[first.attack]


def _positive(facts: Facts, of: Measure, own: pd.DataFrame) -> Measure | None:
    """Return what an attack leaks from the undefended release of the same images, all else being the same.

    An attack that is another one where nothing is defended is compared with that one, whatever the options of both.
    """
    plain = undefended_attack(of.attack)
    options = ["attack_params"] if plain == of.attack else []
    wanted = _keys(own, options)
    for case, parts in facts.defenses.items():
        rows = facts.cases[case]
        same = rows.loc[(rows.attack == plain) & (rows.status == "ok") & rows.external.isna()]
        if parts or not wanted <= _keys(same, options):
            continue
        images = _images(facts, rows.loc[rows.image_sha256.isin(own.image_sha256)])
        if found := measure(images, [plain], of.metric, facts.level)[0]:
            return found
    return None


def _of_leak(
    measure: Measure | None, exact: Mapping[str, int], certificates: Mapping[str, int], images: str
) -> tuple[str, str]:
    """Return the attack that shows a leak, and its figures: by a measure, or by exact images, or by certificates."""
    if measure is not None:
        return measure.attack, str(measure)
    counts = exact if any(exact.values()) else certificates
    by = max(counts, key=lambda name: counts[name])
    if counts is exact:
        return by, f"{exact[by]} of {images} exactly"
    return by, f"{counts[by]} of {images} certified: training on the reconstruction gives the released update"


def _flat(images: pd.DataFrame) -> str:
    """Say on how many images a control is exact, so that an exact reconstruction shows nothing there."""
    count = images.image[images.control.astype(bool) & (images.exact == 1)].nunique()
    return f"; a control is exact too on {some(count, 'image')}, as where there is one colour" if count else ""


def _keys(rows: pd.DataFrame, options: Sequence[str]) -> set[tuple[object, ...]]:
    """Return the identity of each row's measurement, without its defense, setting and draws."""
    columns = [*SHARED_COLUMNS, *options, "image_sha256", "batch"]
    return set(rows[columns].astype(object).where(rows[columns].notna(), None).itertuples(index=False, name=None))


def _most(measure: Measure) -> float:
    return measure.gain.mean if measure.gain.mean == measure.gain.mean else float("-inf")


def _gain_low(measure: Measure | None) -> float:
    return float("-inf") if measure is None else measure.gain.low

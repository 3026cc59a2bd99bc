"""Verdicts with power: a defense is said to hold only where the same attack is seen to work without it.

A case is "broken" if an attack leaks more than the leakiest control, beyond the interval of their difference, or
reconstructs an image exactly. It "holds" only beside a positive control: an attack that knows the defense, in its
stated range, must leak on the undefended release of the same images, with the same batch, precision and conditions, and
it must leak more there than the interval leaves open under the defense. A case in which no defense is at work is "no
defense". Every other case, and one without a score, is "no evidence", with the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import pandas as pd

from privlab.grids import KNOWN
from privlab.metrics import MIRRORED, STRUCTURE
from privlab.report.page import case_names
from privlab.report.tables.flags import FEWEST_IMAGES
from privlab.report.tables.knowledge import kinds_in, knows, undefended_attack, undone
from privlab.report.tables.measure import Measure, measure
from privlab.report.tables.per_image import attack_label, lead_metric, leakiest_geometries, measured_images
from privlab.report.tables.results import Results

__all__ = ["Measure", "PowerVerdict", "power", "power_of", "scope"]

Word = Literal["broken", "holds", "no evidence", "no defense"]

_SHARED_COLUMNS = ("victim_params", "weights_sha256", "block", "release", "dtype", "conditions", "batch_images")
"""The columns in which a record must agree with one of its positive control, besides the image and the batch."""

_NEEDED_COLUMNS = (
    *_SHARED_COLUMNS,
    "attack_params",
    "batch",
    "defense",
    "setting",
    "beyond_range",
    "schema",
    "image",
    "external",
)
_RANGE_SCHEMA = 4
"""The first version of the records that states whether an attack was beyond its range."""


@dataclass(frozen=True)
class PowerVerdict:
    """The verdict on one case: a word, the reason, what leaks most, and the positive control if the defense holds."""

    case: int
    label: str
    word: Word
    why: str
    measure: Measure | None = None
    positive: Measure | None = None

    def __str__(self) -> str:
        """Return the cell of a table."""
        return f"{self.word}{self.why}"


def scope(records: pd.DataFrame) -> str:
    """Return one text on the threat model of every verdict on these records, and on what is outside it."""
    kinds = {*records.reindex(columns=["release"]).release.dropna()}
    seen = " or ".join(sorted(kinds)) or "what is released"
    images = ", has images of its own" if "features" in kinds else ""
    client = ", knows the settings of the client's training" if "update" in kinds else ""
    return (
        f"Threat model: an honest-but-curious server that knows the weights, sees the {seen} of one release of each "
        f"image{images}{client}, and knows the defense's algorithm and options, but not its draws or keys. Outside it: "
        "a server that changes the weights, several rounds of one image, and what else it may know of the image."
    )


def power_of(results: Results) -> list[PowerVerdict]:
    """Return the verdict on each case of results, by the metrics of their table."""
    layout = results.layout
    return power(results.records, case_names(results), layout.columns, layout.geometry, layout.interval)


def power(
    records: pd.DataFrame,
    names: Sequence[str],
    metrics: Sequence[str],
    geometry: str = "in_place",
    level: float = 0.95,
    knowing: frozenset[str] = frozenset(),
) -> list[PowerVerdict]:
    """Return the verdict on each case, from records alone.

    The lead metric comes first. A case is broken by any metric of leakage among `metrics` and `STRUCTURE`; the latter
    see what PSNR does not, and without them no defense is said to hold. Of m attacks and metrics tried, the interval of
    each difference has the level 1 − (1 − level) / m, as the best of many is ahead by chance (Bonferroni). MJP's own
    FFT2D is left out: it compares means above all.

    Args:
        records: a row per image, attack and geometry; `case` has the number of its case.
        names: the names of the cases, by their numbers.
        metrics: the columns of the table.
        geometry: "in_place", "oracle" or "reassembled": in which reconstructions are compared.
        level: confidence level of all intervals of a case together, in (0, 1).
        knowing: attacks that know every defense here, though their classes are not installed.
    """
    leaky = [name for name in metrics if KNOWN[name].direction != "utility" and name != "fft2d_mjp"]
    leaky.sort(key=lambda name: name != lead_metric(metrics))
    leaky += [name for name in STRUCTURE if leaky and name not in leaky and name in records]
    there = records.reindex(columns=list(dict.fromkeys([*records.columns, *_NEEDED_COLUMNS])))
    facts = _Facts(there, names, leaky, geometry, level, knowing)
    return [facts.verdict(case) for case in range(len(names))]


@dataclass(frozen=True, eq=False)
class _Facts:
    """The records of all cases, with the metrics, the geometry and the level by which they are judged."""

    records: pd.DataFrame
    names: Sequence[str]
    metrics: Sequence[str]
    geometry: str
    level: float
    knowing: frozenset[str]

    @cached_property
    def cases(self) -> Mapping[int, pd.DataFrame]:
        return {int(str(case)): rows for case, rows in self.records.groupby("case")}

    @cached_property
    def defenses(self) -> Mapping[int, frozenset[str]]:
        """Return the parts of each case's defense; the set is empty where no defense is at work."""
        named = {case: rows.defense.dropna().unique() for case, rows in self.cases.items()}
        return {case: frozenset("+".join(found).split("+")) - {"none", ""} for case, found in named.items()}

    def images(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return the scores of each attack, control and image; an attack's are of the geometry where it leaks most.

        Its column `geometry` names that.
        """
        best = leakiest_geometries(rows, self.metrics, self.geometry).drop_duplicates("attack")
        where = dict(zip(best.attack, best.geometry, strict=True))
        found = {name: measured_images(rows, self.metrics, name) for name in {self.geometry, *where.values()}}
        own = [
            each.loc[[where.get(attack, self.geometry) == name for attack in each.attack]].assign(geometry=name)
            for name, each in found.items()
        ]
        images = pd.concat(own, ignore_index=True)
        return images.loc[images.image != ""]

    def verdict(self, case: int) -> PowerVerdict:
        """Return the verdict on one case."""
        said = PowerVerdict(case, self.names[case], "no evidence", ": no attack was scored")
        rows, parts = self.cases.get(case), self.defenses.get(case, frozenset())
        if rows is None or not self.metrics:
            return said
        images = self.images(rows)
        attacks = images.attack[images.scored & ~images.control.astype(bool)].drop_duplicates().tolist()
        if not attacks:
            return said
        level = 1 - (1 - self.level) / (len(attacks) * len(self.metrics))
        by_metric = {
            name: [found for attack in attacks if (found := measure(images, attack, name, level, self.level))]
            for name in self.metrics
        }
        if not any(by_metric.values()):
            return replace(said, why=": no negative control was scored")
        leaking = [max(found, key=_most) for each in by_metric.values() if (found := [m for m in each if m.leaks])]
        if leaking:
            first = leaking[0]
            if not parts:
                return replace(said, word="no defense", why=f": {first.attack} leaks ({first})", measure=first)
            of = " of the shuffled image" if (rows.setting == "b").all() else ""
            where = dict(zip(images.attack, images.geometry, strict=True))
            by = attack_label(first.attack, where[first.attack])
            return replace(said, word="broken", why=f" by {by} ({first}{of})", measure=first)
        best = max(next(filter(None, by_metric.values())), key=_most)
        if not parts:
            why = f": nor is any attack seen to leak; the best is {best.attack} ({best})"
            return replace(said, word="no defense", why=why, measure=best)
        return self._unbroken(replace(said, measure=best), rows, by_metric[self.metrics[0]])

    def _unbroken(self, said: PowerVerdict, rows: pd.DataFrame, found: Sequence[Measure]) -> PowerVerdict:
        """Return the verdict that a defense holds beside its positive control, or what is missing for that verdict."""
        parts, own = self.defenses[said.case], {m.attack: rows.loc[rows.attack == m.attack] for m in found}
        kinds = kinds_in(rows, parts)
        beyond = "; ".join(
            f"{name}: {why}" for name, each in own.items() for why in each.beyond_range.dropna().unique()
        )
        positive = {m.attack: self._positive(m.attack, own[m.attack]) for m in found}
        told = "; ".join(f"{m.attack}: {m}" for m in positive.values() if m)
        steps: tuple[tuple[str, Callable[[Measure], bool]], ...] = (
            (
                "no attack that was scored knows the defense",
                lambda m: m.attack in self.knowing or knows(undone(m.attack, rows, self.geometry), parts, kinds),
            ),
            (
                "no record says whether an attack was in its range: run it again",
                lambda m: bool((own[m.attack].schema.fillna(0) >= _RANGE_SCHEMA).all()),
            ),
            (
                f"every attack that knows the defense is outside its stated range ({beyond})",
                lambda m: bool(own[m.attack].beyond_range.isna().all()),
            ),
            (
                f"structure without its scale ({', '.join(STRUCTURE)}) was not measured beside the mirrored image",
                lambda m: bool(own[m.attack].reindex(columns=list(MIRRORED.values())).notna().any(axis=None)),
            ),
            ("attacks that know the defense failed", lambda m: bool((own[m.attack].status == "ok").all())),
            (f"fewer than {FEWEST_IMAGES} images", lambda m: m.gain.images >= FEWEST_IMAGES),
            (
                "no positive control; the same attack on the undefended release of the same images, all else alike, is "
                "added by --setting a,c, or by a case of setting a",
                lambda m: positive[m.attack] is not None,
            ),
            (f"the positive control does not leak ({told})", lambda m: _leaks(positive[m.attack])),
            (
                f"what may leak is no less than what leaks undefended ({told})",
                lambda m: _gain_low(positive[m.attack]) > m.gain.high,
            ),
        )
        for reason, holds in steps:
            found = [measure for measure in found if holds(measure)]
            if not found:
                return replace(said, why=f": {reason}")
        first = max(found, key=lambda m: _gain_low(positive[m.attack]))
        control = positive[first.attack]
        as_named = f", as {control.attack}," if control and control.attack != first.attack else ""
        why = f" against {first.attack} ({first}), which leaks{as_named} without the defense ({control})"
        return replace(said, word="holds", why=why, measure=first, positive=control)

    def _positive(self, attack: str, own: pd.DataFrame) -> Measure | None:
        """Return what an attack leaks from the undefended release of the same images, all else being the same.

        An attack that is another one where nothing is defended is compared with that one, whatever the options of both.
        """
        plain = undefended_attack(attack)
        options = ["attack_params"] if plain == attack else []
        wanted = _keys(own, options)
        for case, parts in self.defenses.items():
            rows = self.cases[case]
            same = rows.loc[(rows.attack == plain) & (rows.status == "ok") & rows.external.isna()]
            if parts or not wanted <= _keys(same, options):
                continue
            images = self.images(rows.loc[rows.image_sha256.isin(own.image_sha256)])
            if found := measure(images, plain, self.metrics[0], self.level, self.level):
                return found
        return None


def _keys(rows: pd.DataFrame, options: Sequence[str]) -> set[tuple[object, ...]]:
    """Return the identity of each row's measurement, without its defense, setting and draws."""
    columns = [*_SHARED_COLUMNS, *options, "image_sha256", "batch"]
    return set(rows[columns].astype(object).where(rows[columns].notna(), None).itertuples(index=False, name=None))


def _most(measure: Measure) -> float:
    return measure.gain.mean


def _leaks(measure: Measure | None) -> bool:
    return measure is not None and measure.leaks


def _gain_low(measure: Measure | None) -> float:
    return float("-inf") if measure is None else measure.gain.low

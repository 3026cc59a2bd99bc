"""The facts that verdicts and red flags read: the scores of each case, and what its rows state."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd

from privlab.evaluation import CONTROL
from privlab.grids import KNOWN
from privlab.metrics import DECIBELS, EXACT_DB, STRUCTURE
from privlab.report.tables.cells import figure_text, unit_of
from privlab.report.tables.knowledge import kinds_in, knows, undone
from privlab.report.tables.measure import Measure, structure
from privlab.report.tables.per_image import Scored, lead_metric, sign_of
from privlab.report.tables.results import Results, case_names

_MOST_TEXTS = 3
"""The most texts of a flag that are listed."""
COMPARED_COLUMNS = [
    *("victim", "weights_sha256", "block", "release", "setting", "defense", "defense_params"),
    *("attack", "geometry", "conditions"),
]
"""The columns that two records must share if their attacks are to be compared by budget alone."""
SHARED_COLUMNS = ("victim_params", "weights_sha256", "block", "release", "dtype", "conditions", "batch_images")
"""The columns in which a record must agree with one of its positive control, besides the image and the batch."""
_NEEDED_COLUMNS = (*COMPARED_COLUMNS, *SHARED_COLUMNS, "attack_params", "seed", "draw", "weights", "reason", "image")
_NEEDED_COLUMNS += ("label_origin", "beyond_range", "effort", "cut_layer", "batch", "schema", "external")


@dataclass(frozen=True, eq=False)
class Facts:
    """What verdicts and red flags are made of: the records of all cases, and how their attacks are compared.

    Args:
        records: a row per image, attack and geometry; `case` has the number of its case.
        names: the names of the cases, by their numbers.
        metrics: the columns of the table; by the lead metric, attacks are compared.
        geometry: "in_place", "oracle" or "reassembled": in which reconstructions are compared.
        level: confidence level of all intervals of a case together, in (0, 1).
        knowing: attacks that know every defense here, though their classes are not installed.
        declared: of classes that are not installed, by their names: under "knows" the defenses that an attack knows,
            and under "effects" the kinds of effects of a defense.
    """

    records: pd.DataFrame
    names: Sequence[str]
    metrics: Sequence[str]
    geometry: str = "in_place"
    level: float = 0.95
    knowing: frozenset[str] = frozenset()
    declared: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Results) -> "Facts":
        """Return the facts of results, by the metrics of their table."""
        layout = results.layout
        declared, level = results.facts.get("declared", {}), layout.interval
        names = case_names(results)
        return cls(results.records, names, layout.columns, layout.geometry, level, declared=declared)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Return the records; columns that they lack are added and null."""
        return self.records.reindex(columns=list(dict.fromkeys([*self.records.columns, *_NEEDED_COLUMNS])))

    @property
    def metric(self) -> str:
        """Return the metric by which attacks are compared."""
        return lead_metric(self.metrics)

    @cached_property
    def leaky(self) -> list[str]:
        """Return the metrics by which a verdict is reached, the lead metric first, and those of `STRUCTURE` last.

        MJP's own FFT2D is left out: it compares means above all.
        """
        leaky = [name for name in self.metrics if sign_of(name) and name != "fft2d_mjp"]
        leaky.sort(key=lambda name: name != self.metric)
        return leaky + [name for name in STRUCTURE if leaky and name not in leaky and name in self.records]

    @property
    def sign(self) -> int:
        """Return 1 where a higher value leaks, −1 where a lower one does, 0 for a utility."""
        return sign_of(self.metric)

    @cached_property
    def own(self) -> pd.Series:
        """Return which rows are those of attacks; the others are controls."""
        return ~self.rows.attack.str.startswith(CONTROL).astype(bool)

    @cached_property
    def images(self) -> pd.DataFrame:
        """Return the scored images of each case, attack and control."""
        found = Scored(self.rows, list(dict.fromkeys([self.metric, *STRUCTURE])), self.geometry).measured
        return found.loc[found.scored]

    @cached_property
    def means(self) -> Mapping[int, Mapping[str, float]]:
        """Return the mean over the images of each attack and control that was scored, by case.

        The mean of an attack is that of the geometry in which it leaks most, among those that an adversary can make.
        """
        means = self.images.groupby(["case", "attack"], sort=False).agg(mean=(self.metric, "mean"))["mean"]
        table: dict[int, dict[str, float]] = {}
        best = Scored(self.rows, [self.metric], self.geometry).leakiest_geometries
        for case, attack, mean in zip(best.case.tolist(), best.attack, best["value"].tolist(), strict=True):
            table.setdefault(case, {}).setdefault(attack, mean)  # our own stand before external ones
        for (case, attack), mean in means.to_dict().items():
            table.setdefault(case, {}).setdefault(attack, mean)
        return table

    @cached_property
    def cases(self) -> Mapping[int, pd.DataFrame]:
        """Return the rows of each case."""
        return {int(str(case)): rows for case, rows in self.rows.groupby("case")}

    @cached_property
    def defenses(self) -> Mapping[int, frozenset[str]]:
        """Return the parts of each case's defense; the set is empty where no defense is at work."""
        named = {case: rows.defense.dropna().unique() for case, rows in self.cases.items()}
        return {case: frozenset("+".join(found).split("+")) - {"none", ""} for case, found in named.items()}

    @cached_property
    def defended(self) -> Mapping[int, frozenset[str]]:
        """Return the parts of each defense that is at work, by case, in the order of the records."""
        cases = self.rows.case[self.rows.defense.notna()].unique().tolist()
        return {case: self.defenses[case] for case in cases if self.defenses[case]}

    def attacks(self, case: int) -> dict[str, float]:
        """Return the means of the attacks that were scored on a case."""
        return {name: mean for name, mean in self.means.get(case, {}).items() if not name.startswith(CONTROL)}

    def beaten(self, case: int) -> tuple[str, dict[str, float]]:
        """Return the leakiest control of a case, and the attacks whose mean is no better."""
        means = self.means.get(case, {})
        best = self.leakiest({name: mean for name, mean in means.items() if name.startswith(CONTROL)})
        if best is None:
            return "", {}
        bar = self.sign * means[best]
        return best, {name: mean for name, mean in self.attacks(case).items() if self.sign * mean <= bar}

    @cached_property
    def structure(self) -> Mapping[int, Mapping[str, Measure]]:
        """Return the attacks that leak structure, by case; their scores are those of the geometry that is asked for."""
        images = {int(str(case)): rows for case, rows in self.images.groupby("case")}
        return {case: structure(images[case], [*self.attacks(case)]) if case in images else {} for case in self.means}

    def rank(self, mean: float) -> float:
        """Return a mean as a number that is higher where more leaks, rounded to the decimals of the tables."""
        mean = min(mean, EXACT_DB) if self.metric in DECIBELS else mean
        return self.sign * round(mean, KNOWN[self.metric].decimals)

    def leakiest(self, means: Mapping[str, float]) -> str | None:
        """Return the name that leaks most; None where none has a mean."""
        known = [name for name, mean in means.items() if mean == mean]  # NaN is not itself
        return max(known, key=lambda name: self.sign * means[name], default=None) if self.sign else None

    def with_mean(self, name: str, mean: float) -> str:
        """Return a name with its mean and its unit."""
        unit = unit_of(self.metric)
        return f"{name} {figure_text(mean, KNOWN[self.metric].decimals)} {unit}"

    def where(self, cases: Iterable[int]) -> str:
        """Return the names of cases as text."""
        names = [self.names[case] for case in cases]
        return "every case" if len(names) == len(self.names) else join_first(names)

    def group(self, found: Mapping[int, str]) -> list[str]:
        """Return the texts found for cases, each once, with the names of its cases unless there is only one case."""
        if len(self.names) == 1:
            return [*found.values()]
        return [
            f"{text} ({self.where(case for case, other in found.items() if other == text)})"
            for text in dict.fromkeys(found.values())
        ]

    def knows(self, attack: str, case: int) -> bool:
        """Return whether all parts of a case's defense are undone in what is scored, by the attack or the geometry."""
        known = undone(attack, self.cases[case], self.geometry).union(self.declared.get("knows", {}).get(attack, ()))
        return attack in self.knowing or knows(known, self.defenses[case], self.kinds[case])

    @cached_property
    def kinds(self) -> Mapping[int, Mapping[str, frozenset[str]]]:
        """Return the kinds of effects of those parts of each case's defense that are not privlab's own."""
        own = {part: frozenset(kinds) for part, kinds in self.declared.get("effects", {}).items()}
        return {
            case: {**kinds_in(self.cases[case], parts), **{part: own[part] for part in parts & own.keys()}}
            for case, parts in self.defenses.items()
        }


def join_first(texts: Sequence[str]) -> str:
    """Join the first texts; if there are more, say how many."""
    more = f"; {len(texts) - _MOST_TEXTS} more" if len(texts) > _MOST_TEXTS else ""
    return "; ".join(texts[:_MOST_TEXTS]) + more

"""The contents of a directory of records, as tables, figures and pages read them."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from privlab.base import PrivlabError, one_line, parse_object
from privlab.evaluation import CONTROLS
from privlab.grids import Figure, Layout, columns_of, papers_attack
from privlab.report.tables.per_image import Scored, lead_metric, sign_of
from privlab.report.tables.rows import NO_SCORE, Kind, Row, Score, leakage
from privlab.stores import Place, RunDirectory, places_of

_PLAIN = re.compile(r"[\w.:-]*")
"""What names of pictures are made of."""


@dataclass(frozen=True, eq=False)
class CaseFacts:
    """One row of the experiment: its name, its own options, a paper's figures, and the attacks that cannot run."""

    label: str
    group: str | None = None
    options: Mapping[str, str | float | int] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Results:
    """An experiment with its records; `records.case` names the case of each row by its place in `cases`."""

    name: str
    title: str
    source: str | None
    cases: tuple[CaseFacts, ...]
    layout: Layout
    figures: tuple[Figure, ...]
    conditions: Mapping[str, str]
    records: pd.DataFrame
    facts: Mapping[str, Any]
    path: Path

    def laid_out(self, **changes: Any) -> "Results":  # noqa: ANN401
        """Return the same results with other columns, another geometry or other fields of the layout."""
        return replace(self, layout=replace(self.layout, **changes))

    @property
    def lead(self) -> str:
        """Return the metric by which attacks are compared."""
        return lead_metric(self.layout.columns)

    @cached_property
    def rows(self) -> list[Row]:
        """Return the rows of the leakage table, case by case."""
        return leakage(self)

    def row(self, case: int, kind: Kind) -> Row | None:
        """Return the first row of a case that has this kind; None if there is none."""
        return self._first_rows.get((case, kind))

    def score(self, case: int, kind: Kind, metric: str) -> Score:
        """Return the score of that row, which is NaN where the metric was not measured.

        Args:
            case: the number of the case, from 0.
            kind: the kind of the row, such as "paper" or "worst".
            metric: the metric's name.
        """
        row = self.row(case, kind)
        return NO_SCORE if row is None else row.scores.get(metric, NO_SCORE)

    def leakiest_control(self, case: int, metric: str) -> Row | None:
        """Return the row of the control of a case that leaks most by a metric; None if none was scored."""
        controls = [row for row in self.rows if row.case == case and row.kind == "control"]
        scored = [row for row in controls if not math.isnan(row.scores[metric].mean)]
        return max(scored, key=lambda row: sign_of(metric) * row.scores[metric].mean, default=None)

    @cached_property
    def _first_rows(self) -> Mapping[tuple[int, str], Row]:
        return {(row.case, row.kind): row for row in reversed(self.rows)}

    @cached_property
    def scored(self) -> Scored:
        """Return the scores of the images, by the columns and in the geometry of the layout."""
        return Scored(self.records, self.layout.columns, self.layout.geometry)

    def picture(self, case: int, image_sha256: str, what: str) -> Place | None:
        """Return the file in which an image of a case is kept, and where in it; None if none is kept.

        `privlab table` keeps PNGs, `privlab attack` strips, and an audit PNGs and contact sheets whose text says what
        they show.

        Args:
            case: the number of the case, from 0.
            image_sha256: the hash of the private image.
            what: "private", "fed" (what the client fed), or the name of an attack, for its reconstruction; with
                " (reassembled)" behind it, for that with its patches in the order that was found.
        """
        attack, _, laid = what.partition(" (")
        suffix = "-reassembled" if laid else ""
        if what in ("private", "fed"):
            attack, suffix = CONTROLS[0], f"-{what}"
        for cell in self._cells.get((case, attack), ()):
            path = self.path / "pictures" / image_sha256[:16] / f"{cell}{suffix}.png"
            if _PLAIN.fullmatch(f"{image_sha256}{cell}{suffix}") and path.exists():  # no path to somewhere else
                return Place(path)
            if place := self._strips.get((f"{cell}{suffix}", image_sha256)):
                return place
        return None

    @cached_property
    def _strips(self) -> Mapping[tuple[str, str], Place]:
        found = (file for folder in ("strips", "pictures") for file in sorted((self.path / folder).glob("*.png")))
        files = (file for file in found if file.is_file())
        return {panel: place for file in files for panel, place in places_of(file).items()}

    @cached_property
    def _cells(self) -> Mapping[tuple[int, str], list[str]]:
        pairs = self.records[["case", "attack", "cell"]].drop_duplicates()
        return pairs.groupby(["case", "attack"]).cell.agg(list).to_dict()


def load_results(path: Path) -> Results:
    """Read the results of a directory that `privlab table` or `privlab attack` wrote.

    Raises:
        PrivlabError: if it holds no run.
    """
    run = RunDirectory(path)
    facts, records = run.read_run(), run.store.frame()
    if "experiment" not in facts and "specification" not in facts:
        raise PrivlabError(f"'{path}' is not a run of privlab: its run.json has neither experiment nor specification.")
    with read_from(path):
        return _results(path, facts, records)


@contextmanager
def read_from(path: Path) -> Iterator[None]:
    """Raise PrivlabError for any error within: whoever wrote the files of a directory may have stated anything."""
    try:
        yield
    except PrivlabError:
        raise
    except Exception as error:
        reason = one_line(error, kind=True)
        raise PrivlabError(f"'{path}' is not a run that privlab wrote, or it is damaged ({reason}).") from error


def _results(path: Path, facts: Mapping[str, Any], records: pd.DataFrame) -> Results:
    """Return the results that the facts and records of a directory state."""
    if "experiment" in facts:
        return _of_experiment(path, facts, records)
    return results_of(records, columns_of(facts["specification"]["metrics"]), facts=facts, path=path)


def _of_experiment(path: Path, facts: Mapping[str, Any], records: pd.DataFrame) -> Results:
    """Return the records that the experiment asked for last; others in the store belong to earlier versions of it."""
    experiment = facts["experiment"]
    wanted = pd.DataFrame(
        [
            (case, cell, job["images"])
            for case, of_case in enumerate(facts["cases"])
            for job in of_case["jobs"]
            for cell in job["cells"].values()
        ],
        columns=["case", "cell", "images"],
    ).drop_duplicates()
    pairs = [(name, image) for name, images in facts["image_lists"].items() for image in images]
    listed = pd.DataFrame(pairs, columns=["images", "image_id"]).drop_duplicates()
    image = records.image_sha256.where(records.image_sha256.fillna("").ne(""), records.image)
    own = records.assign(image_id=image).merge(wanted, on="cell").merge(listed, on=["images", "image_id"])
    if (members := facts.get("members")) is not None:  # the last manifest decides, not that of the records
        said = [members[name].get(image) for name, image in zip(own.images, own.image_id, strict=True)]
        own = own.assign(member=pd.Series(said, own.index, dtype=object))
    own = own.drop(columns=["image_id", "images"])
    labels = {case["label"]: number for number, case in enumerate(facts["cases"])}
    foreign = records[records.external.notna()]
    named = foreign.conditions.map(lambda text: labels.get(parse_object(text, "conditions of a record").get("case")))
    foreign = foreign.assign(case=named).loc[named.notna()]
    layout = experiment["layout"]
    return Results(
        name=experiment["name"],
        title=experiment["title"],
        source=experiment["source"],
        cases=tuple(
            CaseFacts(case["label"], case["group"], case["options"], case["published"], case["refused"])
            for case in facts["cases"]
        ),
        layout=Layout(**layout | {"columns": tuple(layout["columns"])}),
        figures=tuple(Figure(**figure) for figure in experiment["figures"]),
        conditions=experiment["conditions"],
        records=pd.concat([own, foreign], ignore_index=True).astype({"case": int}) if len(foreign) else own,
        facts=facts,
        path=path,
    )


def case_names(results: Results) -> list[str]:
    """Return the label of each case, with its group where another case has the same label."""
    count = Counter(case.label for case in results.cases)
    return [
        f"{case.label}, {case.group}" if case.group and count[case.label] > 1 else case.label for case in results.cases
    ]


def results_of(
    records: pd.DataFrame,
    metrics: Sequence[str],
    geometry: str = "in_place",
    *,
    facts: Mapping[str, Any] = MappingProxyType({}),
    path: Path = Path(),
) -> Results:
    """Return the results of records of one `privlab attack`, with a case for each victim, setting and defense.

    Args:
        records: its records.
        metrics: the columns of the table.
        geometry: the layout of the patches that is scored.
        facts: what `run.json` states.
        path: the directory of the run.
    """
    keys = ["victim", "setting", "defense"]
    found = records.loc[:, keys].drop_duplicates().itertuples(index=False)
    cases = [CaseFacts(f"{row.victim}, setting {row.setting}, {row.defense}", options=row._asdict()) for row in found]
    layout = Layout(columns=tuple(metrics), geometry=geometry, paper_attack=papers_attack(records.attack.unique()))
    cased = records.assign(case=records.groupby(keys, sort=False).ngroup())
    victims, used = (", ".join(map(str, records[name].dropna().unique())) for name in ("victim", "defense"))
    defenses = ", ".join(name for name in used.split(", ") if name not in ("", "none"))
    title = f"{victims} with {defenses}" if defenses else f"{victims}, undefended"
    return Results(path.name, title, None, tuple(cases), layout, (), {}, cased, facts, path)

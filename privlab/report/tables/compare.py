"""The cells of a table that moved between two runs by more than their interval: a guard against regressions."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from privlab.grids import KNOWN
from privlab.metrics import DECIBELS, EXACT_DB
from privlab.report.tables.cells import figure_text, heading, some
from privlab.report.tables.per_image import SINGLE
from privlab.report.tables.results import Results
from privlab.report.tables.rows import NO_SCORE, Row, Score, measure

_ROUNDING_ERROR = 1e-6
"""Relative differences up to this are rounding of float32, on another machine or in another order."""

_EXACT_DIFFERENCE = 1e-8
"""Differences up to this are those of exact reconstructions, whose errors are only rounding."""

_KEY = ["case", "attack", "external", "image"]


@dataclass(frozen=True)
class Moved:
    """A cell that moved: an attack (or the worst case) on a case, by one metric.

    `old` and `new` are the means; for failures, they are numbers of images. `difference` is new − old over the `images`
    that both runs have, with its interval. Where they have none in common, it is the difference of the means, and
    `images` is 0.
    """

    case: str
    group: str | None
    attack: str
    metric: str
    what: Literal["moved", "only in the old run", "only in the new run", "more failures"]
    old: float
    new: float
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    images: int = 0

    @property
    def leaks_more(self) -> bool | None:
        """Return whether the new run leaks more; None where that cannot be said."""
        if self.what != "moved" or not KNOWN[self.metric].arrow or math.isnan(self.difference):
            return None
        return (self.difference > 0) == (KNOWN[self.metric].direction == "higher leaks")

    def __str__(self) -> str:
        case = f"{self.group}, {self.case}" if self.group else self.case
        if self.what == "more failures":
            return f"{case}, {self.attack}: {self.new:g} images failed, {self.old:g} before"
        n = KNOWN[self.metric].decimals
        where = f"{case}, {self.attack}: {heading(self.metric)}"
        if self.what != "moved":
            return f"{where} {self.what}: {figure_text(self.new if math.isnan(self.old) else self.old, n)}"
        interval = "" if math.isnan(self.low) else f" [{figure_text(self.low, n)}, {figure_text(self.high, n)}]"
        over = f"over {some(self.images, 'image')}" if self.images else "no image in common"
        more = {True: ", leaks more", False: ", leaks less", None: ""}[self.leaks_more]
        moved = f"moved by {figure_text(self.difference, n)}{interval}, {over}{more}"
        return f"{where} {figure_text(self.old, n)} → {figure_text(self.new, n)}, {moved}"


def compare(old: Results, new: Results) -> list[Moved]:
    """Return the cells that moved by more than their interval, that only one run has, or in which more images failed.

    A cell moved if Student's interval of its difference, paired by image, does not hold zero. Where the runs have
    no image in common, the interval is that of two independent means (Zou and Donner 2008). Where there is only one
    image, every difference counts. Both runs are read with the new one's layout, without their controls; cases are
    matched by group and label. Finite PSNRs above 100 dB count as 100: such reconstructions are exact.
    """
    layout = new.layout
    metrics = tuple(dict.fromkeys((*layout.columns, *old.layout.columns)))
    places = {name: i for i, name in enumerate(dict.fromkeys((*_names(new), *_names(old))))}
    first, second = (_images(results, metrics, layout.geometry, places) for results in (old, new))
    before, after = (measure(frame, metrics, layout.interval) for frame in (first, second))
    between = measure(_pair(first, second, metrics), metrics, layout.interval, differences=True)
    names = list(places)
    moved = []
    for key in sorted(before.keys() | after.keys()):
        group, label, _ = names[key[0]]
        place = (label, group, f"{key[1]} (external)" if key[2] else key[1])
        moved += _of_cell(place, before.get(key), after.get(key), between.get(key), metrics)
    return moved


_Name = tuple[str | None, str, int]
_Place = tuple[str, str | None, str]


def _names(results: Results) -> list[_Name]:
    """Return a name for each case: its group, its label, and a number that distinguishes equal names."""
    names = [(case.group, case.label) for case in results.cases]
    return [(*name, names[:i].count(name)) for i, name in enumerate(names)]


def _images(results: Results, metrics: tuple[str, ...], geometry: str, places: Mapping[_Name, int]) -> pd.DataFrame:
    """Return the scores by image, without controls and with exact scores made equal; cases are numbered by `places`."""
    found = results.laid_out(columns=tuple(metrics), geometry=geometry).scored.images
    found = found.loc[~found.control & (found.image != "") & (found.attack != SINGLE)]  # one of the others
    numbers = np.array([places[name] for name in _names(results)], dtype="int64")
    for name in (name for name in DECIBELS if name in metrics):
        found[name] = found[name].clip(upper=EXACT_DB).where(found[name] < math.inf, found[name])
    return found.assign(case=numbers[found.case.to_numpy()]).sort_values(_KEY)


def _pair(old: pd.DataFrame, new: pd.DataFrame, metrics: tuple[str, ...]) -> pd.DataFrame:
    """Return new − old for each cell and image that both runs have."""
    was, now = (of.set_index(_KEY)[list(metrics)] for of in (old, new))
    was, now = was.align(now, join="inner")
    change = (now - was).where(now != was, 0.0)  # two infinite figures are the same
    return change.sort_index().reset_index().assign(scored=True, failed=False)


def _of_cell(
    place: _Place, old: Row | None, new: Row | None, both: Row | None, metrics: tuple[str, ...]
) -> Iterator[Moved]:
    """Yield what moved in one cell."""
    if old and new and new.failed > old.failed:
        yield Moved(*place, "failed", "more failures", float(old.failed), float(new.failed))
    for name in metrics:
        before, after, paired = (of.scores[name] if of else NO_SCORE for of in (old, new, both))
        if before.images and after.images:
            change = paired if paired.images else _unpaired_change(before, after)
            if not _still(before, after, change):
                ends = (change.mean, change.low, change.high, change.images)
                yield Moved(*place, name, "moved", before.mean, after.mean, *ends)
        elif before.images or after.images:
            what = "only in the new run" if after.images else "only in the old run"
            yield Moved(*place, name, what, before.mean, after.mean)


def _still(old: Score, new: Score, change: Score) -> bool:
    """Return whether a change is within its interval, or within rounding."""
    finite = [abs(score.mean) for score in (old, new) if math.isfinite(score.mean)]
    return (
        abs(change.mean) <= max([_EXACT_DIFFERENCE, *(_ROUNDING_ERROR * mean for mean in finite)])
        or change.low <= 0 <= change.high
    )


def _unpaired_change(old: Score, new: Score) -> Score:
    """Return the difference of two independent means, with an interval recovered from theirs, over 0 common images."""
    difference = 0.0 if old.mean == new.mean else new.mean - old.mean
    low = difference - math.hypot(new.mean - new.low, old.high - old.mean)
    high = difference + math.hypot(new.high - new.mean, old.mean - old.low)
    return Score(difference, low, high)

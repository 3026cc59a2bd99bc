"""What an attack leaks, compared with the leakiest control of the same images, with the interval of the difference."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from privlab.evaluation import CONTROL
from privlab.grids import KNOWN
from privlab.metrics import DECIBELS, EXACT_DB, MIRRORED, STRUCTURE
from privlab.report.intervals import FEWEST_IMAGES, gain_interval
from privlab.report.tables.cells import figure_text, some, unit_of
from privlab.report.tables.per_image import sign_of
from privlab.report.tables.rows import Score

_MIRRORED = "the mirrored image"
"""A control that the attack itself gives: its reconstruction, compared with the mirrored image."""


@dataclass(frozen=True)
class Measure:
    """What an attack leaks by one metric, compared with the leakiest control of the same images.

    `mean` is that of the attack over `gain.images` images, and `control_mean` that of the control. `ahead` counts the
    images on which the attack leaks more than the control, `exact` those of `exact_images`. `gain` is the mean of the
    difference, positive where the attack leaks more, with the interval by which the verdict is reached.
    """

    attack: str
    metric: str
    mean: float
    control: str
    control_mean: float
    ahead: int
    exact: int
    gain: Score

    @property
    def enough(self) -> bool:
        """Return whether there are enough images for a verdict by the gain."""
        return self.gain.images >= FEWEST_IMAGES

    @property
    def beyond(self) -> bool:
        """Return whether more leaks than from the control, beyond the interval, on enough images."""
        return self.enough and self.gain.low > 0

    @property
    def leaks(self) -> bool:
        """Return whether more leaks beyond the interval, or an image is reconstructed exactly."""
        return self.beyond or self.exact > 0

    def __str__(self) -> str:
        """Return the figures in words; the interval is left out where no verdict is reached by it."""
        n, gain = KNOWN[self.metric].decimals, self.gain
        interval = f" [{figure_text(gain.low, n)}, {figure_text(gain.high, n)}]" if self.enough else ""
        exactly = f", {self.exact} exactly" if self.exact else ""
        return (
            f"{self.ahead} of {some(gain.images, 'image')}{exactly}; {figure_text(self.mean, n)} "
            f"{unit_of(self.metric)} against {figure_text(self.control_mean, n)} of {self.control}, a gain of "
            f"{figure_text(gain.mean, n)}{interval}"
        )


def exact_images(images: pd.DataFrame) -> dict[str, set[str]]:
    """Return the images that each attack reconstructs exactly, without those that a control equals too.

    A control equals a private image that has one colour: that an attack returns it shows nothing. Attacks without an
    exact image are left out.

    Args:
        images: rows of `Scored.measured` of one case, attacks and controls.
    """
    exact = images.loc[images.exact == 1]
    by_name: dict[str, set[str]] = {}
    for name, image in zip(exact.attack, exact.image, strict=True):
        by_name.setdefault(str(name), set()).add(image)
    given = {image for name, own in by_name.items() if name.startswith(CONTROL) for image in own}
    return {name: own - given for name, own in by_name.items() if not name.startswith(CONTROL)}


def measure(images: pd.DataFrame, attacks: Sequence[str], metric: str, level: float) -> list[Measure | None]:
    """Return what each attack leaks compared with the leakiest control of the same images; None where it is unknown.

    The gain of an image is its score less that of the control, with the sign turned where lower values leak. Decibels
    above 100 count as 100, also infinite ones, as they measure rounding. A metric of `STRUCTURE` has the attack's score
    against the mirrored image as one more control, and is None without it: of two images that have nothing in common
    with the reference, the smoother one scores higher.

    Args:
        images: rows of `Scored.measured` of one case, attacks and controls.
        attacks: the names of the attacks. An attack without a score, or of whose images no control has all, is None.
        metric: a column of `images`, one of leakage.
        level: confidence level of the interval of each gain (`gain_interval`), in (0, 1), by which the verdict is
            reached.
    """
    known = images.loc[images[metric].notna()]
    scores, column = _by_image(known, metric, metric), MIRRORED.get(metric, "")
    mirrored = scores.iloc[:, :0]
    if column in known:
        without = known.attack[known[column].isna()].unique()
        mirrored = _by_image(known, column, metric).drop(columns=without)
    exact = exact_images(known)
    return [_measure(attack, metric, level, scores, mirrored, len(exact.get(attack, ()))) for attack in attacks]


def _by_image(known: pd.DataFrame, column: str, metric: str) -> pd.DataFrame:
    """Return a column with a row for each image and a column for each attack: the leakiest of several values."""
    leakiest = "max" if sign_of(metric) > 0 else "min"
    return known.groupby(["image", "attack"])[column].agg(leakiest).unstack()


def _measure(
    attack: str, metric: str, level: float, scores: pd.DataFrame, mirrored: pd.DataFrame, exact: int
) -> Measure | None:
    """Return `measure` of an attack from the scores by image, and those against the mirrored image."""
    if attack not in scores or (metric in MIRRORED and attack not in mirrored):
        return None
    sign, own = sign_of(metric), scores[attack].dropna()
    there = scores.loc[own.index, scores.columns.str.startswith(CONTROL)].dropna(axis="columns")
    if there.empty:
        return None
    values = own.to_numpy(np.float64, copy=True)
    bars = {str(name): there[name].to_numpy(np.float64, copy=True) for name in there}
    if metric in MIRRORED:
        bars[_MIRRORED] = mirrored[attack][own.index].to_numpy(np.float64, copy=True)
    if metric in DECIBELS:
        values = np.minimum(values, EXACT_DB)
        bars = {name: np.minimum(bar, EXACT_DB) for name, bar in bars.items()}
    control = max(bars, key=lambda name: sign * bars[name].mean())
    bar = bars[control]
    gain = sign * np.subtract(values, bar, where=values != bar, out=np.zeros_like(values))  # ∞ − ∞ is no gain
    low, high = gain_interval(gain, level)
    return Measure(
        attack,
        metric,
        float(values.mean()),
        control,
        float(bar.mean()),
        ahead=int((gain > 0).sum()),
        exact=exact,
        gain=Score(float(gain.mean()), float(low), float(high), len(gain)),
    )


def structure(images: pd.DataFrame, attacks: Sequence[str]) -> dict[str, Measure]:
    """Return the attacks that leak structure, each with the first metric of `STRUCTURE` that shows it.

    An attack leaks structure where the whole interval of its gain over the leakiest control is above 0. Of m metrics
    and attacks tried, each interval has the level 1 − 0.05 / m (Bonferroni).

    Args:
        images: rows of `Scored.measured` of one case, with those metrics of `STRUCTURE` that were measured.
        attacks: the names of the attacks that are tried.
    """
    names = [name for name in STRUCTURE if name in images and images[name].notna().any()]
    level = 1 - (1 - 0.95) / max(len(names) * len(attacks), 1)
    found: dict[str, Measure] = {}
    for name in names:
        for attack, one in zip(attacks, measure(images, attacks, name, level), strict=True):
            if one is not None and one.beyond:
                found.setdefault(attack, one)
    return found

"""What an attack leaks, compared with the leakiest control of the same images, with the interval of the difference."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from privlab.evaluation import CONTROL
from privlab.grids import KNOWN
from privlab.metrics import MIRRORED, STRUCTURE
from privlab.report.bootstrap import bootstrap
from privlab.report.tables.leakage import Score
from privlab.report.tables.sheet import figure_text, some, unit_of

__all__ = ["Measure", "measure", "structure"]

_MIRRORED = "the mirrored image"
"""A control that the attack itself gives: its reconstruction, compared with the mirrored image."""


@dataclass(frozen=True)
class Measure:
    """What an attack leaks by one metric, beside the leakiest control of the same images.

    `ahead` counts the images on which the attack leaks more than the control, `exact` those that it reconstructs up to
    rounding. `gain` is the mean of the difference, positive where the attack leaks more, with the interval by which the
    verdict goes.
    """

    attack: str
    metric: str
    score: Score
    control: str
    control_mean: float
    ahead: int
    exact: int
    gain: Score

    @property
    def leaks(self) -> bool:
        """Return whether more leaks than from the control, beyond the interval, or an image is given back exactly."""
        return self.gain.low > 0 or self.exact > 0

    def __str__(self) -> str:
        """Return the figures in words."""
        unit = unit_of(self.metric)
        n, score = KNOWN[self.metric].decimals, self.score
        interval = f" [{figure_text(score.low, n)}, {figure_text(score.high, n)}]" if score.low == score.low else ""
        exactly = f", {self.exact} exactly" if self.exact else ""
        return (
            f"{self.ahead} of {some(score.images, 'image')}{exactly}; {figure_text(score.mean, n)}{interval} {unit} "
            f"against {figure_text(self.control_mean, n)} of {self.control}"
        )


def measure(images: pd.DataFrame, attack: str, metric: str, level: float, shown_level: float) -> Measure | None:
    """Return what an attack leaks beside the leakiest control of the same images; None where that cannot be said.

    The gain of an image is its score less that of the control, with the sign turned where lower values leak. A metric
    of `STRUCTURE` has the attack's score against the mirrored image as one more control, and is None without it: of two
    images that have nothing in common with the reference, the smoother one scores higher.

    Args:
        images: rows of `per_image` of one case, attacks and controls.
        attack: the name of the attack. None is returned if it has no score, or if no control has all of its images.
        metric: a column of `images`, one of leakage.
        level: confidence level of the interval of the gain, in (0, 1), by which the verdict goes.
        shown_level: confidence level of the interval of the attack's own score, which is only shown.
    """
    sign = 1 if KNOWN[metric].direction == "higher leaks" else -1
    known = images.loc[images[metric].notna()]
    wide = known.groupby(["image", "attack"])[metric].agg(_leakiest_of(sign)).unstack()
    if attack not in wide:
        return None
    if metric in MIRRORED:
        own = known.loc[known.attack == attack]
        if MIRRORED[metric] not in own or own[MIRRORED[metric]].isna().any():
            return None
        wide[_MIRRORED] = own.groupby("image")[MIRRORED[metric]].agg(_leakiest_of(sign))
    controls = [name for name in wide if str(name).startswith(CONTROL) or name == _MIRRORED]
    wide = wide.loc[wide[attack].notna(), [attack, *controls]].dropna(axis=1, how="all")
    controls = [name for name in controls if name in wide and wide[name].notna().all()]
    if not controls or controls == [_MIRRORED]:
        return None
    control = max(controls, key=lambda name: sign * wide[name].mean())
    values = wide[attack].to_numpy(np.float64)
    gain = sign * (values - wide[control].to_numpy(np.float64))
    return Measure(
        attack,
        metric,
        _score(values, shown_level),
        str(control),
        float(wide[control].mean()),
        ahead=int((gain > 0).sum()),
        exact=int(known.exact[known.attack == attack].sum()) if metric == "psnr" else 0,
        gain=_score(gain, level),
    )


def _leakiest_of(sign: int) -> str:
    return "max" if sign > 0 else "min"


def _score(values: "np.ndarray[tuple[int], np.dtype[np.float64]]", level: float) -> Score:
    low, high = bootstrap(values, np.zeros(1, dtype=np.intp), level)
    return Score(float(values.mean()), float(low[0]), float(high[0]), len(values))


def structure(images: pd.DataFrame, attacks: Sequence[str], level: float = 0.95) -> dict[str, Measure]:
    """Return the attacks that leak structure, each with the first metric of `STRUCTURE` that shows it.

    An attack leaks structure where the whole interval of its gain over the leakiest control is above 0.

    Args:
        images: rows of `per_image` of one case, with those metrics of `STRUCTURE` that were measured.
        attacks: the names of the attacks that are tried.
        level: confidence level of all intervals together, in (0, 1); of m metrics and attacks tried, each interval has
            the level 1 − (1 − level) / m (Bonferroni).
    """
    names = [name for name in STRUCTURE if name in images and images[name].notna().any()]
    each = 1 - (1 - level) / max(len(names) * len(attacks), 1)
    tried = [(attack, measure(images, attack, name, each, level)) for name in names for attack in attacks]
    found: dict[str, Measure] = {}
    for attack, one in tried:
        if one is not None and one.gain.low > 0:
            found.setdefault(attack, one)
    return found

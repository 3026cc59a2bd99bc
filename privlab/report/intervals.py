"""Confidence intervals of means over images, of gains over a control, by which verdicts are reached, and of shares."""

from dataclasses import replace

import numpy as np
from scipy import special
from scipy.stats import beta

from privlab.base import PrivlabError
from privlab.metrics import EXACT_DB
from privlab.report.tables.per_image import Floats, Segments

FEWEST_IMAGES = 20
"""The number of images of a case below which its means say little, and the failure of an attack says nothing."""

_MAJORITY = 0.7
"""The share of images that may be ahead of a control by chance: exponential gains of mean zero are ahead on at most
0.63 of them, and lognormal gains of σ = 1 on at most 0.69."""
_SKEWED = 0.5
"""The skewness of a sample from which its longer tail is taken as seen."""


def mean_interval(of: Segments, level: float) -> tuple[Floats, Floats]:
    """Return the ends of Student's t interval of the mean of each segment: x̄ ± t s / √n.

    There, t is the quantile (1 + level) / 2 of n − 1 degrees of freedom, and s the standard deviation (n − 1). A
    segment of one value has no interval: both ends are NaN. An infinite value makes the end on its side infinite; for
    the other end it counts as 100 in absolute value, above which decibels measure rounding.

    Args:
        of: n ≥ 1 values in each segment, none of them NaN.
        level: confidence level of the interval, in (0, 1).
    """
    infinite = np.isinf(of.values)
    finite = replace(of, values=np.where(infinite, np.copysign(EXACT_DB, of.values), of.values))
    sizes, means = of.sizes, finite.means()
    if not len(sizes):
        return means, means
    squares = np.add.reduceat((finite.values - np.repeat(means, sizes)) ** 2, of.starts)
    with np.errstate(invalid="ignore", divide="ignore"):  # one value has no deviation
        reach = special.stdtrit(sizes - 1, (1 + level) / 2) * np.sqrt(squares / (sizes - 1) / sizes)
    unbounded = (np.logical_or.reduceat(infinite & (sign * of.values > 0), of.starts) for sign in (-1, 1))
    below, above = (ends & (sizes > 1) for ends in unbounded)
    return np.where(below, -np.inf, means - reach), np.where(above, np.inf, means + reach)


def gain_interval(gains: Floats, level: float) -> tuple[Floats, Floats]:
    """Return the ends of an interval of the mean gain over a control that skewed gains do not make too narrow.

    Where the long tail of a distribution has few images, a sample may miss it, and Student's t interval is then too
    narrow and too far from that tail. So it is extended to where no more than seven of ten images can be beyond its
    end: for the smallest k with P(Bin(n, 0.7) ≥ k) ≤ (1 − level) / 2, or k = n if there is none, the lower end is at
    most the k-th largest gain, and the upper end is at least the k-th smallest. An end is left as it is where the
    longer tail of the sample is on its other side (skewness above 0.5 in absolute value).

    Args:
        gains: one for each of n images, in the last dimension; finite. A single one has no interval: both ends are NaN.
        level: confidence level of the interval, in (0, 1). Of m comparisons, each has the level 1 − (1 − level) / m.
    """
    n = gains.shape[-1]
    means = gains.mean(axis=-1)
    if n < 2:
        return np.full_like(means, np.nan), np.full_like(means, np.nan)
    deviations = gains - means[..., None]
    spread = np.sqrt((deviations**2).sum(axis=-1) / (n - 1))
    # x̄ ± t s / √n, as `mean_interval` has it
    reach = special.stdtrit(n - 1, (1 + level) / 2) * spread / np.sqrt(n)
    low, high = means - reach, means + reach
    # the one-sided binomial test of "at most 0.7 of all images are ahead", solved for the gain that they are ahead of
    beyond = special.bdtrc(np.arange(n), n, _MAJORITY)  # P(Bin(n, 0.7) > j) for j = 0 … n − 1
    k = min(n, 1 + int(np.count_nonzero(beyond > (1 - level) / 2)))
    ordered = np.sort(gains, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        skewness = np.nan_to_num((deviations**3).mean(axis=-1) / spread**3)
    low = np.where(skewness > _SKEWED, low, np.minimum(low, ordered[..., n - k]))
    high = np.where(skewness < -_SKEWED, high, np.maximum(high, ordered[..., k - 1]))
    return low, high


def clopper_pearson(hits: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Return the exact two-sided confidence interval (low, high) of the probability of a success.

    Args:
        hits: successes counted, in [0, trials].
        trials: independent trials, at least 1.
        level: the probability that the interval covers, in (0, 1).

    Raises:
        PrivlabError: if the counts are impossible.

    Source: Clopper & Pearson (1934).
    """
    if not 0 <= hits <= trials or trials < 1:
        raise PrivlabError(f"An interval needs 0 ≤ hits ≤ trials and a trial. Found {hits} of {trials}.")
    tail = (1 - level) / 2
    low = 0.0 if hits == 0 else float(beta.ppf(tail, hits, trials - hits + 1))
    high = 1.0 if hits == trials else float(beta.ppf(1 - tail, hits + 1, trials - hits))
    return low, high

"""The percentile bootstrap interval of a mean, for many segments at once."""

from functools import lru_cache

import numpy as np

from privlab.report.tables.per_image import Floats, Whole

__all__ = ["bootstrap"]

_RESAMPLES = 2000
_BLOCKS = 2048
"""Of more images than this, blocks are resampled; the interval's width stays right to about 1/√(2 · 2048)."""
_SEED = 20230617
_MOST_NUMBERS = 2**23
"""The most numbers of a resampling that are in memory at once."""


def bootstrap(values: Floats, starts: Whole, level: float) -> tuple[Floats, Floats]:
    """Return the ends of the percentile bootstrap interval of the mean of each segment values[starts[i]:starts[i + 1]].

    The means of 2000 resamples are cut at the shares (1 ± level) / 2. The generator is seeded by the segment's length,
    so equal segments have equal intervals, and scores of the same images are resampled alike. An infinite value makes a
    resample that holds it infinite. A segment of one value has no interval: NaN.

    Args:
        values: the scores of all segments, one segment after the other; none is NaN.
        starts: the place of each segment's first value, ascending; the last segment ends with the values.
        level: confidence level of the interval, in (0, 1).
    """
    sizes = np.diff(np.append(starts, len(values)))
    low, high = np.full(len(starts), np.nan), np.full(len(starts), np.nan)
    for size in np.unique(sizes[sizes > 1]).tolist():
        of_size = np.flatnonzero(sizes == size)
        step = max(1, _MOST_NUMBERS // max(size, _RESAMPLES))
        for chunk in (of_size[i : i + step] for i in range(0, len(of_size), step)):
            found = values[starts[chunk][:, None] + np.arange(size)]
            low[chunk], high[chunk] = _percentiles(found, level)
    return low, high


def _percentiles(values: Floats, level: float) -> tuple[Floats, Floats]:
    """Return the ends of the interval for each row of `values` (segments × images)."""
    blocks = min(values.shape[1], _BLOCKS)
    weights = _weights(values.shape[1], blocks)
    finite = np.isfinite(values)
    sums = _fold(np.where(finite, values, 0.0), blocks) @ weights
    means = sums / (_fold(np.ones((1, values.shape[1])), blocks) @ weights)
    for infinity in (np.inf, -np.inf):
        if (at := values == infinity).any():
            means[_fold(at.astype(float), blocks) @ weights > 0] = infinity
    cut = int((1 - level) / 2 * (_RESAMPLES - 1))
    means.partition((cut, _RESAMPLES - 1 - cut), axis=1)
    least, most = values.min(axis=1), values.max(axis=1)  # sums round: the mean of equal values may miss them
    return means[:, cut].clip(least, most), means[:, -1 - cut].clip(least, most)


def _fold(values: Floats, blocks: int) -> Floats:
    """Return the sums of every `blocks`-th column."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % blocks)))
    return padded.reshape(len(values), -1, blocks).sum(axis=1)


@lru_cache(maxsize=4)
def _weights(size: int, blocks: int) -> Floats:
    """Return how often each block is in each resample (blocks × resamples)."""
    drawn = np.random.default_rng([_SEED, size]).integers(blocks, size=(_RESAMPLES, blocks))
    drawn += np.arange(_RESAMPLES)[:, None] * blocks
    counts = np.bincount(drawn.ravel(), minlength=_RESAMPLES * blocks)
    return np.ascontiguousarray(counts.reshape(_RESAMPLES, blocks).T, dtype=np.float64)

"""Intervals of means and of gains: what they cover, and how often pure chance is taken for a leak."""

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from privlab.report.intervals import FEWEST_IMAGES, gain_interval, mean_interval
from privlab.report.tables.per_image import Floats, Segments

LEVEL = 0.95
GROWTH = math.exp(0.5)
"""The mean of a lognormal variable of σ = 1."""

NULLS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Floats]] = {
    "normal": lambda draw, shape: draw.normal(size=shape),
    "Student's t, 3 degrees": lambda draw, shape: draw.standard_t(3, size=shape),
    "exponential, long tail above": lambda draw, shape: draw.exponential(size=shape) - 1,
    "exponential, long tail below": lambda draw, shape: 1 - draw.exponential(size=shape),
    "lognormal, long tail above": lambda draw, shape: draw.lognormal(size=shape) - GROWTH,
    "lognormal, long tail below": lambda draw, shape: GROWTH - draw.lognormal(size=shape),
}
"""Gains over a control whose mean is zero: whatever is ahead is ahead by chance."""

DOCS = Path(__file__).parents[2] / "docs" / "concepts" / "verdicts.md"


def broken(gains: Floats, comparisons: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
    """Return which gains (… × images) show a leak, as one of several comparisons."""
    low, _ = gain_interval(gains, 1 - (1 - LEVEL) / comparisons)
    return (low > 0) & (gains.shape[-1] >= FEWEST_IMAGES)


def family_error(null: str, images: int, comparisons: int, samples: int) -> float:
    """Return the share of families of comparisons, each without a leak, in which one is seen."""
    draw = np.random.default_rng([images, comparisons, [*NULLS].index(null)])
    seen = []
    for _ in range(max(1, samples * images // 2_000_000)):
        each = min(samples, 2_000_000 // images) // comparisons
        seen.append(broken(NULLS[null](draw, (each, comparisons, images)), comparisons).any(axis=1))
    return float(np.concatenate(seen).mean())


def power(images: int, comparisons: int, gain: float, deviation: float = 2.0) -> float:
    """Return how often a true gain is seen."""
    gains = np.random.default_rng([images, comparisons]).normal(gain, deviation, (20_000, images))
    return float(broken(gains, comparisons).mean())


@pytest.mark.parametrize("comparisons", [1, 10, 50])
@pytest.mark.parametrize("images", [2, 8, 20, 64])
def test_chance_is_seldom_taken_for_a_leak(images: int, comparisons: int) -> None:
    for null in NULLS:
        assert family_error(null, images, comparisons, 10_000) <= 0.05, null


@pytest.mark.slow
def test_the_rates_of_false_verdicts_are_those_of_the_documentation() -> None:
    stated = [row.strip("| ").split(" | ") for row in DOCS.read_text("utf-8").splitlines() if row.startswith("| ")]
    table = {(row[0], int(row[1])): row[2:] for row in stated if len(row) == 5 and row[1].isdigit()}
    assert {null for null, _ in table} >= NULLS.keys()
    for (what, images), row in table.items():
        for comparisons, said in zip((1, 10, 50), row, strict=True):
            if what in NULLS:
                found = family_error(what, images, comparisons, 200_000)
                assert found <= 0.05
            else:
                gain, deviation = map(float, re.findall(r"\d+", what))
                found = power(images, comparisons, gain, deviation)
            assert 100 * found == pytest.approx(float(said.removesuffix(" %")), abs=0.1), (what, images, comparisons)


def test_more_comparisons_never_make_a_leak() -> None:
    """A correction that ends, as that of a bootstrap does at its smallest quantile, would let the error grow."""
    gains = np.random.default_rng(0).normal(1, 1, (500, 24))
    ends = [gain_interval(gains, 1 - (1 - LEVEL) / m) for m in (1, 10, 50, 1000, 10**6, 10**9)]
    for (low, high), (lower, higher) in pairwise(ends):
        assert (lower <= low).all()
        assert (higher >= high).all()
    assert broken(gains + 2, 1).mean() == 1
    assert broken(gains, 10**9).mean() == 0


def test_an_interval_of_gains_is_turned_with_their_sign() -> None:
    gains = np.random.default_rng(1).exponential(size=(200, 30))
    low, high = gain_interval(gains, LEVEL)
    below, above = gain_interval(-gains, LEVEL)
    assert np.allclose(low, -above)
    assert np.allclose(high, -below)


def test_a_leak_of_few_images_is_seen() -> None:
    """Of 64 images 16 leak by 20 dB; on the others the attack is as often behind as ahead."""
    draw = np.random.default_rng(2)
    gains = draw.normal(0, 1, (500, 64))
    gains[:, :16] += draw.normal(20, 4, (500, 16))
    assert broken(gains, 50).mean() > 0.9


def test_an_interval_of_gains_holds_that_of_their_mean() -> None:
    gains = np.random.default_rng(3).normal(size=(50, 24))
    low, high = gain_interval(gains, LEVEL)
    of = Segments.of(gains.ravel(), np.repeat(np.arange(50), 24), ascending=False)
    least, most = mean_interval(of, LEVEL)
    assert (low <= least + 1e-12).all()
    assert (high >= most - 1e-12).all()


def test_equal_gains_have_an_interval_without_width() -> None:
    low, high = gain_interval(np.full((1, 20), 0.1), LEVEL)
    assert (float(low[0]), float(high[0])) == pytest.approx((0.1, 0.1), abs=1e-15)
    low, high = gain_interval(np.array([3.0]), LEVEL)
    assert math.isnan(low)
    assert math.isnan(high)


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    of = Segments.of(np.array(values, dtype=float), np.zeros(len(values), dtype=np.intp), ascending=False)
    low, high = mean_interval(of, level)
    return float(low[0]), float(high[0])


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
@pytest.mark.parametrize("images", [2, 5, 60])
def test_interval_is_that_of_scipy(level: float, images: int) -> None:
    values = np.random.default_rng(3).gamma(2.0, size=images)
    theirs = stats.t.interval(level, images - 1, loc=values.mean(), scale=stats.sem(values))
    assert interval(values.tolist(), level) == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("images", [2, 5, 50])
def test_interval_covers_the_truth_as_often_as_it_says(images: int) -> None:
    values = np.random.default_rng(0).normal(5, 2, size=(2000, images))
    of = Segments.of(values.ravel(), np.repeat(np.arange(2000), images), ascending=False)
    low, high = mean_interval(of, 0.9)
    assert 0.88 < np.mean((low <= 5) & (high >= 5)) < 0.92


def test_interval_of_segments_is_that_of_each() -> None:
    values = np.random.default_rng(2).random(12)
    of = Segments(values, np.array([0, 5, 6]), np.arange(3))
    low, high = mean_interval(of, LEVEL)
    assert math.isnan(low[1])
    assert math.isnan(high[1])
    assert (low[0], high[0]) == pytest.approx(interval(values[:5].tolist()), abs=1e-12)
    assert (low[2], high[2]) == pytest.approx(interval(values[6:].tolist()), abs=1e-12)


def test_interval_of_equal_values_has_no_width() -> None:
    assert interval([0.1] * 30) == (0.1, 0.1)


def test_an_infinite_value_leaves_its_end_open() -> None:
    low, high = interval([100.0, *range(20, 60)])
    assert interval([math.inf, *range(20, 60)]) == (low, math.inf)
    assert interval([-math.inf, *range(-60, -20)])[0] == -math.inf
    assert interval([math.inf] * 3) == (100.0, math.inf)
    assert interval([math.inf, *range(-40, 40), -math.inf]) == (-math.inf, math.inf)
    assert all(map(math.isnan, interval([math.inf])))
    assert high < math.inf

"""The reconstruction bound of DP-SGD: its own algebra, the best test, and that no attack crosses it."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import PatchGradient, PatchGradientAdaptive
from privlab.base import PrivlabError, draw_for
from privlab.defenses import GradientNoise
from privlab.experiments.methods.reconstruction_bound import fixed_guess, gram, identify, success_bound
from privlab.metrics import psnr
from privlab.release import observe, released_gradients, released_parameters
from privlab.report.intervals import clopper_pearson
from privlab.threat import Feed
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
LEVEL = 0.9999
"""Of the intervals by which a measured share is held against the bound."""

m, NOISES = 12, (0.3, 1.0, 3.0)


@given(st.floats(0.001, 0.99), st.floats(0.05, 50), st.integers(1, 30))
def test_the_bound_is_between_prior_and_one_and_falls_with_the_noise(κ: float, σ: float, T: int) -> None:
    bound = success_bound(κ, σ, T)
    assert κ <= bound <= 1
    assert success_bound(κ, 1.1 * σ, T) <= bound <= success_bound(min(1.0, 1.1 * κ), σ, T)
    assert success_bound(κ, σ, T + 1) >= bound
    assert success_bound(κ, σ / math.sqrt(T)) == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize("κ", [0.01, 0.3])
def test_without_noise_it_is_one_and_with_endless_noise_the_prior(κ: float) -> None:
    assert success_bound(κ, 0.0) == 1
    assert success_bound(κ, 1e-6) == pytest.approx(1)
    assert success_bound(κ, 1e9) == pytest.approx(κ)
    assert success_bound(0.0, 0.1) == 0
    assert success_bound(1.0, 9.0) == 1


@pytest.mark.parametrize(("κ", "σ", "T"), [(0.1, 1.0, 1), (0.02, 0.7, 1), (0.1, 3.0, 4), (0.25, 2.0, 9)])
def test_the_bound_is_the_power_of_the_best_test(κ: float, σ: float, T: int) -> None:
    """The mean of T draws against a threshold that N(0, σ²) exceeds with probability κ, itself counted."""
    draw, n = Generator().manual_seed(0), 200_000
    absent, present = (torch.randn(T, n, generator=draw) * σ + mean for mean in (0.0, 1.0))
    threshold = absent.mean(0).quantile(1 - κ)
    power = (present.mean(0) > threshold).double().mean().item()
    assert power == pytest.approx(success_bound(κ, σ, T), abs=5 * math.sqrt(2 / n))


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.integers(2, 9), st.floats(8, 30))
def test_no_image_reaches_more_images_than_the_fixed_guess(seed: int, n: int, τ: float) -> None:
    draw = Generator().manual_seed(seed)
    images = torch.rand(3, 3, 4, 4, generator=draw)[torch.randint(3, (n,), generator=draw)]
    images = (images + 0.1 * torch.randn(n, 3, 4, 4, generator=draw)).clamp(0, 1)
    κ = fixed_guess(images, τ)
    assert 1 / n <= κ <= 1
    shares = torch.rand(20, n, generator=draw) ** 4
    guesses = torch.einsum("gn,nchw->gchw", shares / shares.sum(1, keepdim=True), images).clamp(0, 1)
    for guess in (*images, *guesses):
        assert (psnr(guess.expand_as(images), images) >= τ + 1e-4).double().mean() <= κ + 1e-9


def test_the_fixed_guess_of_groups_of_near_images_is_their_largest_share() -> None:
    levels = torch.tensor([0.0, 0.0, 0.5, 0.5, 0.5, 1.0])
    assert fixed_guess(levels.view(-1, 1, 1, 1).expand(-1, 3, 2, 2), 20.0) == 3 / 6
    pair = torch.tensor([0.2, 0.4]).view(2, 1, 1, 1).expand(-1, 3, 2, 2)  # 0.1 from the middle: 20 dB
    assert fixed_guess(pair, 19.9) == 1
    assert fixed_guess(pair, 20.1) == 1 / 2


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (3, 10), (10, 10), (1, 150)])
def test_the_interval_leaves_the_stated_tails(hits: int, trials: int) -> None:
    low, high = clopper_pearson(hits, trials, 0.9)

    def probability(p: float, counts: range) -> float:
        return sum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in counts)

    assert low == 0 if hits == 0 else probability(low, range(hits, trials + 1)) == pytest.approx(0.05)
    assert high == 1 if hits == trials else probability(high, range(hits + 1)) == pytest.approx(0.05)


def test_of_two_opposite_gradients_the_identification_attains_the_bound() -> None:
    draws, products = 40_000, torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    for σ in NOISES:
        found = identify(products, σ, draws, Generator().manual_seed(1))
        share = (found == torch.arange(2)[:, None]).double().mean().item()
        assert share == pytest.approx(success_bound(0.5, σ), abs=4 * math.sqrt(0.25 / (2 * draws)))


@pytest.fixture(scope="module")
def candidates(tiny_model: Model, photographs: Callable[[int, int], Tensor]) -> tuple[VictimModel, Tensor, Tensor]:
    """Return a victim, m photographs and labels, each with a gradient that is clipped."""
    model, images = tiny_model(), photographs(m, 16).double()
    return model, images, torch.arange(m) % 7


@pytest.fixture(scope="module")
def clipped(candidates: tuple[VictimModel, Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the candidates as `gradient-noise` releases them but for the noise."""
    model, images, labels = candidates
    feed = Feed.undefended(images, model.patch)
    whole = released_gradients(model, feed, labels, released_parameters(model))
    return GradientNoise().expected(whole)


def test_without_noise_each_image_is_taken_for_itself_however_long_its_gradient_is() -> None:
    g = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.2, 0.1]], dtype=torch.float64)
    found = identify(gram({"a": g}), 1e-9, 5, Generator().manual_seed(0))
    assert (found == torch.arange(3)[:, None]).all()


def held_against(hits: int, trials: int, bound: float) -> bool:
    """Return whether a measured share is above a bound beyond its interval."""
    return clopper_pearson(hits, trials, LEVEL)[0] > bound


@pytest.mark.parametrize("σ", NOISES)
@pytest.mark.parametrize("T", [1, 3])
def test_the_best_identification_comes_close_and_does_not_cross(σ: float, T: int, clipped: dict[str, Tensor]) -> None:
    """It would cross a bound for half the sensitivity: the check has power."""
    products, draws = gram(clipped), 1000
    assert_close(products.diagonal(), torch.ones(m, dtype=torch.float64))  # all clipped
    found = identify(products, σ / math.sqrt(T), draws, Generator().manual_seed(0))
    hits = int((found == torch.arange(m)[:, None]).sum())
    assert not held_against(hits, m * draws, success_bound(1 / m, σ, T))
    if success_bound(1 / m, 2 * σ, T) < 0.9:  # beyond, both are near one
        assert held_against(hits, m * draws, success_bound(1 / m, 2 * σ, T))


@pytest.mark.slow
@pytest.mark.parametrize("σ", NOISES)
def test_products_tell_as_much_as_the_releases(σ: float, clipped: dict[str, Tensor]) -> None:
    """The likeliest by distance, in releases as they are drawn, is right as often as by the products alone."""
    draws, hits = 40, 0
    flat = torch.cat([clipped[name].flatten(1) for name in sorted(clipped)], 1)
    for draw in range(draws):
        keys = [draw_for(draw, str(i), "release") for i in range(m)]
        released = GradientNoise(multiplier=σ).release(clipped, keys)
        seen = torch.cat([released[name].flatten(1) for name in sorted(released)], 1)
        distance = (seen[:, None] - flat).square().sum(2)
        hits += int((distance.argmin(1) == torch.arange(m)).sum())
    many = identify(gram(clipped), σ, 1000, Generator().manual_seed(3))
    share = (many == torch.arange(m)[:, None]).double().mean().item()
    low, high = clopper_pearson(hits, m * draws, LEVEL)
    assert low <= share <= high
    assert not held_against(hits, m * draws, success_bound(1 / m, σ))


@pytest.mark.slow
@pytest.mark.parametrize("σ", NOISES)
def test_no_reconstruction_crosses_the_bound(σ: float, candidates: tuple[VictimModel, Tensor, Tensor]) -> None:
    model, images, labels = candidates
    draws = 4
    keys = [[draw_for(draw, str(i), "release") for i in range(m)] for draw in range(draws)]
    releases = [
        observe(model, images, labels, PatchGradientAdaptive.parameters, (GradientNoise(multiplier=σ),), each)
        for each in keys
    ]
    for attack in (PatchGradient(), PatchGradientAdaptive()):
        scores = torch.stack([psnr(attack(seen), images) for seen in releases])
        for τ in (12.0, 15.0, 20.0):
            bound = success_bound(fixed_guess(images, τ), σ)
            assert not held_against(int((scores >= τ).sum()), m * draws, bound)


def test_without_noise_the_same_count_crosses(candidates: tuple[VictimModel, Tensor, Tensor]) -> None:
    """The counter of the test above counts: with next to no noise, the bound of noise 3 is crossed."""
    model, images, labels = candidates
    keys = [draw_for(0, str(i), "release") for i in range(m)]
    seen = observe(model, images, labels, PatchGradient.parameters, (GradientNoise(multiplier=1e-9),), keys)
    hits = int((psnr(PatchGradient()(seen), images) >= 20).sum())
    assert held_against(hits, m, success_bound(fixed_guess(images, 20.0), 3.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: success_bound(1.5, 1.0), "Found 1.5, 1 and 1"),
        (lambda: success_bound(0.5, -1.0), "Found 0.5, -1 and 1"),
        (lambda: success_bound(0.5, 1.0, 0), "Found 0.5, 1 and 0"),
        (lambda: success_bound(math.nan, 1.0), "Found nan"),
        (lambda: fixed_guess(torch.zeros(0, 3, 2, 2), 20.0), "at least one image of the prior. Found none"),
        (lambda: clopper_pearson(3, 2), "Found 3 of 2"),
        (lambda: clopper_pearson(0, 0), "Found 0 of 0"),
    ],
)
def test_bad_numbers(call: Callable[[], object], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        call()

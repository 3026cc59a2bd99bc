"""`norm-regression`: its regression against loops, and that it depends on the lengths of gradients alone."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import NormRegression
from privlab.attacks.published import norm_regression
from privlab.attacks.published.norm_regression import FLOOR, RIDGE, WIDTH, KernelRidge
from privlab.base import PrivlabError
from privlab.defenses import Censor, GradientSign
from privlab.metrics import psnr
from privlab.release import gradient_capabilities, observe, released_parameters
from privlab.threat import GradientDefense, Observation, check_capabilities
from privlab.victims import VictimModel

Make = Callable[..., VictimModel]
pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.filterwarnings("ignore:A decoder trained on")]


def seen_of(
    model: VictimModel, images: Tensor, public: Tensor, *defense: GradientDefense, seed: int = 0
) -> Observation:
    labels = model(images).argmax(1).detach()
    draws = [Generator().manual_seed(seed + i) for i in range(len(images))]
    return observe(model, images, labels, released_parameters(model), defense, draws, public=public)


def test_the_regression_is_its_formula() -> None:
    rng = np.random.default_rng(0)
    numbers, images, new = rng.normal(size=(9, 3)) * [1, 5, 0.1], rng.normal(size=(9, 1, 2, 2)), rng.normal(size=(2, 3))
    regression = KernelRidge(9, 3, (1, 2, 2))
    regression.fit(torch.tensor(numbers), torch.tensor(images))
    found = regression(torch.tensor(new)).numpy()
    deviation = numbers.std(0, ddof=1)
    variances, axes = np.linalg.eigh(np.corrcoef(numbers.T))

    def whitened(row: np.ndarray) -> np.ndarray:
        parts = [(row - numbers.mean(0)) / deviation @ axes[:, j] for j in range(3)]
        return np.array([part / (variances[j] ** 0.5 + FLOOR) for j, part in enumerate(parts)])

    rows = [whitened(row) for row in numbers]
    square = np.mean([((a - b) ** 2).sum() for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j])
    kernels = np.array([[np.exp(-((a - b) ** 2).sum() / WIDTH / square) for b in rows] for a in rows])
    weights = np.linalg.solve(kernels + RIDGE * np.eye(9), (images - images.mean(0)).reshape(9, 4))
    for i, row in enumerate(new):
        k = np.array([np.exp(-((whitened(row) - b) ** 2).sum() / WIDTH / square) for b in rows])
        np.testing.assert_allclose(found[i].reshape(4), images.mean(0).reshape(4) + k @ weights, rtol=1e-9)


def test_what_is_drawn_changes_nothing(tiny_model: Make, crops: Tensor) -> None:
    """The lengths are those of the gradients without a defense, of whatever draws."""
    model, images, public = tiny_model(), crops[:2].double(), crops[24:64].double()
    plain, *drawn = (
        NormRegression()(seen_of(model, images, public, *defense, seed=seed))
        for defense, seed in (((), 0), ((Censor(),), 0), ((Censor(),), 7))
    )
    for found in drawn:
        assert_close(found, plain, rtol=0, atol=1e-6)
    assert (plain.min() >= 0, plain.max() <= 1) == (True, True)


def test_brightness_comes_back(tiny_model: Make) -> None:
    """Flat images that it never saw are nearer than the mean of the public ones, which are flat too."""
    grey = torch.rand(100, 3, 1, 1, generator=Generator().manual_seed(0), dtype=torch.float64).expand(-1, -1, 16, 16)
    seen = seen_of(tiny_model(), grey[:20], grey[20:], Censor())
    mean = grey[20:].mean(0).expand(20, -1, -1, -1)
    assert psnr(NormRegression()(seen), grey[:20]).mean() > psnr(mean, grey[:20]).mean() + 1


def test_the_lengths_of_public_images_are_taken_once(
    tiny_model: Make, crops: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images, public = tiny_model(), crops[:2].double(), crops[24:40].double()
    seen = seen_of(model, images, public, Censor())
    first = NormRegression()(seen)
    monkeypatch.setattr(norm_regression, "observe", lambda *_: pytest.fail("they are taken again"))
    assert torch.equal(NormRegression()(seen), first)
    with pytest.raises(pytest.fail.Exception):
        NormRegression()(replace(seen, public=public[1:]))


def test_it_says_where_lengths_may_have_changed(tiny_model: Make, crops: Tensor) -> None:
    model, images = tiny_model(), crops[:1].double()
    attack = NormRegression()
    assert attack.beyond(seen_of(model, images, images, Censor())) is None
    assert attack.beyond(seen_of(model, images, images, GradientSign())) == (
        "gradient-sign may change the lengths of gradients"
    )
    with pytest.raises(PrivlabError, match="auxiliary_images"):
        check_capabilities(attack, gradient_capabilities(model, (Censor(),)))

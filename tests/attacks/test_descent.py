"""The two ways down, step by step: Adam beside torch's own, and L-BFGS's backtracking where its answer is exact."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from privlab.attacks.solvers import Adam, Lbfgs

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def quartic(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.tensor([1.0, 30.0, 1e-3], dtype=torch.float64)
    return (scale * (x - 1) ** 4).sum(1), 4 * scale * (x - 1) ** 3


def parabola(curvature: float) -> Evaluate:
    """Return c/2 · (x − 1)²."""
    return lambda x, _: (curvature / 2 * (x[:, 0] - 1) ** 2, curvature * (x - 1))


def test_adam_is_torchs_with_half_a_cosine() -> None:
    """Thirteen of twenty steps, at entries whose slopes differ by a factor of ten thousand."""
    x, steps = torch.tensor([[0.0, 0.3, -2.0], [3.0, 2.0, 1.5]], dtype=torch.float64), 20
    ours, theirs = Adam(0.05), x.clone().requires_grad_()
    adam = torch.optim.Adam([theirs], lr=0.05, eps=1e-150)
    cosine = torch.optim.lr_scheduler.LambdaLR(adam, lambda k: (1 + math.cos(math.pi * k / steps)) / 2)
    state, rows = ours.start(x, quartic), torch.arange(2)
    for step in range(13):
        theirs.grad = quartic(theirs.detach(), rows)[1]
        adam.step()
        cosine.step()
        state = ours(state, quartic, step, steps)
        assert_close(state["x"], theirs.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lr", [0.01, 0.3])
def test_the_first_step_of_lbfgs_has_the_root_mean_square_that_was_asked_for(lr: float) -> None:
    x = torch.zeros(1, 3, dtype=torch.float64)
    first = Lbfgs(lr)._direction(quartic(x, torch.zeros(1))[1], x.new_zeros(10, 1, 3), x.new_zeros(10, 1, 3))
    assert float(first.square().mean().sqrt()) == pytest.approx(lr)


def after_one_step(evaluate: Evaluate, lr: float) -> tuple[float, int]:
    """Return where the first step from zero ends, and how many points were tried."""
    tried: list[Tensor] = []

    def counted(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        tried.append(x)
        return evaluate(x, rows)

    state = Lbfgs(lr).start(torch.zeros(1, 1, dtype=torch.float64), counted)
    state = Lbfgs(lr)(state, counted, 0, 1)
    return float(state["x"]), len(tried) - 1


@pytest.mark.parametrize("lr", [2.5, 4.0, 9.0])
def test_a_step_that_goes_up_is_cut_to_the_least_of_the_parabola(lr: float) -> None:
    """The first share, 1 / lr, lies between a tenth and a half: the second point is the least itself."""
    at, tried = after_one_step(parabola(3.0), lr)
    assert at == pytest.approx(1)
    assert tried == 2


@pytest.mark.parametrize("beyond", [torch.inf, torch.nan])
def test_a_step_is_cut_to_a_tenth_at_most(beyond: float) -> None:
    """Fifty times too long takes a tenth first, and so does what says nothing; what is hardly too long, a half."""
    at, tried = after_one_step(parabola(1.0), 50.0)
    assert (at, tried) == (pytest.approx(1), 3)  # to 5, and from there to the least

    def walled(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(x[:, 0] < 0.5, -x[:, 0], beyond), torch.full_like(x, -1)

    at, tried = after_one_step(walled, 4.0)
    assert (at, tried) == (pytest.approx(0.4), 2)
    at, tried = after_one_step(parabola(1.0), 2 * (1 - 0.5e-4))  # falls by less than what is enough
    assert (at, tried) == (pytest.approx(1, abs=1e-3), 2)


def test_a_step_must_fall_by_a_ten_thousandth_of_what_the_slope_foretells() -> None:
    """Of a parabola a step of 2 − 2η falls by the share η of that."""
    assert after_one_step(parabola(1.0), 2 - 2 * 1.5e-4)[1] == 1
    assert after_one_step(parabola(1.0), 2 - 2 * 0.5e-4)[1] == 2


def test_where_no_step_goes_down_the_point_stays() -> None:
    """Ten shares are tried, no further; then nothing is left to forget, and the problem is done."""

    def uphill(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, 0], torch.full_like(x, -1)  # a slope that lies

    at, tried = after_one_step(uphill, 1.0)
    assert (at, tried) == (0, 10)
    state = Lbfgs(1.0).start(torch.zeros(1, 1, dtype=torch.float64), uphill)
    assert Lbfgs(1.0).done(Lbfgs(1.0)(state, uphill, 0, 1))

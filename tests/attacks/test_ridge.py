"""The ridge inverse of the closed forms: a Moore-Penrose inverse where that is well posed, and tame elsewhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator
from torch.testing import assert_close

from privlab.attacks.solvers import RTOL, ridge_inverse, warn_of_limits
from privlab.base import PrivlabWarning

SHAPES = st.tuples(st.integers(1, 12), st.integers(1, 12))


@given(shape=SHAPES, seed=st.integers(0, 2**31))
def test_it_satisfies_the_penrose_conditions(shape: tuple[int, int], seed: int) -> None:
    """M P M = M and P M P = P, M P and P M symmetric."""
    M = torch.randn(2, *shape, generator=Generator().manual_seed(seed), dtype=torch.float64)
    smallest = torch.linalg.svdvals(M).min()
    P = ridge_inverse(M)
    if smallest < 1e-3:  # condition number: the ridge shows
        assert torch.linalg.matrix_norm(P).max() <= 2 / smallest
        return
    assert_close(M @ P @ M, M, atol=1e-8, rtol=1e-8)
    assert_close(M @ P, (M @ P).mT, atol=1e-7, rtol=1e-7)
    assert_close(P @ M, (P @ M).mT, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e5])
def test_ill_conditioned_systems_come_back(condition: float) -> None:
    """The error grows with the condition number times float64's epsilon, not with its square."""
    rng = Generator().manual_seed(0)
    U = torch.linalg.qr(torch.randn(60, 40, generator=rng, dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(40, 40, generator=rng, dtype=torch.float64))[0]
    M = U @ torch.diag(torch.logspace(0, -torch.tensor(condition).log10().item(), 40, dtype=torch.float64)) @ V.mT
    X = torch.randn(40, 5, generator=rng, dtype=torch.float64)
    error = (ridge_inverse(M) @ (M @ X) - X).norm() / X.norm()
    assert error < max(1e3 * condition * 2.2e-16, (RTOL * M.norm() * condition) ** 4)


def test_the_ridge_is_the_epsilon_of_float32_and_damps_each_direction_as_stated() -> None:
    """1 − (λ² / (σ² + λ²))² with λ = 2⁻²³ ‖M‖: what is 30 times above the rounding is left alone to a millionth."""
    σ = torch.tensor([1.0, 4e-6, 1e-6, 2.0**-23, 1e-8], dtype=torch.float64)
    λ = 2.0**-23 * σ.norm()
    expected = 1 - (λ**2 / (σ**2 + λ**2)) ** 2
    assert_close(ridge_inverse(σ.diag()).diagonal() * σ, expected, rtol=1e-9, atol=0)
    assert expected[1] > 1 - 1e-6
    assert_close(ridge_inverse(1e3 * σ.diag()).diagonal() * 1e3 * σ, expected, rtol=1e-9, atol=0)


def test_limits_are_told_beyond_the_last_token_that_is_determined() -> None:
    A = torch.ones(1, 5, 6)
    warn_of_limits("some", A, most=5)
    with pytest.warns(PrivlabWarning, match=r"5.*gradients.*6.*4"):
        warn_of_limits("some", A, most=4)
    A[:, 2] = 0
    warn_of_limits("some", A, most=5, knows_mask=True)
    with pytest.warns(PrivlabWarning, match="received no gradient"):
        warn_of_limits("some", A, most=5)


def test_zero_columns_give_zero_rows() -> None:
    """Under MJP the rows of A at masked slots are zero: their patches come back as zero, not as noise."""
    M = torch.randn(8, 5, generator=Generator().manual_seed(0), dtype=torch.float64)
    M[:, 2] = 0
    P = ridge_inverse(M)
    assert_close(P[2], torch.zeros(8, dtype=torch.float64), rtol=0, atol=0)
    assert_close(P[[0, 1, 3, 4]], torch.linalg.pinv(M[:, [0, 1, 3, 4]]))


def test_nothing_gives_nothing() -> None:
    """γ = 1 under MJP: no row of A is left."""
    M = torch.stack([torch.zeros(8, 5, dtype=torch.float64), torch.eye(8, 5, dtype=torch.float64)])
    assert_close(ridge_inverse(M), M.mT)


@pytest.mark.parametrize("shape", [(9, 5), (5, 9)])
def test_no_ridge_is_plain_least_squares(shape: tuple[int, int]) -> None:
    """Down to float64's rounding: a singular value of 1e-12 is taken at its word."""
    rng = Generator().manual_seed(0)
    U, s, Vh = torch.linalg.svd(torch.randn(*shape, generator=rng, dtype=torch.float64), full_matrices=False)
    s[-1] = 1e-12
    M, G = (U * s) @ Vh, torch.randn(shape[0], 2, generator=rng, dtype=torch.float64)
    found, expected = ridge_inverse(M, 0.0) @ G, torch.linalg.lstsq(M, G, driver="gelsd").solution
    assert_close(found, expected, rtol=1e-2, atol=0)
    assert found.norm() > 1e9


def test_underdetermined_systems_get_the_solution_of_least_norm() -> None:
    rng = Generator().manual_seed(0)
    M, G = torch.randn(5, 9, generator=rng, dtype=torch.float64), torch.randn(5, 2, generator=rng, dtype=torch.float64)
    assert_close(ridge_inverse(M) @ G, torch.linalg.lstsq(M, G, driver="gelsd").solution)

"""The parts of token separation, on planted tokens: each constant and formula against what was planted."""

from dataclasses import dataclass

import pytest
import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from privlab.attacks.tokens import Mlp, Near, Spans, row_space, separate
from privlab.attacks.tokens.equations import _distinct, _refine_guesses, _start, backward, outside, refine

D, M, COUNT = 24, 96, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=Generator().manual_seed(seed))


def orthonormal(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(drawn(width, rows, seed=seed)).Q.mT


@dataclass(frozen=True)
class Planted:
    """An MLP, its tokens, what flows back at them, and the spans of the gradients that they make."""

    mlp: Mlp
    u: Tensor
    ε: Tensor
    δ: Tensor
    spans: Spans

    @property
    def α(self) -> Tensor:
        """Return the coordinates of the tokens."""
        return self.u @ self.spans.u.mT


def planted(
    *, off: Tensor | None = None, plain: bool = False, count: int = COUNT, apart: float | None = None
) -> Planted:
    """Return planted tokens; `off` is how far each one's h lies outside the span.

    A `plain` MLP has LayerNorm's scale 1 and bias 0 before it. The first two tokens may be but a little `apart`.
    """
    γ, β = 1 + 0.3 * drawn(D), drawn(D)
    if plain:
        γ, β = torch.ones_like(γ), torch.zeros_like(β)
    W1, b1, W2 = drawn(M, D, seed=1) / D**0.5, 0.1 * drawn(M, seed=2), drawn(D, M, seed=3)
    mlp = Mlp(γ, β, W1, b1, W2, torch.nn.functional.gelu)
    t = drawn(count, D, seed=4)
    if apart is not None:
        t[1] = t[0] + apart * t[1]
    t = t - t.mean(1, keepdim=True)
    u = mlp.γ * t / t.square().mean(1, keepdim=True).sqrt() + mlp.β
    ε, (h, slope) = drawn(count, D, seed=5), mlp.hidden(u)
    δ = slope * (ε @ W2)
    spans = Spans.of(δ.mT @ u, ε.mT @ h, count)
    if off is not None:  # each h has a direction of its own in which it is not heard
        beyond = drawn(count, M, seed=6)
        beyond = torch.linalg.qr((beyond - (beyond @ spans.h.mT) @ spans.h).mT).Q.mT
        moved = h + (off / (1 - off.square()).sqrt() * h.norm(dim=1))[:, None] * beyond
        spans = spans._replace(h=torch.linalg.qr(moved.mT).Q.mT)
    return Planted(mlp, u, ε, δ, spans)


def beside(made: Planted, cosine: Tensor) -> Near:
    """Return guesses that are the tokens, of slots whose known part has this cosine with them, within no span."""
    t = normalize((made.u - made.mlp.β) / made.mlp.γ, dim=1)
    away = drawn(*t.shape, seed=7)
    within = torch.linalg.qr((torch.cat([made.spans.u, made.mlp.β[None]]) / made.mlp.γ).mT).Q
    away = away - (away @ within) @ within.mT  # nothing that is searched lies there: the token stays the best
    away = away - (away * t).sum(1, keepdim=True) * t
    base = cosine[:, None] * t + (1 - cosine.square()).sqrt()[:, None] * normalize(away, dim=1)
    return Near(made.u, base, t.new_zeros(t.shape[1], 0))


def told(made: Planted, near: Near, tolerance: float) -> list[int]:
    """Return which tokens the guesses lead to."""
    found = _refine_guesses(made.mlp, made.spans.take(None), near.take(None, None), 4, 40, tolerance)[0]
    cosine = normalize(found, dim=1) @ normalize(made.u, dim=1).mT
    return sorted(cosine.argmax(1).tolist())


def test_what_is_below_the_rounding_of_float32_is_in_no_span() -> None:
    """Of three singular values, one is just above half of float32's epsilon relative to the first, one just below."""
    U, V = orthonormal(3, 12), orthonormal(3, 8, seed=1)
    σ = torch.tensor([4.0, 4.0 * 2**-23.5, 4.0 * 2**-24.5], dtype=torch.float64)
    G = (U.mT * σ) @ V
    assert len(Spans.of(G, G.mT, 8).u) == len(row_space(G, 8)) == 2
    assert len(Spans.of(G, G.mT, 1).u) == len(row_space(G, 1)) == 1
    assert_close(Spans.of(G, G.mT, 8).σ, σ[:2])


def test_starts_have_the_variances_that_the_gradient_has_as_singular_values() -> None:
    """Of two normal numbers the ratio has the median of their deviations' ratio, however both are scaled."""
    made = planted(plain=True, count=4)
    σ = torch.tensor([16.0, 4.0, 1.0, 0.25], dtype=torch.float64)
    α = _start(made.mlp, made.spans._replace(σ=σ).take(None), 20000, [Generator().manual_seed(0)])[0]
    assert_close((α / α[:, :1]).abs().median(0).values, (σ / σ[0]).sqrt(), rtol=0.05, atol=0)
    assert_close(α.square().sum(1), torch.full((20000,), float(D)).double())


def test_a_guess_that_led_to_a_token_of_another_slot_is_refused() -> None:
    """Of a cosine of 0.995 beyond Q a token is its slot's, of 0.98 or −1 it is another one: it would hide that."""
    made = planted(off=torch.full((COUNT,), 1e-3).double())
    cosine = torch.tensor([1.0, 0.98, 0.995, 0.9, 1.0, -1.0], dtype=torch.float64)
    assert told(made, beside(made, cosine), 0.5) == [0, 2, 4]


def test_a_guess_that_ended_much_farther_off_than_the_others_is_refused() -> None:
    """Thirty times the usual residual is that of a faint token, three hundred times that of none."""
    off = torch.tensor([1e-4, 1e-4, 3e-3, 1e-4, 3e-2, 1e-4], dtype=torch.float64)
    made = planted(off=off)
    assert_close(outside(made.mlp, made.spans, made.α), off, rtol=0.01, atol=0)
    assert told(made, beside(made, torch.ones(COUNT).double()), 0.5) == [0, 1, 2, 3, 5]


def test_exact_guesses_leave_room_for_rounding_and_never_more_than_the_tolerance() -> None:
    """Where the others are exact, 5e-6 still is a token and 5e-5 is none; 0.03 is none where 0.02 is allowed."""
    off = torch.tensor([1e-12, 5e-6, 1e-12, 5e-5, 1e-12, 1e-12], dtype=torch.float64)
    made = planted(off=off)
    assert told(made, beside(made, torch.ones(COUNT).double()), 0.02) == [0, 1, 2, 4, 5]
    far = planted(off=torch.tensor([1e-2, 1e-2, 3e-2, 1e-2, 1e-2, 1e-2], dtype=torch.float64))
    assert told(far, beside(far, torch.ones(COUNT).double()), 0.02) == [0, 1, 3, 4, 5]


def test_the_residual_is_what_lies_outside_and_what_is_not_of_layernorms_form() -> None:
    made, α = planted(), drawn(5, COUNT)
    u = α @ made.spans.u
    h, t = made.mlp.act(u @ made.mlp.W1.mT + made.mlp.b1), (u - made.mlp.β) / made.mlp.γ
    inside = made.spans.h.mT @ torch.linalg.lstsq(made.spans.h.mT, h.mT).solution
    off = (h.mT - inside).norm(dim=0) / h.norm(dim=1)
    assert_close(outside(made.mlp, made.spans, α), off + t.mean(1).abs() + (t.square().mean(1) - 1).abs())


@pytest.mark.parametrize("guided", [False, True])
def test_a_search_ends_where_its_cost_has_no_slope(*, guided: bool) -> None:
    """The cost as it is written down, with a least value that is not zero: so the Jacobian must be the right one."""
    made = planted(off=torch.full((COUNT,), 0.1).double())
    near = beside(made, torch.full((COUNT,), 0.9).double()) if guided else None
    α = made.α + 0.05 * made.α.norm(dim=1, keepdim=True) * drawn(COUNT, COUNT, seed=8)
    mlp, size = made.mlp, made.mlp.hidden(α @ made.spans.u)[0].norm(dim=1).median()

    def cost(α: Tensor) -> Tensor:
        u = α @ made.spans.u
        h, t = mlp.act(u @ mlp.W1.mT + mlp.b1), (u - mlp.β) / mlp.γ
        total = ((h - (h @ made.spans.h.mT) @ made.spans.h) / size).square().sum()
        total = total + t.mean(1).square().sum() + (t.square().mean(1) - 1).square().sum()
        if near is not None:
            along = (t * near.base).sum(1, keepdim=True) * near.base
            total = total + (t - along).square().sum() / D
        return total

    def slope(α: Tensor) -> Tensor:
        return torch.as_tensor(torch.autograd.functional.jacobian(cost, α))

    found = refine(mlp, made.spans, α, 60, near)
    assert cost(found) < cost(α)
    assert slope(found).norm() < 5e-3 * slope(α).norm()  # a hundredth of the cost may be left to gain


def test_solutions_come_by_their_residuals_and_twins_once() -> None:
    """Of two that are as near as the twins' cosine the better one stays; what is beyond the limit is left out."""
    made = planted(off=torch.tensor([3e-4, 1e-4, 2e-4, 1e-4, 1e-4, 5e-2]).double())
    α = made.α[[0, 2, 1, 5]]
    near = torch.cat([α, α[1:2] * (1 + 1e-4)])  # a little longer: not quite of LayerNorm's form

    def of(limit: float, twin: float) -> Tensor:
        return _distinct(made.mlp, made.spans.take(None), near[None], limit, twin)[0]

    assert_close(of(1e-2, 1 - 1e-6), made.u[[1, 2, 0]])
    assert len(of(1e-2, 2.0)) == 4
    assert len(of(1e-1, 1 - 1e-6)) == 4


def test_what_flows_back_is_told_of_each_token() -> None:
    made = planted()
    ε, δ = backward(made.mlp, made.spans, made.u)
    for found, true in ((ε, made.ε), (δ, made.δ)):
        assert_close(torch.cosine_similarity(found, true).abs(), torch.ones(COUNT).double(), rtol=0, atol=1e-12)


def test_guesses_that_lead_to_one_token_count_once_and_tokens_that_are_nearly_alike_twice() -> None:
    """Tokens of a cosine of 1 − 1e-5 are two: what is known of each slot tells them apart."""
    made = planted(apart=0.008)
    assert 1 - 2e-5 < torch.cosine_similarity(made.u[0], made.u[1], dim=0) < 1 - 5e-6
    near = beside(made, torch.ones(COUNT).double())
    assert told(made, near, 0.02) == list(range(COUNT))
    twice = Near(near.u[[0, 3, 3, 4]], near.base[[0, 3, 3, 4]], near.Q)
    assert told(made, twice, 0.02) == [0, 3, 4]


def test_inverse_iteration_ends_at_the_least_eigenvector_where_tokens_are_not_exact() -> None:
    """Against a decomposition, token by token; one step is not enough."""
    made = planted()
    u = made.u + 0.3 * drawn(COUNT, D, seed=9)
    found = backward(made.mlp, made.spans, u)[0]
    for token, ε in zip(u, found, strict=True):
        V = made.mlp.hidden(token)[1] * (made.spans.ε @ made.mlp.W2)
        λ, Q = torch.linalg.eigh((V - (V @ made.spans.δ.mT) @ made.spans.δ) @ V.mT)
        off = 1 - torch.cosine_similarity(Q[:, 0] @ made.spans.ε, ε, dim=0).abs()
        assert off < max(1e-9, 100 * float(λ[0] / λ[1]) ** 8)


def test_a_token_that_was_guessed_is_not_found_again() -> None:
    """The guesses are all tokens but one: the search finds that one, and ends."""
    made = planted()
    whole = beside(made, torch.ones(COUNT).double())
    near = Near(whole.u[1:], whole.base[1:], whole.Q)
    G1, G2 = made.δ.mT @ made.u, made.ε.mT @ made.mlp.hidden(made.u)[0]
    options = {"starts": 4, "rounds": 30, "steps": 40, "tolerance": 0.01}
    draws, guessed = [Generator().manual_seed(0)], near.take(None, None)
    (found,) = separate(made.mlp, G1[None], G2[None], COUNT, draws, **options, near=guessed)
    cosine = normalize(found.u, dim=1) @ normalize(made.u, dim=1).mT
    assert sorted(cosine.argmax(1).tolist()) == list(range(COUNT))
    assert cosine.amax(1).min() > 1 - 1e-9

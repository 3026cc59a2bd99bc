"""From starts to tokens: the equations against their written form, and where the rough and the exact search end."""

import pytest
import torch
from torch import Generator, Tensor
from torch.nn.functional import gelu, normalize
from torch.testing import assert_close

from privlab.attacks.tokens import Mlp, Near, Spans
from privlab.attacks.tokens.equations import outside
from privlab.attacks.tokens.refinement import _Equations, refine, roughen, settle

D, M, COUNT = 24, 512, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def planted() -> tuple[Mlp, Tensor, Spans, Tensor, Tensor]:
    """Return an MLP, tokens, the spans of the gradients that they make, and these gradients."""
    W1, b1, W2 = drawn(M, D, seed=1) / D**0.5, 0.1 * drawn(M, seed=2), drawn(D, M, seed=3)
    mlp = Mlp(1 + 0.3 * drawn(D), drawn(D), W1, b1, W2, gelu)
    t = drawn(COUNT, D, seed=4)
    t = t - t.mean(1, keepdim=True)
    u = mlp.γ * t / t.square().mean(1, keepdim=True).sqrt() + mlp.β
    ε, (h, slope) = drawn(COUNT, D, seed=5), mlp.hidden(u)
    G1, G2 = (slope * (ε @ W2)).mT @ u, ε.mT @ h
    return mlp, u, Spans.of(G1, G2, COUNT), G1, G2


def near_of(mlp: Mlp, u: Tensor, seed: int) -> Near:
    """Return guesses with spans that none of them lies in."""
    Q = torch.linalg.qr(drawn(D, 3, seed=seed)).Q
    base = drawn(len(u), D, seed=seed + 1)
    return Near(u, normalize(base - (base @ Q) @ Q.mT, dim=1), Q)


def residuals(mlp: Mlp, spans: Spans, α: Tensor, size: Tensor, near: Near | None) -> Tensor:
    """Return the residuals of one start, as they are written down."""
    u = α @ spans.u
    h, t = mlp.act(mlp.W1 @ u + mlp.b1), (u - mlp.β) / mlp.γ
    off = (h - spans.h.mT @ (spans.h @ h)) / size
    parts = [off, t.mean()[None], t.square().mean()[None] - 1]
    if near is not None:
        span = torch.cat([near.Q, near.base[0][:, None]], 1)
        parts.append((t - span @ (span.mT @ t)) / D**0.5)
    return torch.cat(parts)


@pytest.mark.parametrize("guided", [False, True])
def test_the_jacobian_is_that_of_the_residuals(
    *, guided: bool, planted: tuple[Mlp, Tensor, Spans, Tensor, Tensor]
) -> None:
    """Cost, Jᵀ r, Jᵀ J and Jᵀ J p against automatic differentiation, start by start."""
    mlp, u, spans, _, _ = planted
    α, p = drawn(3, COUNT, seed=6), drawn(3, COUNT, seed=7)
    near = near_of(mlp, u[:3], 8) if guided else None
    equations = _Equations.of(mlp, spans.take(None), α[None], near and near.take(None, None))
    at, size = equations.at(α[None]), equations.size[0, 0, 0]
    cost, g = at.cost()[0], equations.gradient(at)[0]
    N, q = equations.normal(at)[0], equations.product(at, p[None])[0]
    for i in range(3):
        own = None if near is None else near.take(slice(None), slice(i, i + 1))

        def of(x: Tensor, own: Near | None = own) -> Tensor:
            return residuals(mlp, spans, x, size, own)

        J, r = torch.as_tensor(torch.autograd.functional.jacobian(of, α[i])), of(α[i])
        assert_close(cost[i], r @ r)
        assert_close(g[i], J.mT @ r)
        assert_close(N[i], J.mT @ J)
        assert_close(q[i], J.mT @ (J @ p[i]))


def test_some_units_tell_tokens_as_all_do(planted: tuple[Mlp, Tensor, Spans, Tensor, Tensor]) -> None:
    """Of 512 units 192 are read for six tokens, which have no residual there but rounding; sums of tokens have."""
    mlp, u, spans, _, _ = planted
    rough, coarse = roughen(mlp, spans)
    assert (len(rough.W1), coarse.h.shape) == (192, (COUNT, 192))
    assert rough.W1.dtype == coarse.h.dtype == torch.float32
    assert_close(coarse.h @ coarse.h.mT, torch.eye(COUNT), atol=1e-5, rtol=0)
    α = (u @ spans.u.mT).float()
    assert outside(rough, coarse, α).max() < 1e-5
    assert outside(rough, coarse, (α + α.roll(1, 0)) / 2).min() > 1e-2
    wide = spans._replace(u=drawn(100, D), h=drawn(100, M))  # three units a token, where these are more
    assert len(roughen(mlp, wide)[0].W1) == 300
    assert len(roughen(mlp, spans._replace(u=drawn(300, D)))[0].W1) == M


@pytest.mark.parametrize("guided", [False, True])
def test_what_is_settled_lies_where_the_cost_on_all_units_is_least(
    *, guided: bool, planted: tuple[Mlp, Tensor, Spans, Tensor, Tensor]
) -> None:
    """The least value is not zero, for h lies outside the span: some units alone, or float32, end elsewhere."""
    mlp, u, spans, _, _ = planted
    tilted = spans._replace(h=torch.linalg.qr((spans.h + 0.03 * drawn(COUNT, M, seed=9) / M**0.5).mT).Q.mT)
    α = u @ spans.u.mT
    near = near_of(mlp, u, 10)._replace(base=normalize((u - mlp.β) / mlp.γ, dim=1)) if guided else None
    near = None if near is None else near._replace(Q=near.Q[:, :0])
    found = settle(mlp, tilted, α, 40, near)

    def slope(α: Tensor) -> Tensor:
        equations = _Equations.of(mlp, tilted.take(None), α[None], near and near.take(None, None))
        return equations.gradient(equations.at(α[None]))[0].norm(dim=1)

    rough, coarse = roughen(mlp, tilted)
    ended = refine(rough, coarse, α.float(), 40, None if near is None else near.float()).double()
    assert slope(found).max() < 1e-2 * slope(ended).min()


def test_exact_tokens_are_settled_to_the_precision_of_the_gradient(
    planted: tuple[Mlp, Tensor, Spans, Tensor, Tensor],
) -> None:
    mlp, u, spans, _, _ = planted
    α = u @ spans.u.mT
    found = settle(mlp, spans, α + 0.01 * α.std() * drawn(*α.shape, seed=11), 40)
    assert_close(found @ spans.u, u, atol=1e-9, rtol=0)


def test_starts_end_one_by_one(planted: tuple[Mlp, Tensor, Spans, Tensor, Tensor]) -> None:
    """Each ends where it would among starts that end sooner or later, in its own row and with its own guess."""
    mlp, u, spans, _, _ = planted
    near = near_of(mlp, u, 12)._replace(Q=torch.zeros(D, 0).double(), base=normalize((u - mlp.β) / mlp.γ, dim=1))
    α = u @ spans.u.mT
    far = α + torch.tensor([0.0, 1e-3, 0.1, 0.02, 0.0, 0.2]).double()[:, None] * drawn(*α.shape, seed=13)
    assert_close(refine(mlp, spans, far, 60, near), α, atol=1e-6, rtol=0)


def test_what_is_left_of_a_gradient_has_the_spans_of_what_is_left(
    planted: tuple[Mlp, Tensor, Spans, Tensor, Tensor],
) -> None:
    """Decomposed within the spans of all or by itself: the same spans and singular values."""
    mlp, u, spans, G1, G2 = planted
    ε, (_, slope) = drawn(COUNT, D, seed=5)[:2], mlp.hidden(u[:2])
    Q_ε, Q_δ = (torch.linalg.qr(rows.mT).Q for rows in (ε, slope * (ε @ mlp.W2)))
    G1, G2 = G1 - Q_δ @ (Q_δ.mT @ G1), G2 - Q_ε @ (Q_ε.mT @ G2)
    within, alone = spans.without(G1, G2, 4), Spans.of(G1, G2, 4)
    assert_close(within.σ, alone.σ)
    for a, b in zip(within[:4], alone[:4], strict=True):
        assert_close(a.mT @ a, b.mT @ b)

"""From starts to tokens: the Levenberg-Marquardt method on few hidden units, then the Gauss-Newton method on all."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers import conjugate_gradients
from privlab.attacks.tokens.spans import Mlp, Near, Spans

__all__ = ["CLOSE", "FAR", "refine", "roughen", "settle"]

_MOST_IDLE, _LEAST_DECREASE = 8, 0.01
"""A start ends after so many steps in a row that lower its cost by less than this share, or once none can be expected.

Rejected steps, after which damping rises, may lead to progress again; where the linear model has none to offer, the
start has arrived."""

_ROUNDING = 32
"""A residual below so many units of rounding is zero."""

FAR, CLOSE = 1e-2, 1e-4
"""The first damping, relative to the mean diagonal of Jᵀ J: of a draw or a guess, and of what may be a token."""

_UNITS_PER_TOKEN, _LEAST_UNITS = 3, 192
"""Hidden units that are read before a solution is settled: h lies in a span of one dimension a token.

The other dimensions are equations. Starts that are drawn at random find far fewer tokens with so few of them.
"""

_SETTLING_STEPS, _INNER = 3, 12
"""The most Gauss-Newton steps that settle a solution, and the steps of conjugate gradients in each."""

_FACTOR_RIDGE = 1e-5
"""Is added to the preconditioner of these, relative to its mean diagonal: single precision holds no less."""


class _Point(NamedTuple):
    """act′ at α, the residuals there, of h, of LayerNorm's form and of what is known of t (zero or more), and t."""

    slope: Float[Tensor, "s m"]
    r: Float[Tensor, "s m"]
    form: Float[Tensor, "s 2"]
    off: Float[Tensor, "s _"]
    t: Float[Tensor, "s d"]

    def cost(self) -> Float[Tensor, " s"]:
        """Return the sum of the squared residuals."""
        return self.r.square().sum(1) + self.form.square().sum(1) + self.off.square().sum(1)

    def where(self, better: Tensor, old: "_Point") -> "_Point":
        """Return this point where it is better, else the old one."""
        return _Point(*(torch.where(better[:, None], a, b) for a, b in zip(self, old, strict=True)))

    def take(self, rows: Tensor) -> "_Point":
        """Return some of the starts."""
        return _Point(*(part[rows] for part in self))


@dataclass(frozen=True, eq=False)
class _Equations:
    """|(I − P_h) act(W₁ u + b₁)|² / size² + |mean t|² + (|t|²/d − 1)² of u = α T, and |off t|² / d with `near`.

    Its Jacobian is never made: Jᵀ J = Mᵀ A (I − P_h) A M / size² and so on, with M = W₁ Tᵀ and A = diag(act′).
    """

    mlp: Mlp
    spans: Spans
    near: Near | None
    size: Tensor
    M: Float[Tensor, "m n"]
    P: Float[Tensor, "n d"]

    @classmethod
    def of(cls, mlp: Mlp, spans: Spans, α: Float[Tensor, "s n"], near: Near | None) -> "_Equations":
        """Return the equations, with the usual length of h at the starts α for unit."""
        T = spans.u
        size = mlp.hidden(α @ T)[0].norm(dim=1).median() if len(α) else T.new_ones(())
        return cls(mlp, spans, near, size, mlp.W1 @ T.mT, T / mlp.γ)

    def take(self, rows: Tensor) -> "_Equations":
        """Return the equations of some of the starts."""
        return self if self.near is None else replace(self, near=self.near.take(rows))

    def at(self, α: Float[Tensor, "s n"]) -> _Point:
        """Return the residuals at α."""
        (h, slope), H, d = self.mlp.hidden(α @ self.spans.u), self.spans.h, self.P.shape[1]
        t = α @ self.P - self.mlp.β / self.mlp.γ
        form = torch.stack([t.mean(1), t.square().mean(1) - 1], 1)
        off = t[:, :0] if self.near is None else self.near.off(t) / d**0.5
        return _Point(slope, (h - (h @ H.mT) @ H) / self.size, form, off, t)

    def gradient(self, at: _Point) -> Float[Tensor, "s n"]:
        """Return Jᵀ r, half the gradient of the cost."""
        g = (at.slope * at.r) @ self.M / self.size + (at.form[:, None] @ self._form(at))[:, 0]
        return g if self.near is None else g + at.off @ self.P.mT / self.P.shape[1] ** 0.5

    def normal(self, at: _Point) -> Float[Tensor, "s n n"]:
        """Return Jᵀ J."""
        J, J_form, d = at.slope[..., None] * (self.M / self.size), self._form(at), self.P.shape[1]
        H_J = self.spans.h @ J
        N = J.mT @ J - H_J.mT @ H_J + J_form.mT @ J_form
        if self.near is None:
            return N
        P, along = self.P - (self.P @ self.near.Q) @ self.near.Q.mT, self.near.base @ self.P.mT
        return N + (P @ P.mT - along[:, :, None] * along[:, None]) / d

    def product(self, at: _Point, p: Float[Tensor, "s n"]) -> Float[Tensor, "s n"]:
        """Return Jᵀ J p."""
        H, J_form, d = self.spans.h, self._form(at), self.P.shape[1]
        h = at.slope * (p @ self.M.mT)
        h = at.slope * (h - (h @ H.mT) @ H)
        q = h @ self.M / self.size.square() + ((p[:, None] @ J_form.mT) @ J_form)[:, 0]
        return q if self.near is None else q + self.near.off(p @ self.P) @ self.P.mT / d

    def _form(self, at: _Point) -> Float[Tensor, "s 2 n"]:
        mean, d = self.P.mean(1), self.P.shape[1]
        return torch.stack([mean.expand(len(at.t), -1), 2 / d * (at.t @ self.P.mT)], 1)


def refine(
    mlp: Mlp, spans: Spans, α: Float[Tensor, "s n"], steps: int, near: Near | None = None, damping: float = FAR
) -> Float[Tensor, "s n"]:
    """Minimise |(I − P_h) act(W₁ u + b₁)|² + |mean t|² + (|t|²/d − 1)² over u = α T, for each start by itself.

    With `near`, the squared share of t outside its known span is added, with the same weight.

    Args:
        mlp: the MLP, in the precision of the search.
        spans: the spans of tokens (T) and of hidden units (P_h), in that precision.
        α: coordinates of the starts.
        steps: the most steps of the Levenberg-Marquardt method.
        near: spans that the t of each start is known to lie in, in that precision.
        damping: of the first step, relative to the mean diagonal of Jᵀ J.
    """
    equations, eye = _Equations.of(mlp, spans, α, near), torch.eye(α.shape[1]).to(α)
    at, done, live = equations.at(α), α.clone(), torch.arange(len(α), device=α.device)
    cost = at.cost()
    λ, idle = torch.full_like(cost, damping), torch.zeros_like(live)
    for _ in range(steps):
        N = equations.normal(at)
        damp = (λ * N.diagonal(dim1=1, dim2=2).mean(1))[:, None, None] * eye
        L = torch.linalg.cholesky_ex(N + damp)[0]
        g = equations.gradient(at)
        step = torch.cholesky_solve(g[..., None], L)[..., 0]
        next_α = α - step
        next_at = equations.at(next_α)
        next_cost = next_at.cost()
        better = next_cost < cost  # false for nan
        idle = torch.where(next_cost < (1 - _LEAST_DECREASE) * cost, 0, idle + 1)
        expected = (g * step).sum(1) > _LEAST_DECREASE / 2 * cost  # the linear model gains once to twice as much
        α, at = torch.where(better[:, None], next_α, α), next_at.where(better, at)
        cost, λ = torch.where(better, next_cost, cost), torch.where(better, λ / 5, λ * 4)
        done[live] = α
        more = expected & (idle < _MOST_IDLE) & (cost > (_ROUNDING * torch.finfo(cost.dtype).eps) ** 2)
        rows = more.nonzero()[:, 0]
        if not len(rows):
            break
        if len(rows) < len(live):
            live, α, at, cost, λ, idle = live[rows], α[rows], at.take(rows), cost[rows], λ[rows], idle[rows]
            equations = equations.take(rows)
    return done


def roughen(mlp: Mlp, spans: Spans) -> tuple[Mlp, Spans]:
    """Return the equations of some of the hidden units alone, in single precision.

    act(W₁ u + b₁) ∈ span{h_n} holds in any units. Which these are does not matter: units have no order.
    """
    units = max(_UNITS_PER_TOKEN * len(spans.u), _LEAST_UNITS)
    if units < len(mlp.b1):
        H = torch.linalg.qr(spans.h[:, :units].mT).Q.mT
        mlp = Mlp(mlp.γ, mlp.β, mlp.W1[:units], mlp.b1[:units], mlp.W2[:, :units], mlp.act)
        spans = spans._replace(h=H, δ=spans.δ[:, :units])
    return mlp.to(torch.float32), spans.float()


def settle(
    mlp: Mlp, spans: Spans, α: Float[Tensor, "s n"], steps: int, near: Near | None = None, damping: float = CLOSE
) -> Float[Tensor, "s n"]:
    """Minimise the same as `refine`: roughly first, then on all units in double precision by the Gauss-Newton method.

    Each of its steps is solved by conjugate gradients: a product with Jᵀ J costs a hundredth of making it. The
    preconditioner is the inverse of Jᵀ J where the rough search ended.

    Args:
        mlp: the MLP, in float64.
        spans: the spans of tokens and of hidden units.
        α: coordinates of the starts.
        steps: the most steps of the Levenberg-Marquardt method.
        near: spans that the t of each start is known to lie in.
        damping: of the first step of the rough search.
    """
    rough, coarse = roughen(mlp, spans)
    near_rough = None if near is None else near.float()
    α = refine(rough, coarse, α.float(), steps, near_rough, damping).to(α)
    start = _Equations.of(rough, coarse, α.float(), near_rough)
    N = start.normal(start.at(α.float()))
    damp = (_FACTOR_RIDGE * N.diagonal(dim1=1, dim2=2).mean(1))[:, None, None] * torch.eye(N.shape[1]).to(N)
    L = torch.linalg.cholesky_ex(N + damp)[0]
    equations = _Equations.of(mlp, spans, α, near)
    at = equations.at(α)
    for _ in range(_SETTLING_STEPS):
        old = at
        step = conjugate_gradients(
            lambda p, at=old: equations.product(at, p[..., 0])[..., None],
            -equations.gradient(at)[..., None],
            _INNER,
            lambda r: torch.cholesky_solve(r.float(), L).to(r),
        )
        next_α = α + step[..., 0]
        next_at = equations.at(next_α)
        better, much = next_at.cost() < at.cost(), next_at.cost() < (1 - _LEAST_DECREASE) * at.cost()
        α, at = torch.where(better[:, None], next_α, α), next_at.where(better, at)
        if not bool(much.any()):
            break
    return α

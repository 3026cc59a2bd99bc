"""From starts to tokens: the Levenberg-Marquardt method on few hidden units, then the Gauss-Newton method on all.

Known are the spans of tokens (basis T) and of hidden units (P_h), and starts u = α T. Sought are tokens near them: u
for which h = act(W₁ u + b₁) lies in the span of hidden units, and t = (u − β)/γ has zero mean and unit variance. With
`near`, t also lies in a known span. All of these are squared residuals of the coordinates α.

1. `_Equations` holds the residuals and the products with their Jacobian, of many starts at once.
2. `refine` is the Levenberg-Marquardt method, in which each start has its own damping and end.
3. `settle` refines on a part of the hidden units first (`roughen`), which is fast, and then on all in float64.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.solvers import conjugate_gradients
from privlab.attacks.tokens.spans import Index, Mlp, Near, Spans

_MOST_IDLE, _LEAST_DECREASE = 8, 0.01
"""A start ends after so many steps in a row that lower its cost by less than this share, or once none can be expected.

Rejected steps, after which damping rises, may lead to progress again; where the linear model has none to offer, the
start has arrived."""

_ROUNDING = 32  # a residual below so many units of rounding is zero

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
    """act′ / size at α, the residuals there of h, of LayerNorm's form and of what is known of t, together, and t."""

    slope: Float[Tensor, "b s m"]
    r: Float[Tensor, "b s _"]
    t: Float[Tensor, "b s d"]

    def cost(self) -> Float[Tensor, "b s"]:
        """Return the sum of the squared residuals."""
        return self.r.square().sum(2)

    def where(self, better: Bool[Tensor, "b s"], old: "_Point") -> "_Point":
        """Return this point where it is better, else the old one."""
        return _Point(*(torch.where(better[..., None], a, b) for a, b in zip(self, old, strict=True)))

    def take(self, rows: Index) -> "_Point":
        """Return some of the starts."""
        return _Point(*(part[rows] for part in self))


@dataclass(frozen=True, eq=False)
class _Equations:
    """|(I − P_h) act(W₁ u + b₁)|² / size² + |mean t|² + (|t|²/d − 1)² of u = α T, and |off t|² / d with `near`.

    These are the equations of several releases, each with its own spans. The Jacobian is never made: Jᵀ J =
    Mᵀ A (I − P_h) A M + …, with M = W₁ Tᵀ and A = diag(act′) / size.
    """

    mlp: Mlp
    near: Near | None
    size: Float[Tensor, "b 1 1"]
    H: Float[Tensor, "b n m"]
    M: Float[Tensor, "b n m"]
    P: Float[Tensor, "b n d"]
    real: Bool[Tensor, "b n"]

    @classmethod
    def of(cls, mlp: Mlp, spans: Spans, α: Float[Tensor, "b s n"], near: Near | None) -> "_Equations":
        """Return the equations, with the usual length of h at the starts α of each release for unit."""
        # u = α T enters by its coordinates alone: W₁ u = α M with M = T W₁ᵀ (n × m), and t = α P − β/γ with P = T / γ.
        M, P = spans.u @ mlp.W1.mT, spans.u / mlp.γ
        size = M.new_ones(len(M), 1, 1)
        # The residual of h is divided by the median |h| of the starts, so that it is relative like the others.
        if α.shape[1]:
            size = mlp.activate(torch.bmm(α, M) + mlp.b1)[0].norm(dim=2).nanmedian(1).values[:, None, None]
        return cls(mlp, near, size, spans.h, M, P, spans.real())

    def take(self, releases: Index, rows: Index) -> "_Equations":
        """Return the equations of the starts in some rows of some of the releases."""
        near = None if self.near is None else self.near.take(releases, rows)
        parts = (part[releases] for part in (self.size, self.H, self.M, self.P, self.real))
        return _Equations(self.mlp, near, *parts)

    def at(self, α: Float[Tensor, "b s n"]) -> _Point:
        """Return the residuals at α."""
        (h, slope), d = self.mlp.activate(torch.bmm(α, self.M) + self.mlp.b1), self.P.shape[2]
        t = torch.bmm(α, self.P) - self.mlp.β / self.mlp.γ
        # r = ((I − P_h) h / size, mean t, |t|²/d − 1) with m + 2 entries, and d more, off t / √d, with `near`.
        r = [self._outside(h) / self.size, t.mean(2, keepdim=True), t.square().mean(2, keepdim=True) - 1]
        r += [] if self.near is None else [self.near.off(t) / d**0.5]
        return _Point(slope / self.size, torch.cat(r, 2), t)

    def gradient(self, at: _Point) -> Float[Tensor, "b s n"]:
        """Return Jᵀ r, half the gradient of the cost."""
        m, d = self.M.shape[2], self.P.shape[2]
        # The parts of r but h have the derivatives 1/d, 2 t/d and off/√d by t, and that of t by α is P. The residual
        # of h is outside the span already, so (I − P_h) r = r.
        r, mean, length, off = at.r.split([m, 1, 1, at.r.shape[2] - m - 2], 2)
        of_t = (mean + 2 * length * at.t) / d
        of_t = of_t if self.near is None else of_t + off / d**0.5
        return torch.bmm(at.slope * r, self.M.mT) + torch.bmm(of_t, self.P.mT)

    def normal(self, at: _Point) -> Float[Tensor, "b s n n"]:
        """Return Jᵀ J."""
        # With J = M A (n × m for each start), N = J (I − P_h) Jᵀ = J Jᵀ − (J Hᵀ) (J Hᵀ)ᵀ.
        J = at.slope[:, :, None] * self.M[:, None]
        b, s, n, _ = J.shape
        H_J = torch.bmm(J.flatten(1, 2), self.H.mT).view(b * s, n, n)
        J = J.flatten(0, 1)
        N = torch.baddbmm(torch.bmm(J, J.mT), H_J, H_J.mT, alpha=-1).view(b, s, n, n)
        # The derivative of |t|²/d − 1 by α is (2/d) t Pᵀ. The derivatives of mean t and off t do not depend on α.
        length = 2 / self.P.shape[2] * torch.bmm(at.t, self.P.mT)
        return N + torch.addcmul(self._of_all_points, length[..., None], length[:, :, None])

    @cached_property
    def _of_all_points(self) -> Float[Tensor, "b _ n n"]:
        """The terms of Jᵀ J that do not depend on α."""
        # The derivative of mean t by α is the mean of each row of P.
        mean = self.P.mean(2)
        N = (mean[..., None] * mean[:, None])[:, None]
        if self.near is None:
            return N
        # That of off t / √d is off P / √d; off P is P less its components in Q and along `base`.
        P, along = self.P - (self.P @ self.near.Q) @ self.near.Q.mT, torch.bmm(self.near.base, self.P.mT)
        return N + ((P @ P.mT)[:, None] - along[..., None] * along[:, :, None]) / self.P.shape[2]

    def product(self, at: _Point, p: Float[Tensor, "b s n"]) -> Float[Tensor, "b s n"]:
        """Return Jᵀ J p."""
        # p moves W₁ u by p M and t by p P. Each part's Jacobian and its transpose follow: A (I − P_h) A for h. As no
        # matrix of n × n is made, this costs a hundredth of `normal`.
        d, of_t = self.P.shape[2], torch.bmm(p, self.P)
        of_h = at.slope * self._outside(at.slope * torch.bmm(p, self.M))
        turned = of_t.mean(2, keepdim=True) + 4 / d * (at.t * of_t).sum(2, keepdim=True) * at.t
        turned = turned if self.near is None else turned + self.near.off(of_t)
        return torch.bmm(of_h, self.M.mT) + torch.bmm(turned, self.P.mT) / d

    def damped(self, N: Float[Tensor, "b s n n"], share: Float[Tensor, "b s"] | float) -> Float[Tensor, "b s n n"]:
        """Return the Cholesky factors of N and a share of its mean diagonal, or one in rows of zeros."""
        # The damping is relative to the mean diagonal; rows of padding get one, so that they have an inverse.
        diagonal, real = N.diagonal(dim1=2, dim2=3), self.real[:, None]
        mean = share * diagonal.sum(2) / real.sum(2)
        diagonal.add_(mean[..., None].where(real, 1))
        return torch.linalg.cholesky_ex(N)[0]

    def _outside(self, h: Float[Tensor, "b s m"]) -> Float[Tensor, "b s m"]:
        return torch.baddbmm(h, torch.bmm(h, self.H.mT), self.H, alpha=-1)


def refine(
    mlp: Mlp, spans: Spans, α: Float[Tensor, "*b s n"], steps: int, near: Near | None = None, damping: float = FAR
) -> Float[Tensor, "*b s n"]:
    """Minimise |(I − P_h) act(W₁ u + b₁)|² + |mean t|² + (|t|²/d − 1)² over u = α T, for each start separately.

    With `near`, the squared share of t outside its known span is added, with the same weight. A start of NaN stays one.

    Args:
        mlp: the MLP, in the precision of the search.
        spans: the spans of tokens (T) and of hidden units (P_h), in that precision, of one release or of several.
        α: coordinates of the starts.
        steps: the most steps of the Levenberg-Marquardt method.
        near: spans that the t of each start is known to lie in, in that precision.
        damping: of the first step, relative to the mean diagonal of Jᵀ J.
    """
    if α.dim() == 2:
        return refine(mlp, spans.take(None), α[None], steps, near and near.take(None, None), damping)[0]
    # `done` keeps the result of every start; the other variables hold those that still move, and `places` where they
    # belong in `done`.
    equations, done = _Equations.of(mlp, spans, α, near), α.clone()
    at = equations.at(α)
    cost = at.cost()
    λ, idle, live = torch.full_like(cost, damping), torch.zeros_like(cost), torch.ones_like(cost, dtype=torch.bool)
    places = tuple(torch.meshgrid(*(torch.arange(k, device=α.device) for k in cost.shape), indexing="ij"))
    for _ in range(steps):
        # A Levenberg-Marquardt step solves (Jᵀ J + λ mean(diag) I) step = Jᵀ r. It is taken if it lowers the cost.
        L = equations.damped(equations.normal(at), λ)
        g = equations.gradient(at)
        step = torch.cholesky_solve(g[..., None], L)[..., 0]
        next_α = α - step
        next_at = equations.at(next_α)
        next_cost = next_at.cost()
        better = (next_cost < cost) & live  # false for nan
        # A start ends if its steps gain too little for too long, if none can gain enough, or if its cost is rounding.
        idle = torch.where(next_cost < (1 - _LEAST_DECREASE) * cost, 0, idle + 1)
        expected = (g * step).sum(2) > _LEAST_DECREASE / 2 * cost  # the linear model gains once to twice as much
        # Damping falls after a step that is taken, and rises after one that is not.
        α, at = torch.where(better[..., None], next_α, α), next_at.where(better, at)
        cost, λ = torch.where(better, next_cost, cost), torch.where(better, λ / 5, λ * 4)
        done[places] = α
        live = live & expected & (idle < _MOST_IDLE) & (cost > (_ROUNDING * torch.finfo(cost.dtype).eps) ** 2)
        counts = live.sum(1).tolist()
        if not any(counts):
            break
        # The starts that have ended leave the batch: in each release the others come first, up to the largest number.
        if max(counts) < α.shape[1] or not all(counts):
            going = torch.tensor([i for i, count in enumerate(counts) if count], device=α.device)
            rows = going[:, None], live.int().argsort(dim=1, descending=True, stable=True)[going, : max(counts)]
            equations, at = equations.take(slice(None) if all(counts) else going, rows), at.take(rows)
            α, cost, λ, idle, live = (of[rows] for of in (α, cost, λ, idle, live))
            places = tuple(place[rows] for place in places)
    return done


def roughen(mlp: Mlp, spans: Spans) -> tuple[Mlp, Spans]:
    """Return the equations of some of the hidden units alone, in single precision.

    act(W₁ u + b₁) ∈ span{h_n} holds in any units. Which these are does not matter: units have no order.
    """
    units = max(_UNITS_PER_TOKEN * spans.u.shape[-2], _LEAST_UNITS)
    # h restricted to some units lies in the span restricted to them, which needs a new orthonormal basis.
    if units < len(mlp.b1):
        H = torch.linalg.qr(spans.h[..., :units].mT).Q.mT * spans.real()[..., None]
        mlp = Mlp(mlp.γ, mlp.β, mlp.W1[:units], mlp.b1[:units], mlp.W2[:, :units], mlp.act)
        spans = spans._replace(h=H, δ=spans.δ[..., :units])
    return mlp.to(torch.float32), spans.float()


def settle(
    mlp: Mlp, spans: Spans, α: Float[Tensor, "*b s n"], steps: int, near: Near | None = None, damping: float = CLOSE
) -> Float[Tensor, "*b s n"]:
    """Minimise the same as `refine`: roughly first, then on all units in double precision by the Gauss-Newton method.

    Each of its steps is solved by conjugate gradients: a product with Jᵀ J costs a hundredth of making it. The
    preconditioner is the inverse of Jᵀ J where the rough search ended.

    Args:
        mlp: the MLP, in float64.
        spans: the spans of tokens and of hidden units, of one release or of several.
        α: coordinates of the starts.
        steps: the most steps of the Levenberg-Marquardt method.
        near: spans that the t of each start is known to lie in.
        damping: of the first step of the rough search.
    """
    if α.dim() == 2:
        return settle(mlp, spans.take(None), α[None], steps, near and near.take(None, None), damping)[0]
    # The Levenberg-Marquardt method comes first, in single precision on some of the hidden units.
    rough, coarse = roughen(mlp, spans)
    near_rough = None if near is None else near.float()
    α = refine(rough, coarse, α.float(), steps, near_rough, damping).to(α)
    # The preconditioner is (Jᵀ J + ridge)⁻¹ at the point where that ended.
    start = _Equations.of(rough, coarse, α.float(), near_rough)
    L = start.damped(start.normal(start.at(α.float())), _FACTOR_RIDGE)
    # Gauss-Newton steps on all units follow in double precision: Jᵀ J step = −Jᵀ r by conjugate gradients.
    equations = _Equations.of(mlp, spans, α, near)
    at, going = equations.at(α), torch.ones_like(α[:, :1, 0], dtype=torch.bool)
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
        cost, next_cost = at.cost(), next_at.cost()
        # A step is taken if it lowers the cost. A release goes on as long as one of its starts gains enough.
        better = (next_cost < cost) & going
        α, at = torch.where(better[..., None], next_α, α), next_at.where(better, at)
        going = (better & (next_cost < (1 - _LEAST_DECREASE) * cost)).any(1, keepdim=True)
        if not bool(going.any()):
            break
    return α

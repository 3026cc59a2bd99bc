"""What searches and closed forms share: ridge solves, conjugate gradients, and the Levenberg-Marquardt method.

Known are a matrix (or a map) and a right-hand side; sought are the unknowns that fit best. Four tools:

- `ridge_inverse`: a pseudo-inverse that ignores directions below float32's rounding, for the closed forms.
- `conjugate_gradients`: a symmetric system that is known only by its products with vectors.
- `linearised`: products with the Jacobian of a function and with its transpose, without the Jacobian.
- `levenberg_marquardt`: nonlinear least squares with few unknowns, from many starts in parallel.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import gradients_enabled

Map = Callable[[Tensor], Tensor]

RTOL = 2.0**-23
"""Machine epsilon of float32, in which gradients are released: weaker directions carry no information."""


def ridge_inverse(M: Float[Tensor, "*b d n"], rtol: float = RTOL) -> Float[Tensor, "*b n d"]:
    """Return M⁺ in float64 by Tikhonov's method, iterated twice: P = (Mᵀ M + λ² I)⁻¹ Mᵀ, M⁺ = 2 P − P M P.

    λ = rtol · ‖M‖_F. A direction in which M has the singular value σ is recovered with the factor 1 − (λ² / (σ² +
    λ²))², so directions above the rounding error are almost unchanged. X = M⁺ G solves M X = G: with least error if
    there is no solution, close to least norm if there are many. Zero columns of M give zero rows of X.

    `rtol` must be well above 1e-8, or Mᵀ M + λ² I is not positive in float64; 0 gives the Moore-Penrose inverse, cut
    off at float64's rounding alone: plain least squares.
    """
    if rtol == 0:
        return torch.linalg.pinv(M.double())
    d, n = M.shape[-2:]
    # The Gram matrix of the shorter side is the smaller one, and (Mᵀ)⁺ = (M⁺)ᵀ.
    if n > d:
        return ridge_inverse(M.mT, rtol).mT
    M = M.double()
    norm = torch.linalg.matrix_norm(M, keepdim=True)
    λ = rtol * norm.where(norm > 0, 1)  # M = 0 gives 0
    # P = (Mᵀ M + λ² I)⁻¹ Mᵀ has the factor f = σ² / (σ² + λ²) of M⁺ in each direction; 2 P − P M P has 1 − (1 − f)².
    L = torch.linalg.cholesky(M.mT @ M + λ.square() * torch.eye(n, dtype=M.dtype, device=M.device))
    P = torch.cholesky_solve(M.mT, L)
    return (P @ M @ P).neg_().add_(P, alpha=2)


def conjugate_gradients(
    product: Map, target: Float[Tensor, "*b n k"], steps: int, precondition: Map = lambda r: r
) -> Float[Tensor, "*b n k"]:
    """Return an approximate solution V of product(V) = target, for each of the batch, from V = 0.

    A direction without curvature is not taken: it is one of rounding, where nothing of the target is left.

    Args:
        product: a linear, symmetric, positive semidefinite map, which acts on each of the batch separately.
        target: the right-hand sides.
        steps: number of steps, all of which are taken.
        precondition: an approximate inverse of `product`, symmetric and positive.
    """
    least = torch.finfo(target.dtype).tiny
    V, r = torch.zeros_like(target), target
    # r = target − product(V) is the residual, z the preconditioned residual, p the direction, and square = ⟨r, z⟩.
    p = z = precondition(r)
    square = _dot(r, z)
    for _ in range(steps):
        # The step to the minimum along p is α = ⟨r, z⟩ / ⟨p, A p⟩, for each of the batch separately.
        q = product(p)
        curvature = _dot(p, q)
        α = torch.where(curvature > 0, square / curvature.clamp_min(least), 0)  # rounding makes a residual of none
        V, r = V + α * p, r - α * q
        z = precondition(r)
        # The next direction is z + β p, with β = ⟨r, z⟩ / ⟨r, z⟩ of the last step: it is A-conjugate to all before.
        now = _dot(r, z)
        p, square = z + now / square.clamp_min(least) * p, now
    return V


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1), keepdim=True)


def linearised(
    made: Callable[..., Tensor], at: Sequence[Tensor]
) -> tuple[Tensor, Callable[..., Tensor], Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return the value of a function, v ↦ J v, and w ↦ Jᵀ w; J v is the derivative of ⟨Jᵀ w, v⟩ by w."""
    with gradients_enabled():
        own = [each.detach().requires_grad_() for each in at]
        value = made(*own)
        # Jᵀ w is linear in w, so its value at w = 0 does not count: only its graph is needed, which gives J v.
        w = torch.zeros_like(value, requires_grad=True)
        back = torch.autograd.grad(value, own, w, create_graph=True)

    def along(*v: Tensor) -> Tensor:
        return torch.autograd.grad(back, w, v, retain_graph=True)[0]

    return value.detach(), along, lambda w: torch.autograd.grad(value, own, w, retain_graph=True)


def levenberg_marquardt(
    x: Float[Tensor, "s n"],
    at: Callable[[Tensor], tuple[Tensor, ...]],
    steps: int,
    damping: float,
    normal: Callable[..., tuple[Tensor, Tensor]] = lambda _, r, J: (J.mT @ J, (r[:, None] @ J)[:, 0]),
    over: Callable[[Tensor, Tensor], bool] = lambda cost, tried: False,
) -> tuple[Tensor, ...]:
    """Return where each start leads alone, and what `at` returns there; a step that lowers no cost is not taken.

    Args:
        x: the starts.
        at: returns what the derivatives at points need, row by row, and last the costs |r|².
        steps: the most steps.
        damping: of the first step, relative to the mean diagonal of Jᵀ J.
        normal: returns Jᵀ J and Jᵀ r of points and of what `at` returned for them but the costs, such as r and J.
        over: returns whether no step follows, by the costs before a step and behind it, where it is taken or not.
    """
    # x is s × n: each of the s starts has a separate damping λ and a separate cost.
    (*parts, cost), eye = at(x), torch.eye(x.shape[1]).to(x)
    λ = torch.full_like(cost, damping)
    for _ in range(steps):
        # The step is −(N + λ · mean diag N · I)⁻¹ g with N = Jᵀ J (s × n × n), g = Jᵀ r:
        # Gauss-Newton for small λ, descent for large.
        N, g = normal(x, *parts)
        damp = (λ * N.diagonal(dim1=1, dim2=2).mean(1))[:, None, None] * eye
        # `cholesky_ex` raises nothing where N is not positive; the step is then not
        # finite or not better, and is not taken.
        tried = x - torch.cholesky_solve(g[..., None], torch.linalg.cholesky_ex(N + damp)[0])[..., 0]
        *new, new_cost = at(tried)
        better, done = new_cost < cost, over(cost, new_cost)  # false for nan
        # Starts that did not improve keep their point and all that was computed there.
        x, *parts, cost = (
            torch.where(better.view(-1, *[1] * (a.ndim - 1)), a, b)
            for a, b in zip((tried, *new, new_cost), (x, *parts, cost), strict=True)
        )
        # Success moves λ towards Gauss-Newton, failure towards a short step along the slope.
        λ = torch.where(better, λ / 5, λ * 4)
        if done:
            break
    return x, *parts, cost

"""What the searches for least squares share: products with a Jacobian, and the Levenberg-Marquardt method."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import gradients_enabled


def linearised(
    made: Callable[..., Tensor], at: Sequence[Tensor]
) -> tuple[Tensor, Callable[..., Tensor], Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return the value of a function, v ↦ J v, and w ↦ Jᵀ w; J v is the derivative of ⟨Jᵀ w, v⟩ by w."""
    with gradients_enabled():
        own = [each.detach().requires_grad_() for each in at]
        value = made(*own)
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
    """Return where each start leads by itself, and what `at` returns there; a step that lowers no cost is not taken.

    Args:
        x: the starts.
        at: returns what the derivatives at points need, row by row, and last the costs |r|².
        steps: the most steps.
        damping: of the first step, relative to the mean diagonal of Jᵀ J.
        normal: returns Jᵀ J and Jᵀ r of points and of what `at` returned for them but the costs, such as r and J.
        over: returns whether no step follows, by the costs before a step and behind it, where it is taken or not.
    """
    (*parts, cost), eye = at(x), torch.eye(x.shape[1]).to(x)
    λ = torch.full_like(cost, damping)
    for _ in range(steps):
        N, g = normal(x, *parts)
        damp = (λ * N.diagonal(dim1=1, dim2=2).mean(1))[:, None, None] * eye
        tried = x - torch.cholesky_solve(g[..., None], torch.linalg.cholesky_ex(N + damp)[0])[..., 0]
        *new, new_cost = at(tried)
        better, done = new_cost < cost, over(cost, new_cost)  # false for nan
        x, *parts, cost = (
            torch.where(better.view(-1, *[1] * (a.ndim - 1)), a, b)
            for a, b in zip((tried, *new, new_cost), (x, *parts, cost), strict=True)
        )
        λ = torch.where(better, λ / 5, λ * 4)
        if done:
            break
    return x, *parts, cost

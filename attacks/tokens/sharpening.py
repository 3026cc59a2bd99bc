"""The Gauss-Newton method on all patches of an image at once, with the attention of the first block."""

import copy
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from privlab.attacks.solvers import conjugate_gradients
from privlab.victims import PreNormBlock

__all__ = ["sharpen_coordinates"]

_LEAST_DECREASE = 0.1
"""Share by which a Gauss-Newton step must lower the squared residual to be followed by another one."""

_RIDGE = 1e-9
"""Is added to the preconditioner's matrices, relative to their mean diagonal: some directions are told by no token."""


def sharpen_coordinates(
    prefix: Float[Tensor, "p d"],
    block: PreNormBlock,
    base: Float[Tensor, "n d"],
    basis: Float[Tensor, "r d"],
    target: Float[Tensor, "f d"],
    places: Int[Tensor, " f"],
    guesses: Sequence[Float[Tensor, "n r"]],
    steps: int,
    inner: int,
) -> Float[Tensor, "n r"]:
    """Minimise |u(base + B basis)[places] − target|² over B by the Gauss-Newton method, from the best guess.

    The residual and its gradient are in float64. Products with the Jacobian, which only lead from one to the next, are
    in float32: they take half the time.

    Args:
        prefix: class and register tokens, before the block.
        block: the first block, in float64.
        base: the known part of the embedded patches.
        basis: the directions of what is unknown of them.
        target: tokens u that were found.
        places: their places among all tokens of the image, class and register tokens first.
        guesses: coordinates to start from; the best is taken.
        steps: the most steps of the Gauss-Newton method.
        inner: steps of conjugate gradients in each of them.
    """
    scale = target.norm(dim=1).mean()
    single = copy.deepcopy(block).float()

    def state(B: Tensor, block: PreNormBlock = block) -> Tensor:
        z = torch.cat([prefix.to(B), base.to(B) + B @ basis.to(B)])
        return z + block.attention(z)

    def residual(B: Tensor, block: PreNormBlock = block) -> Tensor:
        return (block.norm2(state(B, block))[places] - target.to(B)) / scale.to(B)

    found = torch.zeros(len(prefix) + len(base), dtype=torch.bool, device=base.device)
    found = found.index_fill(0, places, value=True)[len(prefix) :]
    B = min(guesses, key=lambda B: float(residual(B).square().sum()))
    for _ in range(steps):
        with torch.enable_grad():
            B.requires_grad_()
            r, rough = residual(B), B.detach().float().requires_grad_()
            r_rough = residual(rough, single)
            weight = torch.zeros_like(r_rough, requires_grad=True)  # Jᵀ weight is linear in it: its derivative is J
            (pulled,) = torch.autograd.grad(r_rough, rough, weight, create_graph=True)

        def product(
            p: Tensor, r: Tensor = r_rough, pulled: Tensor = pulled, by: Tensor = weight, B: Tensor = rough
        ) -> Tensor:
            (pushed,) = torch.autograd.grad(pulled, by, p[0], retain_graph=True)
            return torch.autograd.grad(r, B, pushed, retain_graph=True)[0][None]

        (slope,) = torch.autograd.grad(r, B, r.detach())
        B, inverse = B.detach(), _inverse_of_own(block, state(B.detach())[len(prefix) :], basis, found, scale)
        new = B + conjugate_gradients(product, -slope.float()[None], inner, inverse)[0].to(B)
        if not residual(new).square().sum() < (1 - _LEAST_DECREASE) * r.square().sum():
            break
        B = new
    return B.detach()


def _inverse_of_own(
    block: PreNormBlock, v: Float[Tensor, "n d"], basis: Float[Tensor, "r d"], found: Bool[Tensor, " n"], scale: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return the inverse of Jᵀ J without what attention carries from patch to patch: each patch moves its own token.

    With t of token v = z + a, J_n = (I − 1 1ᵀ/d − t tᵀ/d) diag(γ) / std(v). Patches without a token take the mean of
    the others, because nothing but attention tells of them.

    Args:
        block: the first block, whose second LayerNorm counts.
        v: patch tokens before that LayerNorm.
        basis: the directions in which patches can move.
        found: patches whose token is known.
        scale: the length that residuals are divided by.
    """
    norm, d = block.norm2, v.shape[1]
    assert isinstance(norm, nn.LayerNorm)
    std = (v.var(1, correction=0) + norm.eps).sqrt()[:, None]
    t, c = (v - v.mean(1, keepdim=True)) / std, basis - basis.mean(1, keepdim=True)
    J = (c - (t @ c.mT)[..., None] * t[:, None] / d) * (norm.weight / std / scale)[:, None]
    N = (J @ J.mT).where(found[:, None, None], 0)
    N = N.where(found[:, None, None], N.sum(0) / found.sum().clamp_min(1))
    ridge = (_RIDGE * N.diagonal(dim1=1, dim2=2).mean(1)).clamp_min(torch.finfo(N.dtype).tiny)
    eye = torch.eye(len(basis), dtype=N.dtype, device=N.device)
    L = torch.linalg.cholesky(N + ridge[:, None, None] * eye).float()
    return lambda r: torch.cholesky_solve(r[0][..., None], L)[None, ..., 0]

"""The Gauss-Newton method on all patches of an image at once, with the attention of the first block.

Known are tokens u of an image at their places, the block, and embeddings z = base + B `basis` with unknown B. Sought is
the B with which the block produces these tokens, from a first estimate that carries the errors of spans.

Each Gauss-Newton step linearises z ↦ LN(z + attention(z)) for all patches at once, and solves for the step by conjugate
gradients, whose preconditioner leaves attention out.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from privlab.attacks.solvers import conjugate_gradients, linearised
from privlab.base import gradients_enabled
from privlab.victims import PreNormBlock

_LEAST_DECREASE = 0.1
"""Share by which a Gauss-Newton step must lower the squared residual to be followed by another one."""

_RIDGE = 1e-9
"""Is added to the preconditioner's matrices, relative to their mean diagonal: no token shows some directions."""


def sharpen_coordinates(
    prefix: Float[Tensor, "p d"],
    block: PreNormBlock,
    base: Float[Tensor, "*b n d"],
    basis: Float[Tensor, "*b r d"],
    target: Float[Tensor, "*b f d"],
    places: Int[Tensor, "*b f"],
    guesses: Sequence[Float[Tensor, "*b n r"]],
    steps: int,
    inner: int,
) -> Float[Tensor, "*b n r"]:
    """Minimise |u(base + B basis)[places] − target|² over B by the Gauss-Newton method, from the best guess.

    The residual and its gradient are in float64. Products with the Jacobian, which only lead from one to the next, are
    in float32: they take half the time. Several images take their steps together, each as many as it needs.

    Args:
        prefix: class and register tokens, before the block.
        block: the first block, in float64.
        base: the known part of the embedded patches, of one image or of several.
        basis: the directions of what is unknown of them; rows of zeros follow where another image has more.
        target: tokens u that were found, and any rows where another image has more.
        places: their places among all tokens of the image, class and register tokens first; p + n of those rows.
        guesses: coordinates to start from; the best is taken.
        steps: the most steps of the Gauss-Newton method.
        inner: steps of conjugate gradients in each of them.
    """
    # One image is a batch of one.
    if base.dim() == 2:
        base, basis, target, places = base[None], basis[None], target[None], places[None]
        guesses = [B[None] for B in guesses]
        return sharpen_coordinates(prefix, block, base, basis, target, places, guesses, steps, inner)[0]
    b, count, d = len(base), len(prefix) + base.shape[1], base.shape[2]
    # Targets are put at their places among all p + n tokens, and `found` marks them. One more place, the last, takes
    # the padding of smaller images and is cut off.
    found = torch.zeros(b, count + 1, dtype=torch.bool, device=base.device).scatter(1, places, value=True)[:, :count]
    target = base.new_zeros(b, count + 1, d).scatter(1, places[..., None].expand_as(target), target)[:, :count]
    # Residuals are relative to the mean length of the tokens.
    scale = (target.norm(dim=2).sum(1) / found.sum(1))[:, None, None]
    single = copy.deepcopy(block).float()

    # v = z + a are all tokens before LayerNorm, b × (p + n) × d, as the block itself computes them.
    def state(B: Tensor, block: PreNormBlock = block) -> Tensor:
        z = torch.cat([prefix.to(B).expand(b, -1, -1), base.to(B) + B @ basis.to(B)], 1)
        return z + block.attention(z)

    def residual(B: Tensor, block: PreNormBlock = block) -> Tensor:
        return (block.norm2(state(B, block)) - target.to(B)).where(found[..., None], 0) / scale.to(B)

    # Each image starts from the guess of least cost.
    costs = torch.stack([residual(B).square().sum((1, 2)) for B in guesses])
    B = torch.stack(list(guesses))[costs.argmin(0), torch.arange(b, device=base.device)]
    going = torch.ones_like(scale, dtype=torch.bool)
    for _ in range(steps):
        # Jᵀ r is the gradient of |r|²/2 by B, in float64. `forth` and `back` are products with J and Jᵀ, in float32.
        with gradients_enabled():
            r = residual(B.requires_grad_())
        (slope,) = torch.autograd.grad(r, B, r.detach())
        _, forth, back = linearised(lambda B: residual(B, single), (B.float(),))
        # A Gauss-Newton step solves Jᵀ J step = −Jᵀ r by conjugate gradients, preconditioned by `_inverse_of_own`.
        B, v = B.detach(), state(B.detach())[:, len(prefix) :]
        inverse = _inverse_of_own(block, v, basis, found[:, len(prefix) :], scale)
        step = conjugate_gradients(lambda p, forth=forth, back=back: back(forth(p))[0], -slope.float(), inner, inverse)
        # A step counts only if it lowers the cost by the least share; an image for which it does not has arrived.
        new = B + step.to(B)
        before, after = (of.square().sum((1, 2), keepdim=True) for of in (r.detach(), residual(new)))
        going = going & (after < (1 - _LEAST_DECREASE) * before)
        if not bool(going.any()):
            break
        B = torch.where(going, new, B)
    return B.detach()


def _inverse_of_own(
    block: PreNormBlock,
    v: Float[Tensor, "b n d"],
    basis: Float[Tensor, "b r d"],
    found: Bool[Tensor, "b n"],
    scale: Float[Tensor, "b 1 1"],
) -> Callable[[Tensor], Tensor]:
    """Return the inverse of Jᵀ J without what attention carries from patch to patch: each patch moves its own token.

    With t of token v = z + a, J_n = (I − 1 1ᵀ/d − t tᵀ/d) diag(γ) / std(v). Patches without a token take the mean of
    the others, because nothing but attention shows them.
    """
    # u = γ ⊙ (v − mean v) / std(v) + β with the derivative of the docstring; `basis` enters without its means.
    norm, d, found = block.norm2, v.shape[2], found[..., None, None]
    std = (v.var(2, correction=0, keepdim=True) + norm.eps).sqrt()
    t, c = (v - v.mean(2, keepdim=True)) / std, basis - basis.mean(2, keepdim=True)
    # J is b × n × r × d: for each patch, the derivative of its token by its r coordinates. N = J Jᵀ is r × r.
    J = (c[:, None] - (t @ c.mT)[..., None] * t[:, :, None] / d) * (norm.weight / std / scale)[:, :, None]
    N = (J @ J.mT).where(found, 0)
    # Without a token N would be zero; then the mean of the other patches replaces it.
    N = N.where(found, N.sum(1, keepdim=True) / found.sum(1, keepdim=True).clamp_min(1))
    ridge = (_RIDGE * N.diagonal(dim1=2, dim2=3).mean(2)).clamp_min(torch.finfo(N.dtype).tiny)
    eye = torch.eye(basis.shape[1], dtype=N.dtype, device=N.device)
    L = torch.linalg.cholesky(N + ridge[..., None, None] * eye).float()
    return lambda r: torch.cholesky_solve(r[..., None], L)[..., 0]

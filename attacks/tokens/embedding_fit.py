"""From what the first MLP reads to the patches, where the embedding is frozen: a fit of all patches under a prior."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from privlab.attacks.rows import known_tokens
from privlab.attacks.solvers import conjugate_gradients
from privlab.attacks.tokens.mlp_inverse import Inverted
from privlab.attacks.tokens.slots import projection
from privlab.attacks.tokens.spans import Mlp, normalise
from privlab.base import linear_sum_assignment
from privlab.victims import PreNormBlock, VictimModel

__all__ = ["PatchLaw", "fit_patches", "places_of_tokens"]

_RIDGE = 1e-4
"""Is added to the variances of embedded patches, relative to their mean, because the prior is only approximate."""

_ROUNDS = 20
"""Rounds of places and attention in turn."""

_LEVELS = (1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4)
"""Room for the residual of a token's entries, of variance one, from step to step."""

_STEPS, _INNER, _LEAST_DECREASE, _HALVINGS = 4, 40, 0.01, 4
"""The most Gauss-Newton steps at each size of room, the steps of conjugate gradients in each, the share by which one
must lower the cost for another to follow, and how often a step that lowers it not at all is cut to a third."""


class PatchLaw(NamedTuple):
    """The prior x = M c of a patch with c ~ N(0, I), and its embedding z = base_n + c B in slot n."""

    base: Float[Tensor, "n d"]
    B: Float[Tensor, "m d"]
    M: Float[Tensor, "m k"]
    spread: Float[Tensor, "d d"]

    @classmethod
    def of(cls, model: VictimModel, L: Float[Tensor, "k k"]) -> "PatchLaw":
        """Return the law of embedded patches of the prior x ~ N(0, L Lᵀ), with no more unknowns than they tell.

        `spread` is the covariance of an embedding less its mean, with a ridge.

        Args:
            model: the victim, whose projection and position embeddings count.
            L: the factor of the prior, as `patch_prior` returns it.
        """
        W, b = projection(model)
        U, σ, Vh = torch.linalg.svd(W @ L, full_matrices=False)
        wide = (σ.square() + _RIDGE * σ.square().mean()).sqrt()
        B = wide[:, None] * U.mT
        C = B - B.mean(1, keepdim=True)
        S = C.mT @ C
        S = S + _RIDGE * S.diagonal().mean() * torch.eye(len(S)).to(S)
        return cls(b + known_tokens(model)[1], B, (σ / wide)[:, None] * Vh @ L.mT, S)


@torch.no_grad()
def places_of_tokens(
    model: VictimModel, block: PreNormBlock, tokens: Inverted, law: PatchLaw
) -> Int[Tensor, " f"]:
    """Return the places of tokens among all tokens of an image, class and register tokens first.

    A token t is (z + a) / s, less its mean, with a what attention adds and s unknown. Patch tokens are put where z = s t
    − a is likeliest under the law and the doubt of t, for the best s > 0: log p(t) has (D − 2) log s. Class and register
    tokens, whose z is known, are those of greatest cosine. Attention is evaluated on the z of the last round, at first
    on their means.

    Args:
        model: the victim.
        block: its first block, in float64.
        tokens: tokens of one image, in no order.
        law: the law of embedded patches.
    """
    mlp, prefix = Mlp.of(block), known_tokens(model)[0]
    t, p, D, z = _centred(normalise(mlp, tokens.u)), len(prefix), tokens.u.shape[1], law.base
    doubt = _centred(_centred(tokens.doubt / (mlp.γ[:, None] * mlp.γ)).mT)
    a = block.attention(torch.cat([prefix, z]))
    own, at = _assign(1 - nn.functional.cosine_similarity(t[:, None], _centred(prefix + a[:p]), dim=2))
    places = torch.zeros(len(t), dtype=torch.long, device=t.device).index_copy(0, own, at)
    rest = torch.ones_like(places, dtype=torch.bool).index_fill(0, own, value=False).nonzero()[:, 0]
    for _ in range(_ROUNDS):
        c = _centred(law.base + a[p:])
        variance = (c.square().sum(1).mean() + law.spread.diagonal().sum()) / D  # about s²
        L = torch.linalg.cholesky(law.spread + variance * doubt[rest])
        x, y = (torch.linalg.solve_triangular(L, of, upper=False) for of in (t[rest, :, None], c.mT.expand(len(L), -1, -1)))
        xx, xy = x.square().sum(1), (x.mT @ y)[:, 0]
        s = (xy + (xy.square() + 4 * (D - 2) * xx).sqrt()) / (2 * xx)
        rows, ns = _assign((xx * s.square() - 2 * xy * s + y.square().sum(1)) / 2 - (D - 2) * s.log())
        z = law.base.index_copy(0, ns, s[rows, ns, None] * t[rest[rows]] - a[p + ns])
        places[rest[rows]] = p + ns
        a = block.attention(torch.cat([prefix, z]))
    return places


@torch.no_grad()
def fit_patches(
    model: VictimModel,
    block: PreNormBlock,
    tokens: Inverted,
    places: Int[Tensor, " f"],
    law: PatchLaw,
) -> Float[Tensor, "n k"]:
    """Return the patches that are likeliest under the law and have these tokens, patches without a token included.

    |R (u(c) − u)|² + |c|² with Rᵀ R = (room² I + doubt)⁻¹ is minimised by the Gauss-Newton method from c = 0, for less
    and less room.

    Args:
        model: the victim.
        block: its first block, in float64.
        tokens: tokens of one image.
        places: their places among all tokens, class and register tokens first.
        law: the law of patches and their embeddings.
    """
    prefix, (n, _) = known_tokens(model)[0], law.base.shape
    of_patch = places >= len(prefix)
    own = places[of_patch] - len(prefix)

    def residual(c: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
        """Return R (u(c) − u), and the tokens before LayerNorm."""
        z = torch.cat([prefix, law.base + c @ law.B])
        v = z + block.attention(z)
        off = (block.norm2(v)[places] - tokens.u)[..., None]
        return torch.linalg.solve_triangular(L, off, upper=False)[..., 0], v

    c = torch.zeros(n, len(law.B)).to(law.B)
    for room in _LEVELS:
        L = torch.linalg.cholesky(tokens.doubt + room**2 * torch.eye(tokens.u.shape[1]).to(tokens.u))
        for _ in range(_STEPS):
            with torch.enable_grad():
                point = c.requires_grad_()
                r, v = residual(point, L)
                weight = torch.zeros_like(r, requires_grad=True)  # Jᵀ weight is linear in it: its derivative is J
                (pulled,) = torch.autograd.grad(r, point, weight, create_graph=True)

            def product(
                q: Tensor, r: Tensor = r, pulled: Tensor = pulled, by: Tensor = weight, point: Tensor = point
            ) -> Tensor:
                (pushed,) = torch.autograd.grad(pulled, by, q[0], retain_graph=True)
                return torch.autograd.grad(r, point, pushed, retain_graph=True)[0][None] + q

            (slope,) = torch.autograd.grad(r, point, r.detach(), retain_graph=True)
            c, factor = c.detach(), _factor_of_own(block, v.detach()[len(prefix) :], law, own, L[of_patch])
            step = conjugate_gradients(
                product, -(slope + c)[None], _INNER, lambda q, L=factor: torch.cholesky_solve(q[0][..., None], L)[None, ..., 0]
            )[0]
            cost = r.detach().square().sum() + c.square().sum()
            for cut in range(_HALVINGS + 1):
                new = c + step / 3**cut
                after = residual(new, L)[0].square().sum() + new.square().sum()
                if after < cost:
                    break
            if not after < cost:
                break
            c = new
            if after > (1 - _LEAST_DECREASE) * cost:
                break
    return c @ law.M


def _factor_of_own(
    block: PreNormBlock, v: Float[Tensor, "n d"], law: PatchLaw, own: Int[Tensor, " f"], L: Float[Tensor, "f d d"]
) -> Float[Tensor, "n m m"]:
    """Return Cholesky's factors of Jᵀ J + I without what attention carries from patch to patch."""
    norm = block.norm2
    assert isinstance(norm, nn.LayerNorm)
    std = (v.var(1, correction=0) + norm.eps).sqrt()[:, None]
    t, B = _centred(v) / std, _centred(law.B)
    J = (B - (t @ B.mT)[..., None] * t[:, None] / v.shape[1]) * (norm.weight / std)[:, None]
    J = torch.linalg.solve_triangular(L, J[own].mT, upper=False)
    N = torch.zeros(len(v), len(B), len(B)).to(v).index_copy(0, own, J.mT @ J)
    return torch.linalg.cholesky(N + torch.eye(len(B)).to(N))


def _assign(cost: Float[Tensor, "f n"]) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Return the rows and columns of the assignment of least cost."""
    rows, columns = (torch.as_tensor(each, device=cost.device) for each in linear_sum_assignment(cost.cpu()))
    return rows, columns


def _centred(v: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    return v - v.mean(-1, keepdim=True)

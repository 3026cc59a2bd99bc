"""From what the first MLP reads to the patches, where the embedding is frozen: a fit of all patches under a prior.

Known are tokens u of one image, each with the covariance of its error (`doubt`), the weights, and a Gaussian prior of a
patch. Sought are all patches, where the patch embedding has no gradient.

1. The prior becomes one of embeddings z = base + c B with white c (`PatchLaw`).
2. A token is z + a up to scale and mean, with a from attention. The assignment of greatest likelihood puts tokens into
   slots; it and attention follow from each other, in turn (`places_of_tokens`).
3. The Gauss-Newton method fits the c of all patches at once to all tokens, with less and less room for a residual
   (`fit_patches`). Then x = c M.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from privlab.attacks.rows import known_tokens, least_cost
from privlab.attacks.solvers import conjugate_gradients, linearised
from privlab.attacks.tokens.mlp_inverse import Inverted
from privlab.attacks.tokens.slots import projection
from privlab.attacks.tokens.spans import Mlp, normalise
from privlab.victims import PreNormBlock, VictimModel

_RIDGE = 1e-4
"""Is added to the variances of embedded patches, relative to their mean, because the prior is only approximate."""

_ROUNDS = 20  # rounds of places and attention in turn

_LEVELS = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4)
"""Room for the residual of a token's entries, of variance one, from step to step."""

_STEPS, _INNER, _LEAST_DECREASE, _CUTS = 4, 40, 0.01, 4
"""The most Gauss-Newton steps at each size of room, the steps of conjugate gradients in each, the share by which one
must lower the cost for another to follow, and how often a step that lowers it not at all is cut to a third."""

_STARTS, _FAR = 5, 9.0
"""The most starts of a fit, and the mean squared residual of a token, of variance one, from which it is far off."""


class PatchLaw(NamedTuple):
    """The prior x = c M of a patch with c ~ N(0, I), and its embedding z = base_n + c B in slot n."""

    base: Float[Tensor, "n d"]
    B: Float[Tensor, "m d"]
    M: Float[Tensor, "m k"]
    spread: Float[Tensor, "d d"]

    @classmethod
    def of(cls, model: VictimModel, L: Float[Tensor, "k k"]) -> "PatchLaw":
        """Return the law of embedded patches of the prior x ~ N(0, L Lᵀ), with no more unknowns than they tell.

        `spread` is the covariance of an embedding less its mean, with a ridge.
        """
        # A patch x = L g with g ~ N(0, I) has the embedding base + U diag(σ) Vh g, of m = min(d, k) unknowns.
        W, b = projection(model)
        U, σ, Vh = torch.linalg.svd(W @ L, full_matrices=False)
        # B is diag(σ) Uᵀ with a ridge in σ, as if the embedding had a little noise. Given z = base + c B, the mean of x
        # is c M with M = diag(σ/wide) Vh Lᵀ.
        wide = (σ.square() + _RIDGE * σ.square().mean()).sqrt()
        B = wide[:, None] * U.mT
        # LayerNorm removes the mean of an embedding, so the covariance is that of its centred rows, with another ridge.
        C = B - B.mean(1, keepdim=True)
        S = C.mT @ C
        S = S + _RIDGE * S.diagonal().mean() * torch.eye(len(S)).to(S)
        return cls(b + known_tokens(model)[1], B, (σ / wide)[:, None] * Vh @ L.mT, S)


@torch.no_grad()
def places_of_tokens(model: VictimModel, block: PreNormBlock, tokens: Inverted, law: PatchLaw) -> Int[Tensor, " f"]:
    """Return the places of tokens among all tokens of an image, class and register tokens first.

    A token t is (z + a) / s, less its mean, with a what attention adds and s unknown. Patch tokens are put where z = s
    t − a is likeliest under the law and the doubt of t, for the best s > 0: log p(t) has (D − 2) log s. Class and
    register tokens, whose z is known, are those of greatest cosine. Attention is evaluated on the z of the last round,
    at first on their means.

    Args:
        model: the victim.
        block: its first block, in float64.
        tokens: tokens of one image, in no order.
        law: the law of embedded patches.
    """
    # LayerNorm's scale and bias are undone, in t and in the covariance of its error, D × D for each token.
    mlp, prefix = Mlp.of(block), known_tokens(model)[0]
    t, p, D, z = _centred(normalise(mlp, tokens.u)), len(prefix), tokens.u.shape[1], law.base
    doubt = _centred(_centred(tokens.doubt / (mlp.γ[:, None] * mlp.γ)).mT)
    # Class and register tokens have a known z: their tokens have the greatest cosine with z + a.
    a = block.attention(torch.cat([prefix, z]))
    own, at = least_cost(1 - nn.functional.cosine_similarity(t[:, None], _centred(prefix + a[:p]), dim=2))
    places = torch.zeros(len(t), dtype=torch.long, device=t.device).index_copy(0, own, at)
    rest = torch.ones_like(places, dtype=torch.bool).index_fill(0, own, value=False).nonzero()[:, 0]
    for _ in range(_ROUNDS):
        # In slot n, s t is normal with mean c_n, z + a of the mean patch, and covariance spread + s² doubt. The s² in
        # it is approximated by one value for all, because |t|² = D.
        c = _centred(law.base + a[p:])
        variance = (c.square().sum(1).mean() + law.spread.diagonal().sum()) / D  # about s²
        L = torch.linalg.cholesky(law.spread + variance * doubt[rest])
        # Whitened, the cost is |s x − y|²/2 − (D − 2) log s. Its derivative by s vanishes at s² xx − s xy = D − 2, of
        # which s is the positive root, f × n.
        x, y = (
            torch.linalg.solve_triangular(L, of, upper=False) for of in (t[rest, :, None], c.mT.expand(len(L), -1, -1))
        )
        xx, xy = x.square().sum(1), (x.mT @ y)[:, 0]
        s = (xy + (xy.square() + 4 * (D - 2) * xx).sqrt()) / (2 * xx)
        rows, ns = least_cost((xx * s.square() - 2 * xy * s + y.square().sum(1)) / 2 - (D - 2) * s.log())
        # z is s t − a in the slots of tokens, and that of the mean patch in others. Attention follows from these.
        z = law.base.index_copy(0, ns, s[rows, ns, None] * t[rest[rows]] - a[p + ns])
        places[rest[rows]] = p + ns
        a = block.attention(torch.cat([prefix, z]))
    return places


@torch.no_grad()
def fit_patches(
    model: VictimModel, block: PreNormBlock, tokens: Inverted, places: Int[Tensor, " f"], law: PatchLaw, draw: Generator
) -> Float[Tensor, "n k"]:
    """Return the patches that are likeliest under the law and have these tokens, patches without a token included.

    |R (u(c) − u)|² + |c|² with Rᵀ R = (room² I + doubt)⁻¹ is minimised by the Gauss-Newton method, for less and less
    room, from c that is drawn from N(0, I). Another draw follows if a token is far off in the end; the best counts.

    Args:
        model: the victim.
        block: its first block, in float64.
        tokens: tokens of one image.
        places: their places among all tokens, class and register tokens first.
        law: the law of patches and their embeddings.
        draw: generator of the starts.
    """
    # Each start is a draw of all patches from the prior. The search ends at the first fit that explains every token.
    fit, ends = _Fit(block, known_tokens(model)[0], tokens, places, law), list[Tensor]()
    L = fit.factor(_LEVELS[-1])
    for _ in range(_STARTS):
        start = torch.randn(len(law.base), len(law.B), generator=draw, dtype=torch.float64).to(law.B)
        ends.append(fit.descend(start, _LEVELS))
        if bool((fit.residual(ends[-1], L)[0].square().mean(1) < _FAR).all()):
            break
    return min(ends, key=lambda c: float(fit.cost(c, L))) @ law.M


@dataclass(frozen=True, eq=False)
class _Fit:
    """|R (u(c) − u)|² + |c|² of the tokens of one image at their places."""

    block: PreNormBlock
    prefix: Float[Tensor, "p d"]
    tokens: Inverted
    places: Int[Tensor, " f"]
    law: PatchLaw

    @property
    def of_patch(self) -> Bool[Tensor, " f"]:
        """Return which tokens belong to patches."""
        return self.places >= len(self.prefix)

    def factor(self, room: float) -> Float[Tensor, "f d d"]:
        """Return L of room² I + doubt = L Lᵀ."""
        eye = torch.eye(self.tokens.u.shape[1]).to(self.tokens.u)
        return torch.linalg.cholesky(self.tokens.doubt + room**2 * eye)

    def residual(self, c: Float[Tensor, "n m"], L: Tensor) -> tuple[Float[Tensor, "f d"], Float[Tensor, "t d"]]:
        """Return R (u(c) − u), and all tokens before LayerNorm."""
        # The block runs forward on all patches, so that each patch counts in every token through attention.
        z = torch.cat([self.prefix, self.law.base + c @ self.law.B])
        v = z + self.block.attention(z)
        off = (self.block.norm2(v)[self.places] - self.tokens.u)[..., None]
        return torch.linalg.solve_triangular(L, off, upper=False)[..., 0], v

    def cost(self, c: Float[Tensor, "n m"], L: Float[Tensor, "f d d"]) -> Tensor:
        """Return the cost."""
        return self.residual(c, L)[0].square().sum() + c.square().sum()

    def descend(self, c: Float[Tensor, "n m"], levels: Sequence[float]) -> Float[Tensor, "n m"]:
        """Return where the Gauss-Newton method leads, for one size of room after the other."""
        # The room is wide at first, where the prior counts, and narrow in the end, where the tokens count.
        for room in levels:
            L = self.factor(room)
            for _ in range(_STEPS):
                step = self._step(c, L)
                cost = self.cost(c, L)
                # A step is cut to a third until it lowers the cost. If none does, the next size of room follows.
                tried = [c + step / 3**cut for cut in range(_CUTS + 1)]
                better = next((new for new in tried if self.cost(new, L) < cost), None)
                if better is None:
                    break
                c, enough = better, self.cost(better, L) < (1 - _LEAST_DECREASE) * cost
                if not enough:
                    break
        return c

    def _step(self, c: Float[Tensor, "n m"], L: Tensor) -> Float[Tensor, "n m"]:
        # A Gauss-Newton step solves (Jᵀ J + I) step = −(Jᵀ r + c) by conjugate gradients. J (f d × n m) is never made:
        # `forth` and `back` are products with J and Jᵀ.
        r, forth, back = linearised(lambda c: self.residual(c, L)[0], (c,))
        factor = self._factor_of_own(self.residual(c, L)[1], L)
        own = conjugate_gradients(
            lambda q: back(forth(q[0]))[0][None] + q,
            -(back(r)[0] + c)[None],
            _INNER,
            lambda q: torch.cholesky_solve(q[0][..., None], factor)[None, ..., 0],
        )
        return own[0]

    def _factor_of_own(self, v: Float[Tensor, "t d"], L: Tensor) -> Float[Tensor, "n m m"]:
        """Return Cholesky's factors of Jᵀ J + I without what attention carries from patch to patch."""
        # With a fixed, a change dv of v = z + a moves u by γ ⊙ (I − 1 1ᵀ/d − t tᵀ/d) dv / std(v). The rows of B are the
        # directions of v, so J is f × m × d.
        norm, own = self.block.norm2, self.places[self.of_patch]
        std = (v[own].var(1, correction=0) + norm.eps).sqrt()[:, None]
        t, B = _centred(v[own]) / std, _centred(self.law.B)
        J = (B - (t @ B.mT)[..., None] * t[:, None] / v.shape[1]) * (norm.weight / std)[:, None]
        # (R J_n)ᵀ R J_n (m × m) belongs to the slot of token n; a patch without a token has the I of the prior alone.
        J = torch.linalg.solve_triangular(L[self.of_patch], J.mT, upper=False)
        N = torch.zeros(len(self.law.base), len(B), len(B)).to(v).index_copy(0, own - len(self.prefix), J.mT @ J)
        return torch.linalg.cholesky(N + torch.eye(len(B)).to(N))


def _centred(v: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
    return v - v.mean(-1, keepdim=True)

"""The missing tokens of one image: found from what spans say of their patches, and attention on the patches known.

Known are some tokens of an image with their places, the spans of the MLP's factors, and the row spaces of the patch
embedding and of attention. Sought are the tokens that token separation missed, and the embeddings of all patches.

1. Row spaces restrict each embedding to z = base + Q c with few unknowns (`Embeddings`). `slots_by_law` puts tokens
   without places into their slots.
2. Known tokens and attention, in turn, yield the embeddings of their patches (`_embed_tokens`).
3. With these, the token of a missing slot is a function of its coordinates c. The Levenberg-Marquardt method finds
   c such that u and h lie in what the known tokens leave of the spans (`_Search`); the result is settled and checked.
"""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import jacfwd, vmap

from privlab.attacks.rows import known_tokens, least_cost
from privlab.attacks.solvers import levenberg_marquardt
from privlab.attacks.tokens.equations import outside, remaining
from privlab.attacks.tokens.grouping import heads
from privlab.attacks.tokens.mlp_inverse import InputLaw
from privlab.attacks.tokens.refinement import settle
from privlab.attacks.tokens.slots import Reads, projection
from privlab.attacks.tokens.spans import Mlp, Spans, normalise
from privlab.victims import PreNormBlock, VictimModel

_TOLD = 1e-3
"""Least singular value, relative to the largest one, of a direction of patches that what ∂W_qkv heard is taken to tell:
rounding counts more in the others."""

_ROUNDS = 60  # evaluations of attention that lead from tokens to embeddings: each leaves about two thirds of the error

_STEPS, _FIRST_DAMPING = 25, 1e-2
"""The most steps of the Levenberg-Marquardt method for a missing token, and the damping that it starts with."""

_FOUND, _LEAST_DECREASE, _MOST_IDLE = 0.01, 0.05, 4
"""The root of the cost below which a start has found a token, and the share by which one of the starts must lower its
cost within so many steps for their search to go on."""

_TRIED = 3
"""Results of a slot's starts, least residual first, that are refined as tokens."""

_SAME_TOKEN = 0.9  # least cosine of a result and the token that it is refined to: below, it is that of another slot
_STARTS = 8  # Starts of a slot that are searched from at once. The first ones are the patches around it


class Embeddings(NamedTuple):
    """What the spans of the gradients say of an image's embedded patches: z_n = base_n + Q c_n, with orthonormal Q."""

    base: Float[Tensor, "n d"]
    Q: Float[Tensor, "d r"]

    @classmethod
    def of(cls, reads: Reads, Y: Float[Tensor, "m k"], pe: Float[Tensor, "n d"]) -> "Embeddings":
        """Return the z = W x + b + e with x in the span of Y for which γ₁ ⊙ z lies in what ∂W_qkv heard.

        Args:
            reads: the row spaces of the gradients of the first attention.
            Y: orthonormal rows that span the patches.
            pe: the position embeddings of the slots.
        """
        # A patch x = c Y has k unknowns: z = base + c V with base = b + e and V = Y Wᵀ, k × d.
        norm, (W, b) = reads.block.norm1, projection(reads.model)
        heard, base, V = reads.heard, b + pe, Y @ W.mT
        # γ₁ ⊙ z has no component outside `heard`: (base + c V) · unheard = 0, with d − r columns of `unheard`.
        unheard = norm.weight[:, None] * torch.linalg.svd(heard, full_matrices=True).Vh[len(heard) :].mT
        # V · unheard = U diag(S) Vh: along the first k columns of U, these equations determine c = −(base · unheard)
        # Vhᵀ diag(1/S) Uᵀ. Weak singular values are rounding; at least one direction stays open.
        U, S, Vh = torch.linalg.svd(V @ unheard, full_matrices=True)
        k = min(int((_TOLD * S.amax() < S).sum()), len(Y) - 1) if len(S) else 0
        told = -(base @ unheard) @ Vh[:k].mT / S[:k] @ U[:, :k].mT
        # The other columns of U are the open directions of c, and thus those of z; Q is their orthonormal basis.
        return cls(base + told @ V, torch.linalg.qr((U[:, k:].mT @ V).mT).Q)

    def nearest(self, z: Float[Tensor, "*s d"], n: int | slice = slice(None)) -> Float[Tensor, "*s d"]:
        """Return the embeddings of slot n, or of all slots, that are nearest to z."""
        return self.base[n] + (z - self.base[n]) @ self.Q @ self.Q.mT


class ImageTokens(NamedTuple):
    """Tokens u of one image and their places among all its tokens, class and register tokens first."""

    u: Float[Tensor, "f d"]
    place: Int[Tensor, " f"]

    def missing(self, count: int) -> list[int]:
        """Return the places below `count` that have no token."""
        return sorted({*range(count)} - {*self.place.tolist()})


def slots_by_law(mlp: Mlp, u: Float[Tensor, "f d"], usual: Float[Tensor, "m t d"]) -> ImageTokens:
    """Return the places of tokens: the assignment under which they are likeliest as tokens of photographs.

    The t of a place is taken to be normal, with the mean of the photographs there and one covariance for all places.

    Args:
        mlp: the MLP whose inputs the tokens are.
        u: tokens of one image, in no order, no more than it has.
        usual: all tokens of each of m photographs.
    """
    # −2 log p(t at a place) = |L⁻¹ (t − mean_place)|² + constant, f × t: the least sum is the likeliest assignment.
    law = InputLaw.of(normalise(mlp, usual))
    t, mean = (torch.linalg.solve_triangular(law.L, v.mT, upper=False).mT for v in (normalise(mlp, u), law.mean))
    rows, places = least_cost(torch.cdist(t, mean).square())
    return ImageTokens(u[rows], places)


@torch.no_grad()
def _embed_tokens(
    block: PreNormBlock,
    prefix: Float[Tensor, "p d"],
    of: Embeddings,
    tokens: ImageTokens,
    pe: Float[Tensor, "n d"],
    around: Float[Tensor, "n n"],
    z: Float[Tensor, "n d"],
) -> Float[Tensor, "n d"]:
    """Return the embedded patches of tokens: s t_n = z_n + a_n is solved for z and s, and a = attention(z), in turn.

    Patches without a token are the mean of those around them.
    """
    # Only patches count here: their tokens t, centred, because LayerNorm removes the mean of z + a.
    p = len(prefix)
    of_patch = tokens.place >= p
    n, t = tokens.place[of_patch] - p, normalise(Mlp.of(block), tokens.u[of_patch])
    lost = [place - p for place in tokens.missing(p + len(pe)) if place >= p]
    t = t - t.mean(1, keepdim=True)
    # s t = base + Q c + a + a constant: M = (Q, 1) holds the directions of the unknowns, and P is orthonormal.
    M = torch.cat([of.Q, torch.ones_like(of.Q[:, :1])], 1)  # LayerNorm does not see a constant
    P, R = torch.linalg.qr(M)
    for _ in range(_ROUNDS):
        # Attention is evaluated at the last z, which leaves equations linear in s and c.
        known = (of.base + block.attention(torch.cat([prefix, z]))[p:])[n]
        # Beyond M only s is unknown: s beyond_t = beyond, by least squares. Then R (c, constant) = Pᵀ (s t − known).
        beyond_t, beyond = (each - each @ P @ P.mT for each in (t, known))
        s = (beyond_t * beyond).sum(1, keepdim=True) / beyond_t.square().sum(1, keepdim=True)
        c = torch.linalg.solve_triangular(R, P.mT @ (s * t - known).mT, upper=True)[:-1].mT
        z = z.index_copy(0, n, of.base[n] + c @ of.Q.mT)
        # A patch without a token is the mean of its neighbours, without position embeddings, as near as spans allow.
        z[lost] = of.nearest(pe + around @ (z - pe))[lost]
    return z


@torch.no_grad()
def complete_tokens(
    model: VictimModel,
    block: PreNormBlock,
    of: Embeddings,
    whole: Spans,
    gradients: tuple[Float[Tensor, "m d"], Float[Tensor, "d m"]],
    tokens: ImageTokens,
    usual: Float[Tensor, "i n d"],
    *,
    steps: int,
    tolerance: float,
    passes: int,
) -> tuple[ImageTokens, Float[Tensor, "n d"]]:
    """Return the tokens of an image with those that were missing, as far as they are found, and its embeddings.

    A missing token is a function of the coordinates c of its z = base + Q c, as long as the other patches are
    nearly known: attention's keys and values are theirs. The Levenberg-Marquardt method finds c such that u lies in the
    span of the tokens, and h in that of the hidden units, both without what the found tokens account for. It starts
    from the patches around the slot and from those of photographs. Its result is refined as a separate token
    (`settle`), and taken if its residual is below the tolerance.

    Args:
        model: the victim, whose prefix tokens and position embeddings are read.
        block: its first block, in float64, with timm's own attention.
        of: what is known of the embeddings.
        whole: the spans of the gradients of the block's MLP.
        gradients: those of the MLP's two weights, in float64.
        tokens: the tokens that are known.
        usual: embedded patches of photographs, from which more starts are taken, a pass after the other.
        steps: steps of the Levenberg-Marquardt method in the refinement.
        tolerance: the largest residual of a token.
        passes: passes over the missing slots that may find nothing; each takes other photographs.
    """
    prefix, pe = known_tokens(model)
    around = _around(*model.grid).to(pe)
    # The search begins from the mean photograph, within what the spans allow.
    mlp, p, z, idle = Mlp.of(block), len(prefix), of.nearest(usual.mean(0)), 0
    while True:
        # Every pass determines all embeddings again, because attention mixes the patches.
        z = _embed_tokens(block, prefix, of, tokens, pe, around, z)
        lost = [place for place in tokens.missing(p + len(pe)) if place >= p]
        # A later pass without further photographs has no starts.
        if not lost or idle == passes or (idle and len(usual) <= idle * _STARTS):
            return tokens, z
        # Slots with the most known neighbours come first: their starts are the best.
        known = 1 - torch.eye(len(pe)).to(z)[[place - p for place in lost]].sum(0)
        lost.sort(key=lambda place: -float((around[place - p] * known).sum()))
        # What the known tokens leave of both gradients spans the missing ones alone.
        search, found = _Search.of(mlp, block, remaining(mlp, whole, *gradients, tokens.u)), False
        for place in lost:
            n = place - p
            # The first pass starts from the present estimate and from the neighbours, with the position embedding of
            # this slot. Later passes start from photographs, each from others.
            starts = usual[idle * _STARTS : (idle + 1) * _STARTS, n]
            if idle == 0:
                near = (around[n] > 0).nonzero()[:, 0]
                starts = torch.cat([z[n, None], z[near] - pe[near] + pe[n]])[:_STARTS]
            # Results are then settled as separate tokens in the spans of the whole gradients.
            u = search.run(torch.cat([prefix, z]), place, of.base[n], of.Q, (of.nearest(starts, n) - of.base[n]) @ of.Q)
            α = settle(mlp, whole, u @ whole.u.mT, steps)
            new = α @ whole.u
            # A token has a small residual, is still near the result of the search, and differs from all known tokens.
            fits = (outside(mlp, whole, α) < tolerance) & (nn.functional.cosine_similarity(new, u) > _SAME_TOKEN)
            fits &= (nn.functional.normalize(new, dim=1) @ nn.functional.normalize(tokens.u, dim=1).mT).amax(1) < 0.9999
            # The first that fits, in the order of the search's costs, is added; all embeddings follow again.
            if bool(fits.any()):
                best = int(fits.nonzero()[0])
                u_new, at = torch.cat([tokens.u, new[best, None]]), torch.tensor([place], device=z.device)
                tokens, found = ImageTokens(u_new, torch.cat([tokens.place, at])), True
                break
        idle = 0 if found else idle + 1


def _around(height: int, width: int) -> Float[Tensor, "n n"]:
    """Return for each slot the weights of those around it, of equal size, that add up to one."""
    # The neighbours of a slot are those whose row and column differ by one at most: up to eight.
    row, column = (torch.arange(height * width) // width, torch.arange(height * width) % width)
    near = (row[:, None] - row).abs().maximum((column[:, None] - column).abs()) == 1
    return near / near.sum(1, keepdim=True).clamp_min(1)


@dataclass(frozen=True, eq=False)
class _Search:
    """|(I − P_u) u|² / |u|² + |(I − P_h) h|² / |h|² of u = LN(z + a(z)), z = base + Q c, in single precision.

    The lengths |u| and |h| are the usual ones at the starts.
    """

    block: PreNormBlock
    mlp: Mlp
    spans: Spans

    @classmethod
    def of(cls, mlp: Mlp, block: PreNormBlock, rest: Spans) -> "_Search":
        """Return the search for tokens in the spans `rest`."""
        return cls(copy.deepcopy(block).float(), mlp.to(torch.float32), rest.float())

    def run(
        self, tokens: Float[Tensor, "t d"], place: int, base: Float[Tensor, " d"], Q: Tensor, c: Float[Tensor, "s r"]
    ) -> Float[Tensor, "k d"]:
        """Return the tokens u of least residual that the starts c of one place lead to, given all embedded tokens."""
        # The keys and values of all other tokens are constant; only those of the token at this place change with c.
        others = torch.arange(len(tokens), device=tokens.device) != place
        _, k, v = heads(self.block, tokens[others].float())
        base, Q, c = base.float(), Q.float(), c.float()
        T, H = self.spans.u, self.spans.h

        def token(c: Tensor) -> Tensor:
            return self._token(base + Q @ c, k, v)

        u = vmap(token)(c)
        # Both residuals are relative to the median lengths of u and h at the starts.
        idle = torch.zeros(len(c), dtype=torch.long, device=c.device)
        of_u, of_h = (1 / each.norm(dim=1).median() for each in (u, self.mlp.hidden(u)[0]))

        def at(c: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            # The residual is (I − P_u) u and (I − P_h) h, d + m entries, in the spans of the missing tokens.
            u = vmap(token)(c)
            h, slope = self.mlp.hidden(u)
            r = torch.cat([of_u * (u - u @ T.mT @ T), of_h * (h - h @ H.mT @ H)], 1)
            return u, r, of_h * slope, r.square().sum(1)

        def normal(c: Tensor, _: Tensor, r: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
            # J_u is the derivative of u by c, through attention and LayerNorm; that of h is act′ ⊙ W₁ J_u, m × r.
            J_u = of_u * vmap(jacfwd(token))(c)  # s × d × r
            J_h = slope[..., None] * (self.mlp.W1 @ (J_u / of_u))
            # Jᵀ J of residuals outside the spans is the product of all less that within the spans.
            T_J, H_J = T @ J_u, H @ J_h  # residuals are outside the spans already
            N = J_u.mT @ J_u - T_J.mT @ T_J + J_h.mT @ J_h - H_J.mT @ H_J
            return N, (r[:, None] @ torch.cat([J_u, J_h], 1))[:, 0]

        def over(cost: Tensor, tried: Tensor) -> bool:
            # The search ends when one start has arrived, or when no start has gained enough for some steps.
            nonlocal idle
            idle = torch.where(tried < (1 - _LEAST_DECREASE) * cost, 0, idle + 1)
            least = torch.where(tried < cost, tried, cost).min()
            return float(least) < _FOUND**2 or int(idle.min()) >= _MOST_IDLE

        u, *_, cost = levenberg_marquardt(c, at, _STEPS, _FIRST_DAMPING, normal, over)[1:]
        return u[cost.argsort()[:_TRIED]].double()

    def _token(self, z: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return u of an embedded token among others with keys k and values v."""
        # One query attends to all tokens, with its own key and value last. Then come W_proj, layer scale, the skip
        # connection and LayerNorm.
        attn = self.block.attn
        q, own_k, own_v = heads(self.block, z[None])
        k, v = torch.cat([k, own_k], 1), torch.cat([v, own_v], 1)
        o = ((q @ k.mT * attn.scale).softmax(-1) @ v).transpose(0, 1).reshape(1, -1)
        return self.block.norm2(z[None] + self.block.ls1(attn.proj(o)))[0]

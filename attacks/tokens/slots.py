"""From tokens to the patches behind them: slots are identified, a linear solve follows, and attention sharpens it.

Known are tokens u of the first MLP, in no order, the weights, and row spaces of gradients; X = known + C Y holds the
patches. Sought are the slot of each token and its row c of C. Before the MLP's LayerNorm a token is z + a: s t = z + a
+ a constant, with z = W x + b + e linear in c, and a = W_proj o + b_proj, what attention adds, linear in its o.

1. Outside all unknown directions, s t is the known part of one slot: that identifies the slot. Then c and o follow
   linearly (`slots_of_tokens`). `guesses` goes the other way, from guessed patches to guessed tokens.
2. The Gauss-Newton method on c, with the block's own attention, removes the errors of the spans (`sharpen_patches`).
3. Where no gradient of the patch embedding is released, z itself is solved for (`embeddings_of_tokens`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from privlab.attacks.rows import known_tokens, least_cost
from privlab.attacks.tokens.sharpening import sharpen_coordinates
from privlab.attacks.tokens.spans import UNIT_ROUNDOFF, Mlp, Near, factors, normalise
from privlab.threat import Observation
from privlab.victims import PreNormBlock, VictimModel

QKV, PROJ = "blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight"

_SLOT_COSINE = 0.9  # least cosine, beyond what attention may have added, of a token with the slot that it is put into

_SPARE_SHARE = 1 / 8
"""Share of the D equations of a token that must be left over, for rounding, if these alone determine its unknowns."""

_ROUNDS = 3
"""Evaluations of attention that determine the length of embeddings; the first is right except for LayerNorm's ε."""


class Slots(NamedTuple):
    """What is known of one image's patches: X = known + C Y, with z = W x + b + pe; some slots may be known equally."""

    known: Float[Tensor, "n k"]
    Y: Float[Tensor, "m k"]
    pe: Float[Tensor, "n d"]
    alike: Bool[Tensor, " n"]


class Reads(NamedTuple):
    """What the gradients of the first attention say of its inputs: the row spaces of ∂W_qkv and ∂W_proj.

    Every γ₁ ⊙ z lies in the span of the orthonormal rows of `heard`, because normalised tokens lie in the row space of
    ∂W_qkv; and attention adds W_proj o with o in the span of `mixed`. `block` is the model's first one, in float64.
    """

    model: VictimModel
    block: PreNormBlock
    heard: Float[Tensor, "r d"]
    mixed: Float[Tensor, "m d"]

    @classmethod
    def of(cls, seen: Observation, i: int, block: PreNormBlock, count: int) -> "Reads":
        """Return what attention read in one release.

        Args:
            seen: the observation, with the gradients of the first attention.
            i: number of the release.
            block: the first block, whose γ₁ and β₁ are added to the row space of ∂W_qkv.
            count: number of tokens in the release, which bounds the dimensions of the row spaces.
        """
        # ∂W_qkv = Σ_n q_n LN(z_n)ᵀ and ∂W_proj = Σ_n p_n o_nᵀ: their row spaces are the spans of the LN(z_n) and o_n.
        heard, mixed = (row_space(seen.gradients[name][i], count) for name in (QKV, PROJ))
        # LN(z) = γ₁ ⊙ (z − mean z) / σ + β₁, so γ₁ ⊙ z lies in the row space once γ₁ and β₁ are added to it.
        free = torch.cat([heard, block.norm1.weight[None], block.norm1.bias[None]])
        return cls(seen.model, block, torch.linalg.qr(free.mT).Q.mT, mixed)


def row_space(G: Float[Tensor, "m d"], count: int) -> Float[Tensor, "n d"]:
    """Return an orthonormal basis of the row space of a sum of `count` products, without those that are rounding."""
    _, σ, V = factors(G.double())
    return V[: min(count, int((σ > UNIT_ROUNDOFF * σ[0]).sum()))]


class Solved(NamedTuple):
    """Patches, and which of them came from a token."""

    X: Float[Tensor, "n k"]
    found: Bool[Tensor, " n"]


class Linear(NamedTuple):
    """Tokens and their slots after the linear solve: a row for each token that is put into a slot.

    `token` is its row among all tokens, `slot` is counted with the class and register tokens, and `c` holds its
    coordinates in Y, zeros for a class or register token. `mixed` is the output of attention for it before W_proj.
    """

    token: Int[Tensor, " f"]
    slot: Int[Tensor, " f"]
    c: Float[Tensor, "f m"]
    mixed: Float[Tensor, "f d"]

    def take(self, rows: Int[Tensor, " k"]) -> "Linear":
        """Return some of the rows."""
        return Linear(*(part[rows] for part in self))


@torch.no_grad()
def slots_of_tokens(slots: Slots, u: Float[Tensor, "f d"], reads: Reads, images: int = 1) -> Linear:
    """Return the slots of tokens u, and the coordinates c of their patches; each slot takes one token of every image.

    Beyond the columns of M, t' is parallel to its own slot's base (`_equations`): that distinguishes slots, and then c
    and o follow linearly.

    Args:
        slots: the known part and the span of the patches, and their position embeddings; the same for all images.
        u: tokens of the release, in no order, those of the class and registers among them.
        reads: the row spaces of the gradients of the first attention, of the release.
        images: number of images B of the release.
    """
    # LayerNorm's scale and bias are undone; what is left is s t = z + W_proj o + b_proj + a constant, s unknown.
    t, prefix = _centre(reads.block, u), known_tokens(reads.model)[0]
    _, b_p = _attention_adds(reads.block)
    # Class and register tokens come first, because their z is public. Beyond the directions of W_proj o and of
    # constants, t is parallel to z + b_proj, which identifies them; each image has one of each.
    Q, R = torch.linalg.qr(_free_directions(reads))
    own, at = _assign(t, (prefix + b_p).repeat(images, 1), Q)
    at = at % len(prefix) if len(prefix) else at
    left = _without(len(t), own)
    # `first` (f × D) is the output o of attention for them, before W_proj; no patch belongs to them.
    first = _coordinates(t[own], (prefix + b_p)[at], Q, R)[:, : len(reads.mixed)] @ reads.mixed
    none = slots.Y.new_zeros(len(own), len(slots.Y))
    # The other tokens satisfy base + M (c, o, m) = s t', with m a constant. Without a spare equation nothing identifies
    # a slot.
    equations = _equations(slots, reads)
    if equations is None:
        return Linear(own, at, none, first)
    base, M = equations
    Q, R = torch.linalg.qr(M)
    # t' = (t, 0): the equations of what ∂W_qkv heard, if they are used, have zero on the side of the token.
    t = nn.functional.pad(t, (0, len(M) - t.shape[1]))
    # Beyond the columns of M, the cosine with `base` shows the slot of each token; B images offer each slot B times.
    js, ns = _slots_of(t[left], base.repeat(images, 1), Q, slots.alike.repeat(images))
    js, ns = left[js], ns % len(base)
    # With its slot known, each token has a linear system for its own m coordinates of Y, its o and its constant.
    c, o, _ = _coordinates(t[js], base[ns], Q, R).split([len(slots.Y), len(reads.mixed), 1], 1)
    return Linear(*map(torch.cat, ((own, js), (at, len(prefix) + ns), (none, c), (first, o @ reads.mixed))))


@torch.no_grad()
def guesses(slots: Slots, reads: Reads, X: Float[Tensor, "n k"]) -> Near | None:
    """Return what the class, register and patch tokens would be for patches X, and the spans that they lie in.

    Patches in slots that are known equally are left out.

    None if the D equations of a token do not determine its span.

    Args:
        slots: the known part and the span of the patches, and their position embeddings.
        reads: the row spaces of the gradients of the first attention.
        X: guesses of the normalised patches.
    """
    model, block, equations = reads.model, reads.block, _equations(slots, reads)
    if equations is None or equations[0].shape[1] > model.vit.embed_dim:
        return None
    # z holds the embeddings of the guessed patches, class and register tokens first. Slots that are known equally are
    # left out.
    W, b = projection(model)
    prefix, (base, M) = known_tokens(model)[0], equations
    z = torch.cat([prefix, X @ W.mT + b + slots.pe])
    own = torch.cat([torch.ones_like(slots.alike[:1]).expand(len(prefix)), ~slots.alike])
    # Of each t only the multiple of `base`, beyond Q, and the component in Q are open. The guess of u itself is what
    # the block makes of z.
    Q = torch.linalg.qr(M).Q
    base = _off(torch.cat([prefix + _attention_adds(block)[1], base])[own], Q)
    return Near(block.norm2(z + block.attention(z))[own], nn.functional.normalize(base, dim=1), Q)


def _equations(slots: Slots, reads: Reads) -> tuple[Float[Tensor, "n e"], Float[Tensor, "e r"]] | None:
    """Return base and M of base + M (c, o, m) = s t', which holds for every slot; None if no equation is left over.

    A token t is z + W_proj o + b_proj, up to scale and mean, with z = W x + b + e and x = known + Yᵀ c: D equations,
    t' = t. And γ₁ ⊙ z lies in the span of `heard`: D more, t' = (t, 0). Rounding hides a part of that span, so these
    are used only if too few of the others are left over.
    """
    W, b = projection(reads.model)
    _, b_p = _attention_adds(reads.block)
    # M = (W Yᵀ, W_proj Oᵀ, 1) has a column for each unknown of a token: m of its patch, those of o, and the constant.
    free, V = _free_directions(reads), W @ slots.Y.mT
    base, M = slots.known @ W.mT + b + slots.pe, torch.cat([V, free], 1)
    # The scale s is one unknown more. If an eighth of the D equations is left over, these suffice.
    if M.shape[1] + 1 <= (1 - _SPARE_SHARE) * len(M):
        return base + b_p, M
    # ∂W_qkv adds D equations, (base + V c) · unheard = 0, in which attention does not occur. Their rank is D less that
    # of `heard`, and s takes one equation.
    γ = reads.block.norm1.weight  # the component of γ₁ ⊙ z outside the span of `heard` is zero
    unheard = γ[:, None] * (torch.eye(len(γ)).to(γ) - reads.heard.mT @ reads.heard)
    M = torch.cat([M, torch.cat([unheard.mT @ V, torch.zeros_like(free)], 1)])
    if M.shape[1] >= len(M) - len(reads.heard) - 1:
        return None
    return torch.cat([base + b_p, base @ unheard], 1), M


@torch.no_grad()
def sharpen_patches(
    model: VictimModel,
    block: PreNormBlock,
    slots: Sequence[Slots],
    u: Sequence[Float[Tensor, "f d"]],
    linear: Sequence[Linear],
    X: Sequence[Float[Tensor, "n k"]],
    sharpen: int,
    inner: int,
) -> list[Solved]:
    """Return the patches of images by the Gauss-Newton method on c, with the block's own attention.

    This removes the rounding errors of the spans. Where attention depends on places and some slots are equal, it
    cannot be evaluated: the first estimate of c is the result then.

    Args:
        model: the victim, whose patch embedding and prefix tokens are read.
        block: its first block, in float64.
        slots: for each image, the known part and the span of the patches, and their position embeddings.
        u: for each image, tokens of the release, among which `linear` names its own.
        linear: for each image, its tokens and their slots, with the first estimate of c.
        X: for each image, normalised patches to start from, which are also the result for slots without a token.
        sharpen: the most steps of the Gauss-Newton method.
        inner: steps of conjugate gradients in each of them.
    """
    (W, b), prefix = projection(model), known_tokens(model)[0]
    # Without a token, a slot keeps the patch of X. Images without any patch token are done.
    solved = [Solved(x, torch.zeros_like(x[:, 0], dtype=torch.bool)) for x in X]
    some = [i for i, own in enumerate(linear) if bool((own.slot >= len(prefix)).any())]
    if not some:
        return solved
    # W Yᵀ = Q R: with B = c Rᵀ the basis of z is orthonormal, so that B moves z along unit vectors.
    bases, Rs = zip(*(torch.linalg.qr(W @ slots[i].Y.mT) for i in some), strict=True)
    found, solutions, firsts = [], [], []
    for i, R in zip(some, Rs, strict=True):
        of, own, of_patch = slots[i], linear[i], linear[i].slot >= len(prefix)
        # Each image has two starts, r × n: the linear solution where a slot has a token, and X elsewhere; and X alone.
        found.append(own.slot[of_patch] - len(prefix))
        first = (X[i] - of.known) @ of.Y.mT
        solutions.append(R @ first.index_put((found[-1],), own.c[of_patch]).mT)
        firsts.append(R @ first.mT)
    guesses = [pad_sequence(part, batch_first=True).mT for part in (solutions, firsts)]
    # Without places, attention that depends on them cannot be evaluated: the linear solution is the result.
    if block.reads_places and any(bool(of.alike.any()) for of in slots):
        guesses, sharpen = guesses[:1], 0
    # With z + B Qᵀ for embeddings, the block must reproduce `targets` at their `places`; padding gets `nowhere`.
    z = torch.stack([slots[i].known @ W.mT + b + slots[i].pe for i in some])
    basis = pad_sequence([basis.mT for basis in bases], batch_first=True)
    targets = pad_sequence([u[i][linear[i].token] for i in some], batch_first=True)
    nowhere = len(prefix) + z.shape[1]
    places = pad_sequence([linear[i].slot for i in some], batch_first=True, padding_value=nowhere)
    Bs = sharpen_coordinates(prefix, block, z, basis, targets, places, guesses, sharpen, inner)
    for i, R, B, ns in zip(some, Rs, Bs, found, strict=True):
        # B = c Rᵀ yields c, and thus X = known + c Y in the slots with a token.
        C = torch.linalg.solve_triangular(R, B[:, : len(R)].mT, upper=True).mT
        known = solved[i].found.index_fill(0, ns, value=True)
        solved[i] = Solved(torch.where(known[:, None], slots[i].known + C @ slots[i].Y, X[i]), known)
    return solved


@torch.no_grad()
def embeddings_of_tokens(u: Float[Tensor, "f d"], reads: Reads, sharpen: int, inner: int) -> Float[Tensor, "p d"]:
    """Return the embeddings z of the patches among u, in no order, each up to an added constant, which nothing reads.

    This needs no gradient of the patch embedding. γ₁ ⊙ z lies in what ∂W_qkv heard, and the rest of a token's s t = z +
    a (and a constant) in W_proj o + b_proj: so t is split, if the columns of both are independent. What attention adds
    does not depend on the length of z; the length of a determines s. The Gauss-Newton method sharpens z within what was
    heard.

    Args:
        u: exact tokens of one image, in no order. A class token that is missing takes no patch's place; one that is
            inexact, of a cosine below `_SLOT_COSINE`, would count as a patch.
        reads: the row spaces of the gradients of the first attention.
        sharpen: the most steps of the Gauss-Newton method.
        inner: steps of conjugate gradients in each of them.
    """
    model, block = reads.model, reads.block
    # z lies in the span of Z, which is that of `heard` over γ₁, and a in that of W_proj Oᵀ and b_proj.
    t, prefix, count = _centre(block, u), known_tokens(model)[0], model.vit.patch_embed.num_patches
    W_p, b_p = _attention_adds(block)
    mixed = torch.cat([W_p @ reads.mixed.mT, b_p[:, None]], 1)[:, : len(reads.mixed) + int(b_p.any())]
    Z = torch.linalg.qr(reads.heard.mT / block.norm1.weight[:, None]).Q  # a constant is among them
    M = torch.cat([Z, mixed], 1)
    if M.shape[1] >= len(M):  # no equation is left over
        return u[:0]
    # The class and register tokens are identified as in `slots_of_tokens`; the others are the patches.
    own, at = _assign(t, prefix + b_p, torch.linalg.qr(torch.cat([mixed, torch.ones_like(b_p[:, None])], 1)).Q)
    js = _without(len(t), own)[:count]
    if not len(js):
        return u[:0]
    # t = part + rest with part in Z and rest in W_proj o + b_proj, unique if the columns of M are independent. So part
    # is z / s, up to a constant, and rest is a / s.
    Q, R = torch.linalg.qr(M)
    part = torch.linalg.solve_triangular(R, Q.mT @ t[js].mT, upper=True)[: Z.shape[1]].mT @ Z.mT
    part = part - part.mean(1, keepdim=True)
    rest = t[js] - part
    # The length s solves s · rest = a by least squares, with a evaluated at s · part and, for patches without a token,
    # at the mean of the others.
    z, length = part, prefix.std(1).mean() / part.std(1).mean()
    for _ in range(_ROUNDS):  # LayerNorm's ε makes a depend slightly on the length of z
        z = torch.cat([length * part, (length * part).mean(0).expand(count - len(js), -1)])
        a = block.attention(torch.cat([prefix, z]))[len(prefix) : len(prefix) + len(js)]
        length = ((a * rest).sum(1) / rest.square().sum(1))[:, None]
        length = length.where(length > 0, length.abs().median())
    # The Gauss-Newton method then changes all z within Z until the block reproduces the tokens.
    places = torch.cat([at, len(prefix) + torch.arange(len(js), device=u.device)])
    start, known = [z @ Z], torch.zeros_like(z)
    own = u[torch.cat([own, js])]
    B = sharpen_coordinates(prefix, block, known, Z.mT, own, places, start, sharpen, inner)
    return (B @ Z.mT)[: len(js)]


def _centre(block: PreNormBlock, u: Float[Tensor, "f d"]) -> Float[Tensor, "f d"]:
    """Return tokens before LayerNorm's scale and bias, of zero mean and unit length."""
    t = normalise(Mlp.of(block), u)
    return nn.functional.normalize(t - t.mean(1, keepdim=True), dim=1)


def _without(count: int, taken: Int[Tensor, " p"]) -> Int[Tensor, " q"]:
    """Return the numbers below `count` that are not taken, in their order."""
    return torch.ones(count, dtype=torch.bool, device=taken.device).index_fill(0, taken, value=False).nonzero()[:, 0]


def projection(model: VictimModel) -> tuple[Float[Tensor, "d k"], Float[Tensor, " d"]]:
    """Return W and b of the patch embedding, in float64."""
    proj = model.vit.patch_embed.proj
    W = proj.weight.detach().flatten(1).double()
    return W, torch.zeros_like(W[:, 0]) if proj.bias is None else proj.bias.detach().double()


def _free_directions(reads: Reads) -> Float[Tensor, "d m"]:
    """Return the directions that attention may have added to a token, and the constant direction."""
    W, _ = _attention_adds(reads.block)
    return torch.cat([W @ reads.mixed.mT, torch.ones_like(W[:, :1])], 1)


def _attention_adds(block: PreNormBlock) -> tuple[Float[Tensor, "d d"], Float[Tensor, " d"]]:
    """Return the matrix and the bias of attention's projection, with the block's layer scale in them."""
    W, b = block.attn.proj.weight.detach(), block.attn.proj.bias
    # Layer scale multiplies the rows of W_proj and b_proj.
    scale = torch.as_tensor(block.ls1(torch.ones_like(W[:, 0])))
    return scale[:, None] * W, scale * (torch.zeros_like(W[:, 0]) if b is None else b.detach())


def _off(v: Float[Tensor, "f d"], Q: Float[Tensor, "d r"]) -> Float[Tensor, "f d"]:
    """Return v without its component in the orthonormal columns of Q."""
    return v - (v @ Q) @ Q.mT


def _cosine(t: Float[Tensor, "f d"], base: Float[Tensor, "s d"], Q: Float[Tensor, "d r"]) -> Float[Tensor, "f s"]:
    """Return the cosine of each token and each slot's known part, beyond Q."""
    t, base = (nn.functional.normalize(_off(v, Q), dim=1) for v in (t, base))
    return t @ base.mT


def _assign(
    t: Float[Tensor, "f d"], base: Float[Tensor, "s d"], Q: Float[Tensor, "d r"]
) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Return which tokens belong to which slots: the assignment of greatest cosine beyond Q."""
    cosine = _cosine(t, base, Q).nan_to_num(-1)
    rows, columns = least_cost(-cosine)
    # The assignment makes as many pairs as it can; a small cosine shows that a token does not belong to its slot.
    near = cosine[rows, columns] > _SLOT_COSINE
    return rows[near], columns[near]


def _slots_of(
    t: Float[Tensor, "f d"], base: Float[Tensor, "n d"], Q: Float[Tensor, "d r"], alike: Bool[Tensor, " n"]
) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Return tokens and their slots; equal slots take the remaining tokens in any order."""
    # Slots that differ from all others choose among all tokens first.
    open_, hidden = (~alike).nonzero()[:, 0], alike.nonzero()[:, 0]
    js, ns = _assign(t, base[open_], Q)
    rest = _without(len(t), js)
    cosine = _cosine(t[rest], base[hidden[:1]], Q).sum(1)  # one column, the same for all; or none
    # The tokens that fit the shared part of equal slots best fill these, in any order.
    rest = rest[cosine.argsort(descending=True)][: len(hidden)]
    return torch.cat([js, rest]), torch.cat([open_[ns], hidden[: len(rest)]])


def _coordinates(
    t: Float[Tensor, "p d"], base: Float[Tensor, "p d"], Q: Float[Tensor, "d r"], R: Float[Tensor, "r r"]
) -> Float[Tensor, "p r"]:
    """Return the coordinates x for which base + Q R x = s t for some scale s."""
    # Beyond Q no unknown is left but s: s t_off = base_off, by least squares. Then R x = Qᵀ (s t − base).
    t_off, base_off = _off(t, Q), _off(base, Q)
    s = (t_off * base_off).sum(1, keepdim=True) / t_off.square().sum(1, keepdim=True)
    return torch.linalg.solve_triangular(R, Q.mT @ (s * t - base).mT, upper=True).mT

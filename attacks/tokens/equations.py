"""The inputs of a block's MLP, one by one, from the gradients of its two layers: token separation.

Known are the MLP u ↦ h = act(W₁ u + b₁) ↦ W₂ h and the gradients ∂W₁ = Σ_n δ_n u_nᵀ and ∂W₂ = Σ_n ε_n h_nᵀ, sums over
the tokens n. Each single u_n is sought.

1. Decompositions of both gradients yield the spans of the u_n, h_n, δ_n and ε_n, but not yet single vectors (`Spans`).
2. Starts are points of span{u_n}: guesses, draws of LayerNorm's form (`_start`), or tokens of other images.
3. Each start moves until act(W₁ u + b₁) lies in span{h_n} (`refine`, `settle`). It is a token if the residual is small
   (`outside`), and each token counts once (`_distinct`).
4. Tokens that were found are removed from both gradients (`backward`, `_left`). The next round searches the rest.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from privlab.attacks.tokens.refinement import FAR, refine, settle
from privlab.attacks.tokens.spans import Mlp, Near, Spans, normalise, packed

_FIRST_TOLERANCE = 1e-5
"""The largest residual of the first tokens; it grows tenfold, up to the caller's tolerance, when no more are found."""

_MOST_IDLE = 2
"""Idle rounds, or steps without progress, in a row, after which a larger residual is allowed or a search ends."""

_STARTS_PER_TOKEN = 8
"""A round is idle if at most one in this many starts finds a token, as long as the limit can still be raised."""

_SLOT_COSINE = 0.99
"""Least cosine, beyond Q, of a token with its own slot for a guess to count: a wrong token would hide others."""

_OUTLIER_FACTOR = 100
"""A result of a guess is not a token if its residual is more than this many times the median, whatever is allowed."""

_SAME_COSINE = 1 - 1e-6  # the cosine from which the results of two guesses are the same token

_FREE_TWINS = 3e-3  # how far below one that cosine is for guesses of which no span is known, as for random starts

_INVERSE_STEPS = 4
"""Steps of inverse iteration; each gains the square of the error of the search, so four are more than enough."""


class Separated(NamedTuple):
    """Tokens u in no order; `residual` is how far the h of each lies outside the span, relative to its length.

    `wanted` is the number of tokens in the gradient, found or not.
    """

    u: Float[Tensor, "f d"]
    residual: Float[Tensor, " f"]
    wanted: int


@torch.no_grad()
def separate(
    mlp: Mlp,
    G1: Float[Tensor, "b m d"],
    G2: Float[Tensor, "b d m"],
    count: int,
    draws: Sequence[Generator],
    *,
    starts: int,
    rounds: int,
    steps: int,
    tolerance: float,
    near: Near | None = None,
    usual: Float[Tensor, "p d"] | None = None,
    most: int | None = None,
) -> list[Separated]:
    """Find the up to `count` tokens u_n of each release whose products make up G1 = ∂ℓ/∂W₁ and G2 = ∂ℓ/∂W₂.

    A vector u of LayerNorm's form in span{u_n} is taken for a token if act(W₁ u + b₁) lies in span{h_n}: this holds for
    tokens, and not in general for sums of tokens. The Levenberg-Marquardt method finds such u, from guesses first, then
    from random starts. The tokens found are removed: ε_n is the one vector of span{ε} with act′ ⊙ W₂ᵀ ε_n in
    span{δ}, and the rows of (I − P_ε) ∂W₂ and (I − P_δ) ∂W₁, with P on the ε and the δ of found tokens, span those of
    the others alone. So no token is found twice, and each round searches a smaller space.

    All releases are searched in the same rounds, because a GPU takes hardly longer for many than for one. Each has its
    own starts, residuals that are allowed and end.

    Args:
        mlp: the MLP whose gradients they are, in float64.
        G1: the gradient of the first layer's weight in each release.
        G2: the gradient of the second layer's weight.
        count: number of tokens, less than the width d; fewer are sought if the gradients have a smaller rank.
        draws: for each release, the generator of its starts.
        starts: random starts in each round.
        rounds: the most rounds.
        steps: steps of the Levenberg-Marquardt method.
        tolerance: the residual below which a solution is a token. Those of the least residual are taken first, and
            larger ones only when no smaller one is left, because removing an inexact token would hide others.
        near: guesses of some tokens of each release, from which these are found together.
        usual: tokens of other images. Half of the starts of each round are some of them, within the span: nearer to
            tokens than points that are drawn at random.
        most: the largest number of tokens that is searched for in a release, as not all products need be of this MLP;
            None for all.

    Source: ours; the sums are the chain rule, over batch and tokens.
    """
    # `Spans` has orthonormal bases of all four kinds of factors; T (n × d) is that of the u. `whole` keeps the releases
    # that are still searched, `rest` what their missing tokens span, `every` all releases.
    G1, G2, rough, d = G1.double(), G2.double(), mlp.to(torch.float32), G1.shape[2]
    every = whole = rest = Spans.of(G1, G2, count)
    # The rank of a release bounds its tokens: each linearly independent token adds one dimension.
    ranks = every.real().sum(1).tolist()
    wanted = [rank if most is None else min(most, rank) for rank in ranks]
    found, tokens = [0] * len(G1), list(G1[:, :0])
    idle, limits, on = [0] * len(G1), [_FIRST_TOLERANCE] * len(G1), list(range(len(G1)))
    known = G1.new_zeros(len(G1), 0, 2 * d + G1.shape[1])  # u, ε and δ of the tokens found
    for number in range(rounds):
        # After rounds with few new tokens a residual ten times as large is allowed, up to the caller's tolerance.
        for i in on:
            if idle[i] == _MOST_IDLE and limits[i] < tolerance:
                limits[i], idle[i] = min(10 * limits[i], tolerance), 0
        # A release leaves the search once all its tokens are found, or if its rounds stay idle at the largest limit.
        going = [j for j, i in enumerate(on) if found[i] < wanted[i] and idle[i] < _MOST_IDLE]
        if not going:
            break
        if len(going) < len(on):
            rows, on = torch.tensor(going, device=G1.device), [on[j] for j in going]
            whole, rest = whole.take(rows), rest.take(rows)
            G1, G2, known = G1[rows], G2[rows], known[rows]
            near = None if near is None else near.take(rows, rows)
        # Two solutions with residuals up to the limit are the same token from the cosine `twin` on.
        limit, twin = G1.new_tensor([(limits[i], 1 - min(3 * limits[i], 3e-3)) for i in on]).unbind(1)
        # The first round starts from the guesses, if there are any; the others start from points within the rest.
        if near is not None and number == 0:
            new = _refine_guesses(mlp, whole, near, starts, steps, tolerance)
        else:
            of = [draws[i] for i in on]
            α = _start(mlp, rest, starts, of)
            if usual is not None:
                # Tokens of other images replace half of the starts: α = u Tᵀ is the point of the span nearest to u.
                chosen = torch.stack([torch.randperm(len(usual), generator=draw)[: starts // 2] for draw in of])
                images = usual[chosen.to(usual.device)].double() @ rest.u.mT
                α = torch.cat([α[:, : starts - chosen.shape[1]], images], 1)
            # Starts move within the rest in single precision. Distinct results below the tolerance are candidates.
            α = refine(rough, rest.float(), α.float(), steps).double()  # on all units: drawn starts need them
            new = _distinct(mlp, rest, α, tolerance, twin)
            # The candidates settle in double precision in the spans of the whole gradient, which have no errors of
            # removed tokens. Their residual there must be below the present limit.
            α = settle(mlp, whole, new @ whole.u.mT, steps)  # on the spans of the whole gradient
            new = _distinct(mlp, whole, α, limit, twin)
        # A result counts if it repeats no token found before. Those of least residual come first if not all are wanted.
        old = (_unit(new) @ _unit(known[..., :d]).mT >= twin[:, None, None]).any(2)
        fresh = ~old & ~new[..., 0].isnan()
        room = torch.tensor([wanted[i] - found[i] for i in on], device=G1.device)
        new, counts = packed(new, fresh & (fresh.cumsum(1) <= room[:, None]))
        for i, n in zip(on, counts, strict=True):
            # A few tokens in a round do not count as progress as long as a larger residual can still be allowed.
            few = starts // _STARTS_PER_TOKEN if limits[i] < tolerance else 0
            idle[i] = 0 if n > few else idle[i] + 1
            found[i] += n
        if any(counts):
            # Each new token gets its ε and δ, by which it is removed; rows of NaN go to the end of each release.
            parts = [torch.cat([some, *backward(mlp, whole, some)], 2) for some in new.split(starts, 1)]
            known = torch.cat([known, *parts], 1)
            known, _ = packed(known, ~known[..., 0].isnan())
            for i, own in zip(on, known, strict=True):
                tokens[i] = own[: found[i], :d]
            # What remains after the removal of all tokens found so far is the space of the next round.
            left = torch.tensor([ranks[i] - found[i] for i in on], device=G1.device)
            rest = _left(whole, G1, G2, left, *known[..., d:].split([d, G1.shape[1]], 2))
    # The residuals that are returned are those in the spans of the whole gradients, for all releases.
    u = pad_sequence(tokens, batch_first=True)
    residual = outside(mlp, every, u @ every.u.mT)
    return [Separated(own, off[: len(own)], n) for own, off, n in zip(tokens, residual, wanted, strict=True)]


def remaining(
    mlp: Mlp, whole: Spans, G1: Float[Tensor, "m d"], G2: Float[Tensor, "d m"], found: Float[Tensor, "f d"]
) -> Spans:
    """Return the spans of what found tokens leave of both gradients.

    Args:
        mlp: the MLP whose inputs the tokens are.
        whole: spans of the whole gradients.
        G1: the gradient of the first layer's weight, in float64.
        G2: the gradient of the second layer's weight, in float64.
        found: the tokens that are known.
    """
    if not len(found):
        return whole
    return _left(whole, G1, G2, len(whole.u) - len(found), *backward(mlp, whole, found))


def _left(
    whole: Spans,
    G1: Float[Tensor, "*b m d"],
    G2: Float[Tensor, "*b d m"],
    count: int | Int[Tensor, " b"],
    ε: Float[Tensor, "*b f d"],
    δ: Float[Tensor, "*b f m"],
) -> Spans:
    """Return the spans of what is left of both gradients, `count` products, without those of some ε and δ."""
    # Q_ε (d × f) and Q_δ (m × f) have orthonormal columns. Tokens of padding are NaN: QR needs zeros there, and makes
    # unit columns of them, which are set to zero afterwards.
    Q_ε, Q_δ = (torch.linalg.qr(each.nan_to_num(0).mT).Q for each in (ε, δ))
    Q_ε, Q_δ = (Q * ~each[..., None, :, 0].isnan() for Q, each in ((Q_ε, ε), (Q_δ, δ)))
    # (I − P_δ) ∂W₁ = Σ_n (I − P_δ) δ_n u_nᵀ has no term of a token that was found, nor has (I − P_ε) ∂W₂. So their row
    # spaces are the spans of the other u_n and h_n.
    return whole.without(G1 - Q_δ @ (Q_δ.mT @ G1), G2 - Q_ε @ (Q_ε.mT @ G2), count)


def _start(mlp: Mlp, spans: Spans, number: int, draws: Sequence[Generator]) -> Float[Tensor, "b s n"]:
    """Draw coordinates α of points u = α T of LayerNorm's form: t of zero mean and unit variance.

    Along the directions of ∂W₁ they have variances σ. Random sums of its rows would have σ², from which weak tokens are
    missed, and with variances of 1 almost no token of a flat photograph is found.
    """
    # In coordinates, u = α T has t = (u − β) / γ = α P − c, with P = T diag(1/γ), n × d.
    T, d = spans.u, spans.u.shape[2]
    P, c, counts = T / mlp.γ, mlp.β / mlp.γ, spans.real().sum(1)  # t = α P − c
    # The mean of t is α · mean − mean(c), with `mean` of n entries. `base` is the shortest α for which it is zero.
    mean = P.mean(2)
    plain = mean.square().sum(1) <= 1e-10 / d * P.square().sum((1, 2)) / counts
    mean = mean.where(~plain[:, None], 0)  # where β = 0 and γ = 1, every point has zero mean
    back = mean / mean.square().sum(1, keepdim=True).clamp_min(torch.finfo(T.dtype).tiny)
    base = c.mean() * back
    # α is Gaussian with variances σ, drawn separately for each release, and zero in the rows of padding.
    each = zip(draws, counts.tolist(), strict=True)
    drawn = [torch.randn(number, n, generator=draw, dtype=T.dtype).mT for draw, n in each]
    α = pad_sequence([*drawn, drawn[0].new_zeros(T.shape[1], number)], batch_first=True)[:-1].mT.to(T.device)
    α = α * spans.σ.sqrt()[:, None]
    # Only the component orthogonal to `mean` is kept, so t has zero mean for every multiple of α added to `base`.
    α = α - (α @ mean[..., None]) * back[:, None]
    # The length follows from |s v + b|² = d, quadratic in s: s² vv + 2 s vb + bb = 0 with bb = |b|² − d; the larger
    # root is taken. Without a real root, s = −vb / vv comes nearest to it.
    v, b = α @ P, base[:, None] @ P - c
    vv, vb, bb = v.square().sum(2), (v @ b.mT)[..., 0], b.square().sum(2) - d
    return base[:, None] + ((vb.square() - vv * bb).clamp_min(0).sqrt() - vb)[..., None] / vv[..., None] * α


def _refine_guesses(
    mlp: Mlp, whole: Spans, near: Near, starts: int, steps: int, tolerance: float
) -> Float[Tensor, "b k d"]:
    """Return the tokens that the guesses lead to; similar ones are kept if their known spans differ."""
    found: list[Tensor] = []
    for u, base in zip(near.u.split(starts, 1), near.base.split(starts, 1), strict=True):
        # The guesses are searched from far, in the spans of the whole gradient, with what is known of each t.
        of = Near(u, base, near.Q)
        α = settle(mlp, whole, u @ whole.u.mT, steps, of, FAR)
        # A result is dropped if, beyond Q, its t no longer points along the known part of its own slot.
        own = (of.cosine(normalise(mlp, α @ whole.u)) > _SLOT_COSINE) | ~base.any(2)
        found.append(α.where(own[..., None], torch.nan))
    α = torch.cat(found, 1)
    # The median residual shows how exact the spans are; results far above it are not tokens.
    residual = outside(mlp, whole, α)
    usual = residual.where(residual.isfinite(), torch.nan).nanmedian(1).values.nan_to_num(0)
    limit = (_OUTLIER_FACTOR * usual).clamp_min(_FIRST_TOLERANCE).clamp_max(tolerance)
    return _distinct(mlp, whole, α, limit, _SAME_COSINE if near.base.any() else 1 - _FREE_TWINS)


def outside(mlp: Mlp, spans: Spans, α: Float[Tensor, "*b s n"]) -> Float[Tensor, "*b s"]:
    """Return the residual of each u = α T as a token: |(I − P_h) h| / |h|, plus its deviation from LayerNorm's form.

    Args:
        mlp: the MLP whose input u would be.
        spans: the spans of tokens (T) and of hidden units (P_h).
        α: coordinates of the candidates.
    """
    u = α @ spans.u
    h, _ = mlp.hidden(u)
    t = normalise(mlp, u)
    # |(I − P_h) h| / |h| is zero for a token; so are mean t and |t|² / d − 1. A result of NaN is infinitely far off.
    off = (h - (h @ spans.h.mT) @ spans.h).norm(dim=-1) / h.norm(dim=-1)
    return (off + t.mean(-1).abs() + (t.square().mean(-1) - 1).abs()).nan_to_num(torch.inf)


def _distinct(
    mlp: Mlp, spans: Spans, α: Float[Tensor, "b s n"], limit: Tensor | float, twin: Tensor | float
) -> Float[Tensor, "b k d"]:
    """Return the tokens u = α T with a residual below the limit, least residual first, each token once."""
    # The candidates are sorted by their residuals; `twins` (k × k) marks the pairs whose cosine is at least `twin`.
    residual, best = outside(mlp, spans, α).sort(1)
    u = (α @ spans.u).gather(1, best[..., None].expand(-1, -1, spans.u.shape[2]))
    limit, twin = (torch.as_tensor(of, device=α.device).reshape(-1, 1) for of in (limit, twin))
    twins = _unit(u) @ _unit(u).mT >= twin[..., None]
    read = torch.cat([twins, (residual < limit)[..., None]], 2).cpu()  # decisions one by one do not wait for a GPU
    twins, kept = read[..., :-1].numpy(), read[..., -1].numpy().copy()
    # A candidate remains if it is below the limit and no twin of it with a smaller residual remains.
    for i in range(kept.shape[1]):
        kept[:, i] &= ~(twins[:, i, :i] & kept[:, :i]).any(1)
    return packed(u, torch.from_numpy(kept))[0]


def backward(
    mlp: Mlp, whole: Spans, u: Float[Tensor, "*b k d"]
) -> tuple[Float[Tensor, "*b k d"], Float[Tensor, "*b k m"]]:
    """Return the gradients in the MLP at tokens u, up to their length: ε of its output, and δ = act′ ⊙ W₂ᵀ ε.

    Args:
        mlp: the MLP whose inputs the tokens are.
        whole: spans of the whole gradients: ε is the vector of span{ε} whose δ lies in span{δ}.
        u: tokens that were found.
    """
    # With the rows E_i of the basis of span{ε}, ε = c E has δ = act′ ⊙ W₂ᵀ ε = c V. Sought is the c of each token for
    # which δ lies in span{δ}: cᵀ N c = |(I − P_δ) c V|² is zero.
    _, slope = mlp.hidden(u)
    n, real = whole.ε.shape[-2], whole.real()[..., None, :]
    V = slope[..., None, :] * (whole.ε @ mlp.W2)[..., None, :, :]  # for each ε of the basis: k × n × m
    along = (V.flatten(-3, -2) @ whole.δ.mT).unflatten(-2, (-1, n))
    N = V @ V.mT - along @ along.mT  # its least eigenvalue is zero, and inverse iteration finds the vector
    # A shift of 10⁻¹³ of the mean diagonal makes N positive for Cholesky; rows of padding get one.
    diagonal = N.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(torch.where(real, 1e-13 * (diagonal.sum(-1) / real.sum(-1))[..., None], 1))
    L = torch.linalg.cholesky_ex(N)[0]
    # This is inverse iteration: each solve with N enlarges the eigenvector of the least eigenvalue most.
    c = torch.ones_like(N[..., :1]) * real[..., None]
    for _ in range(_INVERSE_STEPS):
        c = torch.nn.functional.normalize(torch.cholesky_solve(c, L), dim=-2)
    return c[..., 0] @ whole.ε, (c.mT @ V)[..., 0, :]


def _unit(u: Float[Tensor, "*b s d"]) -> Float[Tensor, "*b s d"]:
    return torch.nn.functional.normalize(u, dim=-1)

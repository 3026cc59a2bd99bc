"""The inputs of a block's MLP, one by one, from the gradients of its two layers: token separation."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.attacks.tokens.refinement import FAR, refine, settle
from privlab.attacks.tokens.spans import Mlp, Near, Spans, normalise

__all__ = ["Separated", "outside", "remaining", "separate"]

_FIRST_TOLERANCE = 1e-5
"""The largest residual of the first tokens; it grows tenfold, up to the caller's tolerance, when no more are found."""

_MOST_IDLE = 2
"""Idle rounds, or steps without progress, in a row, after which a larger residual is allowed or a search ends."""

_STARTS_PER_TOKEN = 8
"""A round is idle if at most one in this many starts finds a token, as long as the limit can still be raised."""

_SLOT_COSINE = 0.99
"""Least cosine, beyond Q, of a token with its own slot for a guess to count: a wrong token would hide others."""

_OUTLIER_FACTOR = 100
"""A result of a guess is no token if its residual is more than this many times the median, whatever is allowed."""

_SAME_COSINE = 1 - 1e-6
"""The cosine from which the results of two guesses are the same token."""

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
    G1: Float[Tensor, "m d"],
    G2: Float[Tensor, "d m"],
    count: int,
    draw: Generator,
    *,
    starts: int,
    rounds: int,
    steps: int,
    tolerance: float,
    near: Near | None = None,
    usual: Float[Tensor, "p d"] | None = None,
    most: int | None = None,
) -> Separated:
    """Find the up to `count` tokens u_n whose products make up G1 = ∂ℓ/∂W₁ and G2 = ∂ℓ/∂W₂.

    A vector u of LayerNorm's form in span{u_n} is taken for a token if act(W₁ u + b₁) lies in span{h_n}: this holds for
    tokens, and not in general for sums of tokens. The Levenberg-Marquardt method finds such u, from guesses first, then
    from random starts. The tokens found are removed: ε_n is the one vector of span{ε} with act′ ⊙ W₂ᵀ ε_n in
    span{δ}, and the rows of (I − P_ε) ∂W₂ and (I − P_δ) ∂W₁, with P on the ε and the δ of found tokens, span those of
    the others alone. So no token is found twice, and each round searches a smaller space.

    Args:
        mlp: the MLP whose gradients they are, in float64.
        G1: the gradient of the first layer's weight.
        G2: the gradient of the second layer's weight.
        count: number of tokens, less than the width d; fewer are sought if the gradients have a smaller rank.
        draw: generator of the starts.
        starts: random starts in each round.
        rounds: the most rounds.
        steps: steps of the Levenberg-Marquardt method.
        tolerance: the residual below which a solution is a token. Those of the least residual are taken first, and
            larger ones only when no smaller one is left, because removing an inexact token would hide others.
        near: guesses of some tokens, from which these are found together.
        usual: tokens of other images. Half of the starts of each round are some of them, within the span: nearer to
            tokens than points that are drawn at random.
        most: the tokens after which the search ends, where only some of the products are of this MLP's weights; None
            for all of them.

    Source: ours; the sums are the chain rule, batch and tokens alike.
    """
    G1, G2 = G1.double(), G2.double()
    whole = rest = Spans.of(G1, G2, count)
    count = len(whole.u)
    most = count if most is None else min(most, count)
    found, residual = G1.new_zeros(0, G1.shape[1]), G1.new_zeros(0)
    ε, δ = found, G1.new_zeros(0, len(G1))
    idle, limit, rough = 0, _FIRST_TOLERANCE, mlp.to(torch.float32)
    for number in range(rounds):
        if idle == _MOST_IDLE and limit < tolerance:
            limit, idle = min(10 * limit, tolerance), 0
        if len(found) == most or idle == _MOST_IDLE:
            break
        if near is not None and number == 0:
            new = refine_guesses(mlp, whole, near, starts, steps, tolerance)
        else:
            α = start(mlp, rest, starts, draw)
            if usual is not None:
                chosen = torch.randperm(len(usual), generator=draw)[: starts // 2].to(usual.device)
                α = torch.cat([α[: starts - len(chosen)], usual[chosen].double() @ rest.u.mT])
            α = refine(rough, rest.float(), α.float(), steps).double()  # on all units: drawn starts need them
            new = distinct(mlp, rest, α, tolerance, _twin(limit))
            α = settle(mlp, whole, new @ whole.u.mT, steps)  # on the spans of the whole gradient
            new = distinct(mlp, whole, α, limit, _twin(limit))
        if len(found):
            new = new[(_unit(new) @ _unit(found).mT).amax(1) < _twin(limit)]
        new = new[: most - len(found)]
        few = starts // _STARTS_PER_TOKEN if limit < tolerance else 0
        idle = 0 if len(new) > few else idle + 1
        if len(new):
            found = torch.cat([found, new])
            for some in new.split(starts):
                ε, δ = (torch.cat(both) for both in zip((ε, δ), backward(mlp, whole, some), strict=True))
            Q_ε, Q_δ = torch.linalg.qr(ε.mT).Q, torch.linalg.qr(δ.mT).Q
            rest = whole.without(G1 - Q_δ @ (Q_δ.mT @ G1), G2 - Q_ε @ (Q_ε.mT @ G2), count - len(found))
    if len(found):
        residual = outside(mlp, whole, found @ whole.u.mT)
    return Separated(found, residual, most)


def remaining(
    mlp: Mlp,
    whole: Spans,
    G1: Float[Tensor, "m d"],
    G2: Float[Tensor, "d m"],
    found: Float[Tensor, "f d"],
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
    Q_ε, Q_δ = (torch.linalg.qr(each.mT).Q for each in backward(mlp, whole, found))
    return whole.without(G1 - Q_δ @ (Q_δ.mT @ G1), G2 - Q_ε @ (Q_ε.mT @ G2), len(whole.u) - len(found))


def start(mlp: Mlp, spans: Spans, number: int, draw: Generator) -> Float[Tensor, "s n"]:
    """Draw coordinates α of points u = α T of LayerNorm's form: t of zero mean and unit variance.

    Along the directions of ∂W₁ they have variances σ. Random sums of its rows would have σ², from which weak tokens are
    missed, and with variances of 1 almost no token of a flat photograph is found.

    Args:
        mlp: the MLP, whose γ and β define t.
        spans: the spans that are searched; T is their `u`.
        number: number of points s.
        draw: generator of the points.
    """
    T = spans.u
    P, c = T / mlp.γ, mlp.β / mlp.γ  # t = α P − c
    mean = P.mean(1)
    if mean.square().sum() <= 1e-10 * P.square().mean():  # where β = 0 and γ = 1, every point has zero mean
        mean = torch.zeros_like(mean)
    back = mean / mean.square().sum().clamp_min(torch.finfo(T.dtype).tiny)
    base = c.mean() * back
    α = torch.randn(number, len(T), generator=draw, dtype=T.dtype).to(T.device) * spans.σ.sqrt()
    α = α - (α @ mean)[:, None] * back
    v, b = α @ P, base @ P - c
    vv, vb, bb = v.square().sum(1), v @ b, b.square().sum() - T.shape[1]
    return base + ((vb.square() - vv * bb).clamp_min(0).sqrt() - vb)[:, None] / vv[:, None] * α


def refine_guesses(
    mlp: Mlp, whole: Spans, near: Near, starts: int, steps: int, tolerance: float
) -> Float[Tensor, "k d"]:
    """Return the tokens that the guesses lead to; similar ones are kept apart, because their known spans differ.

    Args:
        mlp: the MLP whose inputs are sought.
        whole: spans of the whole gradients.
        near: the guesses, with the span that each token is known to lie in.
        starts: number of guesses that are refined at once.
        steps: steps of the Levenberg-Marquardt method in single precision, and as many again in double.
        tolerance: the largest residual of a token; less is allowed if most results have far smaller ones.
    """
    found: list[Tensor] = []
    for u, base in zip(near.u.split(starts), near.base.split(starts), strict=True):
        of = Near(u, base, near.Q)
        α = settle(mlp, whole, u @ whole.u.mT, steps, of, FAR)
        found.append(α[of.cosine(normalise(mlp, α @ whole.u)) > _SLOT_COSINE])
    α = torch.cat(found)
    usual = float(outside(mlp, whole, α).median()) if len(α) else 0.0
    return distinct(mlp, whole, α, min(tolerance, max(_FIRST_TOLERANCE, _OUTLIER_FACTOR * usual)), _SAME_COSINE)


def outside(mlp: Mlp, spans: Spans, α: Float[Tensor, "s n"]) -> Float[Tensor, " s"]:
    """Return the residual of each u = α T as a token: |(I − P_h) h| / |h|, plus its deviation from LayerNorm's form.

    Args:
        mlp: the MLP whose input u would be.
        spans: the spans of tokens (T) and of hidden units (P_h).
        α: coordinates of the candidates.
    """
    u = α @ spans.u
    h, _ = mlp.hidden(u)
    t = normalise(mlp, u)
    off = (h - (h @ spans.h.mT) @ spans.h).norm(dim=1) / h.norm(dim=1)
    return (off + t.mean(1).abs() + (t.square().mean(1) - 1).abs()).nan_to_num(torch.inf)


def distinct(mlp: Mlp, spans: Spans, α: Float[Tensor, "s n"], limit: float, twin: float) -> Float[Tensor, "k d"]:
    """Return the tokens u = α T with a residual below the limit, least residual first, each token once.

    Args:
        mlp: the MLP whose inputs the tokens are.
        spans: the spans of tokens (T) and of hidden units.
        α: coordinates of the candidates.
        limit: the residual (`outside`) below which a candidate is a token.
        twin: the cosine from which a candidate repeats one of smaller residual.
    """
    residual = outside(mlp, spans, α)
    best = residual.argsort()
    u = (α @ spans.u)[best[residual[best] < limit]]
    twins = (_unit(u) @ _unit(u).mT >= twin).tril(-1).cpu()  # where a decision for each does not wait for a GPU
    kept = torch.ones(len(u), dtype=torch.bool)
    for i in range(len(u)):
        kept[i] = not bool((twins[i] & kept).any())
    return u[kept.to(u.device)]


def backward(mlp: Mlp, whole: Spans, u: Float[Tensor, "k d"]) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k m"]]:
    """Return the gradients in the MLP at tokens u, up to their length: ε of its output, and δ = act′ ⊙ W₂ᵀ ε.

    Args:
        mlp: the MLP whose inputs the tokens are.
        whole: spans of the whole gradients: ε is the vector of span{ε} whose δ lies in span{δ}.
        u: tokens that were found.
    """
    _, slope = mlp.hidden(u)
    V = slope[:, None] * (whole.ε @ mlp.W2)  # for each ε of the basis: k × n × m
    along = V @ whole.δ.mT
    N = V @ V.mT - along @ along.mT  # its least eigenvalue is zero, and inverse iteration finds the vector
    L = torch.linalg.cholesky(
        N + 1e-13 * N.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(len(whole.u)).to(N)
    )
    c = torch.ones_like(N[..., :1])
    for _ in range(_INVERSE_STEPS):
        c = torch.nn.functional.normalize(torch.cholesky_solve(c, L), dim=1)
    return (c.mT @ whole.ε)[:, 0], (c.mT @ V)[:, 0]


def _twin(limit: float) -> float:
    """Return the cosine from which two solutions with residuals up to the limit are the same token."""
    return 1 - min(3 * limit, 3e-3)


def _unit(u: Float[Tensor, "s d"]) -> Float[Tensor, "s d"]:
    return torch.nn.functional.normalize(u, dim=1)

"""The inputs of a bottleneck adapter, one by one, from the gradients of its two layers.

Known are the adapter h ↦ U act(V h + v) and its gradients ∂V = Σ_n δ_n h_nᵀ, ∂v = Σ_n δ_n and ∂U = Σ_n ε_n a_nᵀ with
a_n = act(V h_n + v). Each single input h_n is sought. This is token separation as in `equations`, except that no
LayerNorm fixes the length of h: ∂v does.

1. Both gradients yield span{h_n} and span{a_n}; ∂v restricts h to a plane in the first (`_Search.of`).
2. From random points of the plane, h moves until act(V h + v) lies in span{a_n} (`_Search.run`).
3. Inputs that were found are removed from the gradients (`Bottleneck.without`), and the rest is searched.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from privlab.attacks.solvers import levenberg_marquardt
from privlab.attacks.tokens.equations import Separated, backward
from privlab.attacks.tokens.spans import Mlp, Spans
from privlab.release import Update

_FIRST_DAMPING = 1e-2  # the first damping of the Levenberg-Marquardt method, relative to the mean diagonal of Jᵀ J
_SAME = 1e-3  # distance of two solutions, relative to their length, below which they are the same input
_MOST_IDLE = 3  # rounds in a row that find no input, after which the search ends


class Bottleneck(NamedTuple):
    """h ↦ U act(V h + v) as an `Mlp`, and the gradients of V, v and U, in float64."""

    mlp: Mlp
    G_down: Float[Tensor, "r d"]
    g_down: Float[Tensor, " r"]
    G_up: Float[Tensor, "d r"]

    @classmethod
    def of(cls, adapter: nn.Module, gradients: Update) -> "Bottleneck":
        """Return an adapter of `privlab.victims.bottlenecked` with its gradients.

        Args:
            adapter: the module, whose layers are `down` and `up`.
            gradients: those of one release by the names of its parameters, such as `down.weight`.
        """
        # An adapter reads h without a LayerNorm before it: γ = 1 and β = 0 make u = t = h in `Mlp`.
        V, v, U = (adapter.get_parameter(name).detach().double() for name in ("down.weight", "down.bias", "up.weight"))
        G, g, H = (gradients[name].double() for name in ("down.weight", "down.bias", "up.weight"))
        one = torch.ones_like(V[0])
        return cls(Mlp(one, torch.zeros_like(one), V, v, U, nn.functional.gelu), G, g, H)

    def without(self, whole: Spans, found: Float[Tensor, "f d"]) -> "Bottleneck":
        """Return what the gradients hold except for found inputs."""
        if not len(found):
            return self
        # P_δ on the δ of found inputs removes their terms from ∂V = Σ_n δ_n h_nᵀ and ∂v = Σ_n δ_n, and P_ε from ∂U.
        Q_ε, Q_δ = (torch.linalg.qr(each.mT).Q for each in backward(self.mlp, whole, found))
        G, g, H = (Q @ (Q.mT @ of) for Q, of in ((Q_δ, self.G_down), (Q_δ, self.g_down), (Q_ε, self.G_up)))
        return Bottleneck(self.mlp, self.G_down - G, self.g_down - g, self.G_up - H)


class _Search(NamedTuple):
    """|(I − P) a|² / |a|² of a = act(V h + v), with P on `span`, for h = base + β free."""

    mlp: Mlp
    span: Float[Tensor, "n r"]
    base: Float[Tensor, " d"]
    free: Float[Tensor, "k d"]

    @classmethod
    def of(cls, parts: Bottleneck, spans: Spans) -> "_Search":
        """Return the search in spans of the gradients.

        With ∂V = Σ_n δ_n h_nᵀ = Lᵀ diag(σ) T and h_n = α_n T, ∂v = Σ_n δ_n = Lᵀ diag(σ) τ gives α_n · τ = 1.
        """
        # α · τ = 1 leaves n − 1 unknowns β: α = τ / |τ|² + β N, with orthonormal rows N orthogonal to τ.
        τ = spans.δ @ parts.g_down / spans.σ
        N = torch.linalg.svd(τ[None]).Vh[1:]  # what τ leaves free
        return cls(parts.mlp, spans.h, τ @ spans.u / τ.square().sum(), N @ spans.u)

    def inputs(self, β: Float[Tensor, "s k"]) -> Float[Tensor, "s d"]:
        """Return h at coordinates β."""
        return self.base + β @ self.free

    def coordinates(self, h: Float[Tensor, "s d"]) -> Float[Tensor, "s k"]:
        """Return the coordinates of the points that are nearest to h."""
        return (h - self.base) @ self.free.mT

    def residual(
        self, β: Float[Tensor, "s k"]
    ) -> tuple[Float[Tensor, "s r"], Float[Tensor, "s r k"], Float[Tensor, " s"]]:
        """Return the residual at β, its Jacobian, and its square."""
        # The residual is that of â = a / |a|: a small a alone does not lower it. With J the derivative of a over |a|,
        # act′ ⊙ V freeᵀ / |a| (r × k), that of â is (I − â âᵀ) J.
        a, slope = self.mlp.hidden(self.inputs(β))
        length = a.norm(dim=1, keepdim=True)
        a, J = a / length, slope[..., None] * (self.mlp.W1 @ self.free.mT) / length[..., None]
        # r = (I − P) â, so its derivative is (I − P) J − r âᵀ J.
        r = a - (a @ self.span.mT) @ self.span
        return r, J - self.span.mT @ (self.span @ J) - r[..., None] * (a[:, None] @ J), r.square().sum(1)

    def run(self, β: Float[Tensor, "s k"], steps: int) -> tuple[Float[Tensor, "s d"], Float[Tensor, " s"]]:
        """Return where the Levenberg-Marquardt method leads each start, and the residual there."""
        steps = steps if β.shape[1] else 0
        β, _, _, cost = levenberg_marquardt(β, self.residual, steps, _FIRST_DAMPING)
        return self.inputs(β), cost.sqrt()


@torch.no_grad()
def separate_inputs(
    parts: Bottleneck,
    count: int,
    draw: Generator,
    *,
    size: float,
    starts: int,
    rounds: int,
    steps: int,
    tolerance: float,
) -> Separated:
    """Find the up to `count` inputs h_n of an adapter whose products make up its gradients.

    An h in span{h_n} is an input if act(V h + v) lies in span{act(V h_n + v)}, for r > 2 · count: r − count equations
    for count − 1 unknowns, because ∂ℓ/∂v sets the length of h. The Levenberg-Marquardt method finds such h from random
    starts. The inputs found are removed as in `separate`, so that each round searches a smaller space, and are
    settled in the spans of the whole gradients.

    Args:
        parts: the adapter and its gradients.
        count: number of inputs; fewer are sought if the gradients have a smaller rank.
        draw: generator of the starts.
        size: the usual length of an input, for the starts.
        starts: random starts in each round.
        rounds: the most rounds.
        steps: the most steps of the method.
        tolerance: the residual |(I − P) a| / |a| below which a solution is an input.

    Source: ours; the sums are the chain rule at the adapter.
    """
    # The whole gradients determine the spans and the number of inputs, no more than their rank.
    whole = Spans.of(parts.G_down, parts.G_up, count)
    search, count, idle = _Search.of(parts, whole), len(whole.u), 0
    found, residual = whole.u[:0], whole.σ[:0]
    for _ in range(rounds):
        if len(found) == count or idle == _MOST_IDLE:
            break
        # Each round searches what the inputs found so far leave of the gradients, a smaller space.
        rest = parts.without(whole, found)
        left = whole if not len(found) else whole.without(rest.G_down, rest.G_up, count - len(found))
        near = _Search.of(rest, left)
        # An input of length `size` has about size / √n in each of the n directions, and so have the random starts.
        β = (
            torch.randn(starts, len(near.free), generator=draw, dtype=torch.float64).to(found)
            * size
            / len(whole.u) ** 0.5
        )
        # Solutions in the rest are settled in the whole spans, in which found inputs leave no errors.
        h, off = near.run(β, steps)
        h = h[off < max(tolerance, 1e-2)]  # what found inputs leave has their rounding errors
        h, off = search.run(search.coordinates(h), steps)
        # Those below the tolerance are inputs, least residual first, each once.
        best = off.argsort()
        new, off = h[best[off[best] < tolerance]], off[best[off[best] < tolerance]]
        kept = _distinct(torch.cat([found, new]), len(found))[: count - len(found)]
        idle = 0 if len(kept) else idle + 1
        found, residual = torch.cat([found, new[kept]]), torch.cat([residual, off[kept]])
    return Separated(found, residual, count)


def _distinct(h: Float[Tensor, "f d"], known: int) -> list[int]:
    """Return the rows behind the first `known` ones that repeat no row before them, counted from there."""
    # `same` marks pairs by their distance, relative to a length; each row is compared with rows before it.
    same = (torch.cdist(h, h) < _SAME * h.norm(dim=1)).tril(-1).cpu()
    kept = torch.ones(len(h), dtype=torch.bool)
    for i in range(known, len(h)):
        kept[i] = not bool((same[i] & kept).any())
    return (kept[known:].nonzero()[:, 0]).tolist()

"""From the outputs of a block's MLP back to its inputs: the likeliest ones, with less and less room for a residual.

Known are the weights, outputs h_n of the MLP, in no order, and the law of its inputs, from photographs. Sought is the
input u_n of each: D equations W₂ act(W₁ u + b₁) + b₂ = h, which are not convex and weak in some directions.

1. Every output starts from the mean input of every place, because its own place is unknown.
2. Levenberg-Marquardt searches minimise |MLP(u) − h|²/σ² − 2 log p(u) for smaller and smaller σ, in coordinates w with
   u = mean + L w, in which the prior is white (`_descend`).
3. The best start of each output is its u; the curvature there yields the covariance of its error.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.solvers import levenberg_marquardt
from privlab.attacks.tokens.spans import Mlp

_RIDGE = 1e-3  # is added to the variances of inputs, relative to their mean: the bundled photographs are few

_LEVELS = ((1.0, 8, 6), (0.1, 8, 3), (0.01, 10, 1), (1e-3, 20, 1), (1e-4, 20, 1), (1e-5, 20, 1))
"""Room for a residual, in units of the outputs' root mean square; the most steps, and the starts of an output that are
kept afterwards, least residual first."""

_SINGLE = 0.05  # room from which on single precision is enough
_FOUND = 3e-5  # relative residual up to which an input is found; beyond, the search is made again with all starts kept

_FIRST_DAMPING, _LEAST_DECREASE = 1e-3, 1e-3
"""The first damping, relative to the mean diagonal of Jᵀ J, and the share by which a step must lower the cost of one of
the starts for another to follow."""

_CHUNK = 96  # starts that are searched from at once


class InputLaw(NamedTuple):
    """What is expected of the input of each place: u ~ N(mean_place, L Lᵀ), with one covariance for all places."""

    mean: Float[Tensor, "t d"]
    L: Float[Tensor, "d d"]

    @classmethod
    def of(cls, usual: Float[Tensor, "m t d"]) -> "InputLaw":
        """Return the law of the inputs of photographs, by all inputs of each of m of them, in float64."""
        # Each place has its own mean, and all places share one covariance: the photographs are few.
        mean = usual.mean(0)
        S = (usual - mean).flatten(0, 1).mT.cov(correction=0)
        return cls(mean, torch.linalg.cholesky(S + _RIDGE * S.diagonal().mean() * torch.eye(len(S)).to(S)))

    def to(self, dtype: torch.dtype) -> "InputLaw":
        """Return the law in another precision."""
        return InputLaw(self.mean.to(dtype), self.L.to(dtype))


class Inverted(NamedTuple):
    """Inputs u, the residual of each relative to its output, and the covariance of its error.

    Some directions of u hardly change the output.
    """

    u: Float[Tensor, "f d"]
    residual: Float[Tensor, " f"]
    doubt: Float[Tensor, "f d d"]

    def found(self) -> "Inverted":
        """Return those whose output is the given one."""
        return Inverted(*(part[self.residual < _FOUND] for part in self))


class _Starts(NamedTuple):
    """Starts w, with u = mean_place + L w, each for its own output."""

    w: Float[Tensor, "s d"]
    output: Int[Tensor, " s"]
    place: Int[Tensor, " s"]

    def take(self, rows: Tensor) -> "_Starts":
        """Return some of the starts."""
        return _Starts(*(part[rows] for part in self))


@torch.no_grad()
def invert_mlp(mlp: Mlp, b2: Float[Tensor, " d"], h: Float[Tensor, "f d"], law: InputLaw) -> Inverted:
    """Return u with W₂ act(W₁ u + b₁) + b₂ = h for each output h.

    |MLP(u) − h|² / σ² − 2 log p(u) is minimised by the Levenberg-Marquardt method from the mean input of each place,
    for σ from the size of an output down to 10⁻⁵ of it: at first the law counts, and in the end the equations. Starts
    that lag behind are given up on the way. Of an error of the last σ in the outputs, u has (Jᵀ J / σ² + (L Lᵀ)⁻¹)⁻¹.

    Args:
        mlp: the MLP, in float64.
        b2: the bias of its second layer.
        h: its outputs, in no order.
        law: what is expected of inputs.

    Source: ours.
    """
    # The search starts from the mean input of every place for every output: f · t starts with w = 0.
    size = h.square().mean().sqrt()
    outputs, places = torch.arange(len(h), device=h.device), torch.arange(len(law.mean), device=h.device)
    first = _Starts(
        torch.zeros(len(outputs) * len(places), h.shape[1]).to(h),
        outputs.repeat_interleave(len(places)),
        places.repeat(len(outputs)),
    )
    u, off = torch.zeros_like(h), torch.full_like(h[:, 0], torch.inf)
    # The first search keeps few starts of each output. The second keeps all, for outputs not found. Its results replace
    # the first ones even where their residual is larger: neither of the two counts as found then (`Inverted.found`).
    for keep_all in (False, True):
        lost = off > _FOUND
        if not bool(lost.any()):
            break
        starts = first.take(lost[first.output])
        # Room for a residual shrinks from level to level, and the starts with the largest residuals are given up.
        for room, steps, keep in _LEVELS:
            starts, cost = _lower(mlp, b2, h, law, starts, float(room * size), steps)
            last = room == _LEVELS[-1][0]
            starts = _best(starts, cost, 1 if last else len(places) if keep_all else keep)
        # The best start of each output yields its u = mean_place + L w; `off` is the relative residual.
        u[starts.output] = law.mean[starts.place] + starts.w @ law.L.mT
        out = mlp.hidden(u)[0] @ mlp.W2.mT + b2
        off = (out - h).norm(dim=1) / h.norm(dim=1)
    # J (f × d × d) is the derivative of MLP(u) / σ by w. In w the prior is N(0, I), so the error of w has the
    # covariance (Jᵀ J + I)⁻¹, and that of u is L (…)⁻¹ Lᵀ.
    J = mlp.W2 @ (mlp.hidden(u)[1][..., None] * (mlp.W1 @ law.L)) / (_LEVELS[-1][0] * size)
    doubt = law.L @ torch.linalg.inv(J.mT @ J + torch.eye(h.shape[1]).to(h)) @ law.L.mT
    return Inverted(u, off, doubt)


def _best(starts: _Starts, off: Float[Tensor, " s"], keep: int) -> _Starts:
    """Return the starts of least residual of each output, `keep` at most."""
    rows = []
    for output in starts.output.unique():
        own = (starts.output == output).nonzero()[:, 0]
        rows.append(own[off[own].argsort()[:keep]])
    return starts.take(torch.cat(rows))


def _lower(
    mlp: Mlp, b2: Tensor, h: Tensor, law: InputLaw, starts: _Starts, room: float, steps: int
) -> tuple[_Starts, Float[Tensor, " s"]]:
    """Return the starts after the search at one size of room, and the lengths of their residuals."""
    # With wide room, single precision is enough, and faster.
    dtype = torch.float32 if room > _SINGLE * float(h.square().mean().sqrt()) else torch.float64
    mlp, law, b2, h = mlp.to(dtype), law.to(dtype), b2.to(dtype), h.to(dtype)
    # In w, the first layer is W₁ (mean + L w) + b₁ = base + W w. Chunks of starts bound the memory of the Jacobians.
    W, done = mlp.W1 @ law.L, []
    for part in starts.w.to(dtype).split(_CHUNK):
        rows = slice(len(done) * _CHUNK, len(done) * _CHUNK + len(part))
        mean, target = law.mean[starts.place[rows]], h[starts.output[rows]] - b2
        done.append(_descend(mlp, W, mean @ mlp.W1.mT + mlp.b1, target, part, room, steps))
    w, off = (torch.cat(each) for each in zip(*done, strict=True))
    return starts._replace(w=w.double()), off.double()


def _descend(
    mlp: Mlp, W: Tensor, base: Tensor, target: Tensor, w: Float[Tensor, "s d"], room: float, steps: int
) -> tuple[Float[Tensor, "s d"], Float[Tensor, " s"]]:
    """Minimise |W₂ act(base + W w) − target|² / room² + |w|² for each start, and return |…| too."""
    # r = (W₂ act(base + W w) − target) / room. The cost |r|² + |w|² has Jᵀ J + I and Jᵀ r + w for its normal equations.
    eye = torch.eye(w.shape[1]).to(w)

    def at(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, slope = mlp.activate(base + w @ W.mT)
        r = (a @ mlp.W2.mT - target) / room
        return r, slope, r.square().sum(1) + w.square().sum(1)

    def normal(w: Tensor, r: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        J = mlp.W2 @ (slope[..., None] * W) / room
        return J.mT @ J + eye, (r[:, None] @ J)[:, 0] + w

    def over(cost: Tensor, tried: Tensor) -> bool:
        # The search ends if costs fall, but none by the least share. If none falls, damping rises, and it goes on.
        return bool((tried < cost).any()) and not bool((tried < (1 - _LEAST_DECREASE) * cost).any())

    w, r, _, _ = levenberg_marquardt(w, at, steps, _FIRST_DAMPING, normal, over)
    return w, r.norm(dim=1) * room

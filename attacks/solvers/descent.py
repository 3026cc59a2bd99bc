"""Descent on many independent problems at once; an interrupted run is resumed, for its whole state is a few tensors.

Known are an objective and its gradient, for p problems of q unknowns each; sought is a point of low value for each.

1. `descend` loads the state that an interrupted run kept, or starts from the given points.
2. It calls an optimiser once for each step: `Adam`, whose steps may go up, or `Lbfgs`, whose steps never do.
3. It saves the state from time to time, and returns the best point of each problem.

No problem influences another: every step length and every decision is a vector over the problems.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from privlab.base import PrivlabError, gradients_enabled, warn
from privlab.training import TrainingProgress, keep, kept, tell
from privlab.victims import cache_folder

_SAVE_EVERY = 20.0  # seconds between two saved states

State: TypeAlias = dict[str, Tensor]
"""Of p problems: the points `x` (p × q), `value` and `slope` there, the `best` point so far and its value, `least`."""

Evaluate: TypeAlias = Callable[
    [Float[Tensor, "s q"], Int[Tensor, " s"]], tuple[Float[Tensor, " s"], Float[Tensor, "s q"]]
]
"""(points, the numbers of their problems) ↦ the objective's value and its gradient at each point."""


@dataclass(frozen=True)
class Optimiser:
    """A method of descent, called as (state, evaluate, step, steps) ↦ the state after step number `step` of `steps`.

    It leaves the state that it is given as it is. `lr` is the root mean square of the entries of the (first) step.
    """

    name: ClassVar[str]

    lr: float

    def start(self, x: Float[Tensor, "p q"], evaluate: Evaluate) -> State:
        """Return the state before the first step."""
        value, slope = evaluate(x, torch.arange(len(x), device=x.device))
        return {"x": x, "value": value, "slope": slope, "best": x, "least": value} | self._memory(x)

    def __call__(self, state: State, evaluate: Evaluate, step: int, steps: int) -> State:
        """Return the next state."""
        raise NotImplementedError

    def done(self, state: State) -> bool:
        """Return whether no further step will change the state."""
        return False

    def _memory(self, x: Float[Tensor, "p q"]) -> State:
        """Return the optimiser's memory before the first step."""
        raise NotImplementedError


@dataclass(frozen=True)
class Adam(Optimiser):
    """Adam (Kingma & Ba 2015); its step shrinks to zero along half a cosine."""

    name: ClassVar[str] = "adam"

    first: float = 0.9
    second: float = 0.999

    def _memory(self, x: Float[Tensor, "p q"]) -> State:
        return {"mean": torch.zeros_like(x), "square": torch.zeros_like(x)}

    def __call__(self, state: State, evaluate: Evaluate, step: int, steps: int) -> State:
        """Step against the running mean of the slope, each entry scaled by the root of its running mean square."""
        x, slope = state["x"], state["slope"]
        # Adam's moments: m ← β₁ m + (1 − β₁) g and v ← β₂ v + (1 − β₂) g².
        mean = self.first * state["mean"] + (1 - self.first) * slope
        square = self.second * state["square"] + (1 - self.second) * slope.square()
        # √v̂ with v̂ = v / (1 − β₂^t), t = step + 1. √tiny replaces Adam's ε, so that the step does
        # not depend on the objective's scale.
        scale = (square / (1 - self.second ** (step + 1))).sqrt() + torch.finfo(x.dtype).tiny ** 0.5
        # The rate falls from lr to almost zero over half a cosine; m̂ = m / (1 − β₁^t).
        lr = self.lr * (1 + math.cos(math.pi * step / steps)) / 2
        x = x - lr / (1 - self.first ** (step + 1)) * mean / scale
        # A step may go up, so the best point of each problem is kept separately.
        value, slope = evaluate(x, torch.arange(len(x), device=x.device))
        better = value < state["least"]
        best = torch.where(better[:, None], x, state["best"])
        least = torch.where(better, value, state["least"])
        return {"x": x, "value": value, "slope": slope, "best": best, "least": least, "mean": mean, "square": square}


@dataclass(frozen=True)
class Lbfgs(Optimiser):
    """L-BFGS (Liu & Nocedal 1989) for each problem separately, with backtracking: no step goes up.

    A problem of which no step goes down forgets its curvature, and steps along the slope; if that does not go down
    either, it stays where it is.
    """

    name: ClassVar[str] = "lbfgs"

    remembered: int = 10
    trials: int = 10
    enough: float = 1e-4

    def _memory(self, x: Float[Tensor, "p q"]) -> State:
        empty = x.new_zeros(self.remembered, *x.shape)
        return {"moves": empty, "turns": empty.clone(), "stuck": x.new_zeros(len(x), dtype=torch.bool)}

    def done(self, state: State) -> bool:
        """Return whether every problem is stuck."""
        return bool(state["stuck"].all())

    def __call__(self, state: State, evaluate: Evaluate, step: int, steps: int) -> State:
        """Step along −H⁻¹ ∇f, with H estimated from the last steps; up to `trials` lengths of the step are tried."""
        x, slope, moves, turns = (state[name] for name in ("x", "slope", "moves", "turns"))
        # `fresh` marks problems without any remembered pair, which step along the plain slope.
        fresh = (moves == 0).all(2).all(0)
        lower, new, value, new_slope = self._search(state, self._direction(slope, moves, turns), evaluate)
        # Only a pair with sᵀ y > 0 keeps H positive definite, where s is the move and y the
        # change of the slope. Others are dropped.
        move, turn = new - x, new_slope - slope
        learnt = (lower & (_dot(move, turn) > 0))[:, None]
        forgotten = (~lower)[:, None]
        # The newest pair enters in front and the oldest leaves (h × p × q). A problem
        # whose step failed forgets all pairs.
        moves, turns = (
            torch.where(learnt, torch.cat([last[None], old[:-1]]), old).masked_fill(forgotten, 0)
            for last, old in ((move, moves), (turn, turns))
        )
        return {
            # A problem that fails along the plain slope has nothing else to try: it is stuck. No step
            # goes up, so the last point is the best.
            **{"x": new, "value": value, "slope": new_slope, "best": new, "least": value},
            **{"moves": moves, "turns": turns, "stuck": state["stuck"] | (~lower & fresh)},
        }

    def _direction(
        self, slope: Float[Tensor, "p q"], moves: Float[Tensor, "h p q"], turns: Float[Tensor, "h p q"]
    ) -> Float[Tensor, "p q"]:
        """Return −H⁻¹ ∇f by the recursion over pairs of a move and the change of slope along it, the newest first."""
        # First loop, newest pair first: α_i = s_iᵀ q / y_iᵀ s_i, q ← q − α_i y_i. Empty pairs
        # have y_iᵀ s_i = 0 and add nothing.
        pairs = [(move, turn, _dot(move, turn)) for move, turn in zip(moves, turns, strict=True)]
        shares, q = [], slope
        for move, turn, product in pairs:
            shares.append(torch.where(product > 0, _dot(move, q) / product, 0))
            q = q - shares[-1][:, None] * turn
        # The initial H⁻¹ is sᵀ y / yᵀ y of the newest pair. Without a pair, the step gets the
        # length lr · √q: root mean square lr.
        newest = torch.where(pairs[0][2] > 0, pairs[0][2] / _dot(turns[0], turns[0]), 0)
        size = slope.norm(dim=1).clamp_min(torch.finfo(slope.dtype).tiny)
        q = q * torch.where(newest > 0, newest, self.lr * slope.shape[1] ** 0.5 / size)[:, None]
        # Second loop, oldest pair first: β_i = y_iᵀ q / y_iᵀ s_i, q ← q + (α_i − β_i) s_i.
        for (move, turn, product), share in zip(reversed(pairs), reversed(shares), strict=True):
            back = torch.where(product > 0, _dot(turn, q) / product, 0)
            q = q + (share - back)[:, None] * move
        return -q

    def _search(
        self, state: State, direction: Float[Tensor, "p q"], evaluate: Evaluate
    ) -> tuple[Bool[Tensor, " p"], Float[Tensor, "p q"], Float[Tensor, " p"], Float[Tensor, "p q"]]:
        """Return which problems a share of the direction lowers, and all points, values and slopes after that.

        The next share is at the minimum of the parabola through the value, its slope and the value last tried: about a
        half of the last share or less, and no less than a tenth.
        """
        x, value, slope = (state[name].clone() for name in ("x", "value", "slope"))
        # `down` = ∇fᵀ d < 0 in a direction of descent; `share` is the length t in
        # units of d, at first 1 (a Newton step).
        lower, down, share = torch.zeros_like(state["stuck"]), _dot(slope, direction), torch.ones_like(value)
        for _ in range(self.trials):
            # Only problems without a success so far are evaluated again.
            rows = (~lower & ~state["stuck"] & (down < 0)).nonzero()[:, 0]
            if not len(rows):
                break
            t, fall = share[rows], down[rows]
            tried = x[rows] + t[:, None] * direction[rows]
            there, slope_there = evaluate(tried, rows)
            rise = there - value[rows]
            # The parabola f + fall · t + c t² through the tried value has c = (rise − fall · t) / t²,
            # and its minimum is at −fall / 2c.
            least = -fall * t / (2 * (rise / t - fall))
            share[rows] = least.nan_to_num(0.0).maximum(0.1 * t)
            # Armijo's condition: the decrease is at least a small part of what the slope promises.
            fine = rise <= self.enough * t * fall  # not where it is NaN
            kept = rows[fine]
            lower[kept], x[kept], value[kept], slope[kept] = True, tried[fine], there[fine], slope_there[fine]
        return lower, x, value, slope


def _dot(a: Float[Tensor, "p q"], b: Float[Tensor, "p q"]) -> Float[Tensor, " p"]:
    return (a * b).sum(1)


def values_and_slopes(
    objective: Callable[[Tensor, Tensor], Tensor],
    points: Float[Tensor, "s q"],
    numbers: Int[Tensor, " s"],
    at_a_time: int = 1,
) -> tuple[Float[Tensor, " s"], Float[Tensor, "s q"]]:
    """Return an objective and its gradient at points, a few at a time.

    Args:
        objective: (points, the numbers of their problems) ↦ the value at each.
        points: where it is evaluated.
        numbers: the numbers of their problems.
        at_a_time: how many points are evaluated together.
    """
    values, slopes = [], []
    for some, of_some in zip(points.split(at_a_time), numbers.split(at_a_time), strict=True):
        # Each value depends on one point only, so the gradient of the sum has each point's gradient as a row.
        with gradients_enabled():
            x = some.detach().requires_grad_()
            value = objective(x, of_some)
            (slope,) = torch.autograd.grad(value.sum(), x)
        values.append(value.detach())
        slopes.append(slope)
    return torch.cat(values), torch.cat(slopes)


def descend(
    optimiser: Optimiser, points: Float[Tensor, "p q"], evaluate: Evaluate, steps: int, identity: Iterable[str]
) -> tuple[Float[Tensor, "p q"], Float[Tensor, " p"]]:
    """Return the best points that `steps` steps find, and their values; resume from the kept state, if there is one.

    The state is saved under `PRIVLAB_CACHE` or in the user's cache at intervals of `_SAVE_EVERY` seconds, and when the
    search is interrupted; it is removed when the search ends. `listening` is called with each step.

    Args:
        optimiser: the method of descent.
        points: where the p problems start; if a state was kept, they start there instead.
        evaluate: returns the objective and its gradient at points of the numbered problems.
        steps: the most steps, those of the kept state included, ≥ 0.
        identity: all that the search depends on.

    Raises:
        PrivlabError: if the objective is not finite at the start.
    """
    # A kept state counts only for the same search: the key is a hash of all that the search depends on.
    key = hashlib.sha256("\n".join(identity).encode()).hexdigest()
    path = cache_folder("searches") / f"{key[:32]}.safetensors"
    if (found := kept(path, key)) is None:
        done, state = 0, optimiser.start(points, evaluate)
    else:
        done = int(found.pop("done"))
        state = {name: tensor.to(points.device) for name, tensor in found.items()}
    if not state["least"].isfinite().all():
        raise PrivlabError("The objective is not finite where the search starts.")
    # The time left is estimated from the steps of this run alone, without those of the kept state.
    first, begun = done, time.perf_counter()
    saved = begun
    try:
        while done < steps and not optimiser.done(state):
            state = optimiser(state, evaluate, done, steps)
            done += 1
            now = time.perf_counter()
            left = (now - begun) / (done - first) * (steps - done)
            tell(TrainingProgress(done, steps, 0.0, float(state["least"].mean()), optimiser.lr, now - begun, left))
            if now - saved > _SAVE_EVERY:
                _save(path, key, done, state)
                saved = now
    except BaseException:
        # This includes KeyboardInterrupt: the state is saved, and the exception is raised again.
        if done > first:
            _save(path, key, done, state)
        raise
    with suppress(OSError):  # the cache is not a folder
        path.unlink()
    return state["best"], state["least"]


def _save(path: Path, key: str, done: int, state: State) -> None:
    """Write the state after `done` steps; if that fails, warn and go on."""
    try:
        keep(path, key, state | {"done": torch.tensor(done)})
    except PrivlabError as error:
        warn(f"The search cannot be resumed if it is interrupted: {error}")


OPTIMISERS: dict[str, type[Optimiser]] = {kind.name: kind for kind in (Adam, Lbfgs)}

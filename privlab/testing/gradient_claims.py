"""What defenses on gradients claim of their release, and how that is measured."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks import PatchGradient
from privlab.testing.claims import LEAST_DIVISOR, NOISE_FACTOR, TOLERANCE, Check, Claims, Tensors, largest, unlike
from privlab.threat import Draws, Feed, GradientDefense, defense_declarations

ROUNDING_FACTOR = 3.0
"""The largest factor between declared and measured variance of a rounding; it is wide, as its law is only a model."""
_FEWEST = 50
"""Entries with noise below which the mean of their squares says nothing of its variance."""
_FEWEST_ROUNDED = 1000
"""Entries with a variance below which the errors of a rounding are too unequal to have one."""


@dataclass(frozen=True, eq=False)
class OnGradients(Claims):
    """A defense on the gradients of all released parameters."""

    defense: GradientDefense

    contents: ClassVar[str] = "the gradients of the released parameters, in their shapes and types"

    def inputs(self, *, neighbour: bool = False) -> dict[str, Tensor]:
        """Return the inputs of the defense."""
        return {name: self.given(g) for name, g in self.gradients(self._fed(neighbour=neighbour)).items()}

    def run(self, inputs: Tensors, draws: Draws) -> Any:  # noqa: ANN401
        """Return what the defense makes of these inputs."""
        return self.defense.release(inputs, draws.images)

    def tensors(self, released: Tensors) -> dict[str, Tensor]:
        """Return the release as tensors by name."""
        return dict(released)

    def own(self, released: Tensors) -> dict[str, Tensor]:
        """Return what the first client releases."""
        return {name: value[0] for name, value in released.items()}

    def without_defense(self) -> dict[str, Tensor]:
        """Return what would be released without the defense."""
        return self.inputs()

    def problems(self, released: object) -> Iterator[str]:
        """Yield each deviation of the release from its form, in words."""
        if not isinstance(released, Mapping):
            yield f"{type(released).__name__} instead of gradients by name"
            return
        true = self.inputs()
        withheld = defense_declarations(self.defense).withholds(true)
        yield from (f"{name}, which is no released parameter" for name in released if name not in true)
        yield from (f"{name}, which it says that it withholds" for name in released if name in withheld)
        yield from _unlike({name: g for name, g in true.items() if name not in withheld}, released)

    def checks(self, released: Tensors) -> Iterator[Check]:
        """Yield the checks of a release that has its form."""
        variance = self.defense.variance(released)
        true = {name: g for name, g in self.inputs().items() if name in released}
        wrong = _unlike(true, variance)
        some = {name: released[name] for name in PatchGradient.parameters if name in released}
        known = self.defense.variance(some)  # an adversary may read only some of the gradients
        wrong += [w for name, g in some.items() for w in unlike(f"{name} alone", known.get(name), g.shape, g.dtype)]
        wrong += [f"{name} below zero" for name, value in variance.items() if bool((value < 0).any())]
        if wrong:
            yield Check("variance", math.inf, ROUNDING_FACTOR, f"declared variance: {wrong[0]}")
            return
        told = released
        if (at_bound := defense_declarations(self.defense).at_bound) is not None:
            cut = at_bound(released)
            found = self._at_bound(true, released, cut)
            yield found
            if found.value == math.inf:
                return
            # how large these were, the release does not say: what it says of all others is checked
            told = {name: true[name].where(cut[name], g) for name, g in released.items()}
            variance = {name: value.masked_fill(cut[name], 0) for name, value in variance.items()}
        again = self.run(self.inputs(), self.draws(1))
        yield from self._variance(true, told, variance, again)
        off = self._off_in_noise(told, variance)
        yield Check("gradients", off, 8.0, "error against finite differences, in σ of what is declared")

    def _fed(self, *, neighbour: bool = False) -> Feed:
        return Feed.undefended(self.clients(neighbour=neighbour), self.model.patch)

    @staticmethod
    def _at_bound(true: Tensors, released: Tensors, cut: Tensors) -> Check:
        """Return the check that entries which are said to be cut were no smaller; ∞ if `cut` has not its form."""
        if wrong := _unlike(true, cut, torch.bool):
            return Check("at-bound", math.inf, 0.0, f"declared entries at a bound: {wrong[0]}")
        beyond = sum(int((cut[name] & ~_no_smaller(g, released[name])).sum()) for name, g in true.items())
        return Check("at-bound", float(beyond), 0.0, "entries said to be cut to a bound that were below it")

    def _variance(self, true: Tensors, released: Tensors, variance: Tensors, again: Tensors) -> Iterator[Check]:
        """Yield the factors by which the declared variance is too small and too large, at the best gradient scale.

        `again` is a release with other draws: the variance is that of noise if noise explains the errors. What is zero
        in one of both may be missing there, as draws choose which entries are: that is not noise.
        """
        least = 1e-18 * sum(float(g.square().mean()) for g in true.values()) + LEAST_DIVISOR  # well above rounding
        fitted = _scale_of(true, released, variance, least)
        errors = [
            {name: g - scale.view(-1, *[1] * (g.ndim - 1)) * true[name] for name, g in released.items()}
            for scale in (fitted, torch.zeros_like(fitted))
        ]
        kept = {name: (variance[name] > 0) & (g != 0) & (again[name] != 0) for name, g in released.items()}
        drawn = sum(float((again[name] - g)[kept[name]].square().sum()) / 2 for name, g in released.items())
        noise = drawn > 0.9 * sum(float(e.square().sum()) for e in errors[0].values())
        most = NOISE_FACTOR if noise else ROUNDING_FACTOR
        missing = {name: (g == 0) & (variance[name] > 0) for name, g in released.items()}
        counts = {name: int((~zero).sum()) if noise else zero.numel() for name, zero in missing.items()}
        slack = {name: _slack(count) for name, count in counts.items()}
        stated = {name: float(variance[name].mean()) + least for name in released}
        too_small = min(
            max((float(e.square().mean()) + least) / stated[name] / slack[name] for name, e in error.items())
            for error in errors
        )
        which = "of the worst parameter, less chance"
        yield Check("variance", too_small, most, f"measured over declared, {which}")
        squares = _squares(errors[0], missing, variance)
        factors = {name: stated[name] / (float(e.mean()) + least) / slack[name] for name, e in squares.items()}
        if noise:  # on a share of the entries, a parameter of which few were sent tells nothing
            few = {name for name, zero in missing.items() if zero.any() and counts[name] < _FEWEST}
        else:
            few = {name for name in factors if int((variance[name] > 0).sum()) < _FEWEST_ROUNDED}
        too_large = max((factor for name, factor in factors.items() if name not in few), default=0.0)
        yield Check("overstated", too_large, most, f"declared over measured, {which}")

    def _off_in_noise(self, released: Tensors, variance: Tensors) -> float:
        """Return the error against finite differences in standard deviations of the declared noise.

        The gradient of each image may have its own scale, as clipping leaves it: the best one counts. An error of
        an eighth of the `TOLERANCE` counts as one standard deviation.
        """
        found, slopes, norms, σ = self.directional(self._fed(), released, variance)
        σ = (σ.square() + (TOLERANCE / 8 * norms).square()).sqrt()
        above, below = (found * slopes / σ.square()).sum(0), (slopes / σ).square().sum(0)
        fitted = (above / below.clamp(min=LEAST_DIVISOR)).clamp(min=0)
        return min(largest((found - scale * slopes).abs() / σ) for scale in (fitted, torch.zeros_like(fitted)))


def _unlike(true: Tensors, found: Tensors, dtype: torch.dtype | None = None) -> list[str]:
    """Return each way in which tensors have not the shapes of the true ones, or another type, in words."""
    return [w for name, g in true.items() for w in unlike(name, found.get(name), g.shape, dtype or g.dtype)]


def _no_smaller(true: Tensor, bound: Tensor) -> Tensor:
    """Return which entries have the sign of a bound and are no smaller, up to rounding."""
    return true * bound.sign() >= bound.abs() * (1 - TOLERANCE)


def _slack(count: int) -> float:
    """Return 1 + 6·√(2/n): a mean of n squares has a relative deviation of √(2/n), of which six are allowed."""
    return 1 + 6 * math.sqrt(2 / max(count, 1))


def _scale_of(true: Tensors, released: Tensors, variance: Tensors, least: float) -> Float[Tensor, " b"]:
    """Return c ≥ 0 of each image for which c · ∂ℓ/∂θ is nearest to the release, each entry weighted by 1 / variance."""
    above, below = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for name, g in true.items():
        weight = 1 / (variance[name] + least)
        above = above + (weight * released[name] * g).flatten(1).sum(1)
        below = below + (weight * g.square()).flatten(1).sum(1)
    return (above / below.clamp(min=LEAST_DIVISOR)).clamp(min=0)


def _squares(error: Tensors, missing: Tensors, variance: Tensors) -> dict[str, Tensor]:
    """Return the squares of the errors, by which an overstated variance is found.

    For an entry that was released as zero, a variance v declares a bound, √(3v) (see `GradientDefense`), and all such
    entries of one parameter may lie far below it: so each counts as uniform up to the largest of all those that have
    its variance, in whichever parameter.
    """
    bounds, which = torch.cat([variance[name][zero] for name, zero in missing.items()]).unique(return_inverse=True)
    zeroed = torch.cat([error[name][zero].square() for name, zero in missing.items()])
    highest = zeroed.new_zeros(len(bounds)).scatter_reduce(0, which, zeroed, "amax")
    uniform = zeroed.maximum(highest[which] / 3).split([int(zero.sum()) for zero in missing.values()])
    return {
        name: error[name].square().masked_scatter(zero, known)
        for (name, zero), known in zip(missing.items(), uniform, strict=True)
    }

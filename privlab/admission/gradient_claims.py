"""What defenses on gradients claim of their release, and how that is measured."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privlab.admission.claims import NOISE_FACTOR, Check, Tensors, TwoClients, acts_as, control_of_gradients
from privlab.admission.measures import (
    TOLERANCE,
    entries_with_noise,
    off_in_noise,
    overstatement,
    scale_of,
    understatement,
    unlike,
)
from privlab.attacks import PatchGradient
from privlab.release import per_sample_gradients
from privlab.threat import Draws, Feed, GradientDefense, defense_declarations

__all__ = ["OnGradients"]

ROUNDING_FACTOR = 3.0
"""The largest factor between declared and measured variance of a rounding; it is wide, as its law is only a model."""


@dataclass(frozen=True, eq=False)
class OnGradients:
    """A defense on the gradients of all released parameters."""

    defense: GradientDefense
    subject: TwoClients

    contents: ClassVar[str] = "the gradients of the released parameters, in their shapes and types"

    def inputs(self, *, neighbour: bool = False) -> dict[str, Tensor]:
        """Return the inputs of the defense."""
        model = self.subject.model
        feed = Feed.undefended(self.subject.clients(neighbour=neighbour), model.patch)
        return per_sample_gradients(model, feed, self.subject.labels, self.subject.released)

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
        for name, g in true.items():
            if name not in withheld:
                yield from unlike(name, released.get(name), g.shape, g.dtype)

    def checks(self, released: Tensors) -> Iterator[Check]:
        """Yield the checks of a release that has its form."""
        yield from acts_as(self.defense, self.subject.model)
        variance = self.defense.variance(released)
        true = {name: g for name, g in self.inputs().items() if name in released}
        wrong = [w for name, g in true.items() for w in unlike(name, variance.get(name), g.shape, g.dtype)]
        some = {name: released[name] for name in PatchGradient.parameters if name in released}
        known = self.defense.variance(some)  # an adversary may read only some of the gradients
        wrong += [w for name, g in some.items() for w in unlike(f"{name} alone", known.get(name), g.shape, g.dtype)]
        wrong += [f"{name} below zero" for name, value in variance.items() if bool((value < 0).any())]
        if wrong:
            yield Check.at_most("variance", math.inf, ROUNDING_FACTOR, f"declared variance: {wrong[0]}")
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
        again = self.run(self.inputs(), self.subject.draws(1))
        yield from self._variance(true, told, variance, again)
        model, labels = self.subject.model, self.subject.labels
        feed = Feed.undefended(self.subject.clients(), model.patch)
        off = off_in_noise(model, feed, labels, told, variance, self.subject.seed)
        yield Check.at_most("gradients", off, 8.0, "error against finite differences, in σ of what is declared")

    @staticmethod
    def _at_bound(true: Tensors, released: Tensors, cut: Tensors) -> Check:
        """Return the check that entries which are said to be cut were no smaller; ∞ if `cut` has not its form."""
        wrong = [w for name, g in true.items() for w in unlike(name, cut.get(name), g.shape, torch.bool)]
        if wrong:
            return Check.at_most("at-bound", math.inf, 0.0, f"declared entries at a bound: {wrong[0]}")
        beyond = sum(int((cut[name] & ~_no_smaller(g, released[name])).sum()) for name, g in true.items())
        return Check.at_most("at-bound", float(beyond), 0.0, "entries said to be cut to a bound that were below it")

    def _variance(self, true: Tensors, released: Tensors, variance: Tensors, again: Tensors) -> Iterator[Check]:
        """Yield the factors by which the declared variance is too small and too large, at the best gradient scale.

        `again` is a release with other draws: the variance is that of noise if noise explains the errors. What is zero
        in one of both may be missing there, as draws choose which entries are: that is no noise.
        """
        fitted = scale_of(true, released, variance)
        errors = [
            {name: g - scale.view(-1, *[1] * (g.ndim - 1)) * true[name] for name, g in released.items()}
            for scale in (fitted, torch.zeros_like(fitted))
        ]
        kept = {name: (variance[name] > 0) & (g != 0) & (again[name] != 0) for name, g in released.items()}
        drawn = sum(float((again[name] - g)[kept[name]].square().sum()) / 2 for name, g in released.items())
        noise = drawn > 0.9 * sum(float(e.square().sum()) for e in errors[0].values())
        most = NOISE_FACTOR if noise else ROUNDING_FACTOR
        counts = entries_with_noise(released, variance) if noise else {name: g.numel() for name, g in released.items()}
        too_small = min(understatement(true, error, variance, counts) for error in errors)
        which = "of the worst parameter, less chance"
        yield Check.at_most("variance", too_small, most, f"measured over declared, {which}")
        too_large = overstatement(true, released, errors[0], variance, counts, noise=noise)
        yield Check.at_most(
            "overstated", too_large, most, "declared over measured, of the worst parameter, less chance"
        )

    def control(self) -> Check:
        """Return what leaks without the defense."""
        return control_of_gradients(self.subject)


def _no_smaller(true: Tensor, bound: Tensor) -> Tensor:
    """Return which entries have the sign of a bound and are no smaller, up to rounding."""
    return true * bound.sign() >= bound.abs() * (1 - TOLERANCE)

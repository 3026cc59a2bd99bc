"""How likely a release is, given the gradient behind it and defenses whose errors are of known size."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.solvers.ridge import RTOL
from privlab.threat import Observation, Stack, defense_declarations

__all__ = ["Likelihood"]

Gradients = Mapping[str, Float[Tensor, "s ..."]]


@dataclass(frozen=True, eq=False)
class Likelihood:
    """Released gradients of all layers, with the `variance` of the error of each entry, for each of r releases.

    An entry that was released as zero, and may be another number, lies within ±`edge`; `edge` is zero for all other
    entries. The functions in `expected` apply what a defense does on average, such as clipping.
    """

    released: Mapping[str, Float[Tensor, "r ..."]]
    variance: Mapping[str, Float[Tensor, "r ..."]]
    edge: Mapping[str, Float[Tensor, "r ..."]]
    expected: tuple[Callable[[Gradients], Gradients], ...] = ()

    @classmethod
    def of(cls, seen: Observation, released: Mapping[str, Float[Tensor, "r ..."]]) -> "Likelihood":
        """Return the likelihood of these gradients by what is known of their errors; those of several defenses add up.

        No error is less than that of rounding, which is relative to the root mean square over all parameters.
        """
        stack = Stack(tuple(seen.defense))
        variance = stack.variance(released)
        edge = {name: torch.where(g == 0, (3 * variance[name]).sqrt(), 0) for name, g in released.items()}
        sizes = torch.stack([g.flatten(1).square().sum(1) for g in released.values()]).sum(0)
        count = sum(g[0].numel() for g in released.values())
        least = RTOL**2 * sizes / count
        least = least.clamp_min(torch.finfo(least.dtype).tiny)
        floors = {name: least.view(-1, *[1] * (g.ndim - 1)) for name, g in released.items()}
        variance = {name: torch.where(edge[name] > 0, 0, v).maximum(floors[name]) for name, v in variance.items()}
        expected = (defense_declarations(part).expected for part in stack.on_gradients)
        return cls(released, variance, edge, tuple(each for each in expected if each is not None))

    def take(self, rows: Int[Tensor, " s"]) -> "Likelihood":
        """Return that of some of the releases."""
        parts = (self.released, self.variance, self.edge)
        released, variance, edge = ({name: each[rows] for name, each in part.items()} for part in parts)
        return Likelihood(released, variance, edge, self.expected)

    def __call__(self, g: Gradients, release: Int[Tensor, " s"]) -> Float[Tensor, " s"]:
        """Return −log p(released | g) less a constant: Σ r² / 2v, with r the distance of an entry to its interval."""
        for expected in self.expected:
            g = expected(g)
        total = []
        for name, each in g.items():
            off = each - self.released[name][release]
            edge = self.edge[name][release]
            off = off - off.clamp(-edge, edge)
            total.append((off.square() / self.variance[name][release]).flatten(1).sum(1))
        return torch.stack(total).sum(0) / 2

"""Re-assembly: where an adversary puts patches that a defense shuffled, from what it holds alone."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from privlab.borders import border_costs
from privlab.errors import PrivlabError
from privlab.jigsaw import ROUNDS, assemble

__all__ = ["REASSEMBLIES", "Borders", "Reassembly", "standing"]

BY_CHANCE = 3
"""Patches of photographs that fit each other where a shuffle of all of them has put them: in a group, at most."""


@runtime_checkable
class Reassembly(Protocol):
    """A frozen dataclass of hyper-parameters; calling it puts the patches of each image in order."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]

    def __call__(
        self, patches: Float[Tensor, "b n c p p"], grid: tuple[int, int], known: Bool[Tensor, "b n"]
    ) -> Int[Tensor, "b n"]:
        """Return the orders: slot s of image i is given patch `order[i, s]`, its own where `known`.

        Args:
            patches: reconstructed, in [0, 1], in the slots where they came to light.
            grid: (h, w) with h · w = n.
            known: marks the slots that are known to hold their own patch; none, where nothing says which were shuffled.
        """
        ...


@dataclass(frozen=True)
class Borders:
    """Put patches where their borders fit, by `privlab.jigsaw`, anchored on the slots that are known.

    Where none is known, those are taken for known whose borders fit as they are, if there are any: `standing`.
    Patches that are all alike, such as grey ones, have no order: they stay.

    Args:
        rounds: as in `privlab.jigsaw.assemble`.

    Source: as cited in `privlab.jigsaw`.
    """

    name: ClassVar[str] = "border"
    paper: ClassVar[str] = "ours; after Gallagher (2012), Paikin and Tal (2015)"

    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            PrivlabError: if `rounds` is negative.
        """
        if self.rounds < 0:
            raise PrivlabError(f"rounds of re-assembly must be at least 0. Found {self.rounds}.")

    def __call__(
        self, patches: Float[Tensor, "b n c p p"], grid: tuple[int, int], known: Bool[Tensor, "b n"]
    ) -> Int[Tensor, "b n"]:
        """Return the order of least border cost that is found for each image."""
        return torch.stack([self._order(each, grid, row) for each, row in zip(patches, known, strict=True)])

    def _order(
        self, patches: Float[Tensor, "n c p p"], grid: tuple[int, int], known: Bool[Tensor, " n"]
    ) -> Int[Tensor, " n"]:
        loose = patches[~known]
        if (loose == loose[:1]).all():
            return torch.arange(len(patches), device=patches.device)
        costs = border_costs(patches.float())
        return assemble(costs, grid, known if known.any() else standing(costs, grid), rounds=self.rounds)


def standing(costs: Float[Tensor, "2 n n"], grid: tuple[int, int]) -> Bool[Tensor, " n"]:
    """Mark the patches that stand where they belong, as far as their borders say: the largest group that fits.

    Two neighbours fit if each is the other's best one in their direction. A group no larger than `BY_CHANCE` says
    nothing: none is marked then.
    """
    n = costs.shape[-1]
    alone = torch.eye(n, dtype=torch.bool, device=costs.device)
    slots, edges = torch.arange(n, device=costs.device).view(grid), []
    for cost, first, second in zip(costs, (slots[:, :-1], slots[:-1]), (slots[:, 1:], slots[1:]), strict=True):
        a, b = first.flatten(), second.flatten()
        cost = cost.masked_fill(alone, torch.inf)
        fits = (cost.argmin(1)[a] == b) & (cost.argmin(0)[b] == a)
        edges.append(torch.stack([a[fits], b[fits]]))
    a, b = torch.cat(edges, 1).cpu().numpy()
    _, group = connected_components(coo_array((np.ones(len(a)), (a, b)), (n, n)), directed=False)
    size = np.bincount(group)
    marked = torch.from_numpy(group == size.argmax()).to(costs.device)
    return marked if size.max() > BY_CHANCE else torch.zeros_like(marked)


REASSEMBLIES: dict[str, type[Reassembly]] = {"border": Borders}
"""The solvers by name."""

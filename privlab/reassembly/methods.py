"""Re-assembly: an adversary orders the patches that a defense shuffled, from what it holds alone.

It goes by their borders, or by a position predictor that was trained on images of the same kind, with borders or
without. If patches carry position embeddings, attacks place them by these, and nothing is left to re-assemble.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from privlab.base import PrivlabError, check_range, linear_sum_assignment
from privlab.patches import patchify
from privlab.reassembly.border_costs import exact_costs, in_grains
from privlab.reassembly.predictors import PositionPredictor, load_predictor, predictor_file
from privlab.reassembly.solver import ROUNDS, assemble, standing_slots
from privlab.threat import Reconstruction
from privlab.victims import PLACERS, placer


@runtime_checkable
class Reassembly(Protocol):
    """A frozen dataclass of hyper-parameters; calling it puts the patches of each image in order."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]

    def __call__(
        self, patches: Float[Tensor, "b n c p p"], grid: tuple[int, int], known: Bool[Tensor, "b n"]
    ) -> Int[Tensor, "b n"]:
        """Return the orders: slot s of image i is given patch `order[i, s]`, its own if the slot is `known`.

        Args:
            patches: reconstructed patches in [0, 1], in the slots in which the attack returned them.
            grid: (h, w) with h · w = n.
            known: marks the slots that are known to hold their own patch; no slot, if it is unknown which were
                shuffled.
        """
        ...


@dataclass(frozen=True)
class Borders:
    """Put patches where their borders fit, by `privlab.reassembly.solver`, anchored on the slots that are known.

    If none is known, the slots whose borders fit as they are seem to be, if there are any (`standing_slots`). Costs are
    those of 8-bit values (`exact_costs`): the order of an image depends on these alone, not on other images.
    Patches that are all equal, such as grey ones, have no order and stay.

    Args:
        rounds: rounds of re-growth after the first, at least 0, as in `privlab.reassembly.solver.assemble`.

    Source: as cited in `privlab.reassembly.solver`.
    """

    name: ClassVar[str] = "border"
    paper: ClassVar[str] = "ours; after Gallagher (2012), Paikin and Tal (2015)"

    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        """Raise PrivlabError if `rounds` is negative."""
        check_range(self.rounds >= 0, "rounds of re-assembly", "at least 0", self.rounds)

    def __call__(
        self, patches: Float[Tensor, "b n c p p"], grid: tuple[int, int], known: Bool[Tensor, "b n"]
    ) -> Int[Tensor, "b n"]:
        """Return, for each image, the order of the least border cost that was found."""
        return torch.stack([self._order(each, grid, row) for each, row in zip(patches, known, strict=True)])

    def _order(
        self, patches: Float[Tensor, "n c p p"], grid: tuple[int, int], known: Bool[Tensor, " n"]
    ) -> Int[Tensor, " n"]:
        if _alike(patches[~known]):
            return torch.arange(len(patches), device=patches.device)
        costs = exact_costs(patches)
        standing = None if known.any() else standing_slots(costs, grid)
        return assemble(costs, grid, known, standing=standing, rounds=self.rounds)


@dataclass(frozen=True)
class Predicted:
    """Put patches where a trained position predictor says that they belong.

    Its −log p(slot | patch) is added to the border costs in `privlab.reassembly.solver.assemble`; without border costs,
    the patches are assigned to the slots so that the product of p is largest. Known slots are as in `Borders`.

    Args:
        weights: a `predictor.safetensors` of `privlab train`, or a predictor's name in the zoo; "auto" takes the
            zoo's predictor for these patches.
        borders: whether border costs count too.
        rounds: rounds of re-growth after the first, at least 0, as in `privlab.reassembly.solver.assemble`.
    """

    name: ClassVar[str]
    paper: ClassVar[str]

    weights: str = "auto"
    borders: bool = True
    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        """Check the options."""
        Borders(self.rounds)

    def file(self, grid: tuple[int, int], patch: int) -> Path:
        """Return the file of the predictor for patches of this grid and side.

        Raises:
            PrivlabError: if there is no such file.
        """
        name = placer(self.name, grid, patch) if self.weights == "auto" else self.weights
        if name is None:
            lack = "Its own are not for {} × {} patches of {p} × {p} pixels.".format(*grid, p=patch)
        elif (path := predictor_file(name)).is_file():
            return path
        else:
            lack = f"Found no file '{name}'{', which a clone of privlab holds' if name in PLACERS else ''}."
        raise PrivlabError(
            f"Re-assembly by {self.name} needs a trained predictor: `privlab train {self.name}` makes one, "
            f"--set {self.name}.weights=FILE names it. {lack}"
        )

    def predictor(self, grid: tuple[int, int], patch: int, device: torch.device | str = "cpu") -> PositionPredictor:
        """Return the predictor for patches of this grid and side, on a device; it is shared, as in `load_predictor`.

        Args:
            grid: patches down and across an image.
            patch: side of a patch in pixels.
            device: where the predictor computes.

        Raises:
            PrivlabError: if the file is missing, holds no predictor or one of another kind, or is for other patches.
        """
        found = load_predictor(self.file(grid, patch), device)
        if found.name != self.name:
            raise PrivlabError(f"'{self.weights}' is a predictor of {found.name}. Use --reassembly {found.name}.")
        found.check(grid, patch)
        return found

    @torch.no_grad()
    def __call__(
        self, patches: Float[Tensor, "b n c p p"], grid: tuple[int, int], known: Bool[Tensor, "b n"]
    ) -> Int[Tensor, "b n"]:
        """Return, for each image, the order of the least cost that was found.

        Raises:
            PrivlabError: if there is no predictor for these patches, as `predictor` says.
        """
        predictor = self.predictor(grid, patches.shape[-1], patches.device)
        return torch.stack([self._order(predictor, *each, grid) for each in zip(patches, known, strict=True)])

    def _order(
        self,
        predictor: PositionPredictor,
        patches: Float[Tensor, "n c p p"],
        known: Bool[Tensor, " n"],
        grid: tuple[int, int],
    ) -> Int[Tensor, " n"]:
        if _alike(patches[~known]):
            return torch.arange(len(patches), device=patches.device)
        costs = exact_costs(patches)
        fixed = known if known.any() else standing_slots(costs, grid)
        seen = (patches * 255).round() / 255  # one image at a time: products of a larger batch round differently
        places = in_grains(-predictor.scores(seen[None].float(), fixed[None])[0].T)
        if not self.borders:
            return _assign(places, fixed)
        return assemble(costs, grid, known, standing=fixed, places=places, rounds=self.rounds)


@dataclass(frozen=True)
class ByMp3(Predicted):
    """Placement by MP3, a predictor that was trained to order patches without any position embeddings.

    Source: MP3 (Zhai et al., ICML 2022), Section 4.2.2; as an attack, ours.
    """

    name: ClassVar[str] = "mp3"
    paper: ClassVar[str] = "ours; by MP3 (Zhai et al. 2022)"


@dataclass(frozen=True)
class ByDropPos(Predicted):
    """Placement by DropPos, a predictor that is given the positions of known patches and reconstructs the others.

    Source: DropPos (Wang et al., NeurIPS 2023), Section 3; as an attack, ours.
    """

    name: ClassVar[str] = "droppos"
    paper: ClassVar[str] = "ours; by DropPos (Wang et al. 2023)"


def rearrange(
    reconstruction: Reconstruction, known: Bool[Tensor, "b n"] | None, by: Reassembly, grid: tuple[int, int], patch: int
) -> Int[Tensor, "b n"]:
    """Return the orders in which an adversary puts the patches of its reconstructions, from what it holds alone.

    Args:
        reconstruction: what an attack returned; if it marks slots as loose, all other slots hold their own patch.
        known: marks the slots that the release shows to hold their own patch; None if it shows none. Read only if
            `reconstruction` does not mark loose slots.
        by: the method that puts patches in order.
        grid: (h, w), the patches in a column and in a row of an image.
        patch: the side of a patch, in pixels.
    """
    patches = patchify(reconstruction.images, patch).unflatten(2, (-1, patch, patch))
    if reconstruction.loose is not None:
        known = ~reconstruction.loose
    elif known is None:
        known = torch.zeros(patches.shape[:2], dtype=torch.bool, device=patches.device)
    return by(patches, grid, known)


def _alike(patches: Float[Tensor, "k c p p"]) -> bool:
    return bool((patches == patches[:1]).all())


def _assign(places: Float[Tensor, "n n"], fixed: Bool[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return the order that assigns the pieces that are not fixed to their slots at the least total cost."""
    order, free = torch.arange(len(fixed), device=fixed.device), (~fixed).nonzero()[:, 0]
    among = places[free][:, free].double().cpu().numpy()
    order[free] = free[torch.from_numpy(linear_sum_assignment(among)[1]).to(free)]
    return order


REASSEMBLIES: dict[str, type[Reassembly]] = {kind.name: kind for kind in (Borders, ByMp3, ByDropPos)}
"""The methods of re-assembly by name."""

"""`border-jigsaw`: permuted rows without position embeddings, inverted and put together by their borders."""

from dataclasses import dataclass
from typing import ClassVar

from privlab.attacks.rows import WHITE_BOX, by_borders, warn_of_moves
from privlab.base import check_range
from privlab.reassembly import ROUNDS, load_predictor, predictor_file
from privlab.threat import Capability, FeatureObservation, Reconstruction

__all__ = ["BorderJigsaw"]


@dataclass(frozen=True)
class BorderJigsaw:
    """Invert each row linearly, and re-assemble the patches by `privlab.reassembly.solver`, without anchors.

    A row is taken to be W x + β, which holds for victims without position embeddings (`_nope`). In other victims a row
    contains an unknown e_s, which stays in the patch as an error; use `pe-assignment` or `row-alignment` there. The row
    of the class token, which is known to the last bit, is removed first. Images that share one order are solved
    together, with their border costs added up.

    Args:
        rounds: rounds of `privlab.reassembly.solver.assemble`, at least 0.
        predictor: name in the zoo or file `predictor.safetensors` of a position predictor, whose −log p(slot | patch)
            is added to the border costs; an empty string stands for none.

    Source: the training-free baseline of re-assembly; borders and growth as cited in `privlab.reassembly.solver`.
    """

    name: ClassVar[str] = "border-jigsaw"
    paper: ClassVar[str] = "ours; after Gallagher (2012), Paikin and Tal (2015)"
    knows: ClassVar[frozenset[str]] = frozenset({"row-permutation", "gaussian-noise"})
    requires: ClassVar[frozenset[Capability]] = WHITE_BOX | {Capability.OWN_ROWS}
    effort: ClassVar[str] = "quick"

    rounds: int = ROUNDS
    predictor: str = ""

    def __post_init__(self) -> None:
        """Raise PrivlabError if `rounds` is negative."""
        check_range(self.rounds >= 0, "rounds of border-jigsaw", "at least 0", self.rounds)

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Invert the rows and put them together.

        Raises:
            PrivlabError: if there is no such predictor, or it is for other patches.
        """
        warn_of_moves(self.name, seen, rows=True)
        device = seen.model.mean.device
        found = load_predictor(predictor_file(self.predictor), device) if self.predictor else None
        if found is not None:
            found.check(seen.model.grid, seen.model.patch)
        return by_borders(seen, rounds=self.rounds, predictor=found)

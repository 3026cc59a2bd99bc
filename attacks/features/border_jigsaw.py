"""`border-jigsaw`: permuted rows without position embeddings, inverted and put together by their borders.

Known are rows W x + β in an unknown order; sought are the images. The steps are in `privlab.attacks.rows.by_borders`:
invert each row to a patch, compare the borders of all pairs of patches, and put the patches on the grid.
"""

from dataclasses import dataclass
from typing import ClassVar

from privlab.attacks.rows import WHITE_BOX, by_borders, warn_of_moves
from privlab.base import AtLeast0, Checked
from privlab.reassembly import ROUNDS, load_predictor, predictor_file
from privlab.threat import Capability, FeatureObservation, Reconstruction


@dataclass(frozen=True)
class BorderJigsaw(Checked):
    """Invert each row linearly, and re-assemble the patches by `privlab.reassembly.solver`, without anchors.

    Idea: Without position embeddings a row says nothing of its slot. It still says what its patch looks like, because
    the projection can be inverted. The patches are then put together as a jigsaw puzzle, by their borders.

    Steps: invert each row → compare borders → grow the image

    Algorithm: A row is taken to be W x + β, which holds for victims without position embeddings (`_nope`). In other
    victims a row contains an unknown e_s, which stays in the patch as an error; use `pe-assignment` or `row-alignment`
    there. The row of the class token, which is known to the last bit, is removed first. Images that share one order are
    solved together, with their border costs added up.

    Exact if: every row is placed, up to what the projection W loses (nothing for a square W of full rank).

    Fails if: patches are similar: these are put in the wrong place, above all where each image has its own order.

    Cost: 0.03 to 0.30 s an image for the re-assembly (patches of 16 pixels, 160 and 224 pixels).

    Studies: permutation, training

    Example: privlab attack --model cifar_vit_nope --attack border-jigsaw --defense row-permutation --limit 8

    Args:
        rounds: rounds of `privlab.reassembly.solver.assemble`, at least 0.
        predictor: name in the zoo or file `predictor.safetensors` of a position predictor, whose −log p(slot | patch)
            is added to the border costs; an empty string stands for none.

    Source: the training-free baseline of re-assembly; borders and growth as cited in `privlab.reassembly.solver`.
    [@gallagher2012jigsaw; @paikin2015jigsaw]
    """

    name: ClassVar[str] = "border-jigsaw"
    paper: ClassVar[str] = "ours; after Gallagher (2012), Paikin and Tal (2015)"
    order: ClassVar[int] = 280
    knows: ClassVar[frozenset[str]] = frozenset({"row-permutation", "gaussian-noise"})
    requires: ClassVar[frozenset[Capability]] = WHITE_BOX | {Capability.OWN_ROWS}
    effort: ClassVar[str] = "quick"

    rounds: AtLeast0 = ROUNDS
    predictor: str = ""

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Invert the rows and put them together.

        Raises:
            PrivlabError: if there is no such predictor, or it is for other patches.
        """
        warn_of_moves(self.name, seen, rows=True)
        device = seen.model.mean.device
        # The predictor adds −log p(slot | patch) to the border costs; it must have been
        # trained for this grid and patch size.
        found = load_predictor(predictor_file(self.predictor), device) if self.predictor else None
        if found is not None:
            found.check(seen.model.grid, seen.model.patch)
        return by_borders(seen, rounds=self.rounds, predictor=found)

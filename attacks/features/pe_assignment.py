"""`pe-assignment`: permuted rows return to their slots, because each contains the position embedding of its slot.

Known are rows z = W x + β + e_s in an unknown order and the embeddings e_s; sought is the order, then the images. The
steps are in `privlab.attacks.rows`: `row_costs` and `place_rows` find the order, `invert` the patches.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from privlab.attacks.rows import WHITE_BOX, by_embeddings, known_tokens, place, undone, warn_of_moves
from privlab.threat import Capability, FeatureObservation, Reconstruction


@dataclass(frozen=True)
class PEAssignment:
    """Assign rows to slots so that Σ_s (z_r(s) − μ − e_s)ᵀ Σ⁻¹ (z_r(s) − μ − e_s) is least.

    Idea: Every row carries the position embedding of its slot, and the server knows these embeddings. Rows of public
    photographs show how much the rest of a row varies. So the likeliest slot of each row follows from one assignment
    problem, and the rows are inverted in that order.

    Steps: cost of each row at each slot → solve the assignment → subtract e_s, invert W

    Algorithm: A row is z = W x + β + e_s, and W x + β is about N(μ, Σ) over photographs; public images give μ and Σ.
    The order of highest likelihood solves an assignment problem: one for each image, or one for a batch that shares an
    order. Rows mixed among images are place over the whole batch, b rows in each slot, and then grouped by their
    borders; which group is which image of the batch is not recovered. Known noise is added to Σ.

    `invert_rows` inverts the rows without their position embeddings. The columns must not be permuted.

    Exact if: every row is placed, up to what the projection W loses (nothing for a square W of full rank).

    Fails if: position embeddings drifted from the public ones by several times their deviation: these are not matched.

    Cost: 4.4 ms an image (ViT-Ti, 224 pixels, batches of 32).

    Studies: permutation

    Source: row permutation as in Permutation Equivariance (Xu et al., CVPR 2024), Eq. 2, whose text sends z with its
    position embeddings; the attack is Gaussian classification with an assignment. [@xu2024permutation]
    """

    name: ClassVar[str] = "pe-assignment"
    paper: ClassVar[str] = "ours, against Permutation Equivariance (Xu et al. 2024), Eq. 2"
    order: ClassVar[int] = 270
    knows: ClassVar[frozenset[str]] = frozenset({"row-permutation", "batch-shuffle", "gaussian-noise"})
    requires: ClassVar[frozenset[Capability]] = WHITE_BOX | {Capability.POSITION_EMBEDDINGS}
    effort: ClassVar[str] = "quick"

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Place the rows and invert them."""
        warn_of_moves(self.name, seen, rows=True)
        return by_embeddings(seen)

    def rows(self, seen: FeatureObservation) -> Int[Tensor, "b n"]:
        """Return which row of the batch goes into each slot of each image, without inverting any."""
        return place(seen, undone(seen), known_tokens(seen.model)[1])

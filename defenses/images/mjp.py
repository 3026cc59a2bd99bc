"""`mjp`: masked jigsaw puzzle, with an unknown position embedding in the slots of shuffled patches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from jaxtyping import Float
from torch import Generator, Tensor

from privlab.defenses.images.jigsaw import Jigsaw
from privlab.patches import bits, masked_slots
from privlab.threat import Effects, Feed
from privlab.victims import VictimModel


@dataclass(frozen=True)
class Mjp(Jigsaw):
    """Jigsaw, with the position embedding of every masked slot replaced by the shared learnable E_unk.

    Idea: The client chooses blocks of patches, shuffles these among themselves, and feeds all of them with one unknown
    position embedding. The gradients of the masked slots' own position embeddings are then zero. A linear solver that
    takes these zeros for equations returns noise.

    Steps: choose γ N slots → shuffle their patches → feed them with E_unk

    Fails if: N + |masked| + 1 < D: the zero rows of ∂ℓ/∂E_pos reveal the mask, the rest of the gradient reveals the
    span of the masked patches, and the first block's MLP reveals their tokens.

    Cost: It changes the outputs, and so the accuracy: the study has victims that were trained with it and without.

    Studies: mjp, table5, training

    Example: privlab attack --model cifar_vit_mjp27 --defense mjp

    Args:
        gamma: the share γ of the slots that is masked, in [0, 1]. The paper trains with 0.03, evaluates settings
            b and c with 0.27 (Table 5), and shows 0.9 (Figures 9 and 10).
        per: "batch" or "image", as for `Jigsaw`. With "batch" the zero rows of ∂ℓ/∂E_pos are the mask, however many
            images a gradient sums.
        masked_pe: the position embedding of the masked slots. "unknown": E_unk. "none": no position embedding, which is
            "w/o E_unk" taken literally (Table 5, group 3). "slot": that of the slot, a plain jigsaw, whose accuracy is
            closer to the one printed in that row.

    Source: MJP (CVPR 2023), Algorithms 1 and 2, Equations 3 to 5. [@ren2023mjp]
    """

    name: ClassVar[str] = "mjp"
    paper: ClassVar[str] = "MJP (Ren et al. 2023), Alg. 1 and 2, Eq. 3 to 5"
    order: ClassVar[int] = 30

    masked_pe: Annotated[str, ("unknown", "none", "slot")] = "unknown"

    @property
    def acts_as(self) -> Effects:
        """Return the effect: patches are shuffled, and their position embeddings are replaced or kept."""
        if self.masked_pe == "slot":
            return super().acts_as
        kind = "unknown" if self.masked_pe == "unknown" else "zero"
        return Effects(patches="masked", pe=kind, one_order=self.per == "batch")

    def secret_bits(self, model: VictimModel, together: int) -> float:
        """Return log₂ k! of the order of the k masked patches; the mask shows in what replaces position embeddings."""
        if self.masked_pe == "slot":
            return super().secret_bits(model, together)
        k = masked_slots(model.vit.patch_embed.num_patches, self.gamma)
        return bits(k) * (together if self.per == "image" else 1)

    def __call__(self, images: Float[Tensor, "b c h w"], patch: int, draws: Sequence[Generator]) -> Feed:
        """Return x̃ with the drawn mask, which also marks the slots whose position embeddings are replaced."""
        feed = super().__call__(images, patch, draws)
        if self.masked_pe == "slot":
            return feed
        kind = "unknown" if self.masked_pe == "unknown" else "zero"
        return replace(feed, masked_pe=feed.moved, replacement=kind)

"""`mjp`: masked jigsaw puzzle, with an unknown position embedding in the slots of shuffled patches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import check_name
from privlab.defenses.images.jigsaw import Jigsaw
from privlab.patches import bits
from privlab.threat import Effects, Feed
from privlab.victims import VictimModel

__all__ = ["Mjp"]


@dataclass(frozen=True)
class Mjp(Jigsaw):
    """Jigsaw, with the position embedding of every masked slot replaced by the shared learnable E_unk.

    Args:
        gamma: the share γ of the slots that is masked, in [0, 1]. The paper trains with 0.03, evaluates settings
            b and c with 0.27 (Table 5), and shows 0.9 (Figures 9 and 10).
        per: "batch" or "image", as for `Jigsaw`. With "batch" the zero rows of ∂ℓ/∂E_pos are the mask, however many
            images a gradient sums.
        masked_pe: the position embedding of the masked slots. "unknown": E_unk. "none": no position embedding, which is
            "w/o E_unk" taken literally (Table 5, group 3). "slot": that of the slot, a plain jigsaw, whose accuracy is
            closer to the one printed in that row.

    Source: MJP (CVPR 2023), Algorithms 1 and 2, Equations 3 to 5.
    """

    name: ClassVar[str] = "mjp"
    paper: ClassVar[str] = "MJP (Ren et al. 2023), Alg. 1 and 2, Eq. 3 to 5"

    masked_pe: str = "unknown"

    def __post_init__(self) -> None:
        """Raise PrivlabError if γ is outside [0, 1], or `per` or `masked_pe` is unknown."""
        super().__post_init__()
        check_name("masked_pe", self.masked_pe, ("unknown", "none", "slot"))

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
        k = round(self.gamma * model.vit.patch_embed.num_patches)
        return bits(k) * (together if self.per == "image" else 1)

    def __call__(self, images: Float[Tensor, "b c h w"], patch: int, draws: Sequence[Generator]) -> Feed:
        """Return x̃ with the drawn mask, which also marks the slots whose position embeddings are replaced."""
        feed = super().__call__(images, patch, draws)
        if self.masked_pe == "slot":
            return feed
        kind = "unknown" if self.masked_pe == "unknown" else "zero"
        return replace(feed, masked_pe=feed.moved, replacement=kind)

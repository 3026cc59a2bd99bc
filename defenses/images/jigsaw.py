"""`jigsaw`: the block-wise jigsaw of MJP alone; every slot keeps its own position embedding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import Checked, Share
from privlab.patches import bits, jigsaw, masked_slots
from privlab.threat import Effects, Feed
from privlab.victims import VictimModel


@dataclass(frozen=True)
class Jigsaw(Checked):
    """Shuffle the patches of about γ·N block-wise chosen slots among themselves.

    Idea: The client chooses blocks of patches, and shuffles these among themselves. The model is fed the shuffled image
    with its position embeddings as they are. What is released shows every patch, and hides where some of them belong.

    Steps: choose γ N slots → shuffle their patches

    Algorithm: Settings b and c of a victim that was not trained with MJP (Table 5, group 2), and variant E of Table 4.

    Fails if: the adversary solves for each patch: every patch keeps its own equations, so that all patches come back,
    in the shuffled order. Borders and position predictors put many of them in place.

    Cost: It changes the outputs, and so the accuracy: the study has victims that were trained with it and without.

    Studies: training

    Args:
        gamma: the share γ of the slots that is masked, in [0, 1].
        per: "batch" draws one mask and one order for all images that are released together, as the authors' code does,
            with the generator of the first of them. "image" draws for each image, which reveals less. For one image
            both are the same.

    Source: MJP (CVPR 2023), Algorithm 1, and the mask generator of its authors' code. [@ren2023mjp]
    """

    name: ClassVar[str] = "jigsaw"
    paper: ClassVar[str] = "MJP (Ren et al. 2023), Alg. 1"
    order: ClassVar[int] = 20

    gamma: Share = 0.27
    per: Annotated[str, ("batch", "image")] = "batch"

    @property
    def acts_as(self) -> Effects:
        """Return the effect: patches are shuffled, and the position embeddings do not show which."""
        return Effects(patches="shuffled", one_order=self.per == "batch")

    def secret_bits(self, model: VictimModel, together: int) -> float:
        """Return log₂ of the number of ways in which k = ⌊γ·N⌋ of N patches move, N! / (N − k)!; the mask is secret."""
        n = model.vit.patch_embed.num_patches
        return (bits(n) - bits(n - masked_slots(n, self.gamma))) * (together if self.per == "image" else 1)

    def __call__(self, images: Float[Tensor, "b c h w"], patch: int, draws: Sequence[Generator]) -> Feed:
        """Return x̃ with the drawn mask and order; with `per` = "batch", `draws` has one generator for each release."""
        shuffled, order, moved = jigsaw(images, patch, self.gamma, draws)
        return Feed(images=shuffled, order=order, moved=moved)

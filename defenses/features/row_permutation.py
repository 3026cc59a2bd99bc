"""`row-permutation`: the tokens of an image are sent in a secret order."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch

from privlab.base import Checked
from privlab.patches import bits, draw_orders, permute_features
from privlab.threat import Draws, Effects, Sent
from privlab.victims import VictimModel


@dataclass(frozen=True)
class RowPermutation(Checked):
    """Send P_R Z instead of Z, with P_R drawn again for each batch; the client restores the order of the outputs.

    Idea: The client sends the rows of its features in a secret order, which is new for each batch. A Transformer treats
    all rows in the same way, so that the client can put the outputs back and loses no accuracy. What hides the image is
    only the order, and position embeddings reveal it.

    Steps: features Z → permute the rows: P_R Z

    Algorithm: A Transformer's outputs, gradients and learnt weights are the same as without it (Theorems 4.1 and 4.2,
    Corollary 4.3), so the utility does not change.

    Fails if: rows carry public position embeddings, which put them back. Without position embeddings, borders put back
    many rows, and all rows that share one order.

    Cost: It costs no accuracy: the client puts the outputs back in order.

    Studies: permutation

    Args:
        per: "batch" draws one order for all images of a batch, as the paper does; "image" draws one for each.
        class_token: whether class and register tokens are moved too, as by the paper's 197 × 197 matrices.

    Source: Permutation Equivariance (Xu et al., CVPR 2024), Equation 2. [@xu2024permutation]
    """

    name: ClassVar[str] = "row-permutation"
    paper: ClassVar[str] = "Permutation Equivariance (Xu et al. 2024), Eq. 2, Theorems 4.1 and 4.2"
    order: ClassVar[int] = 90

    per: Annotated[str, ("batch", "image")] = "batch"
    class_token: bool = True

    @property
    def acts_as(self) -> Effects:
        """Return the effect: rows move by one order for the batch, or by each image's own."""
        return Effects(rows="shared" if self.per == "batch" else "own")

    def secret_bits(self, model: VictimModel, together: int) -> float:
        """Return log₂ t! of an order of t tokens, one for a batch or one for each of its images."""
        t = model.vit.patch_embed.num_patches + (model.vit.num_prefix_tokens if self.class_token else 0)
        return bits(t) * (together if self.per == "image" else 1)

    def send(self, sent: Sent, draws: Draws) -> Sent:
        """Return the features with their rows in the secret order."""
        b, t, _ = sent.features.shape
        fixed = 0 if self.class_token else sent.prefix
        generators = [draws.batch] if self.per == "batch" else draws.images
        rows = draw_orders(t, generators, fixed=fixed).to(sent.source.device).expand(b, -1)
        shared = rows[0] if self.per == "batch" else rows
        return replace(
            sent,
            features=permute_features(sent.features, shared),
            source=torch.gather(sent.source, 1, rows),
            key_bits=sent.key_bits + bits(t - fixed),
        )

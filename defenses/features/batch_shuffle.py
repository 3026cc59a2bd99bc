"""`batch-shuffle`: patch tokens are shuffled among the images of a batch."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from privlab.base import Checked, Share
from privlab.patches import bits
from privlab.threat import Draws, Effects, Sent
from privlab.victims import VictimModel


@dataclass(frozen=True)
class BatchShuffle(Checked):
    """Draw a share of the batch's patch tokens and shuffle them among all images; class and register tokens stay.

    Idea: The client exchanges patch tokens between the images of a batch before it sends them. The server's attention
    then mixes patches of different images. The outputs change, so that this defense costs accuracy.

    Steps: draw a share of the tokens → shuffle among all images

    Algorithm: The client restores the order of its outputs.

    Fails if: rows carry public position embeddings: these put the rows back, but do not say to which image they belong.

    Cost: It changes the outputs, and so the accuracy (`correct` in the records of released features).

    Studies: permutation

    Args:
        share: the share of all patch tokens that is shuffled, in [0, 1]. The source prints no number for Table 6.

    Source: Yao et al. (ICDM 2022), batch shuffling; "BS" in Table 6 of Permutation Equivariance (CVPR 2024).
    [@yao2022shuffling; @xu2024permutation]
    """

    name: ClassVar[str] = "batch-shuffle"
    paper: ClassVar[str] = "Yao et al. (ICDM 2022); BS in Permutation Equivariance (2024), Table 6"
    order: ClassVar[int] = 110

    acts_as: ClassVar[Effects] = Effects(rows="mixed")

    share: Share = 1.0

    def secret_bits(self, model: VictimModel, together: int) -> float:
        """Return log₂ of the number of ways in which k of n patch tokens of a batch can move: n! / (n − k)!."""
        n = together * model.vit.patch_embed.num_patches
        return bits(n) - bits(n - round(self.share * n))

    def send(self, sent: Sent, draws: Draws) -> Sent:
        """Return the batch with its patch tokens shuffled."""
        b, t, _ = sent.features.shape
        places = torch.arange(b * t).view(b, t)[:, sent.prefix :].flatten()
        chosen = places[torch.randperm(len(places), generator=draws.batch)[: round(self.share * len(places))]]
        order = torch.arange(b * t)
        order[chosen] = chosen[torch.randperm(len(chosen), generator=draws.batch)]
        order = order.to(sent.source.device)
        return replace(
            sent,
            features=sent.features.flatten(0, 1)[order].view_as(sent.features),
            source=sent.source.flatten()[order].view(b, t),
            key_bits=sent.key_bits + bits(len(chosen)),
        )

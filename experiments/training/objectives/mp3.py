"""`mp3`: masked patch position prediction, without labels and without position embeddings."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from privlab.base import check_range
from privlab.experiments.training.objectives.base import set_drop_path
from privlab.experiments.training.objectives.context import MaskedMp3
from privlab.reassembly import tiles
from privlab.victims import VictimModel


@dataclass(frozen=True)
class TrainMp3:
    """L = −E log p(slot i | patch i), over all patches, of which a random share 1 − η is context.

    Args:
        eta: η, the share of the patches that is no context, in [0, 1): 0.5 for CIFAR-100, 0.8 for Tiny ImageNet, 0.75
            for ImageNet-1K in the paper.
        drop_path: rate of the last block, in [0, 1); it grows linearly over the blocks.

    Raises:
        PrivlabError: for numbers out of range.

    Source: MP3 (Zhai et al., ICML 2022), Sections 3.2 and 4.2, Algorithm 1.
    """

    name: ClassVar[str] = "mp3"
    paper: ClassVar[str] = "MP3 (Zhai et al. 2022), Alg. 1"

    eta: float = 0.75
    drop_path: float = 0.1

    def __post_init__(self) -> None:
        """Check the options."""
        for key, sign in (("eta", " (η)"), ("drop_path", "")):
            check_range(0 <= (value := getattr(self, key)) < 1, f"{key}{sign}", "in [0, 1)", value)

    @property
    def labelled(self) -> bool:
        """Return whether it needs labels."""
        return False

    def module(self, model: VictimModel) -> nn.Module:
        """Return the predictor on the victim's ViT, whose position embeddings, if it has any, are not used."""
        set_drop_path(model, self.drop_path)
        return MaskedMp3(model)

    def batch(
        self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], model: VictimModel, draw: Generator
    ) -> tuple[Tensor, ...]:
        """Return the patches of each image (b × n × c × p × p), and the numbers of those that are context (b × m).

        Args:
            images: the augmented images of the step, in [0, 1].
            labels: not used: the objective needs none.
            model: the victim, which tells the side of the patches.
            draw: the generator of the context of each image.
        """
        patches = tiles(images, model.patch)
        return patches, some_of(patches.shape[1], 1 - self.eta, len(patches), draw)

    def loss(self, module: nn.Module, batch: tuple[Tensor, ...]) -> Float[Tensor, ""]:
        """Return the mean cross-entropy of the slots."""
        logits = module(*batch)
        own = torch.arange(logits.shape[1], device=logits.device).repeat(len(logits))
        return F.cross_entropy(logits.flatten(0, 1), own)


def some_of(n: int, share: float, b: int, draw: Generator) -> Int[Tensor, "b m"]:
    """Return b random subsets of the numbers below n, m = max(1, round(share · n)) in each, in a random order.

    Args:
        n: the numbers 0 … n − 1 are drawn from, without replacement.
        share: the share of them that is drawn, in [0, 1].
        b: the number of subsets, one for each image.
        draw: the generator of all draws.
    """
    return torch.rand(b, n, generator=draw).argsort(1)[:, : max(1, round(share * n))]

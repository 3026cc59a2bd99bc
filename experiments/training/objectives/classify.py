"""`classify`: cross-entropy of a ViT on labelled images, as DeiT is trained."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from privlab.base import check_range
from privlab.experiments.training.classifiers import Classifier


@dataclass(frozen=True)
class Classify:
    """Tell classes apart: L_CE with label smoothing ε, on mixed images where asked.

    Args:
        smoothing: ε, the share of a label that is spread over all classes, in [0, 1).
        mixup: α of Mixup's Beta(α, α); 0 for none.
        cutmix: α of CutMix's; 0 for none. With both, each batch is mixed by one of them, drawn evenly.

    Raises:
        PrivlabError: for numbers out of range.

    Source: DeiT (Touvron et al. 2021); MJP, Table 7.
    """

    name: ClassVar[str] = "classify"
    paper: ClassVar[str] = "DeiT (Touvron et al. 2021)"

    smoothing: float = 0.1
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_range(0 <= self.smoothing < 1, "smoothing", "in [0, 1)", self.smoothing)
        for key in ("mixup", "cutmix"):
            check_range((value := getattr(self, key)) >= 0, key, "at least 0", value)

    @property
    def labelled(self) -> bool:
        """Return whether it needs labels."""
        return True

    def module(self, model: Any) -> nn.Module:  # noqa: ANN401  # a `Classifier`, or what a kind of it takes
        """Return the victim alone."""
        return model

    def batch(
        self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], model: Classifier, draw: Generator
    ) -> tuple[Tensor, ...]:
        """Return the images, mixed where asked, and their labels as rows of probabilities, b × y.

        Args:
            images: the augmented images of the step, in [0, 1].
            labels: the class index of each image, in [0, y).
            model: the victim, which tells the number of classes y.
            draw: the generator of the choice between Mixup and CutMix.
        """
        return self.mix(images, F.one_hot(labels, model.classes).float(), draw)

    def loss(self, module: nn.Module, batch: tuple[Tensor, ...]) -> Float[Tensor, ""]:
        """Return L_CE."""
        images, labels = batch
        return self.cross_entropy(module(images), labels)

    def cross_entropy(self, logits: Float[Tensor, "b y"], labels: Float[Tensor, "b y"]) -> Float[Tensor, ""]:
        """Return the mean of −Σ ((1 − ε) y + ε / Y) log p over the batch."""
        return F.cross_entropy(logits, labels, label_smoothing=self.smoothing)

    def mix(
        self, images: Float[Tensor, "b c h w"], labels: Float[Tensor, "b y"], draw: Generator
    ) -> tuple[Tensor, Tensor]:
        """Mix each image and its label with another's of the batch, by Mixup or by CutMix.

        Mixup returns λ x + (1 − λ) x′, of images and labels alike. CutMix pastes a rectangle of x′ into x, and mixes
        labels by its area. Torchvision does both, and draws from the loop's seeded state. A batch of one image stays as
        it is.

        Args:
            images: the images of the batch.
            labels: their labels, as rows of probabilities.
            draw: the generator that chooses one of the two for the batch, where both are asked for.
        """
        from torchvision.transforms.v2 import CutMix, MixUp

        kinds = [kind(alpha=a) for kind, a in ((MixUp, self.mixup), (CutMix, self.cutmix)) if a]
        if not kinds or len(images) < 2:
            return images, labels
        images, labels = kinds[int(torch.randint(len(kinds), (), generator=draw))](images, labels)
        return images, labels

"""What decoders of releases that are made before the training share: the adversary's own images, and the recipe."""

from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Generator, Tensor, nn

from privlab.attacks.decoders.training import mirrored_and_rolled

__all__ = ["PairTraining", "own_images"]

Network = TypeVar("Network", bound=nn.Module)


class PairTraining(Generic[Network]):
    """The training recipe from inputs to images, by the mean squared error of the images.

    Args:
        model: what is trained.
        inputs: what it reads.
        images: what it shall return, in the same order.
        identity: of all that shapes these.
    """

    def __init__(
        self, model: Network, inputs: Float[Tensor, "r ..."], images: Float[Tensor, "r c h w"], identity: str
    ) -> None:
        self.model, self.inputs, self.images, self.identity = model, inputs, images, identity

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, rows: Tensor, draw: Generator) -> tuple[Tensor, Tensor]:
        """Return some inputs, and their images."""
        rows = rows.to(self.images.device)
        return self.inputs[rows], self.images[rows]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], draw: Generator) -> Tensor:
        """Return the mean squared error of the images of a batch.

        Args:
            model: the model, or what Fabric wraps around it.
            batch: as `batch` returns it.
            draw: not used, because the objective is not random.
        """
        inputs, images = batch
        return F.mse_loss(model(inputs), images)


def own_images(
    public: Float[Tensor, "m c h w"], count: int, at_a_time: int, augment: bool, draw: Generator
) -> Iterator[Float[Tensor, "b c h w"]]:
    """Yield public images in turn, until there are `count`.

    Args:
        public: images of the adversary.
        count: how many there are in all.
        at_a_time: how many come together.
        augment: whether they are mirrored and rolled at random, once each came as it is.
        draw: of the mirroring and rolling.
    """
    for rows in torch.arange(count).split(at_a_time):
        images = public[(rows % len(public)).to(public.device)]
        yield mirrored_and_rolled(images, draw) if augment and int(rows[0]) >= len(public) else images

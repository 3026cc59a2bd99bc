"""`none`: the client feeds its images unchanged. This is the control of every defense, and setting a."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Generator, Tensor

from privlab.threat import Effects, Feed


@dataclass(frozen=True)
class Undefended:
    """Feed x̃ = x.

    Idea: The client feeds its image as it is, and releases what the model gives. No defense acts on the image, on the
    features or on the gradient. It is the control with which a defense is compared.

    Steps: the image as it is

    Fails if: always: it hides nothing.

    Cost: Nothing.
    """

    name: ClassVar[str] = "none"
    paper: ClassVar[str] = "the control"
    order: ClassVar[int] = 10

    acts_as: ClassVar[Effects] = Effects()

    def __call__(self, images: Float[Tensor, "b c h w"], patch: int, draws: Sequence[Generator]) -> Feed:
        """Return the images unchanged, every patch in its own slot."""
        return Feed.undefended(images, patch)

"""`none`: the client feeds its images unchanged. This is the control of every defense, and setting a."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Generator, Tensor

from privlab.threat import Effects, Feed

__all__ = ["Undefended"]


@dataclass(frozen=True)
class Undefended:
    """Feed x̃ = x."""

    name: ClassVar[str] = "none"
    paper: ClassVar[str] = "the control"

    acts_as: ClassVar[Effects] = Effects()

    def __call__(self, images: Float[Tensor, "b c h w"], patch: int, draws: Sequence[Generator]) -> Feed:
        """Return the images unchanged, every patch in its own slot."""
        return Feed.undefended(images, patch)

"""What a client feeds its model: images, and the slots whose position embedding is replaced."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Feed:
    """What a defending client feeds its model; known to the client and to the scorer, not to the adversary.

    `images` are x̃ in [0, 1]; slot i holds patch `order[i]` of the private image. `moved` marks the slots that the
    defense shuffles, `masked_pe` those whose position embedding is replaced by E_unk, or by zero if `replacement` says
    so.
    """

    images: Float[Tensor, "b c h w"]
    order: Int[Tensor, "b n"]
    moved: Bool[Tensor, "b n"]
    masked_pe: Bool[Tensor, "b n"] | None = None
    replacement: Literal["unknown", "zero"] = "unknown"

    @classmethod
    def undefended(cls, images: Float[Tensor, "b c h w"], patch: int) -> "Feed":
        """Return the feed of clients without a defense: every patch of the images in its own slot."""
        b, _, h, w = images.shape
        order = torch.arange((h // patch) * (w // patch), device=images.device).expand(b, -1)
        return cls(images=images, order=order, moved=torch.zeros_like(order, dtype=torch.bool))

    def take(self, rows: slice | Sequence[int]) -> "Feed":
        """Return the feed of some of the clients, by their rows in the batch."""
        masked = None if self.masked_pe is None else self.masked_pe[rows]
        return replace(self, images=self.images[rows], order=self.order[rows], moved=self.moved[rows], masked_pe=masked)

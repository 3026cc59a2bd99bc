"""The client's private knowledge: what it feeds or trains on, its secret draws, and the origin of what it sends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from privlab.patches import inverse, permute_features, restore_features


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


@dataclass(frozen=True, eq=False)
class ClientData:
    """What is private of a client's round: its images and labels, and the generator of its order and its dropout.

    `images` are as the client feeds them, in [0, 1]; no observation and no attack holds any of this. `labels` are class
    indices, or in place of them targets: a probability of each class, such as those of smoothed or mixed labels.
    """

    images: Float[Tensor, "m c h w"]
    labels: Int[Tensor, " m"] | Float[Tensor, "m y"]
    draw: Generator


@dataclass(frozen=True, eq=False)
class Draws:
    """The client's secret generators: one for each image, one for the batch, one for the model's lifetime."""

    images: Sequence[Generator]
    batch: Generator
    model: Generator


@dataclass(frozen=True, eq=False)
class Sent:
    """What a client of split learning sends, with its secret origin; the server sees `features` alone.

    Row (i, j) is row `source[i, j]` of the batch's b·t embedded tokens, counted image by image. Its entry k is entry
    `columns[k]` of that token; None leaves columns in place. The first `prefix` tokens of an image are its class and
    register tokens. `key_bits` is the size of the drawn orders, in bits.
    """

    features: Float[Tensor, "b t d"]
    source: Int[Tensor, "b t"]
    prefix: int
    columns: Int[Tensor, " d"] | None = None
    key_bits: float = 0.0

    @classmethod
    def plain(cls, tokens: Float[Tensor, "b t d"], prefix: int) -> "Sent":
        """Return tokens as an undefended client sends them."""
        b, t, _ = tokens.shape
        return cls(tokens, torch.arange(b * t, device=tokens.device).view(b, t), prefix)

    def restore(self, outputs: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the server's outputs with rows and columns back in the client's order (Eq. 2 and 5)."""
        if self.columns is not None:
            outputs = restore_features(outputs, columns=self.columns)
        return permute_features(outputs.flatten(0, 1), inverse(self.source.flatten())).view_as(outputs)

"""The client's private knowledge: what it feeds or trains on, its secret draws, and the origin of what it sends."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from privlab.patches import inverse, permute_features, restore_features
from privlab.victims.feed import Feed as Feed


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

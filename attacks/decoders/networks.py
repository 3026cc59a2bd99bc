"""Networks that turn released features back into images: what the learned model-inversion attacks train.

Each reads the b × t × d features of a batch and returns the images that they came from. `mae` and `conv` take row i for
slot i, as in the paper's attack; `set` treats the rows as a set without an order; `token` decodes each row separately
and predicts its slot.

Known are the d-dimensional rows that a client released; sought are the images. All four networks whiten the rows, map
them to a smaller width, mix them (attention, convolutions, or not at all), and map each slot linearly to its pixels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from privlab.base import PrivlabError, linear_sum_assignment
from privlab.patches import patchify, unpatchify
from privlab.threat import RowOrder
from privlab.victims import VictimModel

HEAD_WIDTH = 32  # width of an attention head
PIXEL_CHANNELS = 16  # channels of a convolution on pixels, and channels in a group of its norm

Layer = TypeVar("Layer", bound=nn.Module)


@dataclass(frozen=True)
class Shape:
    """What a decoder must know of its victim: the token width, the grid of patches, their side, the prefix tokens."""

    width: int
    grid: tuple[int, int]
    patch: int
    prefix: int

    @classmethod
    def of(cls, model: VictimModel) -> "Shape":
        """Return the shape of a victim's features and images."""
        return cls(model.vit.embed_dim, model.grid, model.patch, model.vit.num_prefix_tokens)

    @property
    def slots(self) -> int:
        """Return the number of patches."""
        return math.prod(self.grid)

    @property
    def image(self) -> tuple[int, int, int]:
        """Return (c, h, w) of an image."""
        return 3, self.grid[0] * self.patch, self.grid[1] * self.patch


class OwnRelease(NamedTuple):
    """Features that an adversary made itself, and what it knows of them.

    `source` is that of `Sent`; `images` are the images before the defense; `fed` are the same images with each patch in
    the slot where the client's defense on images put it.
    """

    features: Float[Tensor, "b t d"]
    source: Int[Tensor, "b t"]
    images: Float[Tensor, "b c h w"]
    fed: Float[Tensor, "b c h w"]


class Whitening(nn.Module):
    """z ↦ C^(−½) (z − μ), fixed before the training.

    The directions that distinguish patches and slots have little variance in z.
    """

    mean: Tensor
    matrix: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("matrix", torch.eye(width))

    def fit(self, rows: Float[Tensor, "m d"]) -> None:
        """Take the mean and the covariance from rows; directions of almost no variance stay small."""
        rows = rows.double()
        mean = rows.mean(0)
        # C = V diag(values) Vᵀ; a small part of the mean variance is added, so that rounding
        # in tiny directions is not enlarged.
        values, V = torch.linalg.eigh((rows - mean).mT @ (rows - mean) / len(rows))
        scale = (values.clamp(min=0) + 1e-4 * values.mean() + 1e-12).rsqrt()
        self.mean.copy_(mean)
        # C^(−½) = V diag(scale) Vᵀ is symmetric: rows may be multiplied from the right without a transposition.
        self.matrix.copy_((V * scale) @ V.mT)

    def forward(self, z: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Whiten rows."""
        return (z - self.mean) @ self.matrix


class Decoder(nn.Module):
    """What all decoders share: their shape, the whitening at their input, and the loss of an image.

    Raises:
        PrivlabError: if `width` is not a multiple of `HEAD_WIDTH`.
    """

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        if width < HEAD_WIDTH or width % HEAD_WIDTH:
            raise PrivlabError(f"The width of a decoder must be a multiple of {HEAD_WIDTH}. Found {width}.")
        self.shape = shape
        self.whiten = Whitening(shape.width)

    def objective(self, call: Callable[..., Any], seen: OwnRelease) -> Tensor:
        """Return the loss of `call`, which is this decoder's forward pass: the mean squared error of the images."""
        return F.mse_loss(call(seen.features), seen.images)

    def reconstruct(
        self, features: Float[Tensor, "b t d"], order: RowOrder
    ) -> tuple[Float[Tensor, "b c h w"], Int[Tensor, "b n"] | None]:
        """Return images in [0, 1], and the row of each slot as `Reconstruction` has it, None if no rows are assigned.

        `order` says what the defense does to the places of rows.
        """
        return self(features).clamp(0, 1), None

    def join(self, patches: Float[Tensor, "b n k"]) -> Float[Tensor, "b c h w"]:
        """Return patches as images; zero is grey."""
        return unpatchify(patches, self.shape.image) + 0.5


class MaeDecoder(Decoder):
    """`mae`: Transformer blocks over rows with fixed 2-D sin-cos positions, then a linear map to pixels.

    Row i is taken for slot i, after the class and register tokens; attention may still use what rows say of their slot.

    Source: MAE (He et al. 2022), the decoder; Permutation Equivariance (CVPR 2024), section 5.3, attacks with one.
    """

    positions: Tensor

    def __init__(self, shape: Shape, width: int, depth: int) -> None:
        super().__init__(shape, width)
        self.inwards = nn.Linear(shape.width, width)
        # Prefix tokens have no place in the image: their positions are zero rows before those of the slots.
        places = slot_positions(shape, width)
        self.register_buffer("positions", F.pad(places, (0, 0, shape.prefix, 0)), persistent=False)
        self.blocks = attention_blocks(width, depth)
        self.outwards = pixel_map(shape, width)

    def forward(self, features: Float[Tensor, "b t d"]) -> Float[Tensor, "b c h w"]:
        """Return images."""
        # b × t × d → b × t × width; each row gets the position of the slot that it is taken for.
        rows = self.blocks(self.inwards(self.whiten(features)) + self.positions)
        # Drop the prefix tokens and map each row to its patch, b × n × (3 · patch²).
        return self.join(self.outwards(rows[:, self.shape.prefix :]))


class ConvDecoder(Decoder):
    """`conv`: residual convolutions on the grid of rows, a transposed convolution to pixels, and convolutions on these.

    Row i is taken for slot i; class and register tokens are left out. Source: Dosovitskiy and Brox (CVPR 2016).
    """

    def __init__(self, shape: Shape, width: int, depth: int) -> None:
        super().__init__(shape, width)
        self.layers = nn.Sequential(
            nn.Conv2d(shape.width, width, 1),
            *(_convolutions(width) for _ in range(depth)),
            nn.ConvTranspose2d(width, PIXEL_CHANNELS, shape.patch, shape.patch),
            _convolutions(PIXEL_CHANNELS),
            silent(nn.Conv2d(PIXEL_CHANNELS, 3, 3, padding=1)),
        )

    def forward(self, features: Float[Tensor, "b t d"]) -> Float[Tensor, "b c h w"]:
        """Return images."""
        # Rows become the channels of a small image: b × n × d → b × d × grid height × grid width.
        rows = self.whiten(features)[:, self.shape.prefix :]
        return self.layers(rows.mT.unflatten(2, self.shape.grid)) + 0.5


class SetDecoder(Decoder):
    """`set`: one query for each slot attends to the set of rows; the order of the rows changes nothing.

    Source: Set Transformer (Lee et al. 2019): an encoder without positions, and attention by seeds, here the slots.
    """

    positions: Tensor

    def __init__(self, shape: Shape, width: int, depth: int) -> None:
        super().__init__(shape, width)
        self.inwards = nn.Linear(shape.width, width)
        self.encoder = attention_blocks(width, 1)
        self.register_buffer("positions", slot_positions(shape, width), persistent=False)
        self.queries = nn.Linear(width, width)
        self.slots = nn.Parameter(0.02 * torch.randn(shape.slots, width))
        self.looks = nn.ModuleList(_Look(width) for _ in range(depth))
        self.blocks = nn.ModuleList(attention_blocks(width, depth))
        self.outwards = pixel_map(shape, width)

    def forward(self, features: Float[Tensor, "b t d"]) -> Float[Tensor, "b c h w"]:
        """Return images."""
        # Attention without positions permutes its output as its input: the bag of rows has no order.
        bag = self.encoder(self.inwards(self.whiten(features)))
        # The queries depend on the slot alone: its fixed position, mapped linearly,
        # plus a learned vector. b × n × width.
        slots = (self.queries(self.positions) + self.slots).expand(len(bag), -1, -1)
        for look, block in zip(self.looks, self.blocks, strict=True):
            # Each slot first reads the bag of rows, and then the slots exchange what they read.
            slots = block(look(slots, bag))
        return self.join(self.outwards(slots))


class TokenDecoder(Decoder):
    """`token`: each row is decoded to a patch separately, and its slot is predicted; an assignment keeps slots unique.

    A linear map predicts the slot of a whitened row. It is trained on the adversary's own releases: it is the linear
    discriminant of the slots, so the position embeddings need not be known.
    """

    def __init__(self, shape: Shape, width: int, depth: int) -> None:
        super().__init__(shape, width)
        tokens = shape.prefix + shape.slots
        self.place = nn.Linear(shape.width, tokens)
        self.inwards = nn.Linear(shape.width, width)
        self.slots = nn.Embedding(tokens, width)
        self.layers = nn.Sequential(*(_mlp(width) for _ in range(depth)))
        self.outwards = pixel_map(shape, width)

    def forward(
        self, features: Float[Tensor, "b t d"], slots: Int[Tensor, "b t"]
    ) -> tuple[Float[Tensor, "b t k"], Float[Tensor, "b t t"]]:
        """Return the patch of each row, given its slot, and the scores of all slots for it, prefix tokens included."""
        rows = self.whiten(features)
        # No row sees another one. The patch depends on the slot through a learned vector; the
        # scores of slots are linear in the row.
        return self.outwards(self.layers(self.inwards(rows) + self.slots(slots))), self.place(rows)

    def objective(self, call: Callable[..., Any], seen: OwnRelease) -> Tensor:
        """Return the mean squared error of the patches, given their slots, and the cross-entropy of the slots."""
        t, prefix = seen.source.shape[1], self.shape.prefix
        # `source` is the place of each row before the defense, counted over the batch: image · t + slot.
        image, slot = seen.source // t, seen.source % t
        patches, scores = call(seen.features, slot)
        # The patch that the client embedded in that slot; −0.5, because zero means grey. Prefix tokens have no patch.
        wanted = patchify(seen.fed, self.shape.patch)[image, (slot - prefix).clamp(min=0)] - 0.5
        of_patch = slot >= prefix
        return F.mse_loss(patches[of_patch], wanted[of_patch]) + F.cross_entropy(scores.flatten(0, 1), slot.flatten())

    def reconstruct(
        self, features: Float[Tensor, "b t d"], order: RowOrder
    ) -> tuple[Float[Tensor, "b c h w"], Int[Tensor, "b n"]]:
        """Return images in [0, 1] and the row of each slot: by the best assignment, or by place if order is kept."""
        b, t, _ = features.shape
        slots = torch.arange(t, device=features.device).expand(b, t)
        if order != "kept":
            # scores[b, r, s] = log p(slot s | row r). The assignment with the greatest sum uses each slot once.
            scores = self.place(self.whiten(features)).detach().log_softmax(2).cpu()
            # If all images share one order, their scores are added up and one assignment serves all.
            groups = scores.sum(0, keepdim=True) if order == "shared" else scores
            found = [torch.from_numpy(linear_sum_assignment(group, maximize=True)[1]) for group in groups.numpy()]
            slots = torch.stack(found).to(features.device).expand(b, t)
        rows = slots.argsort(1)[:, self.shape.prefix :]  # the row that each patch slot got
        patches, _ = self(features, slots)
        # Patches are put in the order of their slots; the rows are returned as numbers over the whole batch.
        placed = patches.gather(1, rows[..., None].expand(-1, -1, patches.shape[2]))
        return self.join(placed).clamp(0, 1), rows + t * torch.arange(b, device=rows.device)[:, None]


DECODERS: dict[str, Callable[[Shape, int, int], Decoder]] = {
    "mae": MaeDecoder,
    "conv": ConvDecoder,
    "set": SetDecoder,
    "token": TokenDecoder,
}


class Residual(nn.Module):
    """x + g(x) with the layers of g, one behind the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the sum."""
        return x + self.layers(x)


def _convolutions(width: int) -> Residual:
    first, second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
    return Residual(nn.GroupNorm(width // PIXEL_CHANNELS, width), first, nn.GELU(), second)


def _mlp(width: int) -> Residual:
    return Residual(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class _Look(nn.Module):
    """Attention of the slots to the rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_slots, self.of_bag = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, width // HEAD_WIDTH, batch_first=True)

    def forward(self, slots: Float[Tensor, "b n e"], bag: Float[Tensor, "b t e"]) -> Float[Tensor, "b n e"]:
        # Slots are the queries, rows are keys and values; the result is added to the slots.
        bag = self.of_bag(bag)
        return slots + self.attention(self.of_slots(slots), bag, bag, need_weights=False)[0]


def attention_blocks(width: int, depth: int) -> nn.Sequential:
    """Return Transformer blocks, whose heads have the width `HEAD_WIDTH`."""
    return nn.Sequential(*(Block(width, width // HEAD_WIDTH, qkv_bias=True) for _ in range(depth)))


def pixel_map(shape: Shape, width: int) -> nn.Linear:
    """Return a map to pixels that starts at grey; where no norm precedes it, a row's length holds its contrast."""
    return silent(nn.Linear(width, 3 * shape.patch**2))


def silent(layer: Layer) -> Layer:
    """Return the layer with all parameters zero: random outputs would take hundreds of steps to undo."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def slot_positions(shape: Shape, width: int) -> Float[Tensor, "n e"]:
    """Return the fixed 2-D sin-cos positions of the slots."""
    return build_sincos2d_pos_embed(list(shape.grid), dim=width)

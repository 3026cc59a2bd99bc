"""`block-scrambling`: learnable image encryption: a client's key permutes blocks, and the pixels within them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from privlab.base import Checked, Share
from privlab.patches import bits, patchify, permute, shuffle_within, unpatchify
from privlab.threat import Effects, Feed
from privlab.victims import VictimModel


@dataclass(frozen=True)
class BlockScrambling(Checked):
    """Permute the blocks of an image by one key, and the c·p² values in every block by another; all images share both.

    Idea: The client cuts an image into the patches of the model, and puts them in a secret order. It puts the values
    within every patch in another secret order. Both orders are a key that serves all its images, and the model is
    fine-tuned on the encrypted images.

    Steps: permute the blocks by a key → permute the values in each block

    Algorithm: Slot i holds block σ(i), and value k of each block is value π(k) of it, so x̃_i = P_π x_σ(i).

    Fails if: the adversary sees several images: one key serves all of them, so that photographs reveal it.
    Neighbouring pixels vary together, and borders continue each other.

    Cost: It changes the outputs; a model is fine-tuned on encrypted images. Not measured here.

    Studies: published

    Args:
        blocks: the share of the blocks that σ moves, in [0, 1]; 1 is an unrestricted permutation.
        pixels: the share of the values of a block that π moves, in [0, 1]; likewise.
        invert: whether half of the values, which the key chooses, are turned into their negative 1 − x.

    Source: Kiya et al. (2023), block-wise encryption, and Horio et al. (2024), whose permutations are restricted. That
    a restricted one moves a share of the places is read off the abstract. `invert` is the negative-positive
    transformation of the same group's other encryptions, as a survey of these has it (Information 2023, Eq. 1).
    [@kiya2023blockwise; @horio2024restricted]
    """

    name: ClassVar[str] = "block-scrambling"
    paper: ClassVar[str] = "Kiya et al. (2023), arXiv 2308.07612; restricted: Horio et al. (2024), arXiv 2408.08529"
    order: ClassVar[int] = 70
    per: ClassVar[str] = "model"

    blocks: Share = 1.0
    pixels: Share = 1.0
    invert: bool = False

    @property
    def acts_as(self) -> Effects:
        """Return the effect: patches are shuffled by one order, and their pixels are changed."""
        patches = "shuffled" if self.blocks > 0 else "kept"
        return Effects(patches=patches, one_order=self.blocks > 0, values=self.pixels > 0, other=self.invert)

    def secret_bits(self, model: VictimModel, together: int) -> float:
        """Return log₂ of the number of keys: ways in which shares of n blocks and k values move, or turn negative."""
        n, k = model.vit.patch_embed.num_patches, math.prod(model.image_shape) // model.vit.patch_embed.num_patches
        moved = sum(bits(m) - bits(m - round(share * m)) for m, share in ((n, self.blocks), (k, self.pixels)))
        return moved + (bits(k) - bits(k // 2, k - k // 2) if self.invert else 0)

    def __call__(self, images: Float[Tensor, "b c h w"], patch: int, draws: Sequence[Generator]) -> Feed:
        """Return the encrypted images; `draws` holds the generator of the client's key alone."""
        (draw,), (b, c, h, w) = draws, images.shape
        n, k = h * w // patch**2, c * patch**2
        moved, order = _restricted(n, self.blocks, draw)
        values = _restricted(k, self.pixels, draw)[1].to(images.device)
        negative = (torch.randperm(k, generator=draw) < k // 2).to(images.device) & self.invert
        order, moved = (each.to(images.device).expand(b, -1) for each in (order, moved))
        X = patchify(permute(images, order, patch), patch)[..., values]
        return Feed(unpatchify(torch.where(negative, 1 - X, X), (c, h, w)), order, moved)


def _restricted(n: int, share: float, draw: Generator) -> tuple[Bool[Tensor, " n"], Int[Tensor, " n"]]:
    """Return the places that a permutation moves, a share of n, and the permutation."""
    moved = torch.randperm(n, generator=draw) < round(share * n)
    return moved, shuffle_within(moved, draw)

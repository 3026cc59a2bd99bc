"""Images as sets of patches: cutting, joining, permuting by index, and the block-wise mask of BEiT and MJP.

Permutations are index tensors, never matrices: `order[i]` names the patch that slot i holds.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from privlab.base import PrivlabError

_SMALLEST, _ASPECT = 8, 0.3
"""The least area of a block of the mask in slots, and the least ratio of its height to its width."""


def patchify(images: Float[Tensor, "b c h w"], patch: int) -> Float[Tensor, "b n k"]:
    """Cut images into rows of k = c·patch² values, in the order of a convolution's flattened weight.

    Raises:
        PrivlabError: if a side of the images is not a multiple of `patch`.
    """
    _, c, h, w = images.shape
    if h % patch or w % patch:
        raise PrivlabError(f"Image sides must be multiples of the patch size {patch}. Found {h}×{w}.")
    grid = images.reshape(-1, c, h // patch, patch, w // patch, patch)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(patches: Float[Tensor, "b n k"], shape: tuple[int, int, int]) -> Float[Tensor, "b c h w"]:
    """Join patches into images of `shape` (c, h, w); the inverse of `patchify`."""
    c, h, w = shape
    patch = math.isqrt(patches.shape[-1] // c)
    grid = patches.reshape(-1, h // patch, w // patch, c, patch, patch)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(-1, c, h, w)


def permute(images: Float[Tensor, "b c h w"], order: Int[Tensor, "b n"], patch: int) -> Float[Tensor, "b c h w"]:
    """Return images with their patches rearranged: slot i holds patch `order[i]` of the same image.

    Args:
        images: the images; their sides are multiples of `patch`.
        order: one permutation of the n patches for each image.
        patch: the side of a patch, in pixels.

    Raises:
        PrivlabError: if a side of the images is not a multiple of `patch`.
    """
    patches, (_, c, h, w) = patchify(images, patch), images.shape
    rows = order[..., None].expand(-1, -1, patches.shape[-1])
    return unpatchify(patches.gather(1, rows), (c, h, w))


def shuffle_within(mask: Bool[Tensor, " n"], draw: Generator) -> Int[Tensor, " n"]:
    """Return the order that shuffles the masked slots among themselves (MJP, Alg. 1, line 4: JigsawPuzzle)."""
    order = torch.arange(len(mask))
    slots = mask.nonzero().squeeze(1)
    order[slots] = slots[torch.randperm(len(slots), generator=draw)]
    return order


def jigsaw(
    images: Float[Tensor, "b c h w"], patch: int, ratio: float, draws: Sequence[Generator]
) -> tuple[Float[Tensor, "b c h w"], Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
    """Return x̃ of each image, with patches shuffled within a block-wise mask, the order and the mask (MJP, Alg. 1).

    Args:
        images: the images; their sides are multiples of `patch`.
        patch: the side of a patch, in pixels.
        ratio: γ in [0, 1], the share of the slots that is masked.
        draws: generators on the CPU, one for each image or one for each group of consecutive images of equal size; the
            images of a group share mask and order.

    Raises:
        PrivlabError: if `ratio` is outside [0, 1], the number of images is not a multiple of that of the draws, or a
            side of the images is not a multiple of `patch`.
    """
    if not draws or len(images) % len(draws):
        raise PrivlabError(f"{len(images)} images take as many draws, or a divisor of that. Found {len(draws)}.")
    group, grid = len(images) // len(draws), (images.shape[2] // patch, images.shape[3] // patch)
    masks = [blockwise_mask(grid, ratio, draw) for draw in draws]
    orders = [shuffle_within(mask, draw) for mask, draw in zip(masks, draws, strict=True)]
    order, mask = (torch.stack(each).to(images.device).repeat_interleave(group, 0) for each in (orders, masks))
    return permute(images, order, patch), order, mask


def slots_to_pixels(
    slots: Bool[Tensor, "b n"], grid: tuple[int, int], patch: int
) -> Bool[Tensor, "b {grid[0]*patch} {grid[1]*patch}"]:
    """Return the mask over pixels of a mask over patch slots.

    Args:
        slots: marks patch slots, row by row of the grid.
        grid: (h, w), the patches in a column and in a row of an image.
        patch: the side of a patch, in pixels.
    """
    square = slots.unflatten(1, grid)
    return square.repeat_interleave(patch, 1).repeat_interleave(patch, 2)


def masked_slots(slots: int, ratio: float) -> int:
    """Return ⌊ratio·n⌋, the number of slots that a block-wise mask covers unless its rectangles find no room.

    Args:
        slots: number n of slots of an image.
        ratio: γ in [0, 1], the share of the slots to mask.
    """
    return int(ratio * slots)


def blockwise_mask(grid: tuple[int, int], ratio: float, draw: Generator) -> Bool[Tensor, " {grid[0]*grid[1]}"]:
    """Return a mask of about ratio·n slots of a grid, made of random rectangles (BEiT, Alg. 1; MJP, Alg. 1, line 3).

    Blocks of s ~ U(8, left) slots and log-uniform aspect ratio in [0.3, 1/0.3] are added until ⌊ratio·n⌋ slots are
    covered; `left` counts the slots that are still missing. A block that would cover more than `left` is drawn again,
    so the count never exceeds the target; it falls short only if ten draws in a row find no room. If fewer than 8 are
    left, s = left (BEiT's code draws s beyond that, mostly in vain), and a block may span the grid.

    Args:
        grid: (h, w), the patches in a column and in a row of an image.
        ratio: γ in [0, 1], the share of the slots to mask.
        draw: the random generator, on the CPU.

    Raises:
        PrivlabError: if `ratio` is outside [0, 1].
    """
    if not 0 <= ratio <= 1:
        raise PrivlabError(f"The mask ratio γ must be in [0, 1]. Found {ratio}.")
    height, width = grid
    target = masked_slots(height * width, ratio)
    mask = torch.zeros(grid, dtype=torch.bool)
    if target == height * width:
        return ~mask.flatten()  # random rectangles might not cover the whole grid
    while (left := target - int(mask.sum())) > 0:
        if not _add_block(mask, left, draw):
            break
    return mask.flatten()


def _add_block(mask: Bool[Tensor, "h w"], left: int, draw: Generator) -> bool:
    """Cover at least one and at most `left` new slots by one rectangle; return False after ten failures."""
    height, width = mask.shape
    for _ in range(10):
        size, shape, top, side = torch.rand(4, generator=draw, dtype=torch.float64).tolist()
        area = min(_SMALLEST, left) + size * (left - min(_SMALLEST, left))
        ratio = math.exp((2 * shape - 1) * math.log(_ASPECT))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if not (0 < h <= height and 0 < w <= width):
            continue
        t, s = int(top * (height - h + 1)), int(side * (width - w + 1))
        block = mask[t : t + h, s : s + w]
        if 0 < int((~block).sum()) <= left:
            block[:] = True
            return True
    return False

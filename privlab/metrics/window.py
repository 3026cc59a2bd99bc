"""Filtering of images by SSIM's window, with banded matrices."""

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

RADIUS, _SIGMA = 5, 1.5  # radius and σ of the Gaussian window of SSIM, 11 × 11
_STRIP = 24  # rows of a strip of the banded matrix: short ones multiply fewer zeros, long ones run at full speed


def gaussian(images: Float[Tensor, "*n h w"]) -> Float[Tensor, "*n h w"]:
    """Filter images, padded with zeros, by the window; its banded matrices are faster here than convolution.

    A strip of a banded matrix reads few pixels; those beyond its band, which it would multiply by zero, are left out.
    """
    h, w = images.shape[-2:]
    planes = images.flatten(0, -3)
    down, across = (_toeplitz(n, images.dtype, images.device) for n in (h, w))
    strips = [down[own, near].expand(len(planes), -1, -1) @ planes[:, near] for own, near in _strips(h)]
    rows = torch.cat(strips, dim=1).flatten(0, 1)
    return torch.cat([rows[:, near] @ across[near, own] for own, near in _strips(w)], dim=1).view(images.shape)


def _strips(n: int) -> list[tuple[slice, slice]]:
    """Return the strips of n rows, each with the rows within the window's reach of it."""
    return [(slice(i, i + _STRIP), slice(max(0, i - RADIUS), i + _STRIP + RADIUS)) for i in range(0, n, _STRIP)]


@lru_cache(maxsize=8)
def _toeplitz(n: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "{n} {n}"]:
    i = torch.arange(n, dtype=dtype, device=device)
    window = sum(math.exp(-(k**2) / (2 * _SIGMA**2)) for k in range(-RADIUS, RADIUS + 1))
    offset = i[:, None] - i
    return torch.exp(-(offset**2) / (2 * _SIGMA**2)) * (offset.abs() <= RADIUS) / window

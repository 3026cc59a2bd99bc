"""Bundled photographs of 64 × 64 pixels, for clients and filters that get them without pytest's fixtures."""

import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from privlab.images import Preprocessing, open_images


def photographs(n: int) -> Tensor:
    """Return the first n of them, in [0, 1]."""
    cut = Preprocessing(size=(64, 64), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic")
    return torch.stack([cut(image.pixels) for image in open_images("samples", limit=n) if image.pixels])


def normalised(images: Tensor) -> Tensor:
    """Return (images − mean) / std of ImageNet, which timm assumes of a model without `pretrained_cfg`, as `Net` is."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    return (images - mean) / std

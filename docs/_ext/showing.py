"""What the tutorials show images with, and photographs that come with scikit-image, small enough for a laptop."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from skimage import data, transform
from torch import Tensor

NAMES = ("astronaut", "coffee", "chelsea")


def photographs(side: int = 32, names: Sequence[str] = NAMES) -> Tensor:
    """Return photographs as a tensor in [0, 1], n × 3 × side × side."""
    images = [transform.resize(getattr(data, name)(), (side, side), anti_aliasing=True) for name in names]
    return torch.stack([torch.tensor(image).float().permute(2, 0, 1) for image in images])


def show(rows: Mapping[str, Tensor]) -> None:
    """Show images in rows, one row for each name."""
    count = max(len(images) for images in rows.values())
    _, axes = plt.subplots(len(rows), count, figsize=(1.5 * count, 1.5 * len(rows)), squeeze=False)
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        for axis, image in zip(line, images, strict=False):
            axis.imshow(image.detach().float().clamp(0, 1).permute(1, 2, 0))
        for axis in line:
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    plt.show()

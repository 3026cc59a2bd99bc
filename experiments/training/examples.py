"""Training data: images of one size with their labels, and their augmentation in batches."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int, UInt8
from torch import Generator, Tensor
from torch.nn import functional as F

from privlab.base import check_range


@dataclass(frozen=True, eq=False)
class Examples:
    """Images as bytes, n × 3 × h × w, and their labels; −1 where there is none.

    The images are in memory, or in a file that is mapped into it.
    `identity` is SHA-256 over pixels and labels; `skipped` says of each unreadable image its name and why.
    """

    images: UInt8[Tensor, "n 3 h w"]
    labels: Int[Tensor, " n"]
    classes: int
    identity: str
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def pixels(self, rows: Int[Tensor, " b"]) -> Float[Tensor, "b 3 h w"]:
        """Return the images of these rows, in [0, 1]."""
        return self.images[rows].float() / 255


@dataclass(frozen=True)
class Augmentation:
    """The augmentation of a batch; each image is changed by draws of its own.

    Args:
        flip: whether each image is mirrored with probability 1/2.
        shift: largest shift in pixels, each way; zeros fill what comes in.
        zoom: least share of the area that a crop keeps, in (0, 1]; the crop is then resized. 1 for no crop.
        randaugment: magnitude of torchvision's RandAugment, in [0, 30], two operations an image; 0 for none.
        erasing: share of the images of which a rectangle is erased, in [0, 1].
    """

    name: ClassVar[str] = "augmentation"

    flip: bool = True
    shift: int = 4
    zoom: float = 1.0
    randaugment: int = 0
    erasing: float = 0.0

    def __post_init__(self) -> None:
        """Raise PrivlabError for a number out of range."""
        check_range(self.shift >= 0, "shift of an augmentation", "at least 0", self.shift)
        check_range(0 < self.zoom <= 1, "zoom of an augmentation", "in (0, 1]", self.zoom)
        check_range(0 <= self.randaugment <= 30, "randaugment of an augmentation", "in [0, 30]", self.randaugment)
        check_range(0 <= self.erasing <= 1, "erasing of an augmentation", "in [0, 1]", self.erasing)

    def __call__(self, images: Float[Tensor, "b c h w"], draw: Generator) -> Float[Tensor, "b c h w"]:
        """Return the changed images."""
        if self.flip:
            mirrored = torch.rand(len(images), 1, 1, 1, generator=draw) < 0.5
            images = torch.where(mirrored.to(images.device), images.flip(3), images)
        if self.zoom < 1:
            images = _zoom(images, self.zoom, draw)
        if self.shift:
            images = _shift(images, self.shift, draw)
        if self.randaugment or self.erasing:
            images = torch.stack([self._one(image) for image in images])
        return images

    def _one(self, image: Float[Tensor, "c h w"]) -> Float[Tensor, "c h w"]:
        """Change one image by torchvision, which draws from the loop's seeded state."""
        from torchvision.transforms.v2 import RandAugment, RandomErasing

        if self.randaugment:
            image = RandAugment(num_ops=2, magnitude=self.randaugment)((image * 255).byte()).float() / 255
        return RandomErasing(p=self.erasing)(image)


def _shift(images: Float[Tensor, "b c h w"], most: int, draw: Generator) -> Float[Tensor, "b c h w"]:
    """Move each image by its own whole number of pixels."""
    (b, _, h, w), device = images.shape, images.device
    top, left = torch.randint(2 * most + 1, (2, b, 1), generator=draw).to(device)
    rows, columns = top + torch.arange(h, device=device), left + torch.arange(w, device=device)
    padded = F.pad(images, (most,) * 4).movedim(1, 3)
    each = torch.arange(b, device=device)[:, None, None]
    return padded[each, rows[:, :, None], columns[:, None]].movedim(3, 1)


def _zoom(images: Float[Tensor, "b c h w"], least: float, draw: Generator) -> Float[Tensor, "b c h w"]:
    """Resize a crop of each image: its area uniform in [least, 1], its aspect log-uniform (Inception)."""
    area, aspect, top, left = torch.rand(4, len(images), generator=draw).to(images.device)
    area, ratio = least + (1 - least) * area, (4 / 3) ** (2 * aspect - 1)
    height, width = (area / ratio).sqrt().clamp(max=1), (area * ratio).sqrt().clamp(max=1)
    zero = torch.zeros_like(area)
    across = torch.stack([width, zero, (2 * left - 1) * (1 - width)], 1)
    down = torch.stack([zero, height, (2 * top - 1) * (1 - height)], 1)
    grid = F.affine_grid(torch.stack([across, down], 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)

"""What is learnt from: pictures of one size with their labels, in memory, and batches of them, augmented."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Generator, Tensor
from torch.nn import functional as F

from privlab.decode import Picture
from privlab.errors import PrivlabError
from privlab.sources import ImageSource

__all__ = ["Augmentation", "Examples", "read_examples"]

MOST_BYTES = 16 * 2**30
"""Pictures of a training are held in memory, as bytes: at most so many."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Examples:
    """Pictures as bytes, n × 3 × h × w, and their labels; −1 where there is none.

    `identity` is SHA-256 over pixels and labels; `skipped` says of each unreadable picture its name and why.
    """

    images: UInt8[Tensor, "n 3 h w"]
    labels: Int[Tensor, " n"]
    classes: int
    identity: str
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def pixels(self, rows: Int[Tensor, " b"]) -> Float[Tensor, "b 3 h w"]:
        """Return the pictures of these rows, in [0, 1]."""
        return self.images[rows].float() / 255


@dataclass(frozen=True)
class Augmentation:
    """How the pictures of a batch are changed, each by draws of its own.

    Args:
        flip: whether half of them are mirrored.
        shift: most pixels by which a picture is moved, each way; zeros come in.
        zoom: least share of the area that a crop keeps, which is then resized; 1 for no crop.
        randaugment: magnitude of torchvision's RandAugment, two operations a picture; 0 for none.
        erasing: share of the pictures of which a rectangle is erased.
    """

    name: ClassVar[str] = "augmentation"

    flip: bool = True
    shift: int = 4
    zoom: float = 1.0
    randaugment: int = 0
    erasing: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            PrivlabError: for a number out of range.
        """
        if self.shift < 0:
            raise PrivlabError(f"shift of an augmentation must be at least 0. Found {self.shift}.")
        if not 0 < self.zoom <= 1:
            raise PrivlabError(f"zoom of an augmentation must be in (0, 1]. Found {self.zoom}.")
        if not 0 <= self.randaugment <= 30:
            raise PrivlabError(f"randaugment of an augmentation must be in [0, 30]. Found {self.randaugment}.")
        if not 0 <= self.erasing <= 1:
            raise PrivlabError(f"erasing of an augmentation must be in [0, 1]. Found {self.erasing}.")

    def __call__(self, images: Float[Tensor, "b c h w"], draw: Generator) -> Float[Tensor, "b c h w"]:
        """Return the changed pictures."""
        if self.flip:
            mirrored = torch.rand(len(images), 1, 1, 1, generator=draw) < 0.5
            images = torch.where(mirrored.to(images.device), images.flip(3), images)
        if self.zoom < 1:
            images = _zoomed(images, self.zoom, draw)
        if self.shift:
            images = _shifted(images, self.shift, draw)
        if self.randaugment or self.erasing:
            images = torch.stack([self._one(image) for image in images])
        return images

    def _one(self, image: Float[Tensor, "c h w"]) -> Float[Tensor, "c h w"]:
        """Change one picture by torchvision, which draws from the loop's seeded state."""
        from torchvision.transforms.v2 import RandAugment, RandomErasing

        if self.randaugment:
            image = RandAugment(num_ops=2, magnitude=self.randaugment)((image * 255).byte()).float() / 255
        return RandomErasing(p=self.erasing)(image)


def _shifted(images: Float[Tensor, "b c h w"], most: int, draw: Generator) -> Float[Tensor, "b c h w"]:
    """Move each picture by its own whole number of pixels."""
    (b, _, h, w), device = images.shape, images.device
    top, left = torch.randint(2 * most + 1, (2, b, 1), generator=draw).to(device)
    rows, columns = top + torch.arange(h, device=device), left + torch.arange(w, device=device)
    padded = F.pad(images, (most,) * 4).movedim(1, 3)
    each = torch.arange(b, device=device)[:, None, None]
    return padded[each, rows[:, :, None], columns[:, None]].movedim(3, 1)


def _zoomed(images: Float[Tensor, "b c h w"], least: float, draw: Generator) -> Float[Tensor, "b c h w"]:
    """Resize a crop of each picture: its area uniform in [least, 1], its aspect log-uniform (Inception)."""
    area, aspect, top, left = torch.rand(4, len(images), generator=draw).to(images.device)
    area, ratio = least + (1 - least) * area, (4 / 3) ** (2 * aspect - 1)
    height, width = (area / ratio).sqrt().clamp(max=1), (area * ratio).sqrt().clamp(max=1)
    zero = torch.zeros_like(area)
    across = torch.stack([width, zero, (2 * left - 1) * (1 - width)], 1)
    down = torch.stack([zero, height, (2 * top - 1) * (1 - height)], 1)
    grid = F.affine_grid(torch.stack([across, down], 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def read_examples(source: ImageSource, size: tuple[int, int], *, labelled: bool = True) -> Examples:
    """Read all pictures of a source, resized and centre-cropped to `size` where they are of another.

    Args:
        source: any that `open_images` opens.
        size: (h, w).
        labelled: whether a picture without label is an error.

    Raises:
        PrivlabError: if nothing can be read, pictures have no labels, a class folder is empty, or they do not fit into
            memory.
    """
    if source.count is not None:
        _check_memory(source.count, size)
    images: list[Tensor] = []
    labels: list[int] = []
    skipped: list[str] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for picture, pixels in _mapped(pool, source, size):
            if pixels is None:
                skipped.append(f"{picture.name}: {picture.problem}")
                continue
            images.append(pixels)
            labels.append(-1 if picture.label is None else picture.label)
    if not images:
        reason = f" The first: {skipped[0]}" if skipped else ""
        raise PrivlabError(f"There is nothing to train on in {source.description}: no picture can be read.{reason}")
    if labelled and -1 in labels:
        raise PrivlabError(
            f"{labels.count(-1)} of the {len(labels)} pictures in {source.description} have no label. "
            "Give one folder per class, or a dataset with labels."
        )
    stacked, numbers = torch.stack(images), torch.tensor(labels)
    digest = hashlib.sha256(stacked.numpy().data)
    digest.update(numbers.numpy().data)
    classes = _classes(source, labels)
    return Examples(stacked, numbers, classes, digest.hexdigest(), tuple(skipped))


def _mapped(
    pool: ThreadPoolExecutor, source: ImageSource, size: tuple[int, int]
) -> Iterator[tuple[Picture, UInt8[Tensor, "3 h w"] | None]]:
    """Read pictures several at a time, a few hundred ahead: in order."""

    def prepared(picture: Picture) -> tuple[Picture, Tensor | None]:
        return picture, None if picture.pixels is None else _fitted(picture.pixels, size)

    if source.at is None:  # a stream is read in one thread, and resized in several
        for some in _groups(source, 512):
            yield from pool.map(prepared, some)
        return
    at = source.at
    for places in _groups(range(len(source)), 512):
        yield from pool.map(lambda place: prepared(at(place)), places)


def _groups(things: Iterable[T], size: int) -> Iterator[list[T]]:
    stream = iter(things)
    while some := list(islice(stream, size)):
        yield some


def _fitted(pixels: Image.Image, size: tuple[int, int]) -> UInt8[Tensor, "3 h w"]:
    """Return a picture's bytes: whole where it has the size, else its shorter side resized and the centre cut out."""
    height, width = size
    if pixels.size != (width, height):
        scale = max(height / pixels.height, width / pixels.width)
        wide, high = max(width, round(pixels.width * scale)), max(height, round(pixels.height * scale))
        left, top = (wide - width) // 2, (high - height) // 2
        pixels = pixels.resize((wide, high), Image.Resampling.BICUBIC).crop((left, top, left + width, top + height))
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous()


def _check_memory(count: int, size: tuple[int, int]) -> None:
    need = count * 3 * size[0] * size[1]
    if need > MOST_BYTES:
        raise PrivlabError(
            f"{count} pictures of {size[0]}×{size[1]} take {need / 2**30:.0f} GiB of memory; at most "
            f"{MOST_BYTES // 2**30} are held. Give fewer (--limit) or a smaller --img-size."
        )


def _classes(source: ImageSource, labels: list[int]) -> int:
    """Return the number of classes: of the source's names, else one more than the largest label."""
    names = source.class_names
    if names is None:
        return max(labels, default=-1) + 1
    present = set(labels)
    empty = [name for label, name in enumerate(names) if label not in present]
    if empty and len(labels) >= len(names):
        raise PrivlabError(f"The class '{empty[0]}' of {source.description} has no picture that can be read.")
    return len(names)

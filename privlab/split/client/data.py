"""The client's images and labels in memory, as eight bits, and the batch of every step."""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from privlab.base import PrivlabError, Progress, draw_for
from privlab.evaluation import batches
from privlab.images import Data, Preprocessing
from privlab.victims import VictimModel

_BATCH_SIZE = 64
"""Images that are read, or classified, at a time."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Preprocessed images; a label is −1 if there is none; `failed` says why an image could not be read, by name."""

    names: tuple[str, ...]
    images: UInt8[Tensor, "n c h w"]
    labels: Int[Tensor, " n"]
    sha256: str
    failed: dict[str, str]

    def __len__(self) -> int:
        return len(self.names)

    def with_labels_of(self, model: VictimModel) -> "Dataset":
        """Return the same images, labelled with the classes that a model predicts for the plain images."""
        with torch.no_grad():
            parts = [
                model(self.pixels(slice(i, i + _BATCH_SIZE)).to(model.mean)) for i in range(0, len(self), _BATCH_SIZE)
            ]
        return replace(self, labels=torch.cat(parts).argmax(1).cpu())

    def check(self, classes: int) -> "Dataset":
        """Return the dataset itself if every image has a label below `classes`.

        Raises:
            PrivlabError: if an image has no label, or one that is too high; the message names the first.
        """
        for name, label in zip(self.names, self.labels.tolist(), strict=True):
            if label < 0:
                raise PrivlabError(
                    f"Training needs labels. '{name}' has none: use class folders, or --labels predicted|FILE.csv."
                )
            if label >= classes:
                raise PrivlabError(f"The model has {classes} classes. Found label {label} of '{name}': use --classes.")
        return self

    def pixels(self, index: Int[Tensor, " b"] | slice) -> Float[Tensor, "b c h w"]:
        """Return images in [0, 1]: the stored eight-bit values divided by 255."""
        return self.images[index].float() / 255


def load(source: Data, preprocessing: Preprocessing, progress: Progress = lambda done, total: None) -> Dataset:
    """Read all images of a source into memory, as eight bits per channel.

    Args:
        source: where the images are.
        preprocessing: how they are resized and cropped for the victim.
        progress: called with the number of images read and that of all images, None if it is unknown.

    Raises:
        PrivlabError: if no image can be read.
    """
    named, images, failed = [], [], {}
    for chunk in batches(source, preprocessing, _BATCH_SIZE):
        named += chunk.named
        images.append((chunk.images * 255).round().to(torch.uint8))
        failed |= {image.name: image.problem or "" for image in chunk.failed}
        progress(len(named), source.count)
    if not named:
        raise PrivlabError(f"No image can be read from {source.description}.")
    labels = [-1 if image.label is None else image.label for image in named]
    digest = hashlib.sha256()
    for image, label in zip(named, labels, strict=True):
        digest.update(f"{image.sha256}:{label}\n".encode())
    names = tuple(image.name for image in named)
    return Dataset(names, torch.cat(images), torch.tensor(labels), digest.hexdigest(), failed)


@dataclass(frozen=True, eq=False)
class Batches:
    """The images of each step: all images in an order drawn again for every epoch; the last batch may be smaller."""

    data: Dataset
    size: int
    seed: int = 0

    @property
    def per_epoch(self) -> int:
        """Return the number of steps in an epoch."""
        return -(-len(self.data) // self.size)

    def images_in(self, step: int) -> int:
        """Return how many images a step takes."""
        return min(self.size, len(self.data) - (step - 1) % self.per_epoch * self.size)

    def __getitem__(self, step: int) -> tuple[Float[Tensor, "b c h w"], Int[Tensor, " b"]]:
        """Return images and labels of a step, counted from 1; they depend on the seed and the step alone."""
        epoch, position = divmod(step - 1, self.per_epoch)
        chosen = _order(self.seed, epoch, len(self.data))[position * self.size : (position + 1) * self.size]
        return self.data.pixels(chosen), self.data.labels[chosen]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n: int) -> Int[Tensor, " n"]:
    return torch.randperm(n, generator=draw_for(seed, "", "order", epoch))

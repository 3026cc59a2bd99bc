"""Reading images as training examples: once, into memory, or into a file that is mapped into it."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from privlab.base import PrivlabError, one_line, write_whole
from privlab.experiments.training.examples import Examples
from privlab.images.data import Data
from privlab.images.decode import NamedImage

MOST_BYTES = 16 * 2**30
"""The most bytes of pixels that a training holds in memory."""

T = TypeVar("T")


class _Read(NamedTuple):
    """What was read beside the pixels."""

    labels: Int[Tensor, " n"]
    identity: str
    skipped: tuple[str, ...]


def read_examples(source: Data, size: tuple[int, int], *, labelled: bool = True, cache: Path | None = None) -> Examples:
    """Read all images of a source; those of another size are resized and centre-cropped to `size`.

    Args:
        source: any that `open_images` opens.
        size: (h, w) in pixels.
        labelled: whether an image without label is an error.
        cache: a folder in which the bytes of the resized images are kept, in a file that is mapped into memory. They
            may then exceed the memory, and are read once, for all trainings and by one of several processes.

    Raises:
        PrivlabError: if nothing can be read, images have no labels, a class folder is empty, they do not fit into
            memory, or the cache cannot be used.
    """
    images, read = _in_memory(source, size) if cache is None else _map(source, size, cache)
    if not len(images):
        reason = f" The first: {read.skipped[0]}" if read.skipped else ""
        raise PrivlabError(f"There is nothing to train on in {source.description}: no image can be read.{reason}")
    if labelled and (without := int((read.labels == -1).sum())):
        raise PrivlabError(
            f"{without} of the {len(images)} images in {source.description} have no label. "
            "Give one folder per class, or a dataset with labels."
        )
    return Examples(images, read.labels, _classes(source, read.labels), read.identity, read.skipped)


def _in_memory(source: Data, size: tuple[int, int]) -> tuple[UInt8[Tensor, "n 3 h w"], _Read]:
    if source.count is not None:
        _check_memory(source.count, size)
    images: list[UInt8[Tensor, "3 h w"]] = []
    read = _read(source, size, images.append)
    return torch.stack(images) if images else torch.empty(0, 3, *size, dtype=torch.uint8), read


def _map(source: Data, size: tuple[int, int], cache: Path) -> tuple[UInt8[Tensor, "n 3 h w"], _Read]:
    """Return what the cache holds of these images, which the first process that asks reads into it."""
    try:
        from filelock import FileLock
    except ImportError as error:
        raise PrivlabError("--cache needs filelock: pip install 'privlab[training]'.") from error
    kept = cache / _key(source, size)
    pixels, facts = kept.with_suffix(".pixels"), kept.with_suffix(".json")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(kept.with_suffix(".lock")):
            if not facts.is_file():  # `facts` is written last
                with pixels.open("wb") as file:
                    read = _read(source, size, lambda image: file.write(image.numpy().data))
                told = {"labels": read.labels.tolist(), "identity": read.identity, "skipped": read.skipped}
                write_whole(facts, lambda path: path.write_text(json.dumps(told), encoding="utf-8"))
        told = json.loads(facts.read_text(encoding="utf-8"))
        read = _Read(torch.tensor(told["labels"], dtype=torch.long), told["identity"], tuple(told["skipped"]))
        shape = (len(read.labels), 3, *size)
        if (found := pixels.stat().st_size) != (wanted := int(np.prod(shape))):
            raise PrivlabError(f"'{pixels}' has {found} bytes, not {wanted}. Delete '{facts}', and it is read anew.")
        images = np.memmap(pixels, np.uint8, mode="c", shape=shape) if found else np.empty(shape, np.uint8)
    except PrivlabError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise PrivlabError(f"The images cannot be kept in '{cache}': {one_line(error)}.") from error
    return torch.from_numpy(images), read


def _key(source: Data, size: tuple[int, int]) -> str:
    """Return the key of these images in a cache: a hash of the source, the size, and its files' sizes and dates."""
    digest = hashlib.sha256(repr((source.description, source.count, source.names, size)).encode())
    for path in source.files or () if source.container is None else [source.container]:
        stat = path.stat()
        digest.update(f"{stat.st_size}-{stat.st_mtime_ns}/".encode())
    return digest.hexdigest()[:16]


def _read(source: Data, size: tuple[int, int], keep: Callable[[UInt8[Tensor, "3 h w"]], object]) -> _Read:
    """Read all images, one after the other, and give those that can be used to `keep`.

    The identity is SHA-256 over their pixels and labels.
    """
    labels: list[int] = []
    skipped: list[str] = []
    digest = hashlib.sha256()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for image, pixels in _prepare(pool, source, size):
            if pixels is None:
                skipped.append(f"{image.name}: {image.problem}")
                continue
            keep(pixels)
            digest.update(pixels.numpy().data)
            labels.append(-1 if image.label is None else image.label)
    numbers = torch.tensor(labels, dtype=torch.long)
    digest.update(numbers.numpy().data)
    return _Read(numbers, digest.hexdigest(), tuple(skipped))


def _prepare(
    pool: ThreadPoolExecutor, source: Data, size: tuple[int, int]
) -> Iterator[tuple[NamedImage, UInt8[Tensor, "3 h w"] | None]]:
    """Read images several at a time, a few hundred ahead: in order."""

    def fit(image: NamedImage) -> tuple[NamedImage, Tensor | None]:
        return image, None if image.pixels is None else _fit(image.pixels, size)

    if source.names is None:  # a stream is read in one thread, and resized in several
        for some in _groups(source, 512):
            yield from pool.map(fit, some)
        return
    for places in _groups(range(len(source)), 512):
        yield from pool.map(lambda place: fit(source[place]), places)


def _groups(things: Iterable[T], size: int) -> Iterator[list[T]]:
    stream = iter(things)
    while some := list(islice(stream, size)):
        yield some


def _fit(pixels: Image.Image, size: tuple[int, int]) -> UInt8[Tensor, "3 h w"]:
    """Return an image's bytes: whole where it has the size, else its shorter side resized and the centre cut out."""
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
            f"{count} images of {size[0]}×{size[1]} take {need / 2**30:.0f} GiB of memory; at most "
            f"{MOST_BYTES // 2**30} are held. Give --cache FOLDER, where they are kept in a file, or fewer (--limit)."
        )


def _classes(source: Data, labels: Int[Tensor, " n"]) -> int:
    """Return the number of classes: of the source's names, else one more than the largest label.

    Raises:
        PrivlabError: if a class has no image that can be read, though there are at least as many images as classes.
    """
    names = source.class_names
    if names is None:
        return int(labels.max()) + 1
    present = set(labels.tolist())
    empty = [name for label, name in enumerate(names) if label not in present]
    if empty and len(labels) >= len(names):
        raise PrivlabError(f"The class '{empty[0]}' of {source.description} has no image that can be read.")
    return len(names)

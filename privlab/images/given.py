"""Images that are given in Python: tensors, arrays, Pillow's images, data sets and loaders, with their labels."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from privlab.base import PrivlabError
from privlab.images.datasets import IMAGE_COLUMNS, LABEL_COLUMNS, with_target
from privlab.images.decode import NamedImage, damage_of, image_from_pil, read_image
from privlab.images.sources import ImageSource

Given: TypeAlias = Any
"""A tensor, an array, a sequence of images, a data set with len(), or an iterable of batches such as a DataLoader."""


def given_images(images: Given, labels: Sequence[Any] | Tensor | np.ndarray | None = None) -> ImageSource:
    """Return images that are in memory, or that a data set or a loader reads, as a source.

    Args:
        images: b × c × h × w values in [0, 1] or bytes, as a tensor or an array; a sequence of such images, of Pillow's
            images or of paths; a data set whose items are images, (image, label) or columns; or an iterable that yields
            the same batches each time, each of them images or (images, labels).
        labels: the class of each image, or its classes as a list; None for those that the images bring along.

    Raises:
        PrivlabError: for something else, an empty sequence, or labels of another number.
    """
    if isinstance(images, Tensor | np.ndarray) and images.ndim != 4:
        found = " × ".join(map(str, images.shape))
        raise PrivlabError(f"images must be b × c × h × w; one image is images[None]. Found {found}.")
    values = images if isinstance(images, Tensor | np.ndarray | list | tuple) else ()
    for place, image in enumerate(values):
        problem = _problem(torch.as_tensor(image)) if isinstance(image, Tensor | np.ndarray) else None
        if problem is not None:
            raise PrivlabError(f"images must be b × c × h × w, of bytes or in [0, 1]. Of image {place}: {problem}")
    if hasattr(images, "__getitem__") and hasattr(images, "__len__"):
        return _sequence(images, labels)
    if not isinstance(images, Iterable) or isinstance(images, Iterator):
        kind = type(images).__name__
        raise PrivlabError(
            f"images must be a tensor, an array, a sequence, a data set, or an iterable of batches that can be read "
            f"twice, such as a DataLoader. Found {kind}."
        )
    if labels is not None:
        raise PrivlabError("An iterable of batches brings its labels along, as (images, labels). Leave labels out.")
    return ImageSource(f"batches of a {type(images).__name__}", None, None, None, read=partial(_batches, images))


def _sequence(images: Any, labels: Sequence[Any] | Tensor | np.ndarray | None) -> ImageSource:  # noqa: ANN401
    count = len(images)
    if not count:
        raise PrivlabError("At least one of images is needed. Found none.")
    if labels is not None and len(labels) != count:
        raise PrivlabError(f"There must be one label for each of the {count} images. Found {len(labels)}.")
    targets = None if labels is None else [_plain(label) for label in labels]
    classes = getattr(images, "classes", None)
    class_names = tuple(map(str, classes)) if isinstance(classes, Sequence) else None
    names = tuple(f"image-{place}" for place in range(count))
    kind = type(images).__name__
    description = f"{count} images of a {kind}" if kind not in ("list", "tuple") else f"{count} images"
    return ImageSource(description, count, class_names, names, at=partial(_item, images, targets, names))


def _item(images: Any, targets: Sequence[Any] | None, names: Sequence[str], place: int) -> NamedImage:  # noqa: ANN401
    """Return the image at a place; one that cannot be read has a problem, and does not end the run."""
    try:
        value = images[place]
        image, target = (value, None) if isinstance(images, Tensor | np.ndarray) else _split(value)
        found = _image(image, names[place])
    except Exception as error:
        return NamedImage(names[place], "", None, problem=damage_of(error))
    return with_target(found, target if targets is None else targets[place])


def _batches(batches: Iterable[Any]) -> Iterator[NamedImage]:
    place = 0
    for batch in batches:
        images, labels = _split(batch)
        for i, image in enumerate(images):
            yield with_target(_image(image, f"image-{place}"), None if labels is None else _plain(labels[i]))
            place += 1


def _split(item: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the image and the label of an item: a pair, columns by name, or an image alone."""
    if isinstance(item, Mapping):
        image = next((item[name] for name in (*IMAGE_COLUMNS, "pixel_values") if name in item), None)
        label = next((item[name] for name in (*LABEL_COLUMNS, "labels") if name in item), None)
        if image is None:
            raise PrivlabError(f"an item needs a column {', '.join(IMAGE_COLUMNS)}; found {', '.join(map(str, item))}")
        return image, _plain(label)
    if isinstance(item, tuple | list) and len(item) > 1:
        return item[0], _plain(item[1])
    return item, None


def _plain(label: Any) -> Any:  # noqa: ANN401
    """Return a label as a plain number or list; a row of zeros and ones becomes the classes of its ones."""
    if not isinstance(label, Tensor | np.ndarray):
        return label
    values = np.asarray(label).tolist()
    if isinstance(values, list) and set(values) <= {0, 1}:
        return [index for index, value in enumerate(values) if value]
    return values


def _image(image: Any, name: str) -> NamedImage:  # noqa: ANN401
    if isinstance(image, str | Path):
        return replace(read_image(image), name=str(image))
    if isinstance(image, Image.Image):
        return image_from_pil(image, name)
    if isinstance(image, Tensor | np.ndarray):
        return _of_values(torch.as_tensor(image), name)
    return NamedImage(name, "", None, problem=f"Not an image but a {type(image).__name__}.")


def _of_values(image: Tensor, name: str) -> NamedImage:
    """Return c × h × w values in [0, 1], or bytes, as an image whose hash is over its shape, type and values."""
    if (problem := _problem(image)) is not None:
        return NamedImage(name, "", None, problem=problem)
    values = image.detach().cpu().contiguous()
    header = f"{tuple(values.shape)}:{values.dtype}:".encode()
    digest = hashlib.sha256(header + values.numpy().tobytes()).hexdigest()
    return NamedImage(name, digest, values.float() / 255 if values.dtype == torch.uint8 else values.float())


def _problem(image: Tensor) -> str | None:
    """Return why values are no image; None if they are one."""
    text = next((text for wrong, text in _PROBLEMS if wrong(image)), None)
    if text is None:
        return None
    low, high = (float(value) for value in image.float().aminmax())
    right = "divide by 255" if low >= 0 and high > 2 else "the model normalises by itself"
    return text.format(" × ".join(map(str, image.shape)), image.dtype, low, high, right)


_OUTSIDE = "found values outside [0, 1], from {2:.4g} to {3:.4g}: {4}."
_PROBLEMS: tuple[tuple[Callable[[Tensor], bool], str], ...] = (
    (lambda x: x.ndim != 3, "an image is c × h × w. Found {0}."),
    (lambda x: x.shape[0] > 4, "an image has its channels first, c × h × w. Found {0}."),
    (lambda x: x.dtype != torch.uint8 and not x.is_floating_point(), "values are bytes or in [0, 1]. Found {1}."),
    (lambda x: x.is_floating_point() and not bool(x.isfinite().all()), "found a value that is not finite."),
    (
        lambda x: x.is_floating_point() and bool(((x < 0) | (x > 1)).any()),
        _OUTSIDE,
    ),
)

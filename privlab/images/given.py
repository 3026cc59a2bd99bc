"""Data that are given in Python: tensors, arrays, Pillow's images, data sets, loaders and generators, with labels."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from privlab.base import PrivlabError
from privlab.images.data import Data, Spool, split_item
from privlab.images.datasets import class_names_of
from privlab.images.decode import MAX_CHANNELS, Target, read_image
from privlab.images.open import open_images
from privlab.images.targets import checked_targets


def data_of(images: Any, labels: Any = None, *, numbers: bool = False) -> Data:  # noqa: ANN401
    """Return images that are in memory, or that a data set, a loader or a generator reads.

    Args:
        images: b × c × h × w values in [0, 1] or bytes, as a tensor or an array; a sequence of such images, of Pillow's
            images or of paths; a data set with `len()` whose items are images, (image, label) or columns; an iterable
            of batches, which is read once: each batch is images, (images, labels) or one image; or what `open_images`
            opens, by its name.
        labels: the class of each image, its classes as a list, or b × y shares of the classes; None for those that the
            images bring along; "predicted" or a path if these are not used.
        numbers: whether labels are numeric targets: b numbers, or b × y.

    Raises:
        PrivlabError: for something else, no image, values outside [0, 1], or labels that are wrong or of another
            number.
    """
    own = labels is None
    data = images if isinstance(images, Data) else open_images(images) if is_named(images) else _opened(images, own=own)
    if own or isinstance(labels, str | Path):
        return data
    targets = checked_targets(labels, data.count, numbers=numbers)
    if data.count is None:  # of a stream, as many images are read as there are labels
        data = replace(data, places=data.places[: len(targets)])
    stated = [(f"labels, image {place}", target) for place, target in enumerate(targets)]
    return replace(data.label(targets, "dataset"), stated=stated)


def is_named(images: Any) -> bool:  # noqa: ANN401
    """Return whether images are given by the name of a source, or by paths."""
    several = [images] if isinstance(images, str | Path) else images
    return isinstance(several, list | tuple) and bool(several) and all(isinstance(each, str | Path) for each in several)


def _opened(images: Any, *, own: bool) -> Data:  # noqa: ANN401
    """Return data that are not a named source; `own` says whether the labels that come with the images are used."""
    kind = type(images).__name__
    if isinstance(images, Tensor | np.ndarray) and images.ndim != 4:
        found = " × ".join(map(str, images.shape))
        raise PrivlabError(f"images must be b × c × h × w; one image is images[None]. Found {found}.")
    if isinstance(images, Mapping) or not (isinstance(images, Iterable) or hasattr(images, "__getitem__")):
        found = f"{kind} of {', '.join(map(str, images))}" if isinstance(images, Mapping) else kind
        raise PrivlabError(
            "images must be a tensor, an array, a sequence, a data set, or an iterable of batches, such as a loader or "
            f"a generator. Found {found}."
        )
    if hasattr(images, "__getitem__") and hasattr(images, "__len__"):
        items: Any = images
        description = f"{len(items)} images" + ("" if kind in ("list", "tuple") else f" of a {kind}")
    else:
        items, description = Spool(lambda: _items(images, own=own)), f"batches of a {kind}"
    data = Data(description, items, "image-", range(len(items)), class_names_of(images))
    _check_values(data, own=own)
    return data


def _check_values(data: Data, *, own: bool) -> None:
    """Check all images that are in memory, but only the first one of a data set: others may be wrong, and fail alone.

    Raises:
        PrivlabError: if there is no image, or one has wrong values or a wrong soft label.
    """
    in_memory = isinstance(data.items, Tensor | np.ndarray | list | tuple)
    for place in range(len(data)) if in_memory and len(data) else [0]:
        try:
            image, label = split_item(data.items[place])
        except PrivlabError:
            raise
        except IndexError:
            raise PrivlabError("At least one of images is needed. Found none.") from None
        except Exception:  # a damaged image must not end the run
            continue
        if isinstance(image, Tensor | np.ndarray) and (problem := read_image(image, name="").problem) is not None:
            raise PrivlabError(f"images must be b × c × h × w, of bytes or in [0, 1]. Of image {place}: {problem}")
        if own:
            checked_targets([label], 1, f"The label that comes with image {place}", strict=False)


def _items(batches: Iterable[Any], *, own: bool) -> Iterator[tuple[Any, Target]]:
    """Yield the images of batches one by one, each with its label."""
    for batch in batches:
        images, labels = split_item(batch)
        if isinstance(images, Image.Image | str | Path) or getattr(images, "ndim", 4) == 3:
            images, labels = [images], None if labels is None else [labels]
        if not hasattr(images, "__len__"):
            raise PrivlabError(f"images must yield batches: images, or (images, labels). Found {type(batch).__name__}.")
        labels = [None] * len(images) if labels is None or not own else labels
        targets = checked_targets(labels, len(images), "The labels of a batch", strict=False)
        for image, target in zip(images, targets, strict=True):  # a view would be kept with all of its batch
            yield image.detach().cpu().clone() if isinstance(image, Tensor) else image, target


def values_of(image: Tensor | np.ndarray) -> tuple[Float[Tensor, "c h w"], str]:
    """Return c × h × w values in [0, 1], or bytes, as floats, and the hash over their shape, type and values.

    Raises:
        PrivlabError: if they are not an image.
    """
    values = torch.as_tensor(image).detach().cpu().contiguous()
    shape = " × ".join(map(str, values.shape))
    if values.ndim != 3:
        raise PrivlabError(f"An image is c × h × w. Found {shape}.")
    if values.shape[0] > MAX_CHANNELS:
        raise PrivlabError(
            f"An image has its channels first, c × h × w with 1 to {MAX_CHANNELS} channels. Found {shape}."
        )
    digest = hashlib.sha256(f"{tuple(values.shape)}:{values.dtype}:".encode() + values.numpy().tobytes()).hexdigest()
    if values.dtype == torch.uint8:
        return values.float() / 255, digest
    if not values.is_floating_point():
        raise PrivlabError(f"Values are bytes or in [0, 1]. Found {values.dtype}.")
    if not bool(values.isfinite().all()):
        raise PrivlabError("Found a value that is not finite.")
    low, high = (float(value) for value in values.float().aminmax())
    if low < 0 or high > 1:
        right = "divide by 255" if low >= 0 and high > 2 else "the model normalises its images itself"
        raise PrivlabError(f"Found values outside [0, 1], from {low:.4g} to {high:.4g}: {right}.")
    return values.float(), digest

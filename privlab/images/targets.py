"""Labels of images: class indices, the classes of a multi-label target, and soft labels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from privlab.base import PrivlabError
from privlab.images.decode import LabelOrigin, NamedImage

Target: TypeAlias = int | tuple[int, ...] | tuple[float, ...] | None
"""A class index, the classes of an image that may have several, or a share for each class; None for no label."""

_ROUNDING = 1e-3
"""How far the shares of a soft label may be from 1 in all: some are stored in 16 bits."""


def with_target(image: NamedImage, target: object, origin: LabelOrigin = "dataset") -> NamedImage:
    """Return an image with the label that its target is, with the classes of a multi-label target, or a soft label.

    Test sets without labels give −1, and other tasks give targets that are no class: these images keep their label.

    Args:
        image: the image.
        target: as `target_of` takes it.
        origin: where the label comes from.
    """
    found = target_of(target)
    if found is None:
        return image
    if isinstance(found, tuple):
        return replace(image, label=None, targets=found, label_origin=origin)
    return replace(image, label=found, targets=None, label_origin=origin)


def target_of(value: object) -> Target:
    """Return the class index that a value is, the classes of a list, in order, or a soft label; None for any other.

    A soft label is an array, or a list with fractions: a share for each class, which add up to 1.
    """
    if isinstance(value, np.ndarray):
        return _shares(value.ravel().tolist())
    if value and isinstance(value, tuple) and all(isinstance(share, float) for share in value):
        return _shares(value)
    if not isinstance(value, list | tuple):
        return class_of(value)
    classes = {index for index in map(class_of, value) if index is not None}
    return tuple(sorted(classes)) if len(classes) == len(value) else _shares(value)


def _shares(values: Sequence[Any]) -> tuple[float, ...] | None:
    """Return shares of classes, which add up to 1; None for other values."""
    if not all(isinstance(value, float) and value >= 0 for value in values):  # NaN is refused too
        return None
    return tuple(values) if abs(sum(values) - 1) <= _ROUNDING else None


def class_of(value: object) -> int | None:
    """Return the class index that a value is: an integer from 0 on, of 64 bits, also as 2.0; None for any other."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    is_index = 0 <= value < 2**63 and value == int(value)
    return int(value) if is_index else None


def plain_targets(labels: Any) -> list[Any]:  # noqa: ANN401
    """Return the labels of several images as plain targets, as `with_target` takes them.

    Rows of zeros and ones become the classes of their ones. Rows of fractions stay arrays: they are soft labels.
    """
    if not hasattr(labels, "dtype"):
        return [plain_target(label) for label in labels]
    values = np.asarray(labels.detach().cpu() if hasattr(labels, "detach") else labels)
    if values.ndim == 2 and np.isin(values, (0, 1)).all():
        return [np.flatnonzero(row).tolist() for row in values]
    is_soft = values.ndim == 2 and values.dtype.kind == "f" and (values != np.floor(values)).any()
    return list(values) if is_soft else values.tolist()


def plain_target(label: Any) -> Any:  # noqa: ANN401
    """Return the label of one image as a plain target; anything but an array is returned as it is."""
    return plain_targets(label[None])[0] if hasattr(label, "dtype") else label


def checked_targets(labels: Any, count: int) -> list[Any]:  # noqa: ANN401
    """Return the labels that a user gave as plain targets.

    Args:
        labels: a class index, a list of classes or a soft label for each image; None for an image without a label.
        count: the number of images.

    Raises:
        PrivlabError: if there are not as many labels as images, or a label is none of these.
    """
    if len(labels) != count:
        raise PrivlabError(f"labels must have one label for each of the {count} images. Found {len(labels)}.")
    targets = plain_targets(labels)
    for place, target in enumerate(targets):
        if target is not None and target_of(target) is None:
            raise PrivlabError(
                "labels must be class indices from 0 on, a list of classes for each image, or a share of each class, "
                f"which add up to 1. Found {target!r} for image {place}."
            )
    return targets


def problem_of_label(image: NamedImage, classes: int) -> str | None:
    """Return why an image's label is none of a victim with so many classes; None if it is one."""
    if image.is_soft:
        if image.targets is not None and len(image.targets) != classes:
            return f"Its soft label has {len(image.targets)} shares; the victim has {classes} classes."
        return None
    largest = max(image.targets or (), default=image.label or 0)
    if largest >= classes:
        return f"Label {largest} is out of range: the victim has {classes} classes (0 to {classes - 1})."
    return None

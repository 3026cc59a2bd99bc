"""Labels of images: class indices, the classes of a multi-label target, and soft labels."""

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from privlab.base import PrivlabError
from privlab.images.decode import Target

ACCEPTED = (
    "a class index from 0 on; for a client with a binary loss, a list of classes or a row of 0 and 1; or a soft label, "
    "which is a row of probabilities that add up to 1"
)
_ROUNDING = 1e-3
"""How far the shares of a soft label may be from 1 in all: some are stored in 16 bits."""


def target_of(value: Any) -> Target:  # noqa: ANN401
    """Return the class index that a value is, the classes of a list, in order, or a soft label; None for any other.

    An array of zeros and ones has a 1 for each class. A list or an array with fractions has a share for each class.
    """
    if hasattr(value, "dtype"):
        is_row = value.ndim == 1
        value = value.tolist()
        if is_row and set(value) <= {0, 1}:
            return tuple(index for index, is_class in enumerate(value) if is_class)
    if not isinstance(value, list | tuple):
        return class_of(value)
    classes = {index for index in map(class_of, value) if index is not None}
    if len(classes) == len(value):
        return tuple(sorted(classes))
    shares = all(isinstance(share, float) and share >= 0 for share in value)
    return tuple(value) if shares and abs(sum(value) - 1) <= _ROUNDING else None


def class_indices(
    names: Sequence[str], *class_to_index: Mapping[str, int] | None
) -> tuple[Mapping[str, int], tuple[str, ...] | None, str]:
    """Return the label of each name of a class, the names of all classes where they are known, and how they came.

    Args:
        names: the names, sorted.
        class_to_index: labels of known names; the first that knows all names is used, also in other case and with
            underscores for spaces. If there is none, the labels are the positions in `names`.
    """
    for table in filter(None, class_to_index):
        known = {name: name if name in table else plain_name(name) for name in names}
        if not table.keys() >= set(known.values()):
            continue
        first_names: dict[int, str] = {}
        for name, index in table.items():
            first_names.setdefault(index, name)
        complete = sorted(first_names) == list(range(len(first_names)))
        class_names = tuple(first_names[index] for index in range(len(first_names))) if complete else None
        indices = {name: table[key] for name, key in known.items()}
        return indices, class_names, f"{len(names)} classes labelled by the given indices"
    indices = {name: index for index, name in enumerate(names)}
    return indices, tuple(names), f"{len(names)} classes labelled in the order of their names"


def plain_name(name: str) -> str:
    """Return the name of a class in lower case, with spaces for underscores and hyphens."""
    return " ".join(re.split(r"[\s_-]+", name.lower().strip()))


def class_of(value: object) -> int | None:
    """Return the class index that a value is: an integer from 0 on, of 64 bits, also as 2.0; None for any other."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    is_index = 0 <= value < 2**63 and value == int(value)
    return int(value) if is_index else None


def checked_targets(
    labels: Any,  # noqa: ANN401
    count: int | None,
    what: str = "labels",
    *,
    strict: bool = True,
    numbers: bool = False,
) -> list[Target]:
    """Return labels that are given for images, one for each.

    Args:
        labels: as `target_of` takes each one; None for an image without a label.
        count: the number of images; None for as many as there are labels.
        what: what the labels are, for the errors.
        strict: whether something else is an error; in data sets it is often a −1, and only wrong shares are an error.
        numbers: whether labels are numeric targets, a number or a row of numbers each.

    Raises:
        PrivlabError: if there are not as many labels as images, or a label is none of those that are accepted.
    """
    if not hasattr(labels, "__len__") or isinstance(labels, Mapping) or getattr(labels, "ndim", 1) == 0:
        raise PrivlabError(f"{what} must be a sequence or an array. Found {type(labels).__name__}.")
    if count is not None and len(labels) != count:
        raise PrivlabError(f"{what} must have one label for each of the {count} images. Found {len(labels)}.")
    if numbers:
        return _numeric(labels, what)
    if isinstance(labels, list) and any(_is_of_shares(row) for row in labels):
        with suppress(ValueError):  # rows of several lengths
            labels = np.asarray(labels, float)  # a row of 0 and 1 among soft labels does not list the classes 0 and 1
    return [_checked(label, place, what, strict) for place, label in enumerate(labels)]


def _numeric(labels: Any, what: str) -> list[Target]:  # noqa: ANN401
    """Return numeric targets, a tuple of numbers for each image."""
    try:
        rows = np.asarray(labels, float).reshape(len(labels), -1)
    except (TypeError, ValueError):
        rows = np.array([math.nan])
    if not np.isfinite(rows).all():
        raise PrivlabError(f"{what} of a loss of numbers must be a finite number, or a row of them, for each image.")
    return [tuple(row) for row in rows.tolist()]


def _is_of_shares(row: object) -> bool:
    """Return whether a label is a list with a number that is not a class."""
    return isinstance(row, list | tuple) and any(isinstance(share, float) and (share % 1 or share < 0) for share in row)


def _checked(label: Any, place: int, what: str, strict: bool) -> Target:  # noqa: ANN401
    target, found = target_of(label), label.tolist() if hasattr(label, "dtype") else label
    if target is not None or found is None or not (strict or _is_of_shares(found)):
        return target
    shown = reprlib.repr(found)
    if _is_of_shares(found):
        shown = f"a row with {min(found):.4g}" if min(found) < 0 else f"a row with the sum {sum(found):.4g}"
    raise PrivlabError(f"{what}: each label must be {ACCEPTED}. Found {shown} for image {place}.")


def problem_of_label(target: Target, classes: int) -> str | None:
    """Return why a label is none of a victim with so many classes; None if it is one."""
    if isinstance(target, tuple) and any(isinstance(share, float) for share in target):
        wrong = len(target) != classes
        return f"Its label has {len(target)} numbers; the victim has {classes} classes." if wrong else None
    largest = max(target, default=0) if isinstance(target, tuple) else target or 0
    if largest >= classes:
        return f"Label {largest} is out of range: the victim has {classes} classes (0 to {classes - 1})."
    return None

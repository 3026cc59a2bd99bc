"""Data sets in archives: arrays in npz files, such as MedMNIST's, and the tar files of WebDataset."""

import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from privlab.base import PrivlabError, check_name, one_line, open_file, parse_json
from privlab.images import medical
from privlab.images.data import IMAGE_COLUMNS, LABEL_COLUMNS, Data
from privlab.images.decode import MAX_BYTES, Target
from privlab.images.targets import checked_targets, class_indices, target_of

_IMAGES = re.compile(r"(?:(?P<split>\w+)_images|x_(?P<other>\w+))")
_ALONE = ("images", "x", "data", "arr_0", *IMAGE_COLUMNS)
_LABELS_ALONE = ("labels", "y", "targets", "arr_1", *LABEL_COLUMNS)
_MOST_PACKED = 20
"""By how much photographs may be packed in an array of more than `MAX_BYTES`; zeros are packed by a thousand."""
_MOST_LABELS = 2**24
"""The most numbers in an array of labels."""
_MAX_TEXT = 2**20
"""In bytes: the longest .cls or .json that is read."""


@dataclass(frozen=True, eq=False)
class _Arrays:
    """The images of an array, each with its label."""

    images: np.ndarray
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        return medical.array_image(self.images[place]), None if self.labels is None else self.labels[place]


def arrays(path: Path, split: str | None = None) -> Data:
    """Open an npz file of images and labels.

    The images are `train_images`, `x_train` and so on for each split, or `images`, `x` or `arr_0`; labels have the same
    names with `labels` and `y`. A row of several labels has a 1 for each class. A volume's label is that of its slices.

    Args:
        path: path of the file.
        split: the split; None for the test split, or the first one where there is none.

    Raises:
        PrivlabError: if the file cannot be read, or has no such arrays or split.
    """
    try:
        with open_file(path, "archive") as file, zipfile.ZipFile(file) as packed:
            archive = np.load(file, allow_pickle=False)
            names = list(archive.files)
            splits = {match["split"] or match["other"]: match[0] for match in map(_IMAGES.fullmatch, names) if match}
            image_name, label_name = _of_split(path, names, splits, split)
            for name in filter(None, (image_name, label_name)):
                _check_packed(path, packed.getinfo(f"{name}.npy"))
            images = medical.stack_of(archive[image_name], several=True)
            labels = None if label_name is None else archive[label_name]
    except PrivlabError:
        raise
    except Exception as error:  # damaged archives raise many errors
        raise PrivlabError(f"'{path}' cannot be read as npz: {one_line(error)}.") from None
    if labels is not None:
        labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
        if labels.ndim not in (1, 2) or not len(labels) or len(images) % len(labels):
            raise PrivlabError(f"'{path}' has {len(images)} images, but {label_name} of {labels.shape}: one for each.")
        if labels.size * (len(images) // len(labels)) > _MOST_LABELS:
            raise PrivlabError(f"'{path}' has labels of {labels.shape}; at most {_MOST_LABELS} numbers are read.")
        labels = labels.repeat(len(images) // len(labels), axis=0)
    chosen = image_name.removesuffix("_images").removeprefix("x_") if splits else None
    prefix = f"{path.name}/{chosen}/" if chosen else f"{path.name}/"
    turns = () if labels is None else [target_of(label) for label in labels]
    description = f"{len(images)} images of {prefix[:-1]}"
    return Data(description, _Arrays(images, labels), prefix, range(len(images)), container=path, turns=turns)


def _of_split(path: Path, names: Sequence[str], splits: Mapping[str, str], split: str | None) -> tuple[str, str | None]:
    """Return the names of the arrays of images and of labels; None for no labels."""
    if splits:
        chosen = split or ("test" if "test" in splits else next(iter(splits)))
        check_name(f"split of '{path}'", chosen, splits)
        label_names = (f"{chosen}_labels", f"y_{chosen}")
        return splits[chosen], next((name for name in label_names if name in names), None)
    image_name = next((name for name in _ALONE if name in names), None)
    if image_name is None or split is not None:
        wanted = "train_images, x_train or images" if split is None else f"{split}_images"
        raise PrivlabError(f"'{path}' has no array {wanted}. Found {', '.join(names) or 'none'}.")
    return image_name, next((name for name in _LABELS_ALONE if name in names), None)


def _check_packed(path: Path, member: zipfile.ZipInfo) -> None:
    if member.file_size > max(MAX_BYTES, _MOST_PACKED * member.compress_size):
        sizes = f"{member.compress_size / 2**20:.0f} MiB to {member.file_size / 2**20:.0f} MiB"
        raise PrivlabError(f"'{path}': {member.filename} unpacks from {sizes}, which is not read.")


@dataclass(frozen=True)
class _Member:
    """Where the bytes of a file in a tar are."""

    tar: Path
    offset: int
    size: int

    def read(self) -> bytes:
        with open_file(self.tar, "archive") as file:
            file.seek(self.offset)
            return file.read(self.size)


@dataclass(frozen=True, eq=False)
class _Members:
    """The images of tar files, each with its label, read when they are asked for."""

    images: Sequence[_Member]
    targets: Sequence[Target]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[Any, Target]:
        member = self.images[place]
        if member.size > MAX_BYTES:
            found = f"{member.size / 2**20:.0f} MiB; at most {MAX_BYTES // 2**20} MiB are read."
            return PrivlabError(found), self.targets[place]
        return member.read(), self.targets[place]


def expand(pattern: Path) -> list[Path]:
    """Return the paths that a pattern such as `shard-{000..003}.tar` stands for, in their order.

    Raises:
        PrivlabError: if these are none, or more than a million.
    """
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern.as_posix())
    if match is None:
        return [pattern]
    text, width, count = pattern.as_posix(), len(match[1]), int(match[2]) - int(match[1]) + 1
    if not 0 < count <= 10**6:
        raise PrivlabError(f"'{pattern}' must name 1 to a million files. Found {max(count, 0)}.")
    numbers = (str(int(match[1]) + step).zfill(width) for step in range(count))
    return [Path(text[: match.start()] + number + text[match.end() :]) for number in numbers]


def tars(
    paths: Mapping[str, Path],
    suffixes: frozenset[str],
    class_to_index: Mapping[str, int] | None = None,
    *,
    own_labels: bool = True,
) -> Data:
    """Open WebDataset's tar files: the members KEY.jpg, KEY.cls and KEY.json are one image and its label.

    The label is the text of KEY.cls, or `label` (or a column like it) of KEY.json: a class index, a list of those, or
    the name of a class. The images stay in their files.

    Args:
        paths: paths of the tars, which are not packed, by their names.
        suffixes: the suffixes of images.
        class_to_index: as `open_images` takes it, for names of classes.
        own_labels: whether these labels are used; if not, it does not matter what they are.

    Raises:
        PrivlabError: if a file is missing or no such tar, holds no image, or has labels that are none.
    """
    samples: dict[str, dict[str, _Member]] = {}
    for tar, path in paths.items():
        for member, found in _members(path):
            key, dot, extension = member.name.partition(".")
            if key:  # a hidden file has none
                samples.setdefault(f"{tar}/{member.parent / key}", {})[dot + extension.lower()] = found
    images: dict[str, _Member] = {}
    labels: list[Any] = []
    for key, files in samples.items():
        suffix = next((suffix for suffix in files if f".{suffix.rpartition('.')[2]}" in suffixes), None)
        if suffix is not None:
            images[f"{key}{suffix}"] = files[suffix]
            labels.append(_label(files) if own_labels else None)
    name = next(iter(paths), "")
    if not images:
        raise PrivlabError(f"No image in '{name}': members such as KEY.jpg are needed, with labels in KEY.cls.")
    description, class_names = f"{len(images)} images of {name} and {len(paths) - 1} other tars", None
    if texts := sorted({label for label in labels if isinstance(label, str)}):
        if any(label is not None and not isinstance(label, str) for label in labels):
            raise PrivlabError(
                f"'{name}' has names of classes, such as '{texts[0]}', and indices: only one kind is read."
            )
        indices, class_names, rule = class_indices(texts, class_to_index)
        labels = [None if label is None else indices[label] for label in labels]
        description = f"{description}, {rule}"
    targets = checked_targets(labels, None, f"labels of '{name}'")
    items = _Members(tuple(images.values()), targets)
    return Data(description, items, tuple(images), range(len(images)), class_names, turns=targets)


def _members(path: Path) -> Iterator[tuple[PurePosixPath, _Member]]:
    """Yield the name and the place of each file in a tar."""
    if not path.exists():
        raise PrivlabError(f"No file '{path}'. Give tar files, such as 'shard-{{000..003}}.tar'.")
    try:
        with open_file(path, "archive") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for info in archive:
                if info.isreg() and not info.issparse():
                    yield PurePosixPath(info.name), _Member(path, info.offset_data, info.size)
    except (OSError, tarfile.TarError, RecursionError, MemoryError) as error:  # of long names: nested, or too long
        raise PrivlabError(f"'{path}' cannot be read as a tar that is not packed: {one_line(error)}.") from None


def _label(files: Mapping[str, _Member]) -> Any:  # noqa: ANN401
    """Return the label of a sample: a number, a list or a text; None where it has none."""
    text = next((files[suffix] for suffix in (".cls", ".json") if suffix in files), None)
    if text is None or text.size > _MAX_TEXT:
        return None
    content = text.read().decode(errors="replace").strip()
    try:
        value = parse_json(content, "a label")
    except PrivlabError:
        return content or None
    if not isinstance(value, Mapping):
        return value
    return next((value[column] for column in LABEL_COLUMNS if column in value), None)

"""Images of torchvision's and Hugging Face's datasets."""

import importlib
import inspect
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from privlab.base import PrivlabError, check_name, unknown_name
from privlab.images.decode import NamedImage, damage_of, image_from_bytes, image_from_pil, one_line
from privlab.images.sources import ImageSource, Opening, by_turns

IMAGE_COLUMNS = ("image", "img", "jpeg", "png", "bytes")
LABEL_COLUMNS = ("label", "fine_label")
"""The columns of a Parquet file in which images and labels are looked for, in this order."""


def torchvision(name: str, how: Opening) -> ImageSource:
    """Open one of torchvision's datasets by the name of its class; it is downloaded where it is not there."""
    cls = _torchvision_class(name)
    root = Path(os.environ.get("PRIVLAB_DATA") or "~/.cache/privlab").expanduser()
    parameters = _parameters(cls)
    arguments, used = _torchvision_arguments(name, parameters, how.split)
    if "root" in parameters:
        arguments["root"] = str(root)
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in arguments]
    if missing:
        raise PrivlabError(
            f"torchvision's {name} also needs {', '.join(missing)}; of such arguments, privlab gives split only."
        )
    try:
        dataset = _construct(cls, arguments, "download" in parameters)
    except Exception as error:  # no network, no such split, a broken archive: each class raises its own errors
        raise PrivlabError(
            f"Cannot open torchvision's {name}, looked for in '{root}' (set PRIVLAB_DATA to change it): "
            f"{one_line(error)}."
        ) from error
    prefix = "/".join(filter(None, (name, used)))
    classes = getattr(dataset, "classes", None)
    class_names = tuple(map(str, classes)) if isinstance(classes, Sequence) else None
    names = tuple(f"{prefix}/{index}" for index in range(len(dataset)))
    description = f"torchvision {prefix}: {len(dataset)} images"
    read = partial(_torchvision_item, dataset, names, bit_depth=how.bit_depth)
    return ImageSource(description, len(dataset), class_names, names, at=read)


def _torchvision_class(name: str) -> type:
    from torchvision import datasets

    bases = {"VisionDataset", "DatasetFolder", "ImageFolder"}
    exported = {key: getattr(datasets, key) for key in datasets.__all__ if key not in bases}
    classes = {key: value for key, value in exported.items() if inspect.isclass(value)}
    check_name("torchvision dataset", name, classes)
    return classes[name]


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    own = inspect.signature(cls).parameters
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own.values())
    inherited = _parameters(cls.__mro__[1]) if passes_on else {}
    return inherited | {key: p for key, p in own.items() if p.kind not in variadic}


def _torchvision_arguments(
    name: str, parameters: Mapping[str, inspect.Parameter], split: str | None
) -> tuple[dict[str, Any], str | None]:
    if "split" in parameters:
        if split is not None:
            return {"split": split}, split
        default = parameters["split"].default
        return {}, default if isinstance(default, str) else None
    if "train" in parameters:
        if split not in (None, "train", "test"):
            raise unknown_name(f"split of torchvision's {name}", split, ("train", "test"))
        return {"train": split == "train"}, split or "test"
    if split is not None:
        raise PrivlabError(f"torchvision's {name} has no splits. Found split '{split}'; leave it out.")
    return {}, None


def _construct(cls: type, arguments: Mapping[str, Any], downloads: bool) -> Any:  # noqa: ANN401
    try:
        return cls(**arguments)
    except (RuntimeError, OSError):  # the data are not there
        if not downloads:
            raise
        return cls(**arguments, download=True)


def _torchvision_item(dataset: Any, names: Sequence[str], index: int, bit_depth: int | None) -> NamedImage:  # noqa: ANN401
    name = names[index]
    try:
        item = dataset[index]
    except Exception as error:  # one damaged image must not end the run
        return NamedImage(name, "", None, problem=damage_of(error))
    image, target, *_ = item if isinstance(item, tuple) else (item, None)
    if isinstance(image, Image.Image):
        return with_target(image_from_pil(image, name, bit_depth=bit_depth), target)
    return with_target(NamedImage(name, "", None, problem=f"Not an image but a {type(image).__name__}."), target)


def with_target(image: NamedImage, target: object) -> NamedImage:
    """Return an image with the label that its target is, or with the classes of a multi-label target.

    Test sets without labels give −1, and other tasks give targets that are no class: these images have no label.
    """
    label = _label_of(target)
    if label is None:
        return image
    if isinstance(label, tuple):
        return replace(image, targets=label, label_origin="dataset")
    return replace(image, label=label, label_origin="dataset")


def _label_of(value: object) -> int | tuple[int, ...] | None:
    """Return the class index that a value is, or those of a list, in order; None for any other value."""
    if not isinstance(value, list | tuple):
        return _class_of(value)
    classes = [_class_of(each) for each in value]
    known = {index for index in classes if index is not None}
    return tuple(sorted(known)) if len(known) == len(classes) else None


def _class_of(value: object) -> int | None:
    """Return the class index that a value is: an integer from 0 on, of 64 bits, also as 2.0; None for any other."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    is_index = 0 <= value < 2**63 and value == int(value)
    return int(value) if is_index else None


def _parquet_labels(values: Sequence[object], path: Path, own: bool) -> list[int | tuple[int, ...] | None]:
    """Return the class index of each row, or its classes; without `own`, a value that is no label is left out."""
    labels = [_label_of(value) for value in values]
    if not own:
        return labels
    for row, (value, label) in enumerate(zip(values, labels, strict=True)):
        if label is None and value is not None:
            raise PrivlabError(
                f"'{path}', row {row}: a label must be a class index, an integer from 0 on, a list of different ones, "
                f"or empty. Found {reprlib.repr(value)}. To use other labels, give --labels predicted or a CSV file."
            )
    return labels


def hugging_face(name: str, how: Opening) -> ImageSource:
    """Open a dataset of the Hugging Face hub, or of a folder, as a stream."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise PrivlabError(f"'hf:{name}' needs the extra: pip install 'privlab[datasets]'.") from None
    try:
        splits = datasets.load_dataset(name, streaming=True)
    except Exception as error:  # no network, no such dataset, a private one: each raises its own error
        raise PrivlabError(f"Cannot open the Hugging Face dataset '{name}': {one_line(error)}.") from error
    chosen = how.split or next((key for key in ("test", "validation", "val") if key in splits), next(iter(splits)))
    check_name(f"split of '{name}'", chosen, splits)
    data = splits[chosen]
    if data.features is None:  # datasets has no public way to infer them from the first rows
        data = data._resolve_features()
    column, label_column = _columns(data.features, datasets, name)
    image_type, label_type = data.features[column], data.features.get(label_column)
    # The images stay undecoded, so that a damaged one does not end the stream.
    rows = data.cast_column(column, datasets.Image(decode=False))
    known = (data.info.splits or {}).get(chosen)
    class_names = tuple(label_type.names) if isinstance(label_type, datasets.ClassLabel) else None

    def read() -> Iterator[NamedImage]:
        for index, row in enumerate(_rows(rows, name)):
            image, target = row[column], row.get(label_column)
            item = _hugging_face_item(image, image_type, f"{name}/{chosen}/{index}", how.bit_depth)
            yield with_target(item, target)

    number = (known.num_examples if known else 0) or None
    return ImageSource(f"Hugging Face {name}/{chosen}", number, class_names, None, read)


def parquet(path: Path, how: Opening) -> ImageSource:
    """Open a Parquet file that holds the bytes of one image in each row; it is read into memory.

    The bytes are in the column `image` (as Hugging Face writes it: bytes, or a struct with `bytes`), `img`, `jpeg`,
    `png` or `bytes`; the label, if any, in `label` or, as in CIFAR-100, `fine_label`; the split in `split`.

    Raises:
        PrivlabError: if the file cannot be read, or has no such column or split; if a label is
            neither a class index nor a list of different ones.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise PrivlabError(f"'{path}' cannot be read as Parquet: {one_line(error)}.") from error
    column = next((name for name in IMAGE_COLUMNS if name in table.column_names), None)
    if column is None:
        raise PrivlabError(
            f"'{path}' has no column {', '.join(IMAGE_COLUMNS)} with images. Found {', '.join(table.column_names)}."
        )
    if how.split is not None:
        table = _rows_of(table, how.split, path)
    if pa.types.is_struct(table.schema.field(column).type):
        table, column = table.flatten(), f"{column}.bytes"
    if not pa.types.is_binary(kind := table.schema.field(column).type) and not pa.types.is_large_binary(kind):
        raise PrivlabError(f"The column {column} of '{path}' holds {kind}, not bytes of images.")
    data = table[column].combine_chunks()
    label_column = next((name for name in LABEL_COLUMNS if name in table.column_names), None)
    values = [None] * len(data) if label_column is None else table[label_column].to_pylist()
    labels = _parquet_labels(values, path, how.own_labels)
    rows = by_turns(labels) if how.spread else list(range(len(data)))
    prefix = f"{path.name}/{how.split}" if how.split else path.name
    names = tuple(f"{prefix}/{row}" for row in rows)

    def at(place: int) -> NamedImage:
        image = image_from_bytes(data[rows[place]].as_py() or b"", names[place], how.bit_depth)
        return with_target(image, labels[rows[place]])

    return ImageSource(f"{len(data)} images of {prefix}", len(data), None, names, at=at, container=path)


def _rows_of(table: Any, split: str, path: Path) -> Any:  # noqa: ANN401
    import pyarrow.compute as pc

    found = sorted(set(table["split"].to_pylist())) if "split" in table.column_names else []
    if split not in found:
        raise PrivlabError(f"'{path}' has no split '{split}'. Found {', '.join(map(str, found)) or 'no column split'}.")
    return table.filter(pc.field("split") == split)


def _columns(features: Mapping[str, Any], datasets: Any, name: str) -> tuple[str, str]:  # noqa: ANN401
    images = [key for key, kind in features.items() if isinstance(kind, datasets.Image)]
    if not images:
        raise PrivlabError(f"The dataset '{name}' has no image column. Found: {', '.join(features)}.")
    labels = [key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    return images[0], "label" if "label" in features or not labels else labels[0]


def _rows(data: Any, name: str) -> Iterator[Mapping[str, Any]]:  # noqa: ANN401
    done = 0
    try:
        for row in data:
            yield row
            done += 1
    except Exception as error:  # the network, mostly
        raise PrivlabError(f"The stream of '{name}' broke at image {done}: {one_line(error)}.") from error


def _hugging_face_item(value: Any, image_type: Any, name: str, bit_depth: int | None) -> NamedImage:  # noqa: ANN401
    if value is None:
        return NamedImage(name, "", None, problem="No image in this row.")
    if value["bytes"] is not None:
        return image_from_bytes(value["bytes"], name, bit_depth)
    try:
        image = image_type.decode_example(value)
    except Exception as error:  # one damaged image must not end the run
        return NamedImage(name, "", None, problem=damage_of(error))
    return image_from_pil(image, name, bit_depth=bit_depth)


@cache
def imagenet_classes() -> dict[str, int]:
    """Return ImageNet's class indices by WordNet id, cached: timm reads its files anew for each table."""
    from timm.data import ImageNetInfo  # this imports torch, which those who only read folders need not wait for

    return {wnid: i for i, wnid in enumerate(ImageNetInfo().label_names())}

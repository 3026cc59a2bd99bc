"""Images of torchvision's and Hugging Face's datasets, and of Parquet files."""

import importlib
import inspect
import json
import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privlab.base import PrivlabError, check_file, check_name, most_unpacked, one_line, unknown_name
from privlab.images.data import IMAGE_COLUMNS, LABEL_COLUMNS, Data, Spool
from privlab.images.sources import SPLITS
from privlab.images.targets import plain_name, target_of

if TYPE_CHECKING:
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile

_MOST_ROWS = 2**21
"""The most rows of a Parquet file, and the most values of a column in one of its row groups."""


def torchvision(name: str, split: str | None = None) -> Data:
    """Open one of torchvision's datasets by the name of its class; it is downloaded where it is not there."""
    from torchvision import datasets

    bases = {"VisionDataset", "DatasetFolder", "ImageFolder"}
    exported = {key: getattr(datasets, key) for key in datasets.__all__ if key not in bases}
    check_name("torchvision dataset", name, [key for key, value in exported.items() if inspect.isclass(value)])
    cls = exported[name]
    root = Path(os.environ.get("PRIVLAB_DATA") or "~/.cache/privlab").expanduser()
    parameters = _parameters(cls)
    arguments, used = _torchvision_arguments(name, parameters, split)
    if "root" in parameters:
        arguments["root"] = str(root)
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in arguments]
    if missing:
        raise PrivlabError(
            f"torchvision's {name} also needs {', '.join(missing)}; of such arguments, privlab gives split only."
        )
    try:
        try:
            dataset = cls(**arguments)
        except (RuntimeError, OSError):  # the data are not there
            if "download" not in parameters:
                raise
            dataset = cls(**arguments, download=True)
    except Exception as error:  # no network, no such split, a broken archive: each class raises its own errors
        raise PrivlabError(
            f"Cannot open torchvision's {name}, looked for in '{root}' (set PRIVLAB_DATA to change it): "
            f"{one_line(error)}."
        ) from error
    prefix = "/".join(filter(None, (name, used)))
    description = f"torchvision {prefix}: {len(dataset)} images"
    return Data(description, dataset, f"{prefix}/", range(len(dataset)), class_names_of(dataset))


def class_names_of(dataset: object) -> tuple[str, ...] | None:
    """Return the names of a dataset's classes; None where it states none."""
    classes = getattr(dataset, "classes", None)
    return tuple(map(str, classes)) if isinstance(classes, Sequence) else None


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


def hugging_face(name: str, split: str | None = None) -> Data:
    """Open a dataset of the Hugging Face hub, or of a folder, as a stream."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise PrivlabError(f"'hf:{name}' needs the extra: pip install 'privlab[datasets]'.") from None
    try:
        splits = datasets.load_dataset(name, streaming=True)
    except Exception as error:  # no network, no such dataset, a private one: each raises its own error
        raise PrivlabError(f"Cannot open the Hugging Face dataset '{name}': {one_line(error)}.") from error
    chosen = split or next((key for key in ("test", "validation", "val") if key in splits), next(iter(splits)))
    check_name(f"split of '{name}'", chosen, splits)
    data = splits[chosen]
    if data.features is None:  # datasets has no public way to infer them from the first rows
        data = data._resolve_features()
    images = [key for key, kind in data.features.items() if isinstance(kind, datasets.Image)]
    if not images:
        raise PrivlabError(f"The dataset '{name}' has no image column. Found: {', '.join(data.features)}.")
    labels = [key for key, kind in data.features.items() if isinstance(kind, datasets.ClassLabel)]
    label = "label" if "label" in data.features or not labels else labels[0]
    image_type, label_type = data.features[images[0]], data.features.get(label)
    # The images stay undecoded, so that a damaged one does not end the stream.
    rows = data.cast_column(images[0], datasets.Image(decode=False))

    def read() -> Iterator[tuple[Any, Any]]:
        done = 0
        try:
            for row in rows:
                yield _undecoded(row[images[0]], image_type), row.get(label)
                done += 1
        except Exception as error:  # the network, mostly
            raise PrivlabError(f"The stream of '{name}' broke at image {done}: {one_line(error)}.") from error

    known = (data.info.splits or {}).get(chosen)
    items = Spool(read, (known.num_examples if known else 0) or None)
    class_names = tuple(label_type.names) if isinstance(label_type, datasets.ClassLabel) else None
    return Data(f"Hugging Face {name}/{chosen}", items, f"{name}/{chosen}/", range(len(items)), class_names)


def _undecoded(value: Any, image_type: Any) -> Any:  # noqa: ANN401
    """Return the bytes of an image of Hugging Face; if it has a path instead, the opened image or the error."""
    if value is None or value["bytes"] is not None:
        return value and value["bytes"]
    try:
        image = image_type.decode_example(value)
        image.load()
        return image
    except Exception as error:  # one damaged image must not end the run
        return error


def parquet_folder(root: Path, files: Sequence[Path], split: str | None = None, *, own_labels: bool = True) -> Data:
    """Open a folder of Parquet files as Hugging Face has it: `data/train-00000-of-00002.parquet`, `test/0000.parquet`.

    Args:
        root: the folder.
        files: paths of the files below it.
        split: the split, which the name of a file or its folder begins with; None as `open_images` says it, or for all
            files where none is one of a split.
        own_labels: as `parquet` takes it.

    Raises:
        PrivlabError: if there is no such split, or as `parquet` says.
    """
    shards: dict[str, list[Path]] = {}
    for path in files:
        words = [re.split(r"[-_.]", part)[0] for part in path.relative_to(root).parts]
        shards.setdefault(next((word for word in words if word in SPLITS), ""), []).append(path)
    order = ("test", "validation", "val", "valid", *shards)
    chosen = split or next(name for name in order if name in shards)
    check_name(f"split of '{root}'", chosen, shards)
    return parquet(root, chosen or None, shards[chosen], own_labels=own_labels)


def parquet(
    path: Path, split: str | None = None, shards: Sequence[Path] | None = None, *, own_labels: bool = True
) -> Data:
    """Open a Parquet file, or several, that hold the bytes of one image in each row; they are read into memory.

    The bytes are in the column `image` (as Hugging Face writes it: bytes, or a struct with `bytes`) or another of
    `IMAGE_COLUMNS`; the label, if any, in `label` or another of `LABEL_COLUMNS`; the split in `split`.

    Args:
        path: path of the file, or the folder of several.
        split: the rows that are used; None for all.
        shards: paths of the files of this split with the same columns; None where `path` is the only one.
        own_labels: whether the file's labels are used; if not, it does not matter what they are.

    Raises:
        PrivlabError: if the file cannot be read, or has no such column or split; if a label is none.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: list[str] = []
    try:
        tables: list[Table] = []
        for file in [path] if shards is None else shards:
            size = check_file(file, "Parquet file")
            opened = pq.ParquetFile(file, memory_map=True)
            found = opened.schema_arrow.names
            wanted = [name for name in found if name in (*IMAGE_COLUMNS, *LABEL_COLUMNS, "split")]
            tables.append(_rows(opened, wanted, size))
        table = pa.concat_tables(tables)
    except (OSError, pa.ArrowException) as error:
        raise PrivlabError(f"'{path}' cannot be read as Parquet: {one_line(error)}.") from error
    column = next((name for name in IMAGE_COLUMNS if name in found), None)
    if column is None:
        raise PrivlabError(f"'{path}' has no column {', '.join(IMAGE_COLUMNS)} with images. Found {', '.join(found)}.")
    if split is not None and shards is None:
        splits = table["split"].to_pylist() if "split" in found else []
        if split not in splits:
            there = ", ".join(map(str, sorted(set(splits)))) or "no column split"
            raise PrivlabError(f"'{path}' has no split '{split}'. Found {there}.")
        table = table.filter(pa.array([own == split for own in splits]))
    if pa.types.is_struct(table.schema.field(column).type):
        table, column = table.flatten(), f"{column}.bytes"
    if not pa.types.is_binary(kind := table.schema.field(column).type) and not pa.types.is_large_binary(kind):
        raise PrivlabError(f"The column {column} of '{path}' holds {kind}, not bytes of images.")
    images = table[column]
    label_column = next((name for name in LABEL_COLUMNS if name in found), None)
    values = [None] * len(images) if label_column is None else table[label_column].to_pylist()
    targets = [target_of(value) for value in values]
    for row, (value, target) in enumerate(zip(values, targets, strict=True)) if own_labels else ():
        if target is None and value is not None:
            raise PrivlabError(
                f"'{path}', row {row}: a label must be a class index, an integer from 0 on, a list of different ones, "
                f"or empty. Found {reprlib.repr(value)}. To use other labels, give --labels predicted or a CSV file."
            )
    prefix = f"{path.name}/{split}/" if split else f"{path.name}/"
    description = f"{len(images)} images of {prefix[:-1]}"
    items = [(content or b"", target) for content, target in zip(images.to_pylist(), targets, strict=True)]
    class_names = None
    with suppress(KeyError, TypeError, ValueError):  # as Hugging Face writes them, where they are
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        class_names = tuple(map(str, features[label_column]["names"]))
    return Data(description, items, prefix, range(len(items)), class_names, container=path, turns=targets)


def _rows(file: "ParquetFile", columns: Sequence[str], size: int) -> "Table":
    """Return these columns of a Parquet file, of a bounded number of rows and bytes.

    A value or a row that is there many times takes a few bytes of the file, so that batches of few rows are read until
    they hold too much.

    Args:
        file: the opened file.
        columns: the columns that are read.
        size: the size of the file in bytes.

    Raises:
        pyarrow.ArrowInvalid: if there are too many rows or bytes.
    """
    import pyarrow as pa

    stated, names = file.metadata, [name for name in columns if name not in IMAGE_COLUMNS]
    groups = [stated.row_group(i) for i in range(stated.num_row_groups)]
    values = 0
    if names:
        file.scan_contents(names)  # where it is damaged, this raises; what reads the counts would end the process
        leaves = [i for i in range(len(file.schema)) if file.schema.column(i).path.partition(".")[0] in names]
        values = max((group.column(i).num_values for group in groups for i in leaves), default=0)
    if max(stated.num_rows, values) > _MOST_ROWS:
        raise pa.ArrowInvalid(f"it states {max(stated.num_rows, values)} values; at most {_MOST_ROWS} are read")
    if sum(group.total_byte_size for group in groups) > most_unpacked(size):
        raise pa.ArrowInvalid(f"its {size} bytes would unpack to more than {most_unpacked(size)}")
    batches, held = [], 0
    largest = max((group.total_byte_size for group in groups), default=0)
    rows_at_once = min(max(1, 2**30 // max(1, largest)), 256)  # were each of them the largest value, they took 1 GiB
    for batch in file.iter_batches(rows_at_once, columns=[*columns]):
        held += batch.nbytes
        if held > most_unpacked(size):
            raise pa.ArrowInvalid(f"its {size} bytes stand for more than {most_unpacked(size)}")
        batches.append(batch)
    schema = pa.schema([field for field in file.schema_arrow if field.name in columns], file.schema_arrow.metadata)
    return pa.Table.from_batches(batches, schema)


@cache
def imagenet_classes() -> dict[str, int]:
    """Return ImageNet's class indices by WordNet id, and by the names of one class alone, as `plain_name` writes them.

    They are cached, since timm reads its files again for each table. torchvision's names come first: by them the crane
    that is a bird differs from the machine.
    """
    from timm.data import ImageNetInfo  # this imports torch, which those who only read folders need not wait for
    from torchvision.models import ViT_B_16_Weights

    facts = ImageNetInfo()
    indices = {wnid: i for i, wnid in enumerate(facts.label_names())}
    of_torchvision = list(enumerate(ViT_B_16_Weights.IMAGENET1K_V1.meta["categories"]))
    of_timm = [(i, name) for i in range(len(indices)) for name in facts.index_to_description(i).split(",")]
    for named in (of_torchvision, of_timm):
        classes: dict[str, set[int]] = {}
        for i, name in named:
            classes.setdefault(plain_name(name), set()).add(i)
        indices = {name: min(found) for name, found in classes.items() if len(found) == 1} | indices
    return dict(sorted(indices.items(), key=lambda item: not re.fullmatch(r"n\d{8}", item[0])))

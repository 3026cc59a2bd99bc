"""Labels from a CSV file, in place of those that a source has."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from privlab.base import PrivlabError
from privlab.images.decode import NamedImage, one_line
from privlab.images.sources import ImageSource

__all__ = ["label_of", "read_labels", "relabel"]


def relabel(source: ImageSource, path: Path) -> ImageSource:
    """Return the source with the labels of the file; an image that the file lacks has no label."""
    table = read_labels(path)
    if source.names is not None:
        _check_labels(table, source.names, path)

    def with_label(image: NamedImage) -> NamedImage:
        label = table.get(image.name, table.get(PurePosixPath(image.name).name))
        return replace(image, label=label, label_origin="none" if label is None else "file")

    return replace(source.transform(with_label), class_names=None)


def _check_labels(table: Mapping[str, int], names: Sequence[str], path: Path) -> None:
    bases = Counter(PurePosixPath(name).name for name in names)
    known = set(names)
    for file in table:
        if file not in known and bases[file] > 1:
            raise PrivlabError(f"{path}: '{file}' could be {bases[file]} images; give the path, as in '{names[0]}'.")
    if not any(file in known or file in bases for file in table):
        raise PrivlabError(f"{path}: none of its {len(table)} files is an image of the source, as '{names[0]}' is.")


def read_labels(path: Path) -> dict[str, int]:
    """Return the label of each file that a CSV file names.

    Raises:
        PrivlabError: if the file cannot be read, or holds something else.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            column = _label_column(rows.fieldnames or [], path)
            table: dict[str, int] = {}
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                name = PurePosixPath(row["file"] or "").as_posix()
                if name in table:
                    raise PrivlabError(f"{where}: the file '{name}' is listed twice; give it one label.")
                table[name] = label_of(row[column], column, where)
            return table
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PrivlabError(f"Cannot read the labels '{path}': {one_line(error)}.") from None


def _label_column(header: Sequence[str], path: Path) -> str:
    column = next((key for key in ("class_index", "label") if key in header), None)
    if column is None or "file" not in header:
        found = ", ".join(header) or "none"
        raise PrivlabError(f"{path}, line 1: expected the columns file and class_index (or label). Found: {found}.")
    return column


def label_of(text: str | None, column: str, where: str) -> int:
    """Return the class index that a cell of a CSV file holds.

    Args:
        text: the cell; None where the line is too short.
        column: the name of its column, for the error.
        where: the file and the line of the cell, for the error.

    Raises:
        PrivlabError: if the cell holds no integer in [0, 2^63 − 1].
    """
    try:
        value = int(text or "")
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise PrivlabError(f"{where}: {column} must be an integer from 0 on, of 64 bits. Found {text!r}.")
    return value

"""CSV files that name photographs one by one: their labels, and manifests with hash, label and membership of each."""

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from privlab.base import PrivlabError, check_range, one_line, read_bytes, sha256_of, unknown_name
from privlab.images.data import Data
from privlab.images.decode import LabelOrigin, NamedImage, Target, as_text
from privlab.images.targets import class_indices, target_of

MEMBERS = ("seen", "not seen", "unknown")
"""The values of the column `member`: whether the victim saw the photograph in training."""

_MOST_BYTES = 2**28
"""The most bytes of a manifest or a file of labels; those of ImageNet's training images have half as many."""
_COLUMNS = ("name", "sha256", "label", "label_origin", "member")
_ORIGINS: Mapping[str, LabelOrigin] = {"folder": "folder", "file": "file", "dataset": "dataset", "none": "none"}
_MOST_CHARACTERS = 60
_NAME = re.compile(r"[^\W\d][^;|]*")
"""What is read as the name of a class, and not as labels."""


@dataclass(frozen=True)
class Entry:
    """One line of a manifest; where it says nothing of the label, `origin` is None, and the source's label stays."""

    name: str
    sha256: str
    target: Target
    origin: LabelOrigin | None
    member: str | None
    line: int


def to_csv(images: Iterable[NamedImage]) -> str:
    """Return the manifest of images: one line for each hash, with the name and the label of its first image.

    Images without a hash are left out. `label_origin` none says that there is no label: the victim's prediction stood
    in.
    """
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    write(_COLUMNS)
    once: dict[str, NamedImage] = {}
    for image in images:
        once.setdefault(image.sha256, image)
    once.pop("", None)
    for p in once.values():
        write([as_text(p.name), p.sha256, _label_cell(p), p.label_origin, p.member or "unknown"])
    return text.getvalue()


def _label_cell(image: NamedImage) -> str:
    if image.targets is None:
        return "" if image.label is None else str(image.label)
    if image.is_soft:
        return "|".join(map(str, image.targets))
    return ";".join(map(str, image.targets)) + ";"


def _target_of(cell: str, column: str, where: str) -> Target:
    """Return the target that a cell states."""
    if ";" in cell:
        return tuple(sorted(_label_of(index, column, where) for index in cell.split(";") if index.strip()))
    if "|" not in cell:
        return _label_of(cell, column, where)
    target = None
    with suppress(ValueError):
        target = target_of(np.array(cell.split("|"), float))
    if target is None:
        raise PrivlabError(f"{where}: {column} must be shares of the classes, which add up to 1. Found {cell!r}.")
    return target


@contextmanager
def _table(path: Path, what: str) -> Iterator["csv.DictReader[str]"]:
    """Open a CSV file in UTF-8."""
    try:
        text = read_bytes(path, what, _MOST_BYTES).decode("utf-8-sig")
        yield csv.DictReader(io.StringIO(text, newline=""), strict=True)
    except (UnicodeDecodeError, csv.Error) as error:
        raise PrivlabError(f"Cannot read the {what} '{path}': {one_line(error)}.") from None


def read_manifest(path: Path) -> tuple[Entry, ...]:
    """Return the lines of a manifest, a CSV file in UTF-8.

    The columns name and sha256 (64 hex digits) are needed. Optional are label (a class index; for a multi-label target
    the index of each class followed by a semicolon, as in 0;3;; for a soft label the share of each class, as in
    0.25|0.75; empty for the source's own label), label_origin (folder, file, dataset, or none for an image without a
    label; file where it is left out) and member (seen, not seen or unknown; unknown where it is left out).

    Raises:
        PrivlabError: if the file cannot be read or is empty; if a column is missing, unknown or there twice; if a value
            is none of these; if a name or a hash is there twice. The message names the line.
    """
    entries: list[Entry] = []
    first: dict[tuple[str, str], int] = {}
    with _table(path, "manifest") as rows:
        _check_header(rows.fieldnames or (), path)
        for row in rows:
            entry = _entry(row, f"{path}, line {rows.line_num}", rows.line_num)
            for kind, value in (("name", entry.name), ("SHA-256", entry.sha256)):
                if (at := first.setdefault((kind, value), entry.line)) != entry.line:
                    raise PrivlabError(
                        f"{path}, line {entry.line}: the {kind} '{_short(value)}' stands in line {at} already. "
                        "Name each photograph once."
                    )
            entries.append(entry)
    if not entries:
        raise PrivlabError(f"The manifest '{path}' names no photograph. Give one or more, each in a separate line.")
    return tuple(entries)


def _check_header(header: Sequence[str], path: Path) -> None:
    where = f"{path}, line 1"
    for name in header:
        if name not in _COLUMNS:
            raise PrivlabError(f"{where}: {unknown_name('column of a manifest', _short(name), _COLUMNS)}")
        if header.count(name) > 1:
            raise PrivlabError(f"{where}: the column {name} is there twice. Keep one of them.")
    if lacking := [name for name in _COLUMNS[:2] if name not in header]:
        found = ", ".join(header) or "none"
        raise PrivlabError(f"{where}: a manifest has the columns name and sha256. Found: {found}; add {lacking[0]}.")


def _entry(row: Mapping[str | None, str | None], where: str, line: int) -> Entry:
    if None in row or None in row.values():
        raise PrivlabError(f"{where}: the line has more or fewer cells than there are columns. Give one for each.")
    cells = {str(key): (value or "").strip() for key, value in row.items()}
    if not (name := row["name"]):
        raise PrivlabError(f"{where}: the name is empty. Give the image's name in its source.")
    if not re.fullmatch("[0-9a-f]{64}", sha256 := cells["sha256"].lower()):
        raise PrivlabError(f"{where}: sha256 must have 64 hex digits. Found '{_short(cells['sha256'])}'.")
    if (member := cells.get("member") or "unknown") not in MEMBERS:
        raise PrivlabError(f"{where}: member must be seen, not seen or unknown. Found '{_short(member)}'.")
    cell = cells.get("label", "")
    target = _target_of(cell, "label", where) if cell else None
    said = cells.get("label_origin") or ("file" if cell else "")
    origin = _ORIGINS.get(said)
    if said and origin is None:
        raise PrivlabError(f"{where}: label_origin must be {', '.join(_ORIGINS)}. Found '{_short(said)}'.")
    if origin is not None and (origin == "none") != (not cell):
        stated = f"label {cell}" if cell else "no label"
        right = "Give label_origin file, or leave one of them out."
        raise PrivlabError(f"{where}: label_origin '{origin}' does not go with {stated}. {right}")
    return Entry(name, sha256, target, origin, None if member == "unknown" else member, line)


def _short(text: str) -> str:
    """Return text that fits into one line of an error."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}…"


def choose_images(data: Data, path: Path, *, check: bool = True) -> Data:
    """Return exactly the images that a manifest names, in its order, with its labels and memberships.

    Args:
        data: the images to choose from; a stream is read until the last of them has come.
        path: path of the manifest, as `read_manifest` reads it.
        check: whether the hash of each chosen image is compared with the manifest's. Whole files are hashed without
            being decoded, other images are read once more for it.

    Raises:
        PrivlabError: as `read_manifest` does; if the data lack an image of the manifest, or its hash differs.
    """
    entries = read_manifest(path)
    by_name = {entry.name: entry for entry in entries}
    position_of = _positions(data, by_name.keys())
    for entry in entries:
        if entry.name not in position_of:
            such = f"; its names are such as '{_short(as_text(data.names[0]))}'" if data.names else ""
            raise PrivlabError(
                f"{path}, line {entry.line}: no image '{_short(entry.name)}' in {data.description}{such}. "
                "Give the --images that the manifest was made for."
            )
    digest = sha256_of(path)
    described = f"{data.description}; {len(entries)} of them chosen by {path.name} (SHA-256 {digest[:16]})"
    chosen = data.choose([position_of[entry.name] for entry in entries])

    def change(image: NamedImage) -> NamedImage:
        entry = by_name[as_text(image.name)]
        image = replace(image, member=entry.member)
        return image if entry.origin is None else image.labelled(entry.target, entry.origin)

    chosen = chosen.transform(change)
    for entry, image in zip(entries, chosen.without_pixels() if check else (), strict=check):
        if image.sha256 != entry.sha256:
            problem = f"is {image.sha256[:12]}…" if image.sha256 else "cannot be had, for it cannot be read"
            raise PrivlabError(
                f"{path}, line {entry.line}: the SHA-256 of '{_short(entry.name)}' {problem}. "
                f"The manifest says {entry.sha256[:12]}…: it names another image, or this one has changed."
            )
    stated = [(f"{path}, line {entry.line}", entry.target) for entry in entries]
    return replace(chosen, description=described, stated=stated)


def _positions(data: Data, wanted: Collection[str]) -> dict[str, int]:
    """Return the positions of the images of these names; a stream is read until it has had them all."""
    found: dict[str, int] = {}
    for position, name in enumerate(data.names or (image.name for image in data)):
        if (text := as_text(name)) in wanted:
            found[text] = position
        if len(found) == len(wanted):
            break
    return found


def check_choice(limit: int | None, every: int | None, offset: int | None, manifest: str | Path | None) -> None:
    """Check the options that choose images, before anything is opened.

    Args:
        limit: the number of images to use, at least 1; None for all.
        every: the step between the images that are used, at least 1; None for 1.
        offset: the position of the first image, from 0 on; None for 0.
        manifest: the CSV file that names the images; with it, the three numbers must be None.

    Raises:
        PrivlabError: if a number is out of range, or a manifest and numbers both choose.
    """
    for name, value, least in (("limit", limit, 1), ("every", every, 1), ("offset", offset, 0)):
        if value is None:
            continue
        if manifest is not None:
            raise PrivlabError(f"A manifest names its photographs one by one. Found {name} {value} with it.")
        right = "a positive integer" if least else "an integer from 0 on"
        check_range(type(value) is int and value >= least, name, right, value)


def relabel(data: Data, path: Path, class_to_index: Mapping[str, int] | None = None) -> Data:
    """Return the data with the labels of the file; an image that the file lacks has no label.

    Args:
        data: the images.
        path: path of the file, as `read_labels` takes it. The name of a volume labels all of its slices.
        class_to_index: as `open_images` takes it, for names of classes; those of the data come first.
    """
    names = {name: index for index, name in enumerate(data.class_names or ())}
    table, rule = read_labels(path, names, class_to_index or {})
    if data.names is not None:
        _check_names(table, data.names, path)

    def with_label(image: NamedImage) -> NamedImage:
        return image.labelled(next((table[name] for name in _also_named(image.name) if name in table), None), "file")

    relabelled = replace(data.transform(with_label), class_names=None, stated=())
    return replace(relabelled, description=f"{data.description}{rule}")


def _also_named(name: str) -> tuple[str, ...]:
    """Return the names by which a file of labels may mean an image: a slice is also meant by its volume."""
    whole = re.sub(r"#\d+$", "", name)
    return name, PurePosixPath(name).name, whole, PurePosixPath(whole).name


def _check_names(table: Mapping[str, Target], names: Sequence[str], path: Path) -> None:
    known = {*names, *(_also_named(name)[2] for name in names)}
    bases = Counter(PurePosixPath(name).name for name in known)
    for file in table:
        if file not in known and bases[file] > 1:
            raise PrivlabError(f"{path}: '{file}' could be {bases[file]} images; give the path, as in '{names[0]}'.")
    if not any(file in known or file in bases for file in table):
        raise PrivlabError(f"{path}: none of its {len(table)} files is an image of the source, as '{names[0]}' is.")


def read_labels(path: Path, *class_to_index: Mapping[str, int]) -> tuple[dict[str, Target], str]:
    """Return the label of each file that a CSV file names, and how names of classes became labels.

    Labels are written as in a manifest, or all of them are names of classes.

    Args:
        path: path of the file.
        class_to_index: the labels of the names that are known; the first of them is used that knows all names. If none
            does, labels are the positions in the sorted names.

    Raises:
        PrivlabError: if the file cannot be read, or holds something else.
    """
    cells: dict[str, tuple[str, str]] = {}
    with _table(path, "labels") as rows:
        header = rows.fieldnames or []
        column = next((key for key in ("class_index", "label") if key in header), None)
        if column is None or "file" not in header:
            found = ", ".join(header) or "none"
            raise PrivlabError(f"{path}, line 1: expected the columns file and class_index (or label). Found: {found}.")
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            name = PurePosixPath(row["file"] or "").as_posix()
            if name in cells:
                raise PrivlabError(f"{where}: the file '{name}' is listed twice; give it one label.")
            cells[name] = row[column] or "", where
    texts = sorted({cell.strip() for cell, _ in cells.values()})
    if column == "label" and texts and all(_NAME.fullmatch(text) for text in texts):
        indices, _, rule = class_indices(texts, *class_to_index)
        return {name: indices[cell.strip()] for name, (cell, _) in cells.items()}, f", {rule}"
    return {name: _target_of(cell, column, where) for name, (cell, where) in cells.items()}, ""


def _label_of(text: str, column: str, where: str) -> int:
    """Return the class index, in [0, 2^63 − 1], that a cell of a CSV file holds, as 2 or 2.0."""
    # Programs that know no empty integers write 2.0 for 2.
    digits = re.fullmatch(r"\s*([0-9]+)(\.0*)?\s*", text)
    value = -1 if digits is None else int(digits[1])
    if not 0 <= value < 2**63:
        raise PrivlabError(f"{where}: {column} must be an integer from 0 on, of 64 bits. Found {text!r}.")
    return value

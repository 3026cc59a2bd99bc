"""Manifests: CSV files that name photographs one by one, with the hash, the label and the membership of each."""

import csv
import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from privlab.base import PrivlabError, unknown_name
from privlab.images.decode import LabelOrigin, NamedImage, as_text, one_line
from privlab.images.label_csv import label_of
from privlab.images.sources import ImageSource

__all__ = ["MEMBERS", "Entry", "check_labels", "choose_images", "read_manifest", "to_csv"]

MEMBERS = ("seen", "not seen", "unknown")
"""The values of the column `member`: whether the victim saw the photograph in training."""

_COLUMNS = ("name", "sha256", "label", "label_origin", "member")
_NEEDED_COLUMNS = ("name", "sha256")
_ORIGINS: tuple[LabelOrigin, ...] = tuple(
    origin for origin in get_args(LabelOrigin) if origin not in ("predicted", "released")
)
_MOST_CHARACTERS = 60


@dataclass(frozen=True)
class Entry:
    """One line of a manifest; where it says nothing of the label, `origin` is None, and the source's label stays."""

    name: str
    sha256: str
    label: int | None
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
        label = "" if p.label is None else p.label
        write([as_text(p.name), p.sha256, label, p.label_origin, p.member or "unknown"])
    return text.getvalue()


def read_manifest(path: Path) -> tuple[Entry, ...]:
    """Return the lines of a manifest, a CSV file in UTF-8.

    The columns name and sha256 (64 hex digits) are needed. Optional are label (a class index, empty for the source's
    own), label_origin (folder, file, dataset, or none for an image without a label; file where it is left out) and
    member (seen, not seen or unknown; unknown where it is left out).

    Raises:
        PrivlabError: if the file cannot be read or is empty; if a column is missing, unknown or there twice; if a value
            is none of these; if a name or a hash is there twice. The message names the line.
    """
    entries: list[Entry] = []
    first: dict[tuple[str, str], int] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, strict=True)
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
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PrivlabError(f"Cannot read the manifest '{path}': {one_line(error)}.") from None
    if not entries:
        raise PrivlabError(f"The manifest '{path}' names no photograph. Give one or more, each in a line of its own.")
    return tuple(entries)


def check_labels(path: Path, classes: int) -> None:
    """Check that the labels of a manifest are those of a victim with so many classes.

    Raises:
        PrivlabError: for a label that is out of range, and as `read_manifest` does.
    """
    for entry in read_manifest(path):
        if entry.label is not None and entry.label >= classes:
            raise PrivlabError(
                f"{path}, line {entry.line}: label must be below {classes}, the number of the victim's classes. "
                f"Found {entry.label}."
            )


def _check_header(header: Sequence[str], path: Path) -> None:
    where = f"{path}, line 1"
    for name in header:
        if name not in _COLUMNS:
            raise PrivlabError(f"{where}: {unknown_name('column of a manifest', _short(name), _COLUMNS)}")
        if header.count(name) > 1:
            raise PrivlabError(f"{where}: the column {name} is there twice. Keep one of them.")
    if lacking := [name for name in _NEEDED_COLUMNS if name not in header]:
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
    label = label_of(cells["label"], "label", where) if cells.get("label") else None
    said = cells.get("label_origin") or ("file" if label is not None else "")
    origins: dict[str, LabelOrigin] = {name: name for name in _ORIGINS}
    origin = origins.get(said)
    if said and origin is None:
        raise PrivlabError(f"{where}: label_origin must be {', '.join(_ORIGINS)}. Found '{_short(said)}'.")
    if origin is not None and (origin == "none") != (label is None):
        stated = "no label" if label is None else f"label {label}"
        right = "Give label_origin file, or leave one of them out."
        raise PrivlabError(f"{where}: label_origin '{origin}' does not go with {stated}. {right}")
    return Entry(name, sha256, label, origin, None if member == "unknown" else member, line)


def _short(text: str) -> str:
    """Return text that fits into one line of an error."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}…"


def choose_images(source: ImageSource, path: Path, *, check: bool = True) -> ImageSource:
    """Return exactly the images of a source that a manifest names, in its order, with its labels and memberships.

    Args:
        source: the images to choose from; a stream is read until the last of them has come.
        path: path of the manifest, as `read_manifest` reads it.
        check: whether the hash of each chosen image is compared with the manifest's. Whole files are hashed without
            being decoded, other images are read once more for it.

    Raises:
        PrivlabError: as `read_manifest` does; if the source lacks an image of the manifest, or its hash differs.
    """
    entries = read_manifest(path)
    by_name = {entry.name: entry for entry in entries}
    taken = (
        _choose_from_stream(source, entries, path) if source.names is None else _choose_by_name(source, entries, path)
    )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()

    def with_entry(image: NamedImage) -> NamedImage:
        entry = by_name[as_text(image.name)]
        label, origin = (image.label, image.label_origin) if entry.origin is None else (entry.label, entry.origin)
        return replace(image, label=label, label_origin=origin, member=entry.member)

    told = f"{source.description}; {len(entries)} of them chosen by {path.name} (SHA-256 {digest[:16]})"
    found = replace(taken.transform(with_entry), description=told)
    for entry, image in zip(entries, found.without_pixels() if check else (), strict=check):
        if image.sha256 != entry.sha256:
            problem = f"is {image.sha256[:12]}…" if image.sha256 else "cannot be had, for it cannot be read"
            raise PrivlabError(
                f"{path}, line {entry.line}: the SHA-256 of '{_short(entry.name)}' {problem}. "
                f"The manifest says {entry.sha256[:12]}…: it names another image, or this one has changed."
            )
    return found


def _choose_by_name(source: ImageSource, entries: Sequence[Entry], path: Path) -> ImageSource:
    """Return the images of a source that knows their names."""
    names = source.names or ()
    place_of = {as_text(name): place for place, name in enumerate(names)}
    for entry in entries:
        if entry.name not in place_of:
            such = f"; its names are such as '{_short(as_text(names[0]))}'" if names else ""
            raise _absence(source, entry, path, such)
    return source.choose([place_of[entry.name] for entry in entries])


def _choose_from_stream(source: ImageSource, entries: Sequence[Entry], path: Path) -> ImageSource:
    """Return the images of a stream: those that come before their turn wait for it."""

    def read() -> Iterator[NamedImage]:
        wanted, waiting, stream = {entry.name for entry in entries}, dict[str, NamedImage](), iter(source)
        for entry in entries:
            while entry.name not in waiting:
                if (image := next(stream, None)) is None:
                    raise _absence(source, entry, path, "")
                if as_text(image.name) in wanted:
                    waiting[as_text(image.name)] = image
            yield waiting.pop(entry.name)

    return replace(source, count=len(entries), read=read, at=None, file=None, about=None)


def _absence(source: ImageSource, entry: Entry, path: Path, names: str) -> PrivlabError:
    return PrivlabError(
        f"{path}, line {entry.line}: no image '{_short(entry.name)}' in {source.description}{names}. "
        "Give the --images that the manifest was made for."
    )

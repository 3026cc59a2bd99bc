"""One reader of all files: regular files of a bounded size, and JSON, TOML and archives of a bounded depth and length.

Whoever made a file may have made it to do harm. A pipe would be waited for, a device has no end, a text of brackets
overflows the parser, and an archive of a few bytes unpacks to any size.
"""

import json
import os
import stat
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from privlab.base.errors import PrivlabError

TEXT_BYTES = 2**26
"""The most bytes of a text that is read: experiments, cards, manifests, run.json."""

_DEEPEST = 100
"""The most lists and tables inside each other; the files of privlab have eight."""

_UNPACKED_BYTES = 2**30
"""Bytes to which any archive may unpack; beyond them, at most `_RATIO` times its own size."""
_RATIO = 16


class Unreadable(PrivlabError):
    """A file that cannot be read; `reason` says why, without its path."""

    reason = ""


def open_file(path: Path, what: str, most: int | None = None) -> BufferedReader:
    """Open a regular file to read its bytes.

    Args:
        path: path of the file.
        what: the word for it in the error, such as "experiment".
        most: the most bytes that it may have; None for any number, where only parts of it are read.

    Raises:
        PrivlabError: if it cannot be read, is a pipe, a device or a folder, or is too large.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)  # without O_NONBLOCK, a pipe would be waited for here
    except (OSError, ValueError) as error:  # ValueError: the path holds a NUL
        raise _unreadable(path, what, error) from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (most is None or status.st_size <= most):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise _unreadable(path, what, "it is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise _unreadable(path, what, "it is not a regular file")
    found, allowed = (size / 2**20 for size in (status.st_size, most or 0))
    raise _unreadable(path, what, f"it has {found:.0f} MiB, and at most {allowed:.0f} MiB are read")


def check_file(path: Path, what: str) -> int:
    """Return the size in bytes of a regular file, for a library that opens it by its path; raises as `open_file`."""
    with open_file(path, what) as file:
        return os.fstat(file.fileno()).st_size


def read_bytes(path: Path, what: str, most: int = TEXT_BYTES) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: path of the file.
        what: the word for it in the error.
        most: the most bytes that it may have.

    Raises:
        PrivlabError: if it cannot be read, is not a regular file, or is too large.
    """
    with open_file(path, what, most) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            data = file.read(size + 1)  # `most + 1` would reserve as much memory, whatever the file has
        except OSError as error:
            raise _unreadable(path, what, error) from None
    if len(data) > size:
        raise _unreadable(path, what, "it grows while it is read")
    return data


def read_text(path: Path, what: str) -> str:
    """Return the text of a file in UTF-8, whatever its line ends are, without the mark that Windows writes first.

    Args:
        path: path of the file.
        what: the word for it in the error, such as "experiment".

    Raises:
        PrivlabError: if there is no such file, or it cannot be read.
    """
    try:
        text = read_bytes(path, what).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(path, what, error) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _unreadable(path: Path, what: str, error: object) -> Unreadable:
    reason = str(getattr(error, "strerror", None) or error)
    found = Unreadable(f"Cannot read the {what} '{path}': {reason}.")
    found.reason = reason
    return found


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the contents of a text in TOML.

    Raises:
        PrivlabError: if it is none, or is nested too deeply; the message begins with `where`.
    """
    return _parsed(tomllib.loads, text, where, "TOML")


def parse_json(text: str | bytes, where: str) -> Any:  # noqa: ANN401
    """Return the contents of a text in JSON.

    Raises:
        PrivlabError: if it is none, or is nested too deeply; the message begins with `where`.
    """
    return _parsed(json.loads, text, where, "JSON")


def _parsed(parse: Callable[[Any], Any], text: str | bytes, where: str, kind: str) -> Any:  # noqa: ANN401
    try:
        value = parse(text)
    except RecursionError:
        raise PrivlabError(f"{where} is no {kind} that can be read: it is nested too deeply.") from None
    except (ValueError, IndexError) as error:  # errors of both parsers, of the encoding, and numbers of 5,000 digits
        raise PrivlabError(f"{where} is no {kind}: {error}.") from None
    if _is_deep(value):
        raise PrivlabError(f"{where} is nested too deeply: at most {_DEEPEST} lists and tables inside each other.")
    return value


def _is_deep(value: object) -> bool:
    """Return whether lists and tables are inside each other more often than privlab's own functions can follow."""
    layer = [value]
    for _ in range(_DEEPEST):
        inner: list[object] = []
        for each in layer:
            if isinstance(each, Mapping):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        layer = inner
    return bool(layer)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the object in a file of JSON.

    Args:
        path: path of the file.
        what: the word for it in the error.

    Raises:
        PrivlabError: if it cannot be read, or holds no JSON, or something else than an object.
    """
    return parse_object(read_bytes(path, what), f"'{path}'")


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the object that a text in JSON holds.

    Raises:
        PrivlabError: if it is none, or is nested too deeply; the message begins with `where`.
    """
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise PrivlabError(f"{where} must hold an object in JSON. Found {type(value).__name__}.")
    return value


def most_unpacked(size: int) -> int:
    """Return the most bytes that a compressed file of a size in bytes may unpack to."""
    return max(_UNPACKED_BYTES, _RATIO * size)


def check_archive(path: Path, what: str) -> None:
    """Check that a file, if it is a zip archive as torch and NumPy write it, unpacks to a bounded size.

    Args:
        path: path of the file, which need not be an archive.
        what: the word for it in the error.

    Raises:
        PrivlabError: if it is not a regular file, is damaged, or unpacks to too many bytes.
    """
    with open_file(path, what) as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(2) != b"PK":
            return
        try:
            with zipfile.ZipFile(file) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
            raise PrivlabError(f"'{path}' cannot be read as {what}; it may be truncated ({error}).") from None
    if unpacked > most_unpacked(size):
        raise _unreadable(path, what, f"its {size} bytes would unpack to {unpacked / 2**20:.0f} MiB")


def refuse_links(folder: Path) -> None:
    """Refuse a folder that holds links, pipes or devices, also in folders inside it: they lead out of the folder.

    Raises:
        PrivlabError: for the first of them, and if the folder cannot be read.
    """
    pending = [os.fspath(folder)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif entry.is_symlink() or not entry.is_file():
                        kind = "link" if entry.is_symlink() else "pipe or device"
                        raise PrivlabError(f"'{folder}' holds a {kind}, '{entry.path}'. Remove it: none is followed.")
        except (FileNotFoundError, NotADirectoryError):  # another process has removed it, or it is not there
            continue
        except OSError as error:
            raise _unreadable(folder, "folder", error) from None

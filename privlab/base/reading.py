"""One reader of all files: regular files of a bounded size, and JSON, TOML and archives of a bounded depth and length.

Whoever made a file may have made it to do harm. A pipe would be waited for, a device has no end, a text of brackets
overflows the parser, and an archive of a few bytes unpacks to any size.
"""

import faulthandler
import gzip
import json
import os
import pickle
import re
import select
import signal
import stat
import sys
import tomllib
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from privlab.base.errors import PrivlabError, one_line

TEXT_BYTES = 2**26
"""The most bytes of a text that is read: experiments, cards, manifests, run.json."""

_DEEPEST = 100
"""The most lists and tables inside each other; the files of privlab have eight."""

_TOML_BYTES = 2**21
"""The most bytes of a text in TOML; its parser takes up to six seconds for a million of them."""
_TOML_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_TOML_LONG_KEY = re.compile(rf"(?<![\w-]){_TOML_PART}(?:[ \t]*+\.[ \t]*+{_TOML_PART}){{{_DEEPEST}}}")
"""A dotted name of too many parts, for which the parser takes time by the cube of their number."""

_TRIAL_SECONDS = 20
"""Seconds of a core that a trial may take, and one more for each `_TRIAL_SPEED` bytes of the file."""
_TRIAL_SPEED = 2**24
_TRIAL_BYTES = 2**31
"""Bytes of memory that a trial may take, and `_TRIAL_RATIO` times the size of the file."""
_TRIAL_RATIO = 4

_UNPACKED_BYTES = 2**30
"""Bytes to which any archive may unpack; beyond them, at most `_RATIO` times its own size."""
_RATIO = 16
_ANSWER_BYTES = 2**14
_GZIP = b"\x1f\x8b"


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


def damaged(what: str, error: Exception) -> PrivlabError:
    """Return the error of a file that a library cannot read; `what` says which, and as what."""
    return PrivlabError(f"{what}; it may be truncated, empty or of another format ({one_line(error)}).")


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the contents of a text in TOML.

    Raises:
        PrivlabError: if it is none, is nested too deeply or too long; the message begins with `where`.
    """
    if len(text) > _TOML_BYTES:
        raise PrivlabError(f"{where} has {len(text)} characters. At most {_TOML_BYTES} of TOML are read.")
    if long := _TOML_LONG_KEY.search(text):
        name = f"{long[0][:20]}…"
        raise PrivlabError(f"{where} is nested too deeply: '{name}' has more than {_DEEPEST} parts.")
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
            if isinstance(each, dict):
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
    """Check that a file unpacks to a bounded size, if it is a zip archive as torch and NumPy write it, or of gzip.

    Args:
        path: path of the file, which need not be an archive.
        what: the word for it in the error.

    Raises:
        PrivlabError: if it is not a regular file, is damaged, or unpacks to too many bytes.
    """
    with open_file(path, what) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(2)
        file.seek(0)
        try:
            unpacked = _zip_bytes(file) if start == b"PK" else _gzip_bytes(file, size) if start == _GZIP else 0
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, OSError) as error:
            raise damaged(f"'{path}' cannot be read as {what}", error) from None
    if unpacked > most_unpacked(size):
        raise _unreadable(path, what, f"its {size} bytes would unpack to {unpacked / 2**20:.0f} MiB or more")


def _zip_bytes(file: BufferedReader) -> int:
    with zipfile.ZipFile(file) as archive:
        return sum(member.file_size for member in archive.infolist())


def _gzip_bytes(file: BufferedReader, size: int) -> int:
    """Return how many bytes a file unpacks to, or the first number that is too large; its header does not state it."""
    found = 0
    with gzip.GzipFile(fileobj=file) as packed:
        while found <= most_unpacked(size) and (part := packed.read(2**20)):
            found += len(part)
    return found


def try_reading(read: Callable[[], object], path: Path, what: str) -> None:
    """Read a file in a copy of this process, with limits on memory and time, before a library reads it in this one.

    It is for libraries whose work has no ceiling that the file's headers state. What the copy reads is lost. Systems
    other than Linux have no such copies or limits, and nothing is done there.

    Args:
        read: what reads the file, in the same way in which it is read afterwards.
        path: path of the file.
        what: the word for it in the error.

    Raises:
        pickle.UnpicklingError: if `read` raises one, with its message.
        PrivlabError: if it raises another error, takes too much memory or time, or ends the process.
    """
    if sys.platform != "linux":
        return
    size = check_file(path, what)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other threads, of which the copy has none
        receiver, sender = os.pipe()
        child = os.fork()
    if child == 0:
        _try(read, sender, size)
    os.close(sender)
    try:
        with os.fdopen(receiver, "rb") as pipe:
            seconds = 2 * (_TRIAL_SECONDS + size / _TRIAL_SPEED)  # other processes may have the core for half of them
            ready, _, _ = select.select([pipe], [], [], seconds)
            answer = pipe.read(_ANSWER_BYTES) if ready else b""
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not answer:
        raise _unreadable(path, what, "reading it takes too much time, or ends the process")
    kind, message = json.loads(answer)
    if kind == pickle.UnpicklingError.__name__:
        raise pickle.UnpicklingError(message)
    if kind == MemoryError.__name__ or "memory" in message:
        raise _unreadable(path, what, f"its {size} bytes take more than {_TRIAL_BYTES / 2**30:.0f} GiB of memory")
    if kind:
        raise damaged(f"'{path}' cannot be read as {what}", ValueError(message or kind))


def _try(read: Callable[[], object], sender: int, size: int) -> NoReturn:
    """Read in the copy, write how it ended as JSON, and end the copy, whatever happens."""
    said = ["", ""]
    try:
        import resource

        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where a library in C++ says that it ends the process
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for limit, most in (
            (resource.RLIMIT_AS, held + _TRIAL_BYTES + _TRIAL_RATIO * size),
            (resource.RLIMIT_CPU, _TRIAL_SECONDS + size // _TRIAL_SPEED),
        ):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        read()
    except BaseException as error:  # this copy ends here
        said = [type(error).__name__, str(error)[:2000]]
    finally:
        os.write(sender, json.dumps(said).encode())
        os._exit(0)


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

"""Files that are written whole or not at all, their hashes, and what JSON can hold."""

import errno
import hashlib
import math
import os
import platform
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from privlab.base.errors import PrivlabError
from privlab.base.reading import open_file

UNFINISHED = ".tmp-"
"""How the name of a file begins that is being written."""

_ABANDONED = 24 * 3600.0
"""Seconds after which nobody is still writing a file, which takes less than one."""


def write_whole(
    path: Path, write: Callable[[Path], object], *, durable: bool = True, private: bool = False, place: str = "--out"
) -> None:
    """Write a temporary file and rename it: a reader sees the whole new file, or what was there before.

    Args:
        path: path of the file; its folder is made if it is not there.
        write: fills the temporary file whose path it is given.
        durable: whether to wait until the file and its name are on the disk, so that it stays after a crash.
        private: whether nobody but the user may read it (0600, from its first byte on) or enter a folder made for it.
        place: what the user may change, for the error.

    Raises:
        PrivlabError: if the disk is full or the file cannot be written.
    """
    temporary = path.with_name(f"{UNFINISHED}{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        path.parent.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)  # never a file that is there
        os.close(os.open(temporary, flags, 0o600 if private else 0o666))
        write(temporary)
        if private:
            temporary.chmod(0o600)
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        raise unwritable(path.parent, error, place) from error
    finally:
        with suppress(OSError):  # a read-only directory has no such file
            temporary.unlink(missing_ok=True)


def delete_unfinished(folder: Path) -> None:
    """Delete what processes that were killed had begun to write into a folder, which nobody will ever finish.

    The file of a process that lives, and of another machine's, stays until it is a day old.

    Args:
        folder: the folder, without those in it; it need not be there.
    """
    import psutil

    for file in folder.glob(f"{UNFINISHED}*"):
        machine, _, rest = file.name.removeprefix(UNFINISHED).partition("-")
        process = rest.partition("-")[0]
        with suppress(OSError):  # its writer has just finished it, or the folder is read-only
            ours = machine == _machine() and process.isdecimal()
            if (ours and not psutil.pid_exists(int(process))) or time.time() - file.stat().st_mtime > _ABANDONED:
                file.unlink()


@cache
def _machine() -> str:
    """Return a short name of where process ids are unique: a machine, or a container on it."""
    try:
        space = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # not Linux
        space = 0
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:8]


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.

    Args:
        path: path of the file or folder; only POSIX opens folders, elsewhere nothing is done for them.
    """
    if os.name != "posix" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(path: Path, error: OSError, place: str = "--out") -> PrivlabError:
    """Return the error that says why a folder or file cannot be written.

    Args:
        path: the folder or file that was to be written.
        error: the operating system's error.
        place: what the user may change.
    """
    if error.errno == errno.ENOSPC:
        return PrivlabError(f"No space left on the device of '{path}'. What was finished before stays readable.")
    reason = os.strerror(error.errno) if error.errno else error  # Arrow's own words are long
    return PrivlabError(f"'{path}' cannot be written: {reason}. Give another {place}.")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file, in hex."""
    with open_file(path, "file") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain_data(value: object) -> object:
    """Return data that JSON can hold: NaN becomes null, and infinity the text "Infinity" or "-Infinity"."""
    if isinstance(value, Mapping):
        return {key: plain_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value

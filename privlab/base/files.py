"""Files that are written whole or not at all, and their hashes."""

import errno
import hashlib
import os
import platform
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from privlab.base.errors import PrivlabError

__all__ = ["UNFINISHED", "delete_unfinished", "read_text", "sha256_of", "sync", "unwritable", "write_whole"]

UNFINISHED = ".tmp-"
"""How the name of a file begins that is being written."""

_ABANDONED = 24 * 3600.0
"""Seconds after which nobody is still writing a file, which takes less than one."""


def write_whole(path: Path, write: Callable[[Path], object], *, durable: bool = True, private: bool = False) -> None:
    """Write a temporary file and rename it: a reader sees the whole new file, or what was there before.

    Args:
        path: path of the file; its folder is made if it is not there.
        write: fills the temporary file whose path it is given.
        durable: whether to wait until the file and its name are on the disk, so that it stays after a crash.
        private: whether nobody but the user may read it (mode 0600), from its first byte on.

    Raises:
        PrivlabError: if the disk is full or the file cannot be written.
    """
    temporary = path.with_name(f"{UNFINISHED}{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if private:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        write(temporary)
        if private:
            temporary.chmod(0o600)
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        raise unwritable(path.parent, error) from error
    finally:
        with suppress(OSError):  # a read-only directory has no such file
            temporary.unlink(missing_ok=True)


def delete_unfinished(folder: Path) -> None:
    """Delete what processes that were killed had begun to write into a folder, which nobody will ever finish.

    The file of a process that lives, and of another machine's, stays until it is a day old.

    Args:
        folder: the folder, without those in it; it need not be there.
    """
    for file in folder.glob(f"{UNFINISHED}*"):
        machine, _, rest = file.name.removeprefix(UNFINISHED).partition("-")
        process = rest.partition("-")[0]
        with suppress(OSError):  # its writer has just finished it, or the folder is read-only
            ours = machine == _machine() and process.isdecimal()
            if (ours and not _lives(int(process))) or time.time() - file.stat().st_mtime > _ABANDONED:
                file.unlink()


def _lives(process: int) -> bool:
    """Return whether a process of this machine is there, as far as can be told."""
    if os.name != "posix":
        return True  # there, signal 0 ends a process
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True


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


def unwritable(path: Path, error: OSError) -> PrivlabError:
    """Return the error that says why a folder or file cannot be written.

    Args:
        path: the folder or file that was to be written.
        error: the operating system's error.
    """
    if error.errno == errno.ENOSPC:
        return PrivlabError(f"No space left on the device of '{path}'. What was finished before stays readable.")
    reason = os.strerror(error.errno) if error.errno else error  # Arrow's own words are long
    return PrivlabError(f"'{path}' cannot be written: {reason}. Give another --out.")


def read_text(path: Path, what: str) -> str:
    """Return the text of a file in UTF-8, whatever its line ends are, without the mark that Windows writes first.

    Args:
        path: path of the file.
        what: the word for it in the error, such as "experiment".

    Raises:
        PrivlabError: if there is no such file, or it cannot be read.
    """
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PrivlabError(f"Cannot read the {what} '{path}': {reason}.") from None


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex.

    Args:
        path: path of the file, which is read in parts.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()

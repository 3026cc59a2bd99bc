"""What the tests of limits share: descriptions of small files that stand for much, and what reading them takes."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from privlab.images import open_images

SECONDS, MEBIBYTES, LARGEST = 30.0, 4096, 10_000_000
"""The most that reading one file may take, in seconds of a core and in memory, and the largest file in bytes."""

NESTED = 9 * 2**20 // 2
"""Half as many brackets as a file of 9 MiB has."""


def images_of(path: Path) -> object:
    """Read the first images of a source as `privlab attack --limit 8` does."""
    return [image.problem for image in open_images(str(path), limit=8)]


Bomb = tuple[str, Callable[[Path], object], Callable[[Path], object]]
BOMBS: dict[str, Bomb] = {}
"""By its description: the name of the file, what writes it, and what reads it."""


def bomb(description: str, name: str, read: Callable[[Path], object]) -> Callable[[Any], Any]:
    def add(write: Callable[[Path], object]) -> Callable[[Path], object]:
        BOMBS[description] = (name, write, read)
        return write

    return add


def npy_header(shape: str) -> bytes:
    data = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(data)) + data


def takes_little(description: str, path: Path, separately: Callable[..., Any], capsys: Any) -> None:
    """Write a file in a folder and read it, in separate processes whose seconds and memory are measured."""
    name, write, read = BOMBS[description]
    path /= name
    ended, _, _ = separately(lambda: write(path))
    assert ended == "None"
    assert path.stat().st_size < LARGEST

    def work() -> None:
        read(path)

    ended, seconds, mebibytes = separately(work)
    with capsys.disabled():
        print(f"\n{description}: {seconds:.1f} s, {mebibytes} MiB, {ended[:60]}")  # noqa: T201
    assert ended == "None" or ended.startswith("refused: ")
    assert seconds < SECONDS
    assert mebibytes < MEBIBYTES

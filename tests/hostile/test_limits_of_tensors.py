"""Small files of tensors that stand for much: reading one takes at most 4 GiB and 30 seconds."""

import io
import pickle
import runpy
import struct
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from privlab.keys import load_key
from privlab.release.gradient_file import read_gradient_file
from privlab.victims.weights import read_state

bombs = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("bombs.py"))))
BOMBS, NESTED, bomb, npy_header = bombs.BOMBS, bombs.NESTED, bombs.bomb, bombs.npy_header

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="measures a copy of this process"),
]


def header(path: Path, entries: str, rest: int = 0) -> None:
    data = entries.encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(rest))


def entry(name: str, shape: str, start: int = 0, end: int = 0) -> str:
    return f'"{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{end}]}}'


@bomb("safetensors: a hundred thousand empty tensors", "a.safetensors", read_state)
def _(path: Path) -> None:
    header(path, "{" + ",".join(entry(str(i), "[0]") for i in range(140_000)) + "}")


@bomb("safetensors: gradients, a hundred thousand empty tensors", "a.safetensors", read_gradient_file)
def _(path: Path) -> None:
    header(path, "{" + ",".join(entry(str(i), "[0]") for i in range(140_000)) + "}")


@bomb("safetensors: a header of 2**60 bytes", "a.safetensors", read_state)
def _(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**60) + bytes(9_000_000))


@bomb("safetensors: a tensor with a million axes", "a.safetensors", read_state)
def _(path: Path) -> None:
    header(path, "{" + entry("a", "[0" + ",1" * 4_000_000 + "]") + "}")


@bomb("safetensors: an empty tensor of 2**60 rows", "a.safetensors", read_state)
def _(path: Path) -> None:
    header(path, "{" + entry("a", f"[0,{2**60}]") + "}")


@bomb("safetensors: nested metadata", "a.safetensors", read_state)
def _(path: Path) -> None:
    header(path, '{"__metadata__":' + "[" * NESTED + "]" * NESTED + "}")


@bomb("key: a hundred thousand orders", "a.key", load_key)
def _(path: Path) -> None:
    header(path, "{" + ",".join(entry(str(i), "[0]") for i in range(140_000)) + "}")
    path.chmod(0o600)


def torch_zip(path: Path, pickled: bytes, packing: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", packing, compresslevel=9) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/byteorder", b"little")
        archive.writestr("a/version", b"3\n")


def call(name: bytes, *arguments: bytes) -> bytes:
    """Return the opcodes that call a function, whose module and name a line end parts, with arguments as opcodes."""
    return b"c" + name + b"\n(" + b"".join(arguments) + b"tR"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


HEX = b"_codecs\nencode"


@bomb("torch: an array of 2**33 bytes, copied", "a.pt", read_state)
def _(path: Path) -> None:
    once = call(b"__builtin__\nbytearray", number(2**32))
    torch_zip(path, b"\x80\x02}" + text("a") + b"(" + call(b"__builtin__\nbytearray", once) * 4 + b"ts.")


@bomb("torch: a text that doubles at each encoding", "a.pt", read_state)
def _(path: Path) -> None:
    made = call(HEX, text("a" * 1000), text("latin1"))
    for _ in range(26):
        made = call(HEX, made, text("hex_codec"))
    torch_zip(path, b"\x80\x02}" + text("a") + made + b"s.")


@bomb("torch: a text that is copied many times", "a.pt", read_state)
def _(path: Path) -> None:
    first = text("a" * 2**22) + b"q\x00" + b"c" + HEX + b"\nq\x01" + text("latin1") + b"q\x02"
    copy = b"h\x01h\x00h\x02\x86R"
    torch_zip(path, b"\x80\x02" + first + b"(" + copy * 400_000 + b"t.")


@bomb("torch: a text that is copied and dropped many times", "a.pt", read_state)
def _(path: Path) -> None:
    first = text("a" * 2**22) + b"q\x00" + b"c" + HEX + b"\nq\x01" + text("latin1") + b"q\x02"
    copy = b"h\x02h\x01h\x00h\x02\x86Rs"
    torch_zip(path, b"\x80\x02" + first + b"}" + copy * 400_000 + b".")


@bomb("torch: numbers of 2 GiB", "a.pt", read_state)
def _(path: Path) -> None:
    kind = call(b"numpy\ndtype", text(f"V{2**31 - 1}"))
    made = call(b"numpy.core.multiarray\nscalar", kind) * 6
    torch_zip(path, b"\x80\x02}" + text("a") + b"(" + made + b"ts.")


@bomb("torch: nine million empty lists", "a.pt", read_state)
def _(path: Path) -> None:
    path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + b"\x80\x02(" + b"]" * 9_000_000)


@bomb("torch: empty lists in a packed archive", "a.pt", read_state)
def _(path: Path) -> None:
    torch_zip(path, b"\x80\x02(" + b"]" * 2**29 + b"t.")


@bomb("torch: sets of one long tuple", "a.pt", read_state)
def _(path: Path) -> None:
    row = b"(" + b"".join(b"J" + struct.pack("<i", i) for i in range(2**17)) + b"tq\x00"
    copies = call(b"__builtin__\nset", b"h\x00") * 5000
    torch_zip(path, b"\x80\x02" + row + b"(" + copies + b"t.")


@bomb("torch: a tensor of repeated numbers", "a.pt", read_state)
def _(path: Path) -> None:
    torch.save({"x": torch.zeros(1).expand(10**10)}, path)


@bomb("npz: packed zeros", "a.npz", read_state)
def _(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(8):
            buffer = io.BytesIO()
            np.save(buffer, np.zeros(2**27 - 64, np.uint8))
            archive.writestr(f"{i}.npy", buffer.getvalue())


@bomb("npz: an array that states more than it holds", "a.npz", read_state)
def _(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(100):
            archive.writestr(f"{i}.npy", npy_header(f"({2**33},)") + bytes(1000))


@bomb("npz: a header of a million brackets", "a.npz", read_state)
def _(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", npy_header("(" * 100_000 + ")" * 100_000))


@bomb("npz: one member under many names", "a.npz", read_state)
def _(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        buffer = io.BytesIO()
        np.save(buffer, np.zeros(2**23, np.uint8))
        archive.writestr("a.npy", buffer.getvalue())
        first = archive.infolist()[0]
        for i in range(100_000):
            again = zipfile.ZipInfo(f"{i}.npy")
            for name in ("header_offset", "file_size", "compress_size", "CRC", "compress_type"):
                setattr(again, name, getattr(first, name))
            archive.filelist.append(again)


@pytest.mark.parametrize("description", BOMBS)
def test_a_small_file_takes_little(description: str, tmp_path: Path, separately: Any, capsys: Any) -> None:
    bombs.takes_little(description, tmp_path, separately, capsys)

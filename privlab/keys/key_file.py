"""Key files: a model key as a safetensors file of mode 0600, with a checksum and the fingerprint of its shape.

| part | what |
|---|---|
| tensors, int32 | `residual` (d), `heads` (l × h), `qk` and `value` (l × h × e), `hidden` (l × m) |
| metadata `format` | `privlab-key/1` |
| metadata `space` | `full`, `paper` or `residual` |
| metadata `shape` | the ModelShape as canonical JSON: sorted names, no spaces |
| metadata `fingerprint` | SHA-256 of `privlab-shape/1`, a line end, and `shape` |
| metadata `checksum` | SHA-256 of the canonical bytes |

Canonical bytes: the lines `privlab-key/1`, `shape` and `space`; then for each tensor, by name, the line
`NAME:DIMENSIONS` (as in `qk:12x3x64`) and its int32 in little-endian. The same key gives the same file, byte by byte:
the file holds no date, and its metadata are sorted. `key_id` is a commitment to the key under a separate hash domain
(the lines `privlab-key-id/1` and `shape`, then the tensors as above). An encrypted model carries it, so that a wrong
key of the right shape is refused. It confirms a guess of the whole key and reveals nothing else of the key.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from privlab.base import PrivlabError, open_file, parse_json, parse_object, write_whole
from privlab.keys.algebra import SPACES, ModelKey, ModelShape, check_fits, key_bits, residual_bits

FORMAT = "privlab-key/1"
_NAMES = ("heads", "hidden", "qk", "residual", "value")
_MOST_BYTES = 1 << 28
"""The most bytes of a key file that are read."""


@dataclass(frozen=True, eq=False)
class KeyFile:
    """A key that was read from a file, with the shape that it fits."""

    key: ModelKey
    shape: ModelShape

    @property
    def key_id(self) -> str:
        """Return the commitment to this key."""
        return key_id(self.key, self.shape)

    def facts(self) -> dict[str, object]:
        """Return the public facts of the key: its space and shape, sizes in bits, and hashes in hexadecimal digits."""
        return {
            "space": self.key.space,
            "bits": round(key_bits(self.shape, self.key.space), 1),
            "residual_bits": round(residual_bits(self.shape, self.key.space), 1),
            **asdict(self.shape),
            "fingerprint": self.shape.fingerprint,
            "key_id": self.key_id,
        }


def key_id(key: ModelKey, shape: ModelShape) -> str:
    """Return the commitment to a key that an encrypted model carries."""
    return hashlib.sha256(f"privlab-key-id/1\n{shape.text}\n".encode() + _tensor_bytes(key)).hexdigest()


def canonical(key: ModelKey, shape: ModelShape) -> bytes:
    """Return the canonical bytes of a key: the checksum is their SHA-256."""
    return f"{FORMAT}\n{shape.text}\n{key.space}\n".encode() + _tensor_bytes(key)


def save_key(key: ModelKey, shape: ModelShape, path: Path, *, overwrite: bool = False) -> None:
    """Write a key file of mode 0600.

    Args:
        key: the orders; they are stored as int32.
        shape: the shape that the key fits.
        path: the file to be written.
        overwrite: whether an existing file may be replaced.

    Raises:
        PrivlabError: if the file exists and may not be overwritten, or cannot be written.
    """
    metadata = {
        "format": FORMAT,
        "space": key.space,
        "shape": shape.text,
        "fingerprint": shape.fingerprint,
        "checksum": hashlib.sha256(canonical(key, shape)).hexdigest(),
    }
    tensors = {name: order.to(torch.int32) for name, order in key.orders().items()}
    write_new(path, to_bytes(tensors, metadata), private=True, overwrite=overwrite)


def load_key(path: Path) -> KeyFile:
    """Read a key file.

    Raises:
        PrivlabError: if the file is missing, readable by others, of another or a newer format, truncated or corrupted.
    """
    data = _read_private(path)
    metadata = _metadata(data)
    version = metadata.get("format", "")
    if not version.startswith("privlab-key/"):
        raise PrivlabError(f"'{path}' is not a key file of privlab, or its header is damaged: expected {FORMAT}.")
    if version != FORMAT:
        raise PrivlabError(f"'{path}' has the format {version}; this privlab reads {FORMAT}. Use a newer privlab.")
    try:
        orders, shape = load(data), _shape(metadata["shape"])
        if sorted(orders) != sorted(_NAMES) or {order.dtype for order in orders.values()} != {torch.int32}:
            raise PrivlabError(f"expected int32 tensors {', '.join(_NAMES)}")
        check_fits(orders := {name: order.long() for name, order in orders.items()}, shape)
        if metadata["space"] not in SPACES:
            raise PrivlabError(f"unknown space '{metadata['space']}'")
        key = ModelKey(**orders, space=metadata["space"])  # pyright: ignore[reportArgumentType]
        if metadata["fingerprint"] != shape.fingerprint:
            raise PrivlabError("its fingerprint is another shape's")
        if metadata["checksum"] != hashlib.sha256(canonical(key, shape)).hexdigest():
            raise PrivlabError("its checksum is wrong")
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"no '{error.args[0]}'" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise PrivlabError(f"The key file '{path}' is corrupted or truncated: {reason}. Restore a copy.") from error
    return KeyFile(key, shape)


def to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file; they depend on its content alone, since the metadata are sorted."""
    copies = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
    data = save(copies, dict(metadata) or None)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if "__metadata__" in header:
        header = {"__metadata__": dict(sorted(header.pop("__metadata__").items()))} | header
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, memoryview(data)[8 + size :]))


def write_new(path: Path, data: bytes, *, private: bool = False, overwrite: bool = False) -> None:
    """Write a new file whole, or replace an old one atomically.

    Args:
        path: the file to be written; its folder is made if it does not exist.
        data: its bytes.
        private: whether nobody but the user may read it (mode 0600).
        overwrite: whether an existing file may be replaced.

    Raises:
        PrivlabError: if the file exists and may not be overwritten, or cannot be written.
    """
    if not overwrite and (path.exists() or path.is_symlink()):
        raise PrivlabError(f"'{path}' exists already: choose another name, or --overwrite.")
    write_whole(path, lambda part: part.write_bytes(data), private=private, place="path")


def _tensor_bytes(key: ModelKey) -> bytes:
    parts = []
    for name, order in sorted(key.orders().items()):
        parts.append(f"{name}:{'x'.join(map(str, order.shape))}\n".encode())
        parts.append(order.cpu().numpy().astype("<i4").tobytes())
    return b"".join(parts)


def _read_private(path: Path) -> bytes:
    try:
        if not path.exists():
            raise PrivlabError(f"No key file at '{path}'. `privlab keys new` makes one.")
        with open_file(path, "key file", _MOST_BYTES) as file:
            status = os.fstat(file.fileno())
            if os.name == "posix" and status.st_mode & 0o077:
                mode = f"{stat.S_IMODE(status.st_mode):03o}"
                raise PrivlabError(f"Others may read the key file '{path}' (mode {mode}): run chmod 600 {path}")
            return file.read(_MOST_BYTES)
    except OSError as error:
        raise PrivlabError(f"The key file '{path}' cannot be read: {error.strerror}.") from error


def _metadata(data: bytes) -> dict[str, str]:
    """Return a file's metadata; an empty mapping if it is not a safetensors file."""
    try:
        found = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")], "its header")["__metadata__"]
        return {str(name): str(value) for name, value in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _shape(text: str) -> ModelShape:
    """Return the shape of its canonical JSON, and refuse any other text."""
    content = parse_object(text, "its shape")
    wanted = {field.name: field.type for field in fields(ModelShape)}
    if {name: type(value) for name, value in content.items()} != wanted:
        raise PrivlabError(f"its shape has not the fields {', '.join(wanted)}")
    return ModelShape(**content)

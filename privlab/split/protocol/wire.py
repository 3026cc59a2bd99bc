"""Tensors as bytes in the safetensors format; received bytes are checked before they are used.

Nothing is unpickled: safetensors' reader checks that sizes, offsets and types agree, and executes no code.
"""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from privlab.base import first
from privlab.split.protocol.contract import Contract, Refusal

HEADER_BYTES = 2**16
"""Room in a message for everything but the numbers, in bytes."""

_MOST_HEADER = 16 * HEADER_BYTES
"""The most bytes of the names and shapes before the numbers: each name becomes a tensor, also one without a number."""

_CHUNK_BYTES = 2**22
"""The most bytes in one part of a large message."""


def pack(name: str, tensor: Tensor) -> bytes:
    """Return one tensor as the bytes of a safetensors file."""
    return pack_state({name: tensor})


def pack_state(state: Mapping[str, Tensor]) -> bytes:
    """Return named tensors as the bytes of a safetensors file."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})


def unpack(data: bytes, name: str, contract: Contract) -> Float[Tensor, "b t d"]:
    """Return the batch of tokens that a message holds.

    Args:
        data: the bytes of a safetensors file with one tensor.
        name: the name that the tensor must have.
        contract: the terms: b ≤ max_batch, t ≤ max_tokens, d and the type.

    Raises:
        Refusal: if the bytes are not such a tensor, its name, type or shape violates the contract, or a number is NaN
            or infinite.
    """
    tensor = _read(data, [name], contract.torch_dtype)[name]
    most = (contract.max_batch, contract.max_tokens, contract.width)
    fits = tensor.ndim == 3 and all(1 <= n <= m for n, m in zip(tensor.shape, most, strict=True))
    if not fits or tensor.shape[2] != contract.width:
        shape = f"(b ≤ {most[0]}, t ≤ {most[1]}, d = {most[2]})"
        raise Refusal("INVALID_ARGUMENT", f"'{name}' must have shape {shape}. Found {tuple(tensor.shape)}.")
    _check_finite(name, tensor)
    return tensor


def unpack_state(data: bytes, like: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return named tensors, which must have exactly the expected names and shapes.

    Args:
        data: the bytes of a safetensors file.
        like: tensors with the expected names and shapes.
        dtype: the expected type of all tensors, float32 or float64.

    Raises:
        Refusal: if the bytes are not such tensors, names, types or shapes differ, or a number is NaN or infinite.
    """
    tensors = _read(data, like, dtype)
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape:
            want, found = tuple(like[name].shape), tuple(tensor.shape)
            raise Refusal("INVALID_ARGUMENT", f"'{name}' must have shape {want}. Found {found}.")
        _check_finite(name, tensor)
    return tensors


def chunks(data: bytes) -> list[bytes]:
    """Return the parts of a large message, in order; the last one is empty."""
    return [data[i : i + _CHUNK_BYTES] for i in range(0, len(data), _CHUNK_BYTES)] + [b""]


def _read(data: bytes, names: Collection[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors; refuse bytes with other names or types."""
    if (header := int.from_bytes(data[:8], "little")) > _MOST_HEADER:
        large = f"names and shapes take at most {_MOST_HEADER} bytes. Found {header}"
        raise Refusal("INVALID_ARGUMENT", f"The {len(data)} bytes are not safetensors that are read: {large}.")
    try:
        found = load(data)
    except (SafetensorError, KeyError, RuntimeError) as error:  # KeyError: a type that torch lacks
        raise Refusal("INVALID_ARGUMENT", f"The {len(data)} bytes are not safetensors: {error}.") from None
    if found.keys() != set(names):
        wanted, theirs = (first((name[:40] for name in sorted(each)), 4) for each in (names, found))
        raise Refusal("INVALID_ARGUMENT", f"The tensors must be {wanted}. Found {theirs or 'none'}.")
    for name, tensor in found.items():
        if tensor.dtype != dtype:
            raise Refusal("INVALID_ARGUMENT", f"'{name}' must be {dtype}. Found {tensor.dtype}.")
    return found


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity."""
    low, high = tensor.detach().aminmax()  # NaN spreads to both; this takes half the work of isfinite, and no memory
    return bool(low.isfinite() & high.isfinite())


def _check_finite(name: str, tensor: Tensor) -> None:
    if not is_finite(tensor):
        raise Refusal("INVALID_ARGUMENT", f"'{name}' holds NaN or infinity. Numbers must be finite.")


class Inbox:
    """Reads one message at a time in a separate thread, since gRPC's iterators offer no time limit."""

    def __init__(self, stream: Iterator[bytes]) -> None:
        self._stream = stream
        self._reader = ThreadPoolExecutor(1, "inbox")
        self._coming: Future[Any] | None = None

    def get(self, seconds: float) -> bytes | None:
        """Return the next message, or None at the end of the stream.

        Raises:
            TimeoutError: (of concurrent.futures) if no message came; the next call waits for the same message.
        """
        if self._coming is None:
            self._coming = self._reader.submit(next, self._stream, None)
        message = self._coming.result(seconds)
        self._coming = None
        return message

    def close(self) -> None:
        """Stop reading; the thread ends with the stream."""
        self._reader.shutdown(wait=False)

"""Tensors that are kept in the user's cache: one file, which says what computation they belong to."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from privlab.base import PrivlabError, write_whole
from privlab.victims import hash_of


def keep(path: Path, key: str, state: Mapping[str, Tensor]) -> None:
    """Write tensors, whole or not at all.

    Args:
        path: the file to be written.
        key: the SHA-256, in hexadecimal, of all that shapes the tensors.
        state: the tensors by name, on any device.

    Raises:
        PrivlabError: if the file cannot be written.
    """
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    facts = {"privlab": f"{key} {hash_of(held)}"}
    try:
        write_whole(path, lambda made: save_file(held, made, facts))
    except SafetensorError as error:
        raise PrivlabError(f"'{path}' cannot be written: {error}.") from error


def kept(path: Path, key: str) -> dict[str, Tensor] | None:
    """Return the tensors that `keep` wrote; None if the file does not exist, is damaged, or has another key."""
    try:
        with safe_open(path, "pt") as file:
            facts = (file.metadata() or {}).get("privlab")
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError):
        return None
    return state if facts == f"{key} {hash_of(state)}" else None

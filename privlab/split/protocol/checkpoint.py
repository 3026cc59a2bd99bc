"""Tensors and facts on disk as one safetensors file, which is complete or absent and readable by its owner alone."""

import json
import os
import stat
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from privlab.base import PrivlabError, check_file, parse_json, write_whole

_FORMAT = "privlab-split/1"


def private_folder(path: Path) -> Path:
    """Make a folder that its owner alone may enter, or return the one that exists.

    Raises:
        PrivlabError: if it cannot be made, or others may enter the one that exists.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise PrivlabError(f"The folder '{path}' cannot be made: {error.strerror}. Give another.") from error
    if os.name == "posix" and mode & 0o077:
        raise PrivlabError(f"The folder '{path}' must have mode 0700. Found {mode:04o}: chmod 700 it, or give another.")
    return path


def write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and plain facts as one file, atomically: an older file stays until the new one is on the disk.

    Args:
        path: the safetensors file to be written, of mode 0600; its folder is made if it does not exist.
        tensors: tensors by name, on any device.
        facts: plain data that JSON can hold.

    Raises:
        PrivlabError: if the disk is full or the folder cannot be written.
    """
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        write_whole(
            path, lambda part: save_file(held, part, {"format": _FORMAT, "facts": json.dumps(facts)}), private=True
        )
    except (PrivlabError, SafetensorError) as error:
        raise PrivlabError(f"The checkpoint '{path}' cannot be written: {error}.") from error


def read(path: Path, *, only_facts: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and facts that `write` wrote, or no tensors with `only_facts`.

    Raises:
        PrivlabError: if the file is missing, incomplete, or of another kind.
    """
    check_file(path, "checkpoint")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise PrivlabError(f"'{path}' is not a checkpoint of split learning: expected format {_FORMAT}.")
            names = [] if only_facts else file.keys()
            facts = parse_json(metadata["facts"], "what it states")
            return {name: file.get_tensor(name) for name in names}, facts
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, PrivlabError):
            raise
        raise PrivlabError(f"The checkpoint '{path}' cannot be read: {error}.") from error


class SessionCheckpoints:
    """The checkpoints of one session: FOLDER/step-00000012.safetensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, the last first."""
        names = (path.stem.removeprefix("step-") for path in self.folder.glob("step-*.safetensors"))
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def path(self, step: int) -> Path:
        """Return the file of a step's checkpoint."""
        return self.folder / f"step-{step:08d}.safetensors"

    def keep(self, steps: Container[int]) -> None:
        """Remove the checkpoints of all other steps."""
        for step in self.steps():
            if step not in steps:
                self.path(step).unlink(missing_ok=True)


def optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return an optimiser's averages and counts as named tensors: "optimizer.INDEX.KEY"."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{index}.{key}": value
        for index, values in state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore the state that `optimizer_state` returned; other tensors are ignored."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            state.setdefault(int(index), {})[key] = tensor.clone()
    groups = optimizer.state_dict()["param_groups"]
    with torch.no_grad():
        optimizer.load_state_dict({"state": state, "param_groups": groups})

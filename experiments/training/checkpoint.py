"""Checkpoints that survive a kill at any moment: a folder per step, complete or not there at all.

`checkpoints/step-00001200/` holds `model.safetensors` (the weights), `state.pt` (tensors and numbers alone, read with
`weights_only`) and `checkpoint.json` (step, identity, and SHA-256 of the other two, so a damaged one is noticed).
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from privlab.base import PrivlabError, sha256_of, sync, warn

KEPT_CHECKPOINTS = 2
"""The number of checkpoints that are kept: the last, and one before it, should the last be damaged."""

UNFINISHED = ".unfinished-"
WEIGHTS, STATE, CARD = "model.safetensors", "state.pt", "checkpoint.json"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one training in a folder.

    `identity` holds by name what must not change between a run and its continuation.
    """

    folder: Path
    identity: Mapping[str, str]

    def save(self, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write the checkpoint of a step and drop all but the last `KEPT_CHECKPOINTS`.

        Args:
            step: the number of steps that are done; it names the checkpoint.
            weights: the model's tensors by name, on any device.
            state: what else a continuation needs, such as the optimiser's averages: tensors and numbers alone.

        Raises:
            PrivlabError: if it cannot be written, with the reason; the earlier ones stay.
        """
        try:
            self._sweep()
            made = self._write(step, weights, state)
            final = self.folder / f"step-{step:08d}"
            shutil.rmtree(final, ignore_errors=True)  # a damaged one that was passed over
            made.rename(final)
            sync(self.folder)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError for a full disk
            self._sweep()
            raise PrivlabError(f"The checkpoint of step {step} cannot be written to {self.folder}: {error}.") from error
        for old in self._all()[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)

    def _write(self, step: int, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Return a new folder under a temporary name that holds the checkpoint, on the disk to the last byte."""
        self.folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self.folder))
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, made / WEIGHTS)
        torch.save(dict(state), made / STATE)
        card: dict[str, Any] = {"step": step, "identity": dict(self.identity)}
        card["sha256"] = {name: sha256_of(made / name) for name in (WEIGHTS, STATE)}
        (made / CARD).write_text(json.dumps(card, indent=1), encoding="utf-8")
        for path in (*made.iterdir(), made):
            sync(path)
        return made

    def last(self) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
        """Return step, weights and state of the last sound checkpoint; None if there is none.

        Raises:
            PrivlabError: if it belongs to another training.

        Warns:
            PrivlabWarning: for each damaged one that was passed over.
        """
        for path in reversed(self._all()):
            try:
                card = json.loads((path / CARD).read_text(encoding="utf-8"))
                damaged = [name for name, sha256 in card["sha256"].items() if sha256_of(path / name) != sha256]
                step, identity = int(card["step"]), dict(card["identity"])
            except (OSError, ValueError, KeyError, TypeError):
                damaged, step, identity = [CARD], 0, {}
            if damaged:
                warn(f"{path} is damaged ({damaged[0]}): passed over.")
                continue
            self._check(path, identity)
            state = torch.load(path / STATE, map_location="cpu", weights_only=True)
            return step, load_file(path / WEIGHTS), state
        return None

    def _check(self, path: Path, identity: Mapping[str, str]) -> None:
        for name, value in self.identity.items():
            if identity.get(name) != value:
                raise PrivlabError(
                    f"{path} is a checkpoint of another training: its {name} is {identity.get(name)}, not {value}. "
                    "Continue with what it was made with, or train into an empty folder."
                )

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def _sweep(self) -> None:
        """Remove what a killed run left half written."""
        for path in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

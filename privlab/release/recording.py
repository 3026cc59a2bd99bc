"""What an honest-but-curious server of split learning keeps: the features and gradients that it is sent.

Format, version 1. A recording is a folder with one folder per session:

    DIR/SESSION/session.json                    {"format": "privlab-recording", "version": 1, "session", "started", ...}
    DIR/SESSION/step-00000012.safetensors       training step 12: `features`, and `gradient` = ∂ℓ/∂outputs if it came
    DIR/SESSION/infer-00000003.safetensors      the third inference: `features`

Each tensor is b × t × d, float32 or float64; the metadata of each file name its `kind` and `step`. `session.json` also
holds the contract of the session, the server's model, and versions. Features come as they were sent: permuted, noisy.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from privlab.base import PrivlabError, one_line, read_bytes, read_json, refuse_links, warn, write_whole
from privlab.release.given import session_folders

_FORMAT, _VERSION = "privlab-recording", 1
_MOST_BYTES = 2**31
"""The most bytes of one recorded batch, which came as two messages of gRPC."""
Kind = Literal["step", "infer"]


@dataclass(frozen=True, eq=False)
class Recorded:
    """One batch that a server saw; `gradient` is ∂ℓ/∂outputs where a training step got so far."""

    session: str
    kind: Kind
    number: int
    features: Float[Tensor, "b t d"]
    gradient: Float[Tensor, "b t d"] | None


class Recorder:
    """Writes a recording; when the disk is full, it stops for good, and says so once: serving goes on.

    Args:
        folder: folder of the recording; made if it is not there.
        facts: facts about the server, which are in every `session.json`.
        on_stop: called with the reason why nothing more is recorded.

    Raises:
        PrivlabError: if the folder cannot be made.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], on_stop: Callable[[str], None]) -> None:
        self._folder, self._facts, self._on_stop, self._stopped = folder, facts, on_stop, False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise PrivlabError(f"--record '{folder}' cannot be made: {error.strerror}. Give another.") from error

    def session(self, name: str, facts: Mapping[str, Any], most: int | None = None) -> "SessionRecorder":
        """Return the recorder of a session, new or resumed.

        Args:
            name: the session's name, that of its folder.
            facts: facts about the session, which its `session.json` states.
            most: the most bytes that its recording takes on the disk; None for any number.
        """
        path = self._folder / name / "session.json"
        if not path.exists():
            started = datetime.now(UTC).isoformat(timespec="seconds")
            about = {"format": _FORMAT, "version": _VERSION, "session": name, "started": started}
            self.write(path, (json.dumps(about | dict(self._facts) | dict(facts), indent=2) + "\n").encode())
        return SessionRecorder(self, path.parent, most)

    def stop_session(self, folder: Path, most: int) -> None:
        """Say that nothing more of one session is recorded."""
        self._on_stop(f"Recording of {folder.name} stopped at {most / 2**20:.0f} MiB (--max-disk); it goes on itself.")

    def write(self, path: Path, data: bytes) -> None:
        """Write one file, whole or not at all; after a failure, nothing more is written."""
        if self._stopped:
            return
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_whole(path, lambda draft: draft.write_bytes(data), durable=False, place="--record")
        except (OSError, PrivlabError) as error:
            self._stopped = True
            self._on_stop(f"Recording stopped: {error} The sessions go on.")


class SessionRecorder:
    """Writes what one session brings."""

    def __init__(self, recorder: Recorder, folder: Path, most: int | None) -> None:
        self._recorder, self._folder, self._most, self._full = recorder, folder, most, False
        self._held = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        self._inferences = max((number for number, _ in _files(folder, "infer")), default=0)

    def step(self, step: int, features: Float[Tensor, "b t d"], gradient: Float[Tensor, "b t d"] | None) -> None:
        """Write what a training step brought, as far as it came.

        Args:
            step: number of the step, from 1 on; an earlier recording of the same step is replaced.
            features: the features that the client sent.
            gradient: ∂ℓ/∂outputs, as the client sent it; None where it did not come.
        """
        self._write("step", step, {"features": features} | ({} if gradient is None else {"gradient": gradient}))

    def inference(self, features: Float[Tensor, "b t d"]) -> None:
        """Write a batch that was sent for inference."""
        self._inferences += 1
        self._write("infer", self._inferences, {"features": features})

    def _write(self, kind: Kind, number: int, tensors: Mapping[str, Tensor]) -> None:
        if self._full:
            return
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        data = save(held, {"format": _FORMAT, "version": str(_VERSION), "kind": kind, "step": str(number)})
        self._held += len(data)
        if self._most is not None and self._held > self._most:
            self._full = True
            self._recorder.stop_session(self._folder, self._most)
            return
        self._recorder.write(self._folder / f"{kind}-{number:08d}.safetensors", data)


def recorded_sessions(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what `session.json` says of each session of a recording, or of the one whose folder this is.

    Raises:
        PrivlabError: if there is no recording, or it has another version.
    """
    paths = session_folders(folder)
    refuse_links(folder)
    return {str(path): _about(path / "session.json") for path in paths}


def recorded_cut_layer(folder: Path) -> int:
    """Return the number of blocks that the clients of a recording held, as the contracts of its sessions say.

    Sessions that state none are older than the choice: 0.

    Raises:
        PrivlabError: if there is no recording, it has another version, or its sessions were cut at different layers.
    """
    found = {about.get("contract", {}).get("cut_layer", 0) for about in recorded_sessions(folder).values()}
    if len(found) > 1:
        cuts = ", ".join(map(str, sorted(found)))
        raise PrivlabError(f"The sessions in '{folder}' have cut layers {cuts}: give the folder of one session.")
    return int(found.pop())


def read_recording(folder: Path, kind: Kind | None = None) -> Iterator[Recorded]:
    """Yield the batches of a recording, or of one session of it, by sessions, training before inference, in order.

    Raises:
        PrivlabError: if there is no recording, or it has another version.

    Warns:
        PrivlabWarning: for each file that is torn or not of this format; it is left out.
    """
    sessions = recorded_sessions(folder)
    return (
        batch
        for path, about in sessions.items()
        for each in (("step", "infer") if kind is None else (kind,))
        for number, file in _files(Path(path), each)
        if (batch := _batch(str(about["session"]), each, number, file)) is not None
    )


def _files(folder: Path, kind: Kind) -> list[tuple[int, Path]]:
    names = [(path.stem.removeprefix(f"{kind}-"), path) for path in folder.glob(f"{kind}-*.safetensors")]
    return sorted((int(number), path) for number, path in names if number.isdecimal())


def _about(path: Path) -> dict[str, Any]:
    about = read_json(path, "recording")
    try:
        found = about["format"], about["version"], about["session"]
    except KeyError as error:
        raise PrivlabError(f"'{path}' cannot be read as a recording: {one_line(error, kind=True)}.") from error
    if found[:2] != (_FORMAT, _VERSION):
        raise PrivlabError(f"'{path}' must be {_FORMAT}, version {_VERSION}. Found {found[0]}, version {found[1]}.")
    return about


def _batch(session: str, kind: Kind, number: int, path: Path) -> Recorded | None:
    try:
        tensors = load(read_bytes(path, "recording", _MOST_BYTES))
        features, gradient = tensors["features"], tensors.get("gradient")
        for tensor in (features, features if gradient is None else gradient):
            if tensor.ndim != 3 or tensor.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"expected b × t × d floats, found {tuple(tensor.shape)} of {tensor.dtype}")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        warn(f"Left out '{path}': {one_line(error)}.")
        return None
    return Recorded(session, kind, number, features, gradient)

"""The README's main job as a user runs it: a separate process, alone and next to one that keeps a core busy."""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from privlab.benchmarks.common import MAIN, Process

IMAGES = 8
"""Images of the README's main command."""

_BUSY = "while True: pass"


@dataclass(frozen=True)
class MainJob:
    """The time that the main job takes, its start included: `wall` and `processor` seconds."""

    wall: float
    processor: float


def run_main_job(model: str, device: str, *, busy: bool, images: int = IMAGES) -> MainJob:
    """Run `privlab attack --model MODEL --setting c --limit N` into a directory that is removed afterwards.

    Args:
        model: name of the victim; MJP defends one that has an unknown position embedding, and the jigsaw another.
        device: "auto", "cpu", "cuda" or "cuda:N".
        busy: whether a process keeps a core busy meanwhile.
        images: number of images.

    Raises:
        PrivlabError: if the command fails.
    """
    arguments = ("attack", "--model", model, "--setting", "c", "--limit", str(images), "--device", device, "--quiet")
    job = Process(MAIN, (*arguments, "--out", "run"))
    with tempfile.TemporaryDirectory() as folder:
        other = subprocess.Popen([sys.executable, "-c", _BUSY]) if busy else None
        try:
            began = time.perf_counter()
            processor = job.seconds(Path(folder))
            return MainJob(time.perf_counter() - began, processor)
        finally:
            if other is not None:  # waited for after the times were read, to which it would be added
                other.kill()
                other.wait()

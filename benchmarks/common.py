"""What all benches share: their result, the timing of stages in rounds, and the photographs that they run on."""

import itertools
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from jaxtyping import Float
from PIL import ImageChops
from rich.table import Table
from torch import Tensor

from privlab.base import PrivlabError, PrivlabWarning, Progress, hardware, versions
from privlab.images import open_images
from privlab.victims import Victim

MAIN = "from privlab.cli import main; main()"
"""What runs the command line in a process."""


@dataclass(frozen=True)
class Bench:
    """Ratios and other figures with their targets ("≤ 0.75"), and the medians from which they were computed.

    `unit` is what the medians are per: an image, except for `privlab bench startup`, which runs none. `gpu_memory` is
    the most memory on the GPU that each stage held, in MiB; a CPU has none.
    """

    ratios: Mapping[str, float]
    targets: Mapping[str, str]
    seconds_per_image: Mapping[str, float]
    setup: Mapping[str, object]
    unit: str = "image"
    gpu_memory: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain data, with a separate key for each ratio."""
        speed = {name: 1 / seconds for name, seconds in self.seconds_per_image.items()}
        return {
            **self.ratios,
            "targets": dict(self.targets),
            f"seconds_per_{self.unit}": dict(self.seconds_per_image),
            f"{self.unit}s_per_second": speed,
            **({"peak_gpu_memory_mib": dict(self.gpu_memory)} if self.gpu_memory else {}),
            "setup": dict(self.setup),
        }

    def tables(self) -> list[Table]:
        """Return the medians and the ratios as tables."""
        columns = ["stage", f"ms per {self.unit}", f"{self.unit}s per second", *["peak MiB"][: len(self.gpu_memory)]]
        stages = Table(*columns, title="medians", header_style="bold")
        for name, seconds in self.seconds_per_image.items():
            held = [f"{self.gpu_memory[name]:.0f}"] if self.gpu_memory else []
            stages.add_row(name, f"{1000 * seconds:.2f}", f"{1 / seconds:.1f}", *held)
        ratios = Table("ratio", "measured", "target", title="ratios", header_style="bold")
        for name, ratio in self.ratios.items():
            ratios.add_row(name, f"{ratio:.3f}" if ratio >= 0.1 else f"{ratio:.2g}", self.targets[name])
        return [stages, ratios]


@dataclass(frozen=True)
class Process:
    """Code that a process of its own runs, and how it must end: a process that fails early is no fast one."""

    code: str
    arguments: tuple[str, ...] = ()
    status: int = 0
    said: str = ""

    def seconds(self, folder: Path) -> float:
        """Return the processor time of the process and of what it starts, by the user and by the system.

        Raises:
            PrivlabError: if it ends otherwise than it must, or on Windows, which keeps no such time.
        """
        if os.name != "posix":
            raise PrivlabError("This bench needs the processor time of processes that have ended: run it on Linux.")
        import resource

        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", self.code, *self.arguments]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=folder, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode != self.status or self.said not in done.stdout + done.stderr:
            found = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
            raise PrivlabError(
                f"'{' '.join(('privlab', *self.arguments)) if self.arguments else self.code}' must end with status "
                f"{self.status}. Found {done.returncode}: {found}"
            )
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def quiet() -> AbstractContextManager[object]:
    """Ignore privlab's warnings: random weights, or more tokens than equations, weaken a verdict, but not the speed."""
    return warnings.catch_warnings(action="ignore", category=PrivlabWarning)


def machine(device: torch.device) -> dict[str, object]:
    """Return what the setup of a bench states of the machine."""
    return {"hardware": hardware(device), "versions": versions()}


def time_rounds(
    stages: Mapping[str, Callable[[], object]], repeats: int, device: torch.device, progress: Progress
) -> dict[str, float]:
    """Return the median seconds of every stage, for a bench that times nothing else.

    Args:
        stages: as in `median_seconds`.
        repeats: as in `median_seconds`.
        device: as in `median_seconds`.
        progress: is called with the stages done and their number.
    """
    total, done = (repeats + 1) * len(stages), itertools.count(1)
    return median_seconds(stages, repeats, device, lambda: progress(next(done), total))


def median_seconds(
    stages: Mapping[str, Callable[[], object]], repeats: int, device: torch.device, step: Callable[[], None]
) -> dict[str, float]:
    """Return the median seconds of every stage over `repeats` rounds, after one round that warms up.

    Each round times every stage once, so that a noisy moment affects all equally.

    Args:
        stages: the stages by name, in the order in which they are timed.
        repeats: rounds that count, ≥ 1.
        device: the device on which the stages work; a GPU is waited for.
        step: is called after each stage of each round, `repeats` + 1 times for each.
    """
    timings: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(repeats + 1):
        for name, stage in stages.items():
            timings[name].append(time_stage(stage, device))
            step()
    return {name: statistics.median(seconds[1:]) for name, seconds in timings.items()}


def time_stage(stage: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a stage takes; on a GPU between two events in its queue, which the GPU itself times."""
    if device.type != "cuda":
        start = time.perf_counter()
        stage()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record(torch.cuda.current_stream(device))
    stage()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def peak_gpu_memory(stages: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the most memory on the GPU that is allocated while each stage runs once more, in MiB; on a CPU nothing."""
    held: dict[str, float] = {}
    for name, stage in stages.items() if device.type == "cuda" else ():
        torch.cuda.reset_peak_memory_stats(device)
        stage()
        torch.cuda.synchronize(device)
        held[name] = torch.cuda.max_memory_allocated(device) / 2**20
    return held


def peak_memory() -> int:
    """Return the most memory that this process has held, in kB.

    On Linux it is read from /proc: `ru_maxrss` survives an exec, and would be that of the process that started this
    one. Elsewhere it is in bytes on macOS, and `peak_wset` on Windows.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    if (most := getattr(psutil.Process().memory_info(), "peak_wset", None)) is not None:
        return most // 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)


def sample_images(base: Victim, n: int) -> Float[Tensor, "b c h w"]:
    """Return n different photographs, preprocessed for the victim: the bundled ones, shifted cyclically."""
    samples = [image.pixels for image in open_images("samples") if image.pixels is not None]
    shifted = (ImageChops.offset(samples[i % len(samples)], 37 * (i // len(samples))) for i in range(n))
    return torch.stack([base.preprocessing(pixels) for pixels in shifted])

"""`privlab bench startup`: what a command costs before it works, next to the imports that it cannot do without."""

import itertools
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from privlab.base import Progress
from privlab.benchmarks.common import MAIN, Bench, Process, machine

_TORCH, _TIMM = "import torch", "import torch, timm"
_HELP, _WRONG, _START = "privlab --help", "refuse a wrong name", "privlab attack, until its victim is built"

_TARGETS = {
    "help_over_import_torch": "≤ 0.15",
    "wrong_name_over_import_torch": "≤ 0.2",
    "attack_start_over_import_torch_timm": "≤ 1.3",
}


def bench_startup(*, repeats: int, progress: Progress = lambda done, total: None) -> Bench:
    """Measure the processor time of processes that start, side by side in `repeats` rounds after one that warms up.

    `help_over_import_torch`: the help of `privlab`; `wrong_name_over_import_torch`: `privlab attack` with an unknown
    model; both over a process that imports torch and nothing else. `attack_start_over_import_torch_timm`: `privlab
    attack` until it reads the weights of its victim, a file that holds none, over a process that imports torch and
    timm. Times include the start of Python.

    Args:
        repeats: rounds that count, ≥ 1; medians are returned.
        progress: is called with the processes run and their number.

    Raises:
        PrivlabError: if a process ends otherwise than it must.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        empty = folder / "empty.safetensors"
        empty.touch()
        processes = _processes(empty)
        total, done = (repeats + 1) * len(processes), itertools.count(1)
        seconds: dict[str, list[float]] = {each: [] for each in processes}
        for _ in range(repeats + 1):
            for each, process in processes.items():
                seconds[each].append(process.seconds(folder))
                progress(next(done), total)
    medians = {each: statistics.median(found[1:]) for each, found in seconds.items()}
    setup = {"repeats": repeats} | machine(torch.device("cpu"))
    return Bench(_figures(medians), _TARGETS, medians, setup, unit="start")


def _processes(empty: Path) -> dict[str, Process]:
    """Return what is measured.

    Args:
        empty: a file of weights that cannot be read.
    """
    attack = ("attack", "--setting", "c", "--model")
    started = (*attack, "deit_s_mjp", "--weights", str(empty))
    return {
        _TORCH: Process(_TORCH),
        _TIMM: Process(_TIMM),
        _HELP: Process(MAIN, ("--help",), said="Usage: privlab"),
        _WRONG: Process(MAIN, (*attack, "nope"), status=2, said="Unknown model 'nope'"),
        _START: Process(MAIN, started, status=2, said=f"'{empty}' cannot be read as weights"),
    }


def _figures(seconds: Mapping[str, float]) -> dict[str, float]:
    return {
        "help_over_import_torch": seconds[_HELP] / seconds[_TORCH],
        "wrong_name_over_import_torch": seconds[_WRONG] / seconds[_TORCH],
        "attack_start_over_import_torch_timm": seconds[_START] / seconds[_TIMM],
    }

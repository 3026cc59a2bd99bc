"""What this machine has, and what is missing for which feature."""

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch

from privlab.errors import PrivlabError
from privlab.lpips_backbones import BACKBONES, find_backbone
from privlab.machine import versions
from privlab.victims import ARCHITECTURES
from privlab.weights import WeightsUnavailable, pretrained_file

__all__ = ["examine"]

Row = Mapping[str, str]


def examine(lpips_weights: Path | None = None) -> list[Row]:
    """Return rows of what, whether it is there ("ok" or "missing"), what was found, and what it is for."""
    return [
        *(_row(name, found is not None, found or "not installed", _use(name)) for name, found in versions().items()),
        _row("threads", True, f"{torch.get_num_threads()} of {os.cpu_count()} cores", "speed on a CPU"),
        _row("gpu", torch.cuda.is_available(), _gpu(), "--device cuda"),
        _row("disk", True, f"{shutil.disk_usage(Path.cwd()).free / 1e9:.0f} GB free here", "run directories"),
        *(_pretrained(name, timm_name) for name, timm_name in ARCHITECTURES.items()),
        *(_backbone(net, lpips_weights) for net in BACKBONES),
        _row("datasets", find_spec("datasets") is not None, "the extra privlab[datasets]", "--images hf:NAME"),
    ]


def _row(what: str, there: bool, found: str, use: str) -> Row:
    return {"what": what, "state": "ok" if there else "missing", "found": found, "needed for": use}


def _use(package: str) -> str:
    return {"breaching": "privlab bench attack", "lpips": "the metrics lpips_*"}.get(package, "everything")


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "torch sees no CUDA device"


def _pretrained(name: str, architecture: str) -> Row:
    use = f"--weights pretrained with {name}, {name}_mjp, {name}_nope"
    try:
        return _row(f"weights {name}", True, str(pretrained_file(architecture, download=False)), use)
    except WeightsUnavailable as error:
        return _row(f"weights {name}", False, str(error), use)


def _backbone(net: str, weights: Path | None) -> Row:
    try:
        return _row(f"lpips {net}", True, str(find_backbone(net, weights, download=False)), f"the metric lpips_{net}")
    except PrivlabError as error:
        return _row(f"lpips {net}", False, str(error), f"the metric lpips_{net}")

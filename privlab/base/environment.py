"""What this machine is: the device to compute on, versions, hardware, the commit of a checkout."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from privlab.base.errors import PrivlabError

__all__ = ["commit", "hardware", "pick_device", "versions"]

_PACKAGES = (
    "privlab",
    "torch",
    "torchvision",
    "timm",
    "lpips",
    "breaching",
    "scikit-image",
    "numpy",
    "pandas",
    "pyarrow",
)


def pick_device(name: str) -> torch.device:
    """Return the device of "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        PrivlabError: for another name, or a GPU that is not there.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, colon, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (colon and not number.isdecimal())):
        raise PrivlabError(f"Unknown device '{name}'. Use auto, cpu, cuda or cuda:N.")
    if name == "cpu":
        return torch.device("cpu")
    if int(number or 0) >= torch.cuda.device_count():
        raise PrivlabError(
            f"Device '{name}' is not there: torch sees {torch.cuda.device_count()} GPUs. Use --device cpu."
        )
    return torch.device("cuda", int(number or 0))


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that shape a result; None for one that is missing."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def hardware(device: torch.device) -> dict[str, object]:
    """Return the platform, the processor, the threads and the device that a result was computed on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": gpu,
    }


def commit() -> dict[str, object] | None:
    """Return commit and dirty flag of the checkout around the working directory; None outside of one."""
    try:
        head = _git("rev-parse", "HEAD")
        return {"sha": head, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

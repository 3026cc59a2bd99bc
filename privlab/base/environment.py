"""What this machine is: the device to compute on, versions, hardware, the commit of a checkout."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from privlab.base.errors import PrivlabError

if TYPE_CHECKING:
    import torch

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


def check_device(name: str) -> None:
    """Refuse what is not the name of a device, which costs no import of torch.

    Raises:
        PrivlabError: for another name than "auto", "cpu", "cuda" and "cuda:N".
    """
    kind, colon, number = name.partition(":")
    if name not in ("auto", "cpu") and (kind != "cuda" or (colon and not number.isdecimal())):
        raise PrivlabError(f"Unknown device '{name}'. Use auto, cpu, cuda or cuda:N.")


def pick_device(name: str) -> "torch.device":
    """Return the device of "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        PrivlabError: for another name, or a GPU that is not there.
    """
    import torch

    check_device(name)
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    number = name.partition(":")[2]
    if int(number or 0) >= torch.cuda.device_count():
        raise PrivlabError(
            f"Device '{name}' is not there: torch sees {torch.cuda.device_count()} GPUs. Use --device cpu."
        )
    return torch.device("cuda", int(number or 0))


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that shape a result; None for one that is missing."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in _PACKAGES}


def hardware(device: "torch.device") -> dict[str, object]:
    """Return the platform, the processor, the threads and the device that a result was computed on."""
    import torch

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": gpu,
    }


def core_count() -> int:
    """Return the number of processor cores that this process may use; where nothing restricts it, all."""
    import psutil

    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # macOS has none
        return len(process.cpu_affinity())
    return psutil.cpu_count() or 1


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


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None for one that is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None

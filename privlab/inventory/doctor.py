"""The packages, hardware and weights of this machine, and which features need those that are not there."""

import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import requires
from importlib.resources import files
from pathlib import Path

import torch

from privlab.base import PrivlabError, version_of, versions
from privlab.metrics import LPIPS_BACKBONES, find_backbone, is_shipped
from privlab.victims import ARCHITECTURES, COMPACT, PLACERS, ZOO, WeightsUnavailable, pretrained_file, shipped_file

Finding = Mapping[str, str]

_EXTRAS: Mapping[str, str] = tomllib.loads(files("privlab.inventory").joinpath("extras.toml").read_text("utf-8"))

_USES = {"lpips": "the metrics lpips_*"}


def examine(lpips_weights: Path | None = None) -> list[Finding]:
    """Return a row for each part: what, its state ("ok", "missing" or "optional"), what was found, its use."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return [
        *(
            _row(name, found is not None, found or "not installed", _USES.get(name, "everything"))
            for name, found in versions().items()
            if name not in _EXTRAS
        ),
        _row("threads", True, f"{torch.get_num_threads()} of {os.cpu_count()} cores", "speed on a CPU"),
        _row("gpu", gpu is not None, gpu or "torch sees no CUDA device", "--device cuda"),
        _row("disk", True, f"{shutil.disk_usage(Path.cwd()).free / 1e9:.0f} GB free here", "run directories"),
        *(_pretrained_weights(name, timm_name) for name, timm_name in ARCHITECTURES.items() if name not in COMPACT),
        _shipped_weights("zoo victims", list(ZOO), "their names in --model, and --weights pretrained"),
        _shipped_weights("zoo predictors", list(PLACERS), "--reassembly mp3 or droppos"),
        *(_backbone(net, lpips_weights) for net in LPIPS_BACKBONES),
        *(_extra(name, use) for name, use in _EXTRAS.items()),
    ]


def _row(what: str, there: bool, found: str, use: str) -> Finding:
    state = "ok" if there else "missing" if use == "everything" else "optional"
    return {"what": what, "state": state, "found": found, "needed for": use}


def _extra(name: str, use: str) -> Finding:
    """Return whether all packages of an extra are installed, or the command that installs them."""
    found = {package: version_of(package) for package in _packages(name)}
    if lacking := [package for package, there in found.items() if there is None]:
        return _row(f"extra {name}", False, f"no {', '.join(lacking)}: pip install 'privlab[{name}]'", use)
    return _row(f"extra {name}", True, ", ".join(f"{package} {there}" for package, there in found.items()), use)


def _packages(extra: str) -> Iterator[str]:
    """Yield the packages that privlab's own metadata list for an extra, as 'datasets>=2.19; extra == "datasets"'."""
    for requirement in requires("privlab") or ():
        needed, _, condition = requirement.partition(";")
        if re.search(rf"""extra == ["']{extra}["']""", condition) and (named := re.match(r"[\w.-]+", needed)):
            yield named[0]


def _pretrained_weights(name: str, architecture: str) -> Finding:
    use = f"--weights pretrained with {name}, {name}_mjp, {name}_nope"
    try:
        return _row(f"weights {name}", True, str(pretrained_file(architecture, download=False)), use)
    except WeightsUnavailable as error:
        return _row(f"weights {name}", False, str(error), use)


def _shipped_weights(what: str, names: Sequence[str], use: str) -> Finding:
    """Return whether this package holds the trained weights of all these models, as it should."""
    if lacking := [name for name in names if shipped_file(name) is None]:
        return _row(what, False, f"only in a clone of privlab: {', '.join(lacking)}", use)
    return _row(what, True, f"come with privlab: {', '.join(names)}", use)


def _backbone(net: str, weights: Path | None) -> Finding:
    use = f"the metric lpips_{net}" + ("; without it lpips is by squeeze" if net == "alex" else "")
    try:
        path = find_backbone(net, weights, download=False)
    except PrivlabError as error:
        return _row(f"lpips {net}", False, str(error), use)
    return _row(f"lpips {net}", True, f"{'comes with privlab: ' if is_shipped(path) else ''}{path}", use)

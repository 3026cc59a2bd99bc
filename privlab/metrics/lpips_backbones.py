"""Where the pretrained backbones of LPIPS come from: privlab, a file, a folder, torchvision's cache, or its download.

A distance taken with a random backbone looks plausible and means nothing, so no backbone is ever made up: a missing
file is an error, and the hash of the file that was read goes with the metric.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from privlab.base import PrivlabError, check_name, sha256_of

_FOLDER = Path(str(resources.files("privlab.metrics"))) / "backbones"
_HOW = "Give the file, or the folder that holds it, with --lpips-weights PATH."


class LpipsUnavailable(PrivlabError):
    """The pretrained backbone of an LPIPS network is not on this machine and cannot be downloaded."""


@dataclass(frozen=True)
class LpipsBackbone:
    """One of torchvision's networks as LPIPS uses it; its pooling needs images of at least `min_side` pixels a side."""

    prefix: str  # of the names of the files with its weights
    weight: str  # name of torchvision's enum entry
    min_side: int


LPIPS_BACKBONES: dict[str, LpipsBackbone] = {
    "alex": LpipsBackbone("alexnet", "AlexNet_Weights.IMAGENET1K_V1", min_side=31),
    "vgg": LpipsBackbone("vgg16", "VGG16_Weights.IMAGENET1K_V1", min_side=16),
    "squeeze": LpipsBackbone("squeezenet1_1", "SqueezeNet1_1_Weights.IMAGENET1K_V1", min_side=17),
}
"""The networks of LPIPS by the names of its columns, with torchvision's weights and the least side of an image."""

SHIPPED: dict[str, tuple[str, str]] = {
    "squeeze": (
        "squeezenet1_1_features.safetensors",
        "29dd9af42ad48cb39a767454d382a2232dbc1625a1de3f00fca4868ee65dfc4b",
    )
}
"""The networks whose backbones come with privlab, each with the name of its file and the file's SHA-256."""


def net_at_hand(weights: Path | None = None, *, download: bool = True) -> tuple[str, str | None]:
    """Return the LPIPS network for who names none: AlexNet, as in papers, or else SqueezeNet, with the reason.

    Args:
        weights: as in `find_backbone`; where it is a folder, it must hold the backbone of one of the two.
        download: as in `find_backbone`.

    Raises:
        LpipsUnavailable: if `weights` holds the backbone of neither.
    """
    try:
        find_backbone("alex", weights, download=download)
    except LpipsUnavailable as error:
        if weights is not None and not (weights.is_dir() and _in_folder(weights, "squeeze").is_file()):
            raise
        return "squeeze", str(error)
    return "alex", None


def find_backbone(net: str, weights: Path | None = None, *, download: bool = True) -> Path:
    """Return the file of the pretrained backbone of an LPIPS network.

    Args:
        net: "alex", "vgg" or "squeeze".
        weights: the file, or a folder with a file named after the network (alexnet…, vgg16…, squeezenet1_1…); nothing
            else is tried, but that "squeeze" comes with privlab, if a folder lacks it too. None takes what comes with
            privlab, or else looks into torchvision's cache.
        download: whether a file that is missing in the cache is downloaded as torchvision does; never with
            HF_HUB_OFFLINE=1, nor if `weights` is given.

    Raises:
        PrivlabError: if there is no network of that name, or the backbone that came with privlab is damaged.
        LpipsUnavailable: if the file is in none of these places; the message names them.
    """
    check_name("LPIPS network", net, LPIPS_BACKBONES)
    if weights is None:
        return _shipped(net) if net in SHIPPED else _from_torchvision(net, download)
    path = _in_folder(weights, net) if weights.is_dir() else weights
    if not path.is_file() and weights.is_dir() and net in SHIPPED:
        return _shipped(net)
    if not path.is_file():
        raise LpipsUnavailable(f"No pretrained backbone for lpips_{net}: found no file {path}. {_HOW}")
    return path


def read_features(path: Path) -> tuple[dict[str, Tensor], str]:
    """Return the tensors named `features.*` in a .safetensors or torch file, and the SHA-256 of the file.

    Raises:
        PrivlabError: if the file is truncated, holds code, or holds no tensors by name.
    """
    from privlab.victims import read_state

    features = {name: tensor for name, tensor in read_state(path).items() if name.startswith("features.")}
    return features, sha256_of(path)


def load_features(trunk: torch.nn.Module, features: Mapping[str, Tensor], path: Path) -> None:
    """Load torchvision's tensors into the slices of LPIPS's trunk, every tensor or none.

    Args:
        trunk: the backbone of an LPIPS network. Its slices keep torchvision's indices: `features.3.weight` is
            `slice2.3.weight`.
        features: torchvision's tensors by their names `features.*`.
        path: the file that they came from, for the error message.

    Raises:
        PrivlabError: if a tensor is missing, unexpected or of another shape; the message names it.
    """
    from privlab.victims import misfits

    own = {f"features.{name.split('.', 1)[1]}": name for name in trunk.state_dict()}
    if found := misfits(features, {name: trunk.state_dict()[slot] for name, slot in own.items()}):
        raise PrivlabError(f"{path} does not fit this LPIPS network. Found {found}.")
    trunk.load_state_dict({own[name]: tensor for name, tensor in features.items()})


def is_shipped(path: Path) -> bool:
    """Return whether a backbone's file is one of those that come with privlab."""
    return path.parent == _FOLDER


def _shipped(net: str) -> Path:
    """Return the file that came with privlab, if its content is what it was."""
    name, sha256 = SHIPPED[net]
    path = _FOLDER / name
    if not path.is_file():
        raise LpipsUnavailable(f"No pretrained backbone for lpips_{net}: this package lacks {path}. Install it again.")
    if (found := sha256_of(path)) != sha256:
        raise PrivlabError(
            f"The backbone of lpips_{net} that came with privlab is damaged: the SHA-256 of {path} must be "
            f"{sha256[:12]}…. Found {found[:12]}…: install privlab again."
        )
    return path


def _in_folder(folder: Path, net: str) -> Path:
    """Return the first file named after the network, or the pattern that was looked for if there is none."""
    prefix = LPIPS_BACKBONES[net].prefix
    name = re.compile(rf"{prefix}(?!_bn)([-_].*)?\.(safetensors|pth|pt|bin)")
    found = sorted(path for path in folder.iterdir() if name.fullmatch(path.name))
    return found[0] if found else folder / f"{prefix}*.safetensors or {prefix}*.pth"


def _from_torchvision(net: str, download: bool) -> Path:
    import torchvision

    url = torchvision.models.get_weight(LPIPS_BACKBONES[net].weight).url
    path = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if not path.is_file() and (why := _download(url, path) if download else "was not tried"):
        found = f"{path} does not exist, and {url} {why}"
        raise LpipsUnavailable(f"No pretrained backbone for lpips_{net}: {found}. {_HOW}")
    return path


def _download(url: str, path: Path) -> str:
    """Download into torchvision's cache; return why it failed, or an empty string."""
    from privlab.victims.weights import offline, reachable

    if offline():
        return "was not tried (HF_HUB_OFFLINE is set)"
    if not reachable(url):
        return "cannot be reached"
    sha256_start = path.stem.rpartition("-")[2]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=sha256_start, progress=False)
    except (OSError, RuntimeError) as error:  # RuntimeError: the content has another hash
        return f"failed ({error})"
    return ""

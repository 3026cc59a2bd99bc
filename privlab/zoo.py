"""The compact ViTs that come with privlab: their shapes, and their trained weights where the package holds them."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

__all__ = ["BASE", "COMPACT", "ZOO", "Entry", "shipped"]

_CIFAR: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 128,
    "depth": 4,
    "num_heads": 4,
    "num_classes": 10,
    "pretrained_cfg_overlay": {
        "input_size": (3, 32, 32),
        "crop_pct": 1.0,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "num_classes": 10,
    },
}

BASE = "vit_tiny_patch16_224"
COMPACT: dict[str, dict[str, Any]] = {"cifar_vit": _CIFAR}
"""Our name of an architecture -> what it changes of timm's `BASE`. N = 64 tokens are fewer than D = 128, MJP's too."""


@dataclass(frozen=True)
class Entry:
    """A victim of the zoo: its architecture, its variant ("", "_nope" or "_mjp") and one line on its training."""

    architecture: str
    variant: str
    about: str


ZOO: dict[str, Entry] = {
    "cifar_vit": Entry("cifar_vit", "", "plain"),
    "cifar_vit_early": Entry("cifar_vit", "", "plain, after one epoch"),
    "cifar_vit_nope": Entry("cifar_vit", "_nope", "without position embeddings"),
    "cifar_vit_mjp": Entry("cifar_vit", "_mjp", "MJP at γ = 0.03, as the paper trains"),
    "cifar_vit_mjp27": Entry("cifar_vit", "_mjp", "MJP at γ = 0.27"),
}
"""The victims of the zoo by name."""


def shipped(name: str) -> Path | None:
    """Return the weights of a victim of the zoo; None where this package holds none."""
    path = Path(str(resources.files("privlab.models") / f"{name}.safetensors"))
    return path if path.is_file() else None

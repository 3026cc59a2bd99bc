"""The compact networks that come with privlab: their shapes, and their trained weights where the package holds them."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

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

_TINY: dict[str, Any] = _CIFAR | {
    "img_size": 64,
    "patch_size": 8,
    "num_classes": 200,
    "pretrained_cfg_overlay": _CIFAR["pretrained_cfg_overlay"] | {"input_size": (3, 64, 64), "num_classes": 200},
}

BASE = "vit_tiny_patch16_224"
COMPACT: dict[str, dict[str, Any]] = {"cifar_vit": _CIFAR, "tiny_vit": _TINY}
"""Our name of an architecture -> its changes to timm's `BASE`. N = 64 tokens are fewer than D = 128, as in MJP."""

NOT_ATTACKED = (
    *("swin_t", "swin_s", "swin_b", "cifar_swin", "resnet50", "cifar_resnet"),
    *("cifar_vit_idx", "vit_ti_idx", "deit_ti_idx", "deit_s_idx"),
    *("cifar_vit_relpos", "vit_ti_relpos", "vit_s_relpos", "vit_b_relpos"),
)
"""The classifiers that `privlab.experiments` trains and evaluates, which are not plain ViTs."""


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
    "cifar_vit_mjp": Entry("cifar_vit", "_mjp", "fine-tuned with MJP at γ = 0.03"),
    "cifar_vit_mjp27": Entry("cifar_vit", "_mjp", "fine-tuned with MJP at γ = 0.27"),
    "cifar_vit_mp3": Entry("cifar_vit", "", "MP3-pretrained, fine-tuned"),
    "cifar_vit_droppos": Entry("cifar_vit", "", "DropPos-pretrained, fine-tuned"),
}
"""The victims of the zoo by name."""


@dataclass(frozen=True)
class Placer:
    """A position predictor of the zoo: its kind ("mp3" or "droppos"), and the compact ViT whose patches it places."""

    kind: str
    architecture: str


PLACERS: dict[str, Placer] = {
    "cifar_mp3": Placer("mp3", "cifar_vit"),
    "cifar_droppos": Placer("droppos", "cifar_vit"),
    "tiny_mp3": Placer("mp3", "tiny_vit"),
    "tiny_droppos": Placer("droppos", "tiny_vit"),
}
"""The position predictors of the zoo by name; those of `tiny_vit` come with a clone, not with a wheel."""


def placer(kind: str, grid: tuple[int, int], patch: int) -> str | None:
    """Return the name of the zoo's position predictor for a grid and a side of patches; None where there is none.

    Args:
        kind: "mp3" or "droppos".
        grid: the number of patches in a column and in a row.
        patch: the side of a patch, in pixels.
    """
    for name, each in PLACERS.items():
        side, own = (COMPACT[each.architecture][key] for key in ("img_size", "patch_size"))
        if (each.kind, own, (side // own,) * 2) == (kind, patch, grid):
            return name
    return None


def shipped_file(name: str) -> Path | None:
    """Return the weights of a victim or a position predictor of the zoo; None where this package holds none."""
    path = Path(str(resources.files("privlab.victims.zoo_weights") / f"{name}.safetensors"))
    return path if path.is_file() else None

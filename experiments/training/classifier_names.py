"""The classifiers that are trained and evaluated, but not attacked: their names and shapes, without torch."""

from typing import Any

from privlab.base import unknown_name
from privlab.victims.names import victim_names
from privlab.victims.zoo import BASE, COMPACT

_VIT = COMPACT["cifar_vit"]
_SWIN: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 2,
    "embed_dim": 48,
    "depths": (2, 2, 2),
    "num_heads": (2, 4, 8),
    "window_size": 4,
    "num_classes": 10,
    "pretrained_cfg_overlay": _VIT["pretrained_cfg_overlay"],
}
_RESNET: dict[str, Any] = {
    "channels": (32, 64, 128, 256),
    "num_classes": 10,
    "pretrained_cfg_overlay": _VIT["pretrained_cfg_overlay"],
}

CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "swin_t": ("swin_tiny_patch4_window7_224", {}),
    "swin_s": ("swin_small_patch4_window7_224", {}),
    "swin_b": ("swin_base_patch4_window7_224", {}),
    "cifar_swin": ("swin_tiny_patch4_window7_224", _SWIN),
    "resnet50": ("resnet50", {}),
    "cifar_resnet": ("resnet18", _RESNET),
    "cifar_vit_idx": (BASE, _VIT),
    "vit_ti_idx": ("vit_tiny_patch16_224", {}),
    "deit_ti_idx": ("deit_tiny_patch16_224", {}),
    "deit_s_idx": ("deit_small_patch16_224", {}),
    "cifar_vit_relpos": (BASE, _VIT | {"pos_embed": "none"}),
    "vit_ti_relpos": ("vit_tiny_patch16_224", {"pos_embed": "none"}),
    "vit_s_relpos": ("vit_small_patch16_224", {"pos_embed": "none"}),
    "vit_b_relpos": ("vit_base_patch16_224", {"pos_embed": "none"}),
}
"""Our name of a model that is trained and evaluated, but not attacked -> timm's name, and the changes to it.

The Swins also come as NAME_mjp (with absolute position embeddings and E_unk). NAME_relpos has relative position
embeddings alone; NAME_idx also has embeddings of the patches' own indices (IDX of MJP's Table 4).
"""


def classifier_names() -> list[str]:
    """Return the names of all models that can be trained and evaluated: victims, and `CLASSIFIERS`."""
    return [*victim_names(), *CLASSIFIERS]


def check_classifier_name(name: str) -> None:
    """Refuse a name that is neither of a victim nor of `CLASSIFIERS`; timm's names are left to timm.

    Raises:
        PrivlabError: for another name, with the nearest ones.
    """
    known = classifier_names()
    if not name.startswith("timm:") and name not in known and name.removesuffix("_mjp") not in CLASSIFIERS:
        raise unknown_name("model", name, [*known, "timm:NAME"])

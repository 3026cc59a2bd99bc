"""The names of the victims and of the other models, which cost no import of torch or timm."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from privlab.base import PrivlabError, unknown_name, with_plugins
from privlab.victims.zoo import COMPACT, NOT_ATTACKED, ZOO

ARCHITECTURES: dict[str, str] = {
    "vit_ti": "vit_tiny_patch16_224",
    "vit_s": "vit_small_patch16_224",
    "vit_b": "vit_base_patch16_224",
    "deit_ti": "deit_tiny_patch16_224",
    "deit_s": "deit_small_patch16_224",
    "deit_b": "deit_base_patch16_224",
    "cifar_vit": "cifar_vit",
    "tiny_vit": "tiny_vit",
}
"""Our name -> timm's, or that of a compact one of ours (`privlab.victims.zoo`).

Each also comes as NAME_nope (no position embeddings) and NAME_mjp (with E_unk).
"""

NORMALISATIONS: Mapping[str, tuple[Sequence[float], Sequence[float]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "inception": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
"""The means and deviations that have a name: timm's constants, and pixels in [0, 1] as they are."""

_PATCH = 16
"""The side of the patches of timm's architectures above, in pixels."""


def victim_names() -> list[str]:
    """Return the names of all victims, those of other packages included (`privlab.victims`), which load nothing."""
    ours = [name + variant for name in ARCHITECTURES for variant in ("", "_nope", "_mjp")]
    return [*dict.fromkeys([*ours, *ZOO]), *with_plugins({}, "privlab.victims")]


def resolve_own(name: str) -> tuple[str, str]:
    """Return the architecture of a victim of ours, by timm's name of it or by that of `COMPACT`, and its variant.

    Raises:
        PrivlabError: for another name, with the nearest ones.
    """
    for variant in ("_mjp", "_nope", ""):
        base = name.removesuffix(variant)
        if base in ARCHITECTURES and base + variant == name:
            return ARCHITECTURES[base], variant
    if name in ZOO:
        return ZOO[name].architecture, ZOO[name].variant
    if name.removesuffix("_mjp") in NOT_ATTACKED:
        raise PrivlabError(
            f"This needs a plain ViT, timm's VisionTransformer. Found {name}: `privlab evaluate` and `privlab train "
            f"classify|mjp{'|finetune' if name.endswith('_relpos') else ''}` take it, nothing else."
        )
    raise unknown_name("model", name, [*victim_names(), "timm:NAME", "FOLDER"])


def check_victim_name(name: str) -> None:
    """Refuse a name of no victim; whether timm has what "timm:NAME" names is left to timm.

    Raises:
        PrivlabError: for another name, with the nearest ones, and for a folder without a model.
    """
    if _is_ours(name):
        resolve_own(name)


def _is_ours(name: str) -> bool:
    """Return whether a model is not timm's, of another package, or in a folder."""
    return not (name.startswith("timm:") or name in with_plugins({}, "privlab.victims") or folder_of(name))


def folder_of(name: str) -> Path | None:
    """Return the folder that names a model, as transformers' save_pretrained writes it; None for another name.

    Raises:
        PrivlabError: for a path at which there is none.
    """
    path = Path(name)
    is_path = path.exists() or len(path.parts) > 1
    if not is_path or name.startswith("timm:") or name in victim_names():
        return None
    if (path / "config.json").is_file():
        return path
    raise PrivlabError(
        "A model is a name of `privlab list victims`, timm:NAME, or a folder with config.json and weights, as "
        f"transformers' save_pretrained writes it. Found no config.json in '{name}'."
    )


def check_img_size(name: str, img_size: int | None) -> None:
    """Refuse a side that the patches of a victim of ours do not divide; other models are checked when they are made.

    Raises:
        PrivlabError: if the side is not a multiple of the patches'.
    """
    if img_size is None or not _is_ours(name):
        return
    architecture, _ = resolve_own(name)
    patch = COMPACT.get(architecture, {}).get("patch_size", _PATCH)
    if img_size % patch:
        raise size_error(name, img_size, patch)


def normalisation_of(stated: str, channels: int | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the deviation of each channel that a name or MEAN/STD states, one number being for all.

    Raises:
        PrivlabError: if it is neither, or does not have a number for each channel, where their number is given.
    """
    if stated in NORMALISATIONS:
        mean, std = (of_channels(values, channels or 3) for values in NORMALISATIONS[stated])
        return mean, std
    try:
        mean, std = (tuple(float(value) for value in part.split(",")) for part in stated.split("/"))
    except ValueError:
        mean, std = (), ()
    count = channels or max(len(mean), len(std), 1)
    mean, std = (values * count if len(values) == 1 else values for values in (mean, std))
    if {len(mean), len(std)} != {count} or not all(map(math.isfinite, (*mean, *std))) or 0 in std:
        raise PrivlabError(
            f"A normalisation is {', '.join(NORMALISATIONS)}, or MEAN/STD with a number for each of {count} channels, "
            f"or one for all, and no deviation of 0, as 0.5/0.5. Found '{stated}'."
        )
    return mean, std


def of_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return the mean or deviation of each channel: those of the colours, and their mean for luma and other bands."""
    luma = sum(values) / len(values)
    return (luma,) if channels == 1 else (*values, *[luma] * channels)[:channels]


def size_error(name: str, img_size: int, patch: int) -> PrivlabError:
    """Return the error for a side of the input that is not a multiple of the patches'.

    Args:
        name: of the model.
        img_size: the side that was asked for, in pixels.
        patch: the side of the patches, in pixels.
    """
    return PrivlabError(
        f"--img-size {img_size} does not fit {name}: an image is cut into patches of {patch}×{patch} pixels, so give a "
        f"multiple, such as {max(1, img_size // patch) * patch}."
    )


def file_and_entry(path: Path) -> tuple[Path, str | None]:
    """Return the file or folder of FILE#ENTRY and the name of the entry; None if the path has none."""
    if path.exists():
        return path, None
    name, _, entry = path.name.partition("#")
    return path.with_name(name or "#"), entry


def check_weights_file(path: Path) -> None:
    """Refuse weights whose file or folder is not there; FILE#ENTRY is an entry of FILE.

    Raises:
        PrivlabError: if there is no such file.
    """
    if not file_and_entry(path)[0].exists():
        raise PrivlabError(f"No weights file at '{path}'. Give a file, auto, pretrained or random.")

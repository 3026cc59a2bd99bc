"""Which attack reconstructs what from each kind of ViT: closed forms and linear inversion, on drawn weights."""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from torch import nn

from privlab.base import PrivlabError, check_range, first
from privlab.evaluation import Case, applicable
from privlab.evaluation.records import exact_db
from privlab.grids import specify
from privlab.runs import execute
from privlab.victims import as_timm, victim

ATTACKS = {"patch-gradient": "gradients", "token-separation": "gradients", "least-squares": "features"}
"""The attacks of the study -> what is released to them."""

ARCHITECTURES = (
    "vit_tiny_patch16_224",
    "vit_small_patch8_224",
    "vit_small_patch32_224",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "vit_base_patch16_clip_224",
    "vit_base_patch16_siglip_224",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "eva02_tiny_patch14_224",
    "vit_small_patch16_rope_224",
    "beit_base_patch16_224",
    "vit_relpos_small_patch16_224",
    "vit_relpos_small_patch16_rpn_224",
    "swin_tiny_patch4_window7_224",
    "cait_xxs24_224",
    "vit_small_r26_s32_224",
    "transformers:vit",
    "transformers:dinov2",
    "transformers:clip",
    "transformers:siglip",
    "transformers:vit-grey",
    "transformers:vit-4-channels",
    "transformers:vit-rectangle",
)
"""The models of the study, by timm's names and those of `_OF_TRANSFORMERS`: one or two of each kind."""

_OF_TRANSFORMERS: Mapping[str, tuple[str, int, int, int, int]] = {
    "transformers:vit": ("ViT", 16, 3, 4, 4),
    "transformers:dinov2": ("Dinov2", 14, 3, 4, 4),
    "transformers:clip": ("CLIPVision", 32, 3, 4, 4),
    "transformers:siglip": ("SiglipVision", 16, 3, 4, 4),
    "transformers:vit-grey": ("ViT", 16, 1, 4, 4),
    "transformers:vit-4-channels": ("ViT", 16, 4, 4, 4),
    "transformers:vit-rectangle": ("ViT", 16, 3, 3, 5),
}
"""Name -> class of Hugging Face's `transformers`, patch size, channels, rows and columns of patches."""

_DEPTH = 4
"""Blocks of a model of transformers: the closed forms read the embedding and the first block."""

_GRID = 4
"""Patches in a column and in a row: few enough that N < D, which the closed forms need, for every model."""

_GAIN = 3.0
"""The least gain over the control, a flat image, in dB, of an attack that counts as partly successful."""


@dataclass(frozen=True)
class ArchitectureStudy:
    """Attack models of timm and of transformers with drawn weights, on photographs of 4 × 4 patches.

    Weights are as these draw them, but for layer scales: these begin at 10⁻⁵ or 10⁻⁶, where no block adds anything that
    float32 tells, and leave it in training. Here each is `layer_scale`.

    Args:
        models: timm's names, and "transformers:vit" and its like: of the width that their configuration has by default,
            with four blocks. Those that this timm lacks are left out, and without transformers its own.
        images: a source of photographs, such as "samples" or a folder.
        limit: photographs, ≥ 1.
        layer_scale: the value of all layer scales, > 0.
        classes: of the heads, ≥ 2.
        seed: seed of the weights, in [0, 2^63).

    Raises:
        PrivlabError: if a value is out of its range, or there is none of the models.
    """

    models: tuple[str, ...] = ARCHITECTURES
    images: str = "samples"
    limit: int = 4
    layer_scale: float = 0.1
    classes: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError if a number is out of its range, or timm has none of the models."""
        check_range(self.limit >= 1, "limit", "a positive number", self.limit)
        check_range(0 < self.layer_scale < math.inf, "layer_scale", "a finite number > 0", self.layer_scale)
        check_range(self.classes >= 2, "classes", "at least 2", self.classes)
        if not any(map(_is_there, self.models)):
            raise PrivlabError(f"timm has none of these models. Found {first(list(self.models))}.")

    def __call__(self, say: Callable[[str], object] = lambda line: None) -> list[dict[str, Any]]:
        """Run the study and return a row for each model.

        A row has `model`, and `refused` with the reason, or `input` (c, h, w), `patch`, `width`, `tokens`, and for each
        attack `outcome` ("exact" on all photographs, "partial", "none" or "refused"), `psnr` in dB (mean over the
        photographs, in place), `exact` (the number of photographs with every grey level right) of `images`, the PSNR
        `flat` of one colour, or the `reason`.

        Args:
            say: called with each model's name before it is attacked.
        """
        rows = []
        for name in filter(_is_there, self.models):
            say(name)
            try:
                rows.append(self._row(name))
            except PrivlabError as refusal:
                rows.append({"model": name, "refused": str(refusal)})
        return rows

    def _row(self, name: str) -> dict[str, Any]:
        vit = self._model(name)
        base = victim(vit)
        tokens = base.model.grid[0] * base.model.grid[1] + base.model.vit.num_prefix_tokens
        facts = {"input": base.model.image_shape, "patch": base.model.patch, "width": base.model.vit.embed_dim}
        found: dict[str, Any] = {}
        for attack, release in ATTACKS.items():
            asked: dict[str, Any] = {"images": (self.images,), "limit": self.limit, "seed": self.seed}
            asked |= {"release": release, "metrics": ("psnr",), "attack": (attack,), "model": ("own",)}
            spec = specify(**asked, block="stock")
            refused = applicable(spec, base)[1]
            if refused:
                found[attack] = {"outcome": "refused", "reason": refused[attack]}
            else:
                found[attack] = _attacked(attack, spec, vit, math.prod(base.model.image_shape))
        return {"model": name, **facts, "tokens": tokens, "attacks": found}

    def _model(self, name: str) -> nn.Module:
        """Return a model with drawn weights, for images of 4 × 4 patches; of its own size if it has no patches."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self.seed)
            drawn = _of_transformers(name, self.classes) if name in _OF_TRANSFORMERS else None
            vit: Any = drawn or timm.create_model(name, num_classes=self.classes)
            patch = getattr(getattr(vit, "patch_embed", None), "patch_size", None)
            if drawn is None and hasattr(vit, "set_input_size") and hasattr(vit, "blocks") and patch:
                torch.manual_seed(self.seed)
                vit = timm.create_model(name, num_classes=self.classes, img_size=_GRID * patch[0])
            for key, tensor in vit.named_parameters():
                if key.rpartition(".")[2] in ("gamma", "gamma_1", "gamma_2"):
                    tensor.fill_(self.layer_scale)
        return vit.eval()


def _is_there(name: str) -> bool:
    """Return whether timm, or transformers if it is installed, has a model of a name."""
    if name in _OF_TRANSFORMERS:
        return importlib.util.find_spec("transformers") is not None
    return timm.is_model(name)


def _of_transformers(name: str, classes: int) -> nn.Module:
    """Return a model of transformers as timm's, with a head of so many classes."""
    import transformers

    kind, patch, channels, rows, columns = _OF_TRANSFORMERS[name]
    size = {"patch_size": patch, "num_channels": channels, "num_hidden_layers": _DEPTH}
    side: Any = rows * patch if rows == columns else (rows * patch, columns * patch)
    config = getattr(transformers, f"{kind}Config")(**size, image_size=side)
    vit = as_timm(getattr(transformers, f"{kind}Model")(config).eval())
    vit.reset_classifier(classes)
    return vit


def _attacked(attack: str, spec: Case, vit: nn.Module, values: int) -> dict[str, Any]:
    """Return how an attack did, over all photographs of so many values each."""
    with TemporaryDirectory() as folder:
        frame: Any = execute(spec, Path(folder, "run"), own=vit).records
    placed = frame[(frame.geometry == "in_place") & (frame.status == "ok")]
    mine, flat = (placed[placed.attack == name].psnr for name in (attack, "control:flat"))
    if not len(mine):
        return {"outcome": "none", "reason": str(frame.reason.dropna().iloc[0])}
    exact, mean, control = int((mine > exact_db(values)).sum()), float(mine.mean()), float(flat.mean())
    outcome = "exact" if exact == len(mine) else "partial" if mean > control + _GAIN else "none"
    return {"outcome": outcome, "psnr": mean, "exact": exact, "images": len(mine), "flat": control}


def to_rows(facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of text for each model: its numbers, and the outcome of each attack with its mean PSNR in dB.

    Args:
        facts: what a study returned.
    """
    return [
        {"model": of["model"]}
        | {key: str(of.get(key, "—")) for key in ("patch", "width", "tokens")}
        | {name: "refused" if "refused" in of else _cell(of["attacks"][name]) for name in ATTACKS}
        for of in facts
    ]


def reasons(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each model or attack that is refused, with the reason.

    Args:
        facts: what a study returned.
    """
    lines = []
    for of in facts:
        refused = {"": of["refused"]} if "refused" in of else {}
        refused |= {name: cell["reason"] for name, cell in of.get("attacks", {}).items() if "reason" in cell}
        lines += [f"{of['model']}: {reason}" for reason in refused.values()]
    return lines


def _cell(of: Mapping[str, Any]) -> str:
    if "psnr" not in of:
        return of["outcome"]
    count = f" ({of['exact']} of {of['images']} exact)" if of["outcome"] == "partial" and of["exact"] else ""
    return f"{of['outcome']}, {of['psnr']:.1f}{count}"

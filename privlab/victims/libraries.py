"""ViTs of transformers, torchvision and MONAI as timm's `VisionTransformer`: the same weights, tokens and outputs.

Nothing here imports these libraries: a model brings its settings and its tensors, and a file of transformers may have
its `config.json` next to it.
"""

import copy
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import LayerNorm, get_act_layer
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from privlab.base import PrivlabError, check_name, first, one_line, read_json
from privlab.victims.layouts import KINDS, from_any_layout, kind_of
from privlab.victims.names import NORMALISATIONS
from privlab.victims.weights import misfits

_MODULES = {
    "peft": "peft.",
    "transformers": "transformers.",
    "torchvision": "torchvision.models.vision_transformer",
    "MONAI": "monai.networks.nets.vit",
}
"""The libraries, and how the names of the modules that define their models begin."""

_ACTIVATIONS = {"gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh"}

_NEEDED = {"patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight"}
"""The tensors of each ViT, by timm's names."""

_SETTINGS = {"layer_norm_eps": float | int, "num_attention_heads": int, "hidden_act": str, "image_size": int | list}
"""What is read of a configuration of transformers."""

_SAME = 1e-4
"""Largest deviation of the tokens, relative to their size: rounding in float32."""


class ClassAndMean(nn.Module):
    """The class token, and the mean of the patches' tokens behind it: what a classifier of DINOv2 reads."""

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, tokens: Float[Tensor, "b t d"]) -> Float[Tensor, "b w"]:
        """Return both, one behind the other."""
        return torch.cat([tokens[:, 0], tokens[:, self.prefix :].mean(1)], 1)


def library_of(model: nn.Module) -> str | None:
    """Return the library that defines a model's class, or one that it inherits from; None for timm and others."""
    modules = [kind.__module__ for kind in type(model).__mro__]
    return next((name for name, start in _MODULES.items() if any(each.startswith(start) for each in modules)), None)


def merged(model: nn.Module) -> nn.Module:
    """Return a copy of peft's model with its adapters merged into the weights; another model is returned as it is."""
    own: Any = model
    return copy.deepcopy(own).merge_and_unload() if hasattr(own, "merge_and_unload") else model


def merged_state(state: Mapping[str, Tensor], model: nn.Module | None) -> Mapping[str, Tensor]:
    """Return a state dict of a model with adapters of peft merged into the weights; one without them as it is.

    Args:
        state: of the model, or of what it was before it got adapters.
        model: the model, which may wrap that of peft; None if it is not known.

    Raises:
        PrivlabError: for adapters of a model that is not known, or is not peft's.
    """
    adapters = [name for name in state if ".lora_" in name]
    if not adapters:
        return state
    parts = [] if model is None else [*model.named_modules()]
    for path, part in parts:
        if hasattr(part, "merge_and_unload"):
            start = f"{path}." if path else ""
            twin = copy.deepcopy(part)
            twin.load_state_dict({name.removeprefix(start): each for name, each in state.items()}, strict=False)
            return merged(twin).state_dict()
    raise PrivlabError(
        f"LoRA's adapters are merged by peft's own model. Found {first(adapters, 1)}, and no PeftModel: give that as "
        "the model after the training, or the state dict of merge_and_unload()."
    )


def as_timm(model: nn.Module) -> VisionTransformer:
    """Return timm's `VisionTransformer` with the weights of another library's ViT; tokens and outputs are compared.

    Of transformers: ViT, DeiT, DINOv2 (with registers too), and the vision towers of CLIP and SigLIP, with their
    classifiers, or the projection of CLIP, as head, or without. Of torchvision and MONAI: their ViTs. Adapters of peft
    are merged. The model is left as it is.

    Raises:
        PrivlabError: for another kind of model, parts that timm's ViT lacks, or if the tokens differ.
    """
    model = merged(model)
    tensors, name = model.state_dict(), type(model).__name__
    state = from_any_layout(tensors)
    kind = kind_of(tensors)
    config = _settings(model)
    if kind is None or library_of(model) != KINDS[kind].library or not state.keys() >= _NEEDED:
        raise PrivlabError(f"{name} must be one of the ViTs {', '.join(KINDS)}. Found {first([*tensors], 1)}.")
    vit = _build(kind, state, config)
    if odd := misfits(state, vit.state_dict()):
        raise PrivlabError(
            f"{name} is not a ViT of one classifier on pooled tokens, as timm has it. Found {odd}: give "
            f"the model without its head, such as {name.split('For')[0]}Model."
        )
    vit.load_state_dict(state)
    trained = from_any_layout(
        {key: torch.zeros_like(p) + float(p.requires_grad) for key, p in model.named_parameters()}
    )
    for key, parameter in vit.named_parameters():
        parameter.requires_grad_(bool(trained[key].any()))
    vit.train(model.training)
    _compare(model, vit)
    return vit


def of_folder(folder: Path, state: Mapping[str, Tensor], img_size: int | None = None) -> VisionTransformer:
    """Return timm's ViT of the kind that transformers wrote into a folder, without its weights.

    Args:
        folder: it has the model's `config.json`.
        state: the tensors, by timm's names.
        img_size: the side of the input, in pixels; None is that of the configuration.

    Raises:
        PrivlabError: for another kind of model.
    """
    config = config_beside(folder)
    kind = f"transformers-{config.get('model_type')}"
    if kind not in KINDS or not state.keys() >= _NEEDED:
        kinds = [name.removeprefix("transformers-") for name in KINDS if name.startswith("transformers-")]
        raise PrivlabError(
            f"The model in '{folder}' must be one of the ViTs {', '.join(kinds)}. Found the model_type "
            f"'{config.get('model_type')}' in its config.json."
        )
    try:
        return _build(kind, state, config if img_size is None else {**config, "image_size": img_size})
    except (RuntimeError, TypeError, AssertionError) as error:
        raise PrivlabError(f"The model in '{folder}' cannot be built: {one_line(error)}.") from error


def options_of(kind: str, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of timm's `VisionTransformer` that another library's tensors and configuration show.

    Args:
        kind: one of `KINDS`.
        state: the tensors, by timm's names.
        config: `layer_norm_eps`, `hidden_act` and `num_attention_heads` as transformers calls them; those that are not
            given are as the library has them, and the number of heads is left out.

    Raises:
        PrivlabError: for another activation than timm's.
    """
    of = KINDS[kind]
    activation = config.get("hidden_act", of.activation)
    check_name("hidden_act of transformers", activation, _ACTIVATIONS)
    pooled = "norm.weight" not in state or "cls_token" not in state
    heads = {"num_heads": config["num_attention_heads"]} if "num_attention_heads" in config else {}
    return {
        "class_token": "cls_token" in state,
        "reg_tokens": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "pre_norm": "norm_pre.weight" in state,
        "init_values": 1.0 if "blocks.0.ls1.gamma" in state else None,
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "global_pool": "map" if "attn_pool.latent" in state else "avg" if pooled else "token",
        "final_norm": "norm.weight" in state,
        "fc_norm": False,
        "norm_layer": partial(LayerNorm, eps=config.get("layer_norm_eps", of.eps)),
        "act_layer": get_act_layer(_ACTIVATIONS[activation]),
        **of.options,
        **heads,
    }


def config_beside(file: Path) -> Mapping[str, Any]:
    """Return the configuration of transformers in the folder of a file of weights; nothing where there is none.

    Raises:
        PrivlabError: if it is not a valid JSON object, or a setting is of another kind.
    """
    path = (file if file.is_dir() else file.parent) / "config.json"
    config = read_json(path, "settings of the model") if path.is_file() else {}
    config = config["vision_config"] if isinstance(config.get("vision_config"), dict) else config
    for name, kinds in _SETTINGS.items():
        if name in config and not isinstance(config[name], kinds):
            raise PrivlabError(f"{name} in '{path}' must be what transformers writes. Found {config[name]!r}.")
    return config


def normalisation_beside(folder: Path) -> str | None:
    """Return how transformers' image processor in a folder normalises, as MEAN/STD; None where none is there.

    Raises:
        PrivlabError: if it is not a valid JSON object, or its means and deviations are no lists of numbers.
    """
    path = folder / "preprocessor_config.json"
    config = read_json(path, "settings of the image processor") if path.is_file() else {}
    if not config.keys() & {"do_normalize", "image_mean"}:
        return None
    if not config.get("do_normalize", True):
        return "0/1"
    parts = list[str]()
    for name in ("image_mean", "image_std"):
        values = config.get(name)
        if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
            raise PrivlabError(f"{name} in '{path}' must be a list of numbers. Found {values!r}.")
        parts.append(",".join(map(str, values)))
    return "/".join(parts)


def fit_head(vit: VisionTransformer, state: Mapping[str, Tensor]) -> None:
    """Give a ViT the classifier that another library's tensors have: without bias, or on class token and mean.

    Args:
        vit: the model, whose head is replaced where it is another one.
        state: the tensors, by timm's names.
    """
    head = state.get("head.weight")
    if head is None or head.ndim != 2:
        return
    classes, width = head.shape
    if width == 2 * vit.embed_dim:
        pool: Any = ClassAndMean(vit.num_prefix_tokens)
        vit.attn_pool, vit.global_pool, vit.pool_include_prefix = pool, "map", True
    bias = "head.bias" in state
    if width != vit.embed_dim or not bias:
        vit.head = nn.Linear(width, classes, bias=bias)


def _settings(model: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the settings of a model of another library, by the names of transformers."""
    match library_of(model):
        case "torchvision":
            heads = model.encoder.layers[0].self_attention.num_heads
            return {"num_attention_heads": heads, "layer_norm_eps": model.encoder.ln.eps}
        case "MONAI":
            return {"num_attention_heads": model.blocks[0].attn.num_heads, "layer_norm_eps": model.norm.eps}
        case _:
            config = getattr(model, "config", None)
            config = getattr(config, "vision_config", config)
            return {name: getattr(config, name) for name in _SETTINGS if hasattr(config, name)}


def _build(kind: str, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> VisionTransformer:
    """Return timm's ViT of the sizes that the tensors show."""
    width, channels, *patch = state["patch_embed.proj.weight"].shape
    options, head = options_of(kind, state, config), state.get("head.weight")
    unplaced = 0 if "no_embed_class" in options else options["class_token"] + options["reg_tokens"]
    unplaced += "dist_token" in state
    side = math.isqrt(state["pos_embed"].shape[1] - unplaced) * patch[0]
    mean, std = NORMALISATIONS[KINDS[kind].normalisation]
    with torch.random.fork_rng(devices=[]):
        vit = (VisionTransformerDistilled if "dist_token" in state else VisionTransformer)(
            img_size=config.get("image_size", side),
            patch_size=patch[0],
            in_chans=channels,
            embed_dim=width,
            depth=len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
            mlp_ratio=len(state["blocks.0.mlp.fc1.weight"]) / width,
            num_classes=0 if head is None else len(head),
            **options,
        )
    fit_head(vit, state)
    config_of_images: Any = {
        "architecture": kind,
        "input_size": (channels, *vit.patch_embed.img_size),  # pyright: ignore[reportGeneralTypeIssues]
        "mean": mean,
        "std": std,
        "interpolation": "bilinear" if KINDS[kind].library == "torchvision" else "bicubic",
        "crop_pct": 1.0,
    }
    vit.pretrained_cfg = config_of_images
    return vit.to(state["patch_embed.proj.weight"])


@torch.no_grad()
def _compare(model: nn.Module, vit: VisionTransformer) -> None:
    """Check that the last tokens, before or after the last norm, and the outputs of a head are the model's own."""
    own, twin = copy.deepcopy(model).eval(), copy.deepcopy(vit).eval()
    height, width = twin.patch_embed.img_size or (0, 0)
    like = twin.patch_embed.proj.weight
    images = torch.randn(2, twin.patch_embed.proj.in_channels, height, width, generator=torch.Generator()).to(like)
    normed: list[Tensor] = []
    hook = twin.norm.register_forward_hook(lambda _, args, out: normed.extend((args[0], out)))
    outputs = twin(images)
    hook.remove()
    if library_of(model) == "transformers":
        tower: Any = getattr(own, "base_model", own)
        theirs = getattr(tower, "vision_model", tower)(pixel_values=images).last_hidden_state
        off = min(_distance(theirs, tokens) for tokens in normed)
        made: Any = own(pixel_values=images)
        heads = [of for name in ("logits", "image_embeds") if (of := getattr(made, name, None)) is not None]
    else:
        made = own(images)
        theirs = made[0] if isinstance(made, tuple) else made
        off, heads = min(_distance(theirs, of) for of in (outputs, *normed)), []
    off = max([off, *(_distance(of, outputs) for of in heads)])
    if not off <= _SAME:
        name = type(model).__name__
        raise PrivlabError(f"{name} gives other tokens than timm's ViT with its weights: {off:.2g} apart.")


def _distance(theirs: Tensor, ours: Tensor) -> float:
    return torch.inf if theirs.shape != ours.shape else float((theirs - ours).abs().max() / theirs.abs().max())

"""ViTs of Hugging Face's `transformers` and of torchvision as timm's `VisionTransformer`: the same weights and tokens.

Nothing here imports these libraries: a model brings its configuration and its tensors.
"""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from timm.layers import LayerNorm, get_act_layer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from privlab.base import PrivlabError, check_name
from privlab.victims.layouts import from_any_layout, timm_names
from privlab.victims.names import NORMALISATIONS
from privlab.victims.weights import misfits

_KINDS: Mapping[str, tuple[dict[str, Any], str]] = {
    "vit": ({}, "inception"),
    "dinov2": ({"init_values": 1.0}, "imagenet"),
    "dinov2_with_registers": ({"init_values": 1.0, "no_embed_class": True}, "imagenet"),
    "clip_vision_model": ({"pre_norm": True}, "clip"),
    "siglip_vision_model": ({"class_token": False, "global_pool": "map"}, "inception"),
}
"""`model_type` of a configuration -> options of timm's `VisionTransformer`, and the normalisation of its images."""

_ACTIVATIONS = {"gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh"}

_SAME = 1e-4
"""Largest deviation of the tokens, relative to their size: rounding in float32."""


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model's class, or one that it inherits from, is of transformers."""
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def is_of_torchvision(model: nn.Module) -> bool:
    """Return whether a model is a ViT of torchvision."""
    return type(model).__module__ == "torchvision.models.vision_transformer"


def as_timm(model: nn.Module) -> VisionTransformer:
    """Return timm's `VisionTransformer` with the weights of a ViT of transformers or torchvision; tokens are compared.

    Of transformers: a ViT, DINOv2 (with registers too), or the vision tower of CLIP or SigLIP; with a classifier on the
    class token, or the projection of CLIP, as head, or without. The model is left as it is.

    Raises:
        PrivlabError: for another kind of model, parts that timm's ViT lacks, or if the tokens differ.
    """
    if is_of_torchvision(model):
        return _of_torchvision(model)
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    check_name("model_type of transformers", kind, _KINDS)
    state = timm_names(model.state_dict())
    vit = _build(config, kind, state)
    if odd := misfits(state, vit.state_dict()):
        raise PrivlabError(
            f"{type(model).__name__} is no ViT of one classifier on pooled tokens, as timm has it. Found {odd}: give "
            f"the model without its head, such as {type(model).__name__.split('For')[0]}Model."
        )
    vit.load_state_dict(state)
    trained = timm_names({key: torch.zeros_like(p) + float(p.requires_grad) for key, p in model.named_parameters()})
    for name, parameter in vit.named_parameters():
        parameter.requires_grad_(bool(trained[name].any()))
    vit.train(model.training)
    _compare(model, vit)
    return vit


def _of_torchvision(model: Any) -> VisionTransformer:  # noqa: ANN401
    """Return timm's `VisionTransformer` with the weights of torchvision's; its outputs are compared."""
    state, attention = from_any_layout(model.state_dict()), model.encoder.layers[0].self_attention
    with torch.random.fork_rng(devices=[]):
        vit = VisionTransformer(
            img_size=model.image_size,
            patch_size=model.patch_size,
            embed_dim=model.hidden_dim,
            depth=len(model.encoder.layers),
            num_heads=attention.num_heads,
            mlp_ratio=model.mlp_dim / model.hidden_dim,
            num_classes=model.num_classes,
            norm_layer=partial(LayerNorm, eps=model.encoder.ln.eps),
        )
    if odd := misfits(state, vit.state_dict()):
        raise PrivlabError(f"{type(model).__name__} of torchvision must have its own layers. Found {odd}.")
    vit.load_state_dict(state)
    trained = {key: torch.tensor(p.requires_grad) for key, p in model.named_parameters()}
    for name, kept in from_any_layout(trained).items():
        vit.get_parameter(name).requires_grad_(bool(kept))
    config_of_images: Any = {
        "architecture": "torchvision-vit",
        "input_size": (3, model.image_size, model.image_size),
        "mean": NORMALISATIONS["imagenet"][0],
        "std": NORMALISATIONS["imagenet"][1],
        "interpolation": "bilinear",
        "crop_pct": 1.0,
    }
    vit.pretrained_cfg = config_of_images
    vit.to(state["patch_embed.proj.weight"]).train(model.training)
    images = torch.randn(2, 3, model.image_size, model.image_size, generator=torch.Generator())
    own, twin = copy.deepcopy(model).eval(), copy.deepcopy(vit).eval()
    with torch.no_grad():
        images = images.to(twin.patch_embed.proj.weight)
        off = _distance(own(images), twin(images))
    if not off <= _SAME:
        raise PrivlabError(
            f"{type(model).__name__} gives other outputs than timm's ViT with its weights: {off:.2g} apart."
        )
    return vit


def _build(config: Any, kind: str, state: Mapping[str, Tensor]) -> VisionTransformer:  # noqa: ANN401
    options, normalisation = _KINDS[kind]
    mean, std = NORMALISATIONS[normalisation]
    check_name("hidden_act of transformers", config.hidden_act, _ACTIVATIONS)
    if getattr(config, "use_swiglu_ffn", False):
        raise PrivlabError(f"{kind} with use_swiglu_ffn has a gated MLP in an order of its own. Take timm's DINOv2.")
    head = state.get("head.weight")
    with torch.random.fork_rng(devices=[]):
        vit = VisionTransformer(
            img_size=config.image_size,
            patch_size=config.patch_size,
            in_chans=config.num_channels,
            embed_dim=config.hidden_size,
            depth=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            mlp_ratio=state["blocks.0.mlp.fc1.weight"].shape[0] / config.hidden_size,
            qkv_bias="blocks.0.attn.qkv.bias" in state,
            reg_tokens=state["reg_token"].shape[1] if "reg_token" in state else 0,
            num_classes=0 if head is None else len(head),
            norm_layer=partial(LayerNorm, eps=config.layer_norm_eps),
            act_layer=get_act_layer(_ACTIVATIONS[config.hidden_act]),
            **options,
        )
    if head is not None and "head.bias" not in state:
        vit.head = nn.Linear(head.shape[1], len(head), bias=False)
    config_of_images: Any = {
        "architecture": f"transformers-{kind}",
        "input_size": (config.num_channels, *vit.patch_embed.img_size),  # pyright: ignore[reportGeneralTypeIssues]
        "mean": mean,
        "std": std,
        "interpolation": "bicubic",
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
    tower: Any = getattr(own, "base_model", own)
    tower = getattr(tower, "vision_model", tower)
    theirs = tower(pixel_values=images).last_hidden_state
    normed: list[Tensor] = []
    hook = twin.norm.register_forward_hook(lambda _, args, out: normed.extend((args[0], out)))
    outputs = twin(images)
    hook.remove()
    off = min(_distance(theirs, each) for each in normed)
    made = own(pixel_values=images)
    heads = [each for name in ("logits", "image_embeds") if (each := getattr(made, name, None)) is not None]
    off = max([off, *(_distance(each, outputs) for each in heads)])
    if not off <= _SAME:
        name = type(model).__name__
        raise PrivlabError(f"{name} gives other tokens than timm's ViT with its weights: {off:.2g} apart.")


def _distance(theirs: Tensor, ours: Tensor) -> float:
    return torch.inf if theirs.shape != ours.shape else float((theirs - ours).abs().max() / theirs.abs().max())

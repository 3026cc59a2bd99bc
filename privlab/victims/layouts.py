"""Layouts of weights: what a file wraps them in, and timm's names for them, whoever named them.

Weights are found in entries of a file ("state_dict", "model_ema") and under prefixes of names ("module.", "model.").
Their own names may be timm's, the MJP authors', or those of torchvision, transformers or MONAI (`KINDS`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from privlab.base import PrivlabError, check_name, first

State = dict[str, Tensor]

_WRAPPERS = re.compile(r"^((module|_orig_mod|_module|victim|vit|net)\.)+")

_ENTRIES = (
    *("current_model_state", "state_dict", "model", "model_state_dict", "net", "weights", "student"),
    *("state_dict_ema", "model_ema"),
)
"""The entries of checkpoints, those that come first being taken first; Lightning averages into `state_dict`."""

_PATCHES = re.compile(
    r"^(.*?)(patch_embed\.proj|conv_proj|embeddings\.patch_embedding(s(\.projection)?)?"
    r"|patch_embedding\.patch_embeddings(\.1)?)\.(weight|base_layer\.weight)$"
)
"""The patch projection in the layouts that are known; what stands before it wraps the model."""

_BESIDE = re.compile(
    r"^(heads?|classifier|fc|(cls|distillation)_classifier|visual_projection|fc_norm|norm|pos_embed|cls_token|unk_embed"
    r"|dlocr|dal)\b"
)
"""Tensors of a ViT that may be outside the wrapper of its backbone."""

_PRETRAINING = re.compile(r"^(decoder|mask_token)")
"""Tensors of masked autoencoders (MAE, RETFound) that no ViT has."""

_TRANSFORMERS = (
    (r"^(vit|deit|dinov2|dinov2_with_registers|vision_model)\.", ""),
    (r"^(classifier|cls_classifier|visual_projection)\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
    (r"^embeddings\.(cls_token|class_embedding)$", "cls_token"),
    (r"^embeddings\.(register_tokens|distillation_token)$", "reg_token"),
    (r"^embeddings\.position_embeddings?(\.weight)?$", "pos_embed"),
    (r"^embeddings\.patch_embedding(s\.projection)?\.", "patch_embed.proj."),
    (r"^pre_layrnorm\.", "norm_pre."),
    (r"^(post_)?layernorm\.", "norm."),
    (r"^head\.probe$", "attn_pool.latent"),
    (r"^head\.attention\.in_proj_", "attn_pool.in_proj."),
    (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
    (r"^head\.layernorm\.", "attn_pool.norm."),
    (r"^head\.mlp\.", "attn_pool.mlp."),
    (r"^(encoder\.)?layers?\.(\d+)\.", r"blocks.\2."),
    (r"\.(layernorm_before|layer_norm1)\.", ".norm1."),
    (r"\.(layernorm_after|layer_norm2)\.", ".norm2."),
    (r"\.(attention\.attention|attention|self_attn)\.([qkv])\w+\.", r".attn.\2."),
    (r"\.(attention\.output\.dense|attention\.o_proj|self_attn\.out_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"^(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
)
"""Names of transformers, of its versions 4 and 5, and timm's for them."""

_TORCHVISION = (
    (r"^class_token$", "cls_token"),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"(^|\.)conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(3|linear_2)\.", ".mlp.fc2."),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.head\.", "head."),
)
"""Names of torchvision's `VisionTransformer`, and timm's for them."""

_MONAI = (
    (r"^patch_embedding\.position_embeddings$", "pos_embed"),
    (r"^patch_embedding\.patch_embeddings\.", "patch_embed.proj."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.linear([12])\.", r".mlp.fc\1."),
    (r"^classification_head\.", "head."),
)
"""Names of MONAI's `ViT`, and timm's for them."""

_PEFT = re.compile(r"^base_model\.model\.|(?<=\.)(modules_to_save\.default|base_layer)\.")
"""What peft adds to the names of the tensors that it does not adapt."""

_LEFT_OUT = re.compile(r"pooler\.|embeddings\.mask_token|embeddings\.position_ids|cross_attn\.")
"""Tensors of transformers and MONAI that no token of an image depends on."""

_UNLIKE = (
    (r"\.mlp\.(weights_in|gate_proj)\.", "a gated MLP (use_swiglu_ffn): take timm's DINOv2"),
    (r"\.lambda_1$", "relative positions (BEiT): take timm's BEiT"),
    (r"^embeddings\.patch_embeddings\.weight$", "rotary positions (DINOv3): take timm's DINOv3"),
    (r"^patch_embed\.proj\.1\.", "patches that a linear layer embeds (proj_type='perceptron'): take proj_type='conv'"),
    (r"^head\.0\.", "a tanh behind its classifier (post_activation='Tanh'): take post_activation=None"),
)
"""What timm's `VisionTransformer` does not have: a pattern of the name, and what is said of it."""


@dataclass(frozen=True)
class Kind:
    """A kind of ViT of another library, with what timm needs and the tensors do not show.

    `marker` is a pattern of a name that this kind has and those above it in `KINDS` do not. `eps` and `activation` are
    those of its configurations by default; `options` are further ones of timm's `VisionTransformer`.
    """

    library: str
    marker: str
    rules: tuple[tuple[str, str], ...]
    eps: float
    normalisation: str
    activation: str = "gelu"
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


_UNPLACED = MappingProxyType({"no_embed_class": True})  # class and register tokens have no position embedding

KINDS = {
    "torchvision-vit": Kind("torchvision", r"(^|\.)conv_proj\.", _TORCHVISION, 1e-6, "imagenet"),
    "monai-vit": Kind("MONAI", r"(^|\.)patch_embedding\.patch_embeddings\.", _MONAI, 1e-5, "none", options=_UNPLACED),
    "transformers-clip_vision_model": Kind(
        "transformers", r"embeddings\.class_embedding$", _TRANSFORMERS, 1e-5, "clip", "quick_gelu"
    ),
    "transformers-siglip_vision_model": Kind(
        "transformers", r"embeddings\.patch_embedding\.", _TRANSFORMERS, 1e-6, "inception", "gelu_pytorch_tanh"
    ),
    "transformers-dinov2_with_registers": Kind(
        "transformers", r"embeddings\.register_tokens$", _TRANSFORMERS, 1e-6, "imagenet", options=_UNPLACED
    ),
    "transformers-dinov2": Kind("transformers", r"\.layer_scale1\.lambda1$", _TRANSFORMERS, 1e-6, "imagenet"),
    "transformers-deit": Kind("transformers", r"\bembeddings\.distillation_token$", _TRANSFORMERS, 1e-12, "imagenet"),
    "transformers-vit": Kind(
        "transformers", r"embeddings\.patch_embeddings\.projection", _TRANSFORMERS, 1e-12, "inception"
    ),
}
"""The kinds of ViTs of other libraries; the first whose marker is found is taken."""


def kind_of(names: Iterable[str]) -> str | None:
    """Return which of `KINDS` has tensors of these names; None for another layout, such as timm's."""
    names = [*names]
    return next((kind for kind, each in KINDS.items() if any(re.search(each.marker, name) for name in names)), None)


def choose(content: object, source: str, wanted: str | None = None) -> tuple[State, str]:
    """Return the weights that a checkpoint holds, and what is said of where they were; "" if they were by themselves.

    Args:
        content: what was read of a file.
        source: the file's name, for the error.
        wanted: the entry or the prefix that is asked for, such as "model_ema" or "teacher".

    Raises:
        PrivlabError: if there are no tensors by name, or not what is asked for.
    """
    found = {
        "/".join(part for part in (entry, prefix.rstrip(".")) if part): (entry, prefix, state)
        for entry, tensors in sorted(_states(content), key=lambda each: _rank(each[0]))
        for prefix, state in _wrapped(tensors).items()
    }
    most = max((len(state) for *_, state in found.values()), default=0)
    found = {name: each for name, each in found.items() if 2 * len(each[2]) > most}  # a step, a centre, class weights
    if not found:
        raise PrivlabError(f"'{source}' holds no state dict: expected tensors by name, found {type(content).__name__}.")
    names = [*found]
    if wanted is not None:
        names = [name for name in found if wanted in (name, *name.split("/"))]
        if not names:
            check_name(f"entry of {source}", wanted, [*found])
    entry, prefix, state = found[names[0]]
    own_training = prefix.endswith("vit.") and kind_of(state) is None  # its wrapper goes without saying
    is_wrapped = _WRAPPERS.sub("", prefix) and not own_training
    told = [f"the tensors whose names begin with '{prefix}'"] if is_wrapped else []
    if entry and (told or entry not in ("state_dict", "model")):
        told = [f"the entry '{entry}'", *told]
    if len(found) > 1:
        others = ", ".join(f"#{name}" for name in found if name != names[0])
        told = [f"'{names[0]}'; the file also holds other weights (add to its name {others})"]
    return state, " and ".join(told)


def _rank(entry: str) -> tuple[int, ...]:
    """Return where an entry comes in the order in which entries are taken; unknown ones come last."""
    return tuple(_ENTRIES.index(part) if part in _ENTRIES else len(_ENTRIES) for part in entry.split("/"))


def _states(content: object, path: str = "") -> Iterator[tuple[str, State]]:
    """Yield every mapping of names to tensors in a checkpoint, with the entries that lead to it."""
    if not isinstance(content, Mapping):
        return
    named = {name: value for name, value in content.items() if isinstance(name, str)}
    if tensors := {name: value for name, value in named.items() if isinstance(value, Tensor)}:
        yield path, tensors
    for name, value in named.items():
        if not name.startswith(("optim", "lr_sched", "scheduler")):
            yield from _states(value, f"{path}/{name}".lstrip("/"))


def _wrapped(state: State) -> dict[str, State]:
    """Return the tensors of each model in a state, by the prefix of its names: a student and a teacher are two."""
    prefixes = [match[1] for name in state if (match := _PATCHES.match(name))]
    if len(prefixes) < 2:
        return dict.fromkeys(prefixes or [""], state)
    return {prefix: {n: t for n, t in state.items() if n.startswith(prefix)} for prefix in prefixes}


def from_any_layout(state: Mapping[str, Tensor]) -> State:
    """Return a state in privlab's own layout: timm's names, and `unk_embed` for E_unk (1 × 1 × D) if there is one.

    Known layouts are timm's, privlab's own (timm's names and `unk_embed`), torchvision's, that of transformers, and the
    MJP authors', where `pos_embed.weight` has the rows class token, N patches, unknown, and DAL adds the training-only
    `dlocr.*`. Prefixes of what wraps the model are left out, and tensors outside its wrapper that are no head.
    Checkpoints of `privlab train` count as privlab's own.
    """
    named = _unwrapped(state)
    state = {name: tensor for name, tensor in named.items() if not name.startswith(("dlocr.", "dal."))}
    table = state.get("pos_embed.weight")
    if table is not None and table.ndim == 2:
        del state["pos_embed.weight"]
        state["pos_embed"], state["unk_embed"] = table[None, :-1], table[-1]
    if (unknown := state.pop("unk_embed", None)) is not None:
        state["unk_embed"] = unknown.reshape(1, 1, unknown.numel())
    return state


def _unwrapped(state: Mapping[str, Tensor]) -> State:
    """Return a state by timm's names, without wrappers; a part of a model, as a gradient may be, has no projection."""
    prefix = next((match[1] for name in state if (match := _PATCHES.match(name))), None)
    if prefix is None:
        return {bare_name(name): tensor.detach() for name, tensor in state.items()}
    parts, named = prefix.split(".")[:-1], State()
    for name, tensor in state.items():
        inside, bare = name.startswith(prefix), name.removeprefix(prefix)
        for part in () if inside else parts:
            bare = bare.removeprefix(f"{part}.")
        if (inside or _BESIDE.match(bare)) and not _PRETRAINING.match(bare):
            named[bare] = tensor.detach()
    if kind_of(named) is not None:
        return timm_names(named)
    if "head.weight" in named:
        return named
    return {re.sub(r"^(classifier|fc)\.", "head.", name): tensor for name, tensor in named.items()}


def _renamed(name: str, patterns: tuple[tuple[str, str], ...]) -> str:
    for pattern, new in patterns:
        name = re.sub(pattern, new, name)
    return name


def with_adapters(base: State, adapters: State, config: Mapping[str, Any], source: str) -> State:
    """Return weights with LoRA's adapters merged into them, W + s B A with s = α / r, or α / √r (rsLoRA).

    Args:
        base: the weights without adapters, by the names of any library.
        adapters: what peft saved: A and B of the layers, and the whole tensors of those that it trained besides.
        config: peft's `adapter_config.json`.
        source: the file of the adapters, for errors.

    Raises:
        PrivlabError: for other adapters than LoRA's, or of layers that the base does not have.
    """
    kind, merged = kind_of(base), dict(base)
    rules = () if kind is None else KINDS[kind].rules
    places = {_renamed(bare_name(name), rules): name for name in base}
    for name, tensor in adapters.items():
        plain = _PEFT.sub("", name)
        part = re.fullmatch(r"(.*)\.lora_([AB])\.(\w+\.)?weight", plain)
        if config.get("use_dora") or (part is None and ".lora_" in name):
            raise PrivlabError(f"{source} must hold LoRA's A and B. Found {name}: save merge_and_unload() instead.")
        plain = plain if part is None else f"{part[1]}.weight"
        renamed = _renamed(bare_name(plain), rules)
        place = places.get(renamed, renamed)
        if part is None:
            merged[place] = tensor
        elif place not in base:
            raise PrivlabError(f"{source} adapts {plain}, which its base does not have. Found {first([*base], 3)}.")
        elif part[2] == "A":
            B, A, W = adapters[name.replace(".lora_A.", ".lora_B.")].flatten(1), tensor.flatten(1), base[place]
            named = (
                alpha for key, alpha in config.get("alpha_pattern", {}).items() if re.search(rf"(^|\.){key}$", part[1])
            )
            alpha, r = next(named, config["lora_alpha"]), len(A)
            merged[place] = W + (alpha / (r**0.5 if config.get("use_rslora") else r) * (B @ A)).reshape(W.shape)
    return merged


def bare_name(name: str) -> str:
    """Return a tensor's name without the prefixes of what wraps the model: torch's, a victim, a training's module."""
    return _WRAPPERS.sub("", name)


def own_layout(model: nn.Module) -> State:
    """Return the tensors of a model in privlab's own layout: timm's names, and `unk_embed` for E_unk."""
    return {bare_name(name): tensor for name, tensor in model.state_dict().items()}


def by_order(state: State, names: list[str]) -> State:
    """Return arrays without names ("arr_0", as NumPy numbers them) by the names of a model, in its order.

    Args:
        state: the tensors.
        names: the names of the model's tensors, in the order of its state dict.

    Raises:
        PrivlabError: if there are not as many arrays as names.
    """
    if not all(re.fullmatch(r"arr_\d+", name) for name in state):
        return state
    if len(state) != len(names):
        raise PrivlabError(
            f"Arrays without names are read in the order of the model's {len(names)} tensors. Found {len(state)}: "
            "save them by name, as in numpy.savez(file, **arrays)."
        )
    return {name: state[f"arr_{i}"] for i, name in enumerate(names)}


def timm_names(tensors: Mapping[str, Float[Tensor, "..."]]) -> dict[str, Float[Tensor, "..."]]:
    """Return tensors of another library's ViT by timm's names: renamed, and queries, keys and values joined.

    That is linear, and each entry keeps its place in one tensor, so that it takes weights as well as their gradients
    and updates. The position embedding of a class token before registers is added to that token, as timm does: that
    suits weights alone. The tensors are those of one of `KINDS`.

    Raises:
        PrivlabError: for parts that timm's `VisionTransformer` does not have.
    """
    kind = kind_of(tensors) or "transformers-vit"
    named = {_renamed(name, KINDS[kind].rules): tensor for name, tensor in tensors.items()}
    found = {name: tensor for name, tensor in named.items() if not _LEFT_OUT.search(name)}
    _check_expressible(kind, found)
    for name in [name for name in found if ".attn.q." in name]:
        parts = [found.pop(name.replace(".attn.q.", f".attn.{part}."), None) for part in "qkv"]
        if any(part is None for part in parts):
            raise PrivlabError(f"{name} of {kind} must have keys and values as well. Found {first([*tensors], 3)}.")
        found[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat([part for part in parts if part is not None])
    classifies = any(re.search(r"(^|\.)classifier\.", name) for name in tensors)
    if classifies and kind == "transformers-clip_vision_model":  # it reads the mean of tokens that are not normalised
        found = {name: tensor for name, tensor in found.items() if not name.startswith("norm.")}
    if classifies and kind == "transformers-siglip_vision_model":  # it reads the mean of the tokens
        found = {name: tensor for name, tensor in found.items() if not name.startswith("attn_pool.")}
    for part in ("weight", "bias"):
        if (joint := found.pop(f"attn_pool.in_proj.{part}", None)) is not None:
            width = len(joint) // 3
            found[f"attn_pool.q.{part}"], found[f"attn_pool.kv.{part}"] = joint[:width], joint[width:]
    for name in ("cls_token", "pos_embed"):
        if name in found:
            found[name] = found[name].reshape(1, -1, found[name].shape[-1])
    if kind == "transformers-dinov2_with_registers" and "cls_token" in found:
        found["cls_token"] = found["cls_token"] + found["pos_embed"][:, :1]
        found["pos_embed"] = found["pos_embed"][:, 1:]
    if "head_dist.weight" in found:  # of timm's distilled ViT; without its head, timm has the token as a register
        found["dist_token"] = found.pop("reg_token")
    return found


def _check_expressible(kind: str, named: Mapping[str, Tensor]) -> None:
    """Check that timm's `VisionTransformer` has the parts of another library's ViT, by names that are timm's.

    Raises:
        PrivlabError: if it does not, with what would be right.
    """
    for pattern, what in _UNLIKE:
        if any(re.search(pattern, name) for name in named):
            raise PrivlabError(f"{kind} has {what}.")
    proj = named.get("patch_embed.proj.weight")
    if proj is not None and proj.ndim == 5:
        raise PrivlabError(
            f"{kind} has three-dimensional patches, {tuple(proj.shape[2:])}. No attack here reads these: audit a ViT "
            "that is fed the slices of a volume."
        )


def timm_gradients(gradients: Mapping[str, Tensor], shapes: Mapping[str, Tensor]) -> State:
    """Return gradients by timm's names; of tensors that are joined there, those with a part that has none are left out.

    Args:
        gradients: those of a model of timm or of another library, by its own names.
        shapes: all its parameters, by the same names.
    """
    zeros = {name: torch.zeros_like(p) for name, p in shapes.items()}
    whole = from_any_layout({name: zeros[name] + float(name in gradients) for name in shapes})
    named = from_any_layout({name: gradients.get(name, zeros[name]) for name in shapes})
    # the class token before registers holds its position embedding, which a gradient does not
    unplaced = {"cls_token"} if kind_of(shapes) == "transformers-dinov2_with_registers" else set[str]()
    return {name: g for name, g in named.items() if name not in unplaced and bool(whole[name].all())}

"""Which axes of which tensors a model key permutes, by family of models."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

Rules = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class WeightLayout:
    """Tensor names of one family of models, with the order of each axis.

    `layer` splits a tensor's name into the layer's index and the rest. `inner` gives one order per axis for each rest,
    and `outer` for each name outside of the layers. `owner` matches the names of tensors that stay with the key's owner
    and are not permuted.

    The names of the orders are: residual; qk and value, of the features of all heads; qkv, the three stacked; head, of
    the features of one head, shared by all heads; hidden; and up, which is hidden, or hidden twice if fc1 is gated.
    """

    layer: re.Pattern[str]
    inner: Mapping[str, tuple[str, ...]]
    outer: Mapping[str, tuple[str, ...]]
    owner: re.Pattern[str]


def affine(order: str, *modules: str) -> Rules:
    """Return the rules of norms, whose weight and bias have one axis (Eq. 12)."""
    return {f"{module}.{kind}": (order,) for module in modules for kind in ("weight", "bias")}


def linear(outputs: str, inputs: str, *modules: str, transposed: bool = False) -> Rules:
    """Return the rules of linear maps: weight is outputs × inputs, and bias has the axis of the outputs (Eq. 6, 13).

    Args:
        outputs: the order of the outputs, by its name in `WeightLayout`.
        inputs: the order of the inputs.
        modules: the maps that these orders hold for, by their names within a layer.
        transposed: whether weight is inputs × outputs, as in GPT-2.
    """
    axes = (inputs, outputs) if transposed else (outputs, inputs)
    weights: Rules = {f"{module}.weight": axes for module in modules}
    return weights | {f"{module}.bias": (outputs,) for module in modules}


VIT = WeightLayout(
    layer=re.compile(r"blocks\.(\d+)\.(.+)"),
    inner={
        **affine("residual", "norm1", "norm2"),
        **linear("qkv", "residual", "attn.qkv"),
        **affine("head", "attn.q_norm", "attn.k_norm"),
        **affine("value", "attn.norm"),
        **linear("value", "residual", "attn.gate"),
        **linear("residual", "value", "attn.proj"),
        **linear("up", "residual", "mlp.fc1"),
        **linear("hidden", "residual", "mlp.fc1_g", "mlp.fc1_x"),
        **affine("hidden", "mlp.norm"),
        **linear("residual", "hidden", "mlp.fc2"),
        "ls1.gamma": ("residual",),
        "ls2.gamma": ("residual",),
    },
    outer=affine("residual", "norm_pre"),
    owner=re.compile(
        r"(cls_token|reg_token|dist_token|pos_embed|unk_embed)|(patch_embed|norm|fc_norm|attn_pool|head|head_dist)\..+"
    ),
)
"""timm's VisionTransformer. The owner keeps embedding, final norm and head: they work on restored features."""

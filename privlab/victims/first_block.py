"""The first block of a victim by its parts, for closed forms that read attention and MLP one after the other."""

import copy
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import LayerScale, Mlp
from timm.models.vision_transformer import Attention, Block
from torch import Tensor, nn

from privlab.victims.anatomy import is_changed, told_of_places
from privlab.victims.model import AprilBlock, VictimModel

_SAME = 1e-4
"""Largest deviation of a block from its parts, relative to what it returns: rounding in float32."""


class PreNormBlock(nn.Module):
    """x ↦ y + ls2(MLP(norm2(y))) with y = x + ls1(attn(norm1(x))); attention gets what the model says of places.

    Args:
        block: a block with these parts; its layer scales may be `gamma_1` and `gamma_2`, or missing.
    """

    norm1: nn.LayerNorm
    norm2: nn.LayerNorm
    attn: Attention
    mlp: Mlp

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        parts: Any = block
        self.norm1, self.attn = parts.norm1, parts.attn
        self.norm2, self.mlp = parts.norm2, parts.mlp
        self.ls1, self.ls2 = _scale(block, 1), _scale(block, 2)
        self.told = {name: value.detach() for name, value in told_of_places(block).items()}

    def attention(self, z: Float[Tensor, "*b t d"]) -> Float[Tensor, "*b t d"]:
        """Return what attention adds to the tokens of one image, or of several."""
        return self._attend(z) if z.dim() == 3 else self._attend(z[None])[0]

    def forward(self, z: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the tokens of images after the block."""
        y = z + self._attend(z)
        return y + self.ls2(self.mlp(self.norm2(y)))

    def _attend(self, z: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        told = {name: value.to(z) for name, value in self.told.items()}
        return self.ls1(self.attn(self.norm1(z), **told))

    @property
    def reads_places(self) -> bool:
        """Return whether attention depends on the places of tokens, by a rotary embedding or a relative bias."""
        return type(self.attn) is not Attention


def first_block(model: VictimModel) -> PreNormBlock:
    """Return a copy of the first block in float64, without fused attention, which has no second derivatives.

    It is that of a victim for which `why_no_plain_block` has nothing to say.
    """
    block = PreNormBlock(copy.deepcopy(model.vit.blocks[0])).double().requires_grad_(False)
    setattr(block.attn, "fused_attn", False)  # noqa: B010  # timm declares it as final
    return block


@torch.no_grad()
def why_no_plain_block(model: VictimModel) -> str | None:
    """Return why the closed forms of the first block do not hold for a victim; None if they do.

    They need the embedded tokens to enter, as they are, a block of attention and MLP with LayerNorm before each; qkv,
    the projection and the two layers of the MLP have one matrix each. What a block is made of is read, and what it
    computes is compared with it.
    """
    block, before = model.vit.blocks[0], model.vit.norm_pre
    if isinstance(block, AprilBlock):
        return "the first block has neither pre-norm nor skip (--block april)"
    if not isinstance(before, nn.Identity):
        name = type(before).__name__
        return f"a pre-norm, {name} `norm_pre`, stands between the embedding and the first block, as in CLIP's models"
    parts = dict(block.named_children())
    kind = f"the first block, {type(block).__name__},"
    if not {"norm1", "attn", "norm2", "mlp"} <= parts.keys():
        return f"{kind} is not attention followed by an MLP"
    mlp, attn = parts["mlp"], parts["attn"]
    if type(mlp) is not Mlp or not isinstance(mlp.norm, nn.Identity):
        return f"{kind} has the MLP {type(mlp).__name__}, which is more than two layers with an activation between"
    for norm in ("norm1", "norm2"):
        layer = parts[norm]
        if not isinstance(layer, nn.LayerNorm) or layer.weight is None or layer.bias is None:
            return f"{kind} normalises by {type(layer).__name__}, and not by a LayerNorm with weight and bias"
    if not all(isinstance(_base(getattr(attn, name, None)), nn.Linear) for name in ("qkv", "proj")):
        return f"{kind} projects queries, keys and values by a matrix each"
    if type(block) is Block and not is_changed(block):
        return None
    like = next(block.parameters())
    size = model.vit.num_prefix_tokens + model.vit.patch_embed.num_patches, model.vit.embed_dim
    z = torch.linspace(-3, 3, size[0] * size[1]).sin().view(size).to(like)
    whole = block(z[None])
    if not float((PreNormBlock(block)(z[None]) - whole).abs().max()) <= _SAME * float(whole.abs().max()):
        return f"{kind} does more than LayerNorm, attention, LayerNorm and MLP, each added to the tokens"
    return None


def _base(layer: object) -> object:
    """Return the layer that LoRA adapts, or the layer itself."""
    return getattr(layer, "base_layer", layer)


def _scale(block: nn.Module, number: int) -> nn.Module:
    """Return the layer scale of a block's attention (1) or MLP (2); the identity where it has none."""
    γ = getattr(block, f"gamma_{number}", None)
    if γ is None:
        return getattr(block, f"ls{number}", nn.Identity())
    scale = LayerScale(len(γ)).to(γ)
    scale.gamma = nn.Parameter(γ.detach())
    return scale

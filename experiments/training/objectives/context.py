"""MP3 with a share of the patches as context: only context tokens give keys and values, all give queries."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from privlab.reassembly import Mp3Network
from privlab.reassembly.predictors import class_token


class MaskedMp3(Mp3Network):
    """MP3 in training, called with patches and the context of each image."""

    def forward(
        self, patches: Float[Tensor, "b n c p p"], context: Int[Tensor, "b m"] | None = None
    ) -> Float[Tensor, "b n s"]:
        """Return what `in_context` returns; without a context, all patches are context."""
        return super().forward(patches) if context is None else in_context(self, patches, context)


def in_context(
    network: Mp3Network, patches: Float[Tensor, "b n c p p"], context: Int[Tensor, "b m"]
) -> Float[Tensor, "b n s"]:
    """Return the logits of the slots for each patch if only some patches are context.

    Args:
        network: the predictor.
        patches: patches in [0, 1], in any order.
        context: the indices of the context patches of each image, without repetition.
    """
    n, m = patches.shape[1], context.shape[1]
    if m == n:
        return Mp3Network.forward(network, patches)
    order = _first(context, n)  # once: slices of the first rows are cheaper than gathers in every block
    vit, x = network.model.vit, network.embed(_rows(patches, order))
    x = torch.cat([class_token(vit, len(x)), x], 1)
    for block in vit.blocks:
        x = masked_block(block, x, 1 + m)
    return _rows(network.head(vit.norm(x[:, 1:])), order.argsort(1))


def masked_block(block: Any, x: Float[Tensor, "b t d"], m: int) -> Float[Tensor, "b t d"]:  # noqa: ANN401
    """Return the output of timm's block with keys and values of the first m rows alone.

    This equals dense attention with −∞ at the keys of all other rows, whose keys and values are never computed.

    Args:
        block: timm's Block of a plain ViT.
        x: the rows, context first; all of them give queries.
        m: the number of context rows, the class token included, in [1, t].
    """
    x = x + block.drop_path1(block.ls1(_masked_attention(block.attn, block.norm1(x), m)))
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def _masked_attention(attn: Any, x: Float[Tensor, "b t d"], m: int) -> Tensor:  # noqa: ANN401
    d, wide, bias = x.shape[2], attn.qkv.weight, attn.qkv.bias
    q = F.linear(x, wide[:d], None if bias is None else bias[:d])
    k, v = F.linear(x[:, :m], wide[d:], None if bias is None else bias[d:]).chunk(2, 2)
    q, k, v = (part.unflatten(2, (attn.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
    fused = F.scaled_dot_product_attention if attn.fused_attn else _attention
    return attn.proj(fused(q, k, v).transpose(1, 2).flatten(2))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * q.shape[-1] ** -0.5) @ k.mT).softmax(-1) @ v


def _first(chosen: Int[Tensor, "b m"], n: int) -> Int[Tensor, "b n"]:
    """Return the orders of n rows in which the chosen ones come first."""
    rank = torch.arange(n, 2 * n, device=chosen.device).repeat(len(chosen), 1)
    return rank.scatter(1, chosen, torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)).argsort(1)


def _rows(x: Float[Tensor, "b n *k"], order: Int[Tensor, "b n"]) -> Float[Tensor, "b n *k"]:
    """Return the rows of each matrix in its order, by index_select, whose backward pass is fast on a CPU."""
    b, n = order.shape
    flat = order + n * torch.arange(b, device=order.device)[:, None]
    return x.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, (b, n))

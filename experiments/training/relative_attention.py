"""2-D relative position biases on the attention of timm's ViT."""

from typing import Any

import torch
from jaxtyping import Float
from timm.layers import RelPosBias
from torch import Tensor, nn
from torch.nn import functional as F

TABLE = "rel_pos.relative_position_bias_table"
"""The end of the names of the biases."""


class RelativeBlock(nn.Module):
    """timm's plain block with the attention softmax(Q Kᵀ/√d + B) V; B depends on the offset of a key's slot.

    The offset is that from the query's slot. Each head of each block has a B of its own, zero at the start, in which
    the class token has rows and columns of its own. Closed forms of attention do not hold for it.

    Source: BEiT (Bao et al. 2021), as in MP3 (Zhai et al. 2022), Section 4.2.3.
    """

    def __init__(self, block: Any, grid: tuple[int, int], prefix: int) -> None:  # noqa: ANN401  # timm's Block
        super().__init__()
        self.norm1, self.attn, self.ls1, self.drop_path1 = block.norm1, block.attn, block.ls1, block.drop_path1
        self.norm2, self.mlp, self.ls2, self.drop_path2 = block.norm2, block.mlp, block.ls2, block.drop_path2
        self.rel_pos = RelPosBias(grid, block.attn.num_heads, prefix)
        nn.init.zeros_(self.rel_pos.relative_position_bias_table)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Apply attention, then the MLP."""
        x = x + self.drop_path1(self.ls1(self._attention(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))

    def _attention(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Apply attention with the bias; timm's own attention takes a bias only in its later versions."""
        attn, bias = self.attn, self.rel_pos.get_bias()
        q, k, v = attn.qkv(x).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if attn.fused_attn:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            mixed = torch.softmax(q @ k.mT * attn.scale + bias, -1) @ v
        return attn.proj(mixed.transpose(1, 2).flatten(2))

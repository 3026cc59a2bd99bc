"""Cloaks: weight matrices that an untrusted device multiplies with, hidden by a mask, scales and an order of the rows.

With W of u rows, and c, r and a integers of u entries, the device holds

    W̃_j = a_i W_i + r_i m,   i = order[j],   m = Σ_k c_k W_k,

and returns W̃ x. The owner's enclave computes the one product m·x itself, and W_i x = (W̃_j x − r_i m·x) / a_i. The mask
m turns every row into another direction: this is ArrowCloak (Wang et al., USENIX Security 2025), which its authors put
against the matching of directions (ArrowMatch). It covers Q, K and V, the projection after them, and both layers of the
MLP, each with its own cloak. Biases, norms, embedding and head stay in the enclave.

That the integers are these is read off a public implementation, of whose authorship nothing is known; the abstract says
no more than that vectors are protected by matrix-vector products.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.base import PrivlabError
from privlab.keys.layouts import VIT
from privlab.patches import bits

COMBINATION = (0, 1, 2, 3, 4)
"""The entries of c."""

RATIOS = tuple(range(-5, 6))
"""The entries of r."""

SCALES = (1, 2)
"""The entries of a."""

_PARTS: Mapping[str, tuple[str, ...]] = {
    "attn.qkv.weight": ("attn.q", "attn.k", "attn.v"),
    "attn.proj.weight": ("attn.proj",),
    "mlp.fc1.weight": ("mlp.fc1",),
    "mlp.fc2.weight": ("mlp.fc2",),
}


@dataclass(frozen=True, eq=False)
class Cloak:
    """The secrets of one matrix: place j of the cloaked one holds row `order[j]`. The repr shows none of them."""

    order: Int[Tensor, " u"] = field(repr=False)
    scales: Int[Tensor, " u"] = field(repr=False)
    ratios: Int[Tensor, " u"] = field(repr=False)
    combination: Int[Tensor, " u"] = field(repr=False)


def offloaded(state: Mapping[str, Tensor]) -> dict[str, Float[Tensor, "u d"]]:
    """Return the matrices of a timm ViT that the device multiplies with, such as `blocks.0.attn.q`.

    Args:
        state: weights by timm's names.

    Raises:
        PrivlabError: if there is none.
    """
    found = {}
    for name, W in state.items():
        if (layer := VIT.layer.fullmatch(name)) and layer[2] in _PARTS:
            names = _PARTS[layer[2]]
            found |= {f"blocks.{layer[1]}.{part}": M for part, M in zip(names, W.chunk(len(names)), strict=True)}
    if not found:
        raise PrivlabError(f"The weights of a timm ViT have {', '.join(_PARTS)} in each block. Found none of them.")
    return found


def new_cloak(rows: int) -> Cloak:
    """Draw a cloak of a matrix uniformly, with the operating system's CSPRNG.

    Args:
        rows: u.
    """
    system = random.SystemRandom()
    order = list(range(rows))
    system.shuffle(order)

    def drawn(values: Sequence[int]) -> Tensor:
        return torch.tensor(system.choices(values, k=rows))

    return Cloak(torch.tensor(order), drawn(SCALES), drawn(RATIOS), drawn(COMBINATION))


def apply_cloak(weights: Float[Tensor, "u d"], cloak: Cloak) -> Float[Tensor, "u d"]:
    """Return W̃; the owner's matrix is not changed.

    Args:
        weights: W.
        cloak: its secrets.

    Raises:
        PrivlabError: if the cloak has another number of rows.
    """
    if len(cloak.order) != len(weights):
        raise PrivlabError(f"The cloak has {len(cloak.order)} rows. Found a matrix of {len(weights)}.")
    mask = cloak.combination.to(weights) @ weights
    covered = cloak.scales.to(weights)[:, None] * weights + cloak.ratios.to(weights)[:, None] * mask
    return covered[cloak.order]


def cloak_bits(rows: int) -> float:
    """Return log₂ of the number of cloaks of a matrix: of its orders, scales, ratios and combinations.

    Args:
        rows: u.
    """
    return bits(rows) + rows * math.log2(len(SCALES) * len(RATIOS) * len(COMBINATION))

"""The gradients of the first blocks' matrices as a function of the patches and of one gradient behind these blocks.

Known are the released gradients of the matrices in the first L blocks; sought are the patches X and the one gradient
Δ = ∂ℓ/∂z_L behind these blocks. An attack proposes X and Δ, computes the gradients that they give (`FirstBlocks`), and
compares these with the released ones, for example row by row (`row_disagreement`).
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from privlab.attacks.solvers.masked_slots import slot_rows
from privlab.base import gradients_enabled
from privlab.patches import unpatchify
from privlab.victims import PREFIX_TOKENS, VictimModel

_PE = "pos_embed"

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class FirstBlocks:
    """The embedding and the first L blocks: X and Δ = ∂ℓ/∂z_L give the gradients of all their matrices.

    Whatever follows block L, ∂ℓ/∂θ = ∂⟨Δ, z_L(X)⟩/∂θ for each parameter θ before it. So L blocks add equations for X
    and no unknown: Δ has as many numbers as the gradient of the tokens z_0.
    """

    model: VictimModel
    blocks: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, model: VictimModel, blocks: int, released: Collection[str]) -> "FirstBlocks":
        """Return the first blocks of a copy of a model, and the names of their matrices of which something is released.

        Args:
            model: the model; it is left as it is.
            blocks: L; a model that has fewer is taken whole, except for its head.
            released: timm's names of the parameters whose gradients are released.
        """
        # Of the embedding and the first L blocks, only matrices with a released gradient are compared.
        twin, blocks = twice_derivable(model), min(blocks, len(model.vit.blocks))
        before = ("pos_embed", "patch_embed.", *(f"blocks.{level}." for level in range(blocks)))
        names = [
            name
            for name, parameter in twin.vit.named_parameters()
            if parameter.ndim > 1 and name in released and name.startswith(before)
        ]
        for name in names:
            twin.vit.get_parameter(name).requires_grad_(True)
        return cls(twin, blocks, tuple(names))

    @property
    def prefix(self) -> int:
        """Return the number of tokens before the patches, as the class token."""
        own = (getattr(self.model.vit, name, None) for name in PREFIX_TOKENS)
        return sum(each.shape[1] for each in own if each is not None)

    def matrix(self, name: str, of: Float[Tensor, "..."]) -> Float[Tensor, "r c"]:
        """Return a parameter, or what is given for each entry, as rows: those of patches of the position embeddings."""
        return slot_rows(self.model, of) if name == _PE else of.flatten(1)

    def gradients(
        self, X: Float[Tensor, "n k"], delta: Float[Tensor, "t d"], *, create_graph: bool = False
    ) -> dict[str, Float[Tensor, "_ _"]]:
        """Return ∂⟨Δ, z_L(X)⟩/∂θ of each matrix.

        Args:
            X: normalised patches.
            delta: Δ, for all t tokens; it may be of any scale.
            create_graph: whether the result is to be differentiated.
        """
        model = self.model
        # `embed` takes pixels in [0, 1], so the normalisation is undone first.
        images = unpatchify(X[None], model.image_shape) * model.std + model.mean
        with gradients_enabled():
            # The chain rule gives ∂ℓ/∂θ = ∂⟨Δ, z_L⟩/∂θ with Δ held constant: one
            # backward pass from the t × D tokens z_L.
            z = model.client_blocks(model.embed(images), self.blocks)[0]
            own = [model.vit.get_parameter(name) for name in self.names]
            parts = torch.autograd.grad((z * delta).sum(), own, create_graph=create_graph)
        return {name: self.matrix(name, part) for name, part in zip(self.names, parts, strict=True)}


def row_disagreement(
    made: Mapping[str, Float[Tensor, "_ _"]], wanted: Mapping[str, Float[Tensor, "r c"]]
) -> Float[Tensor, ""]:
    """Return the mean of 1 − cos(row, wanted row), over the rows of each matrix and then over matrices; in [0, 2].

    The cosine needs no scale of a row, which signs do not tell. A row of zeros counts 1.
    """
    # eps = 0 makes 0 / 0 of a row of zeros, which becomes the cosine 0.
    off = [
        (1 - F.cosine_similarity(each, wanted[name], dim=1, eps=0.0).nan_to_num()).mean() for name, each in made.items()
    ]
    return torch.stack(off).mean()


def twice_derivable(model: Network) -> Network:
    """Return a frozen copy of a model without fused attention, whose gradients cannot be differentiated again."""
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    for module in twin.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)  # noqa: B010  # timm's own switch, which no type declares
    return twin

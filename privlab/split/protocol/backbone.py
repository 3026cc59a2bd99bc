"""The cut through a victim: T, which the server holds, and F₁ and F₂, which the client keeps."""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from privlab.base import PrivlabError, first
from privlab.victims import VictimModel, told_of_places


class Backbone(nn.Module):
    """T: a trainable copy of a victim's blocks behind the first ℓ, with timm's names; for ℓ = 0 with the norm before.

    Dropout and drop path stay off, since a step that is computed again must give the same result.

    Args:
        model: the victim, which is not changed.
        dtype: the precision of T.
        cut_layer: ℓ, the number of blocks that the client holds, in 0 … depth − 1.

    Raises:
        PrivlabError: if no block is left for the server.
    """

    def __init__(self, model: VictimModel, dtype: torch.dtype, cut_layer: int = 0) -> None:
        super().__init__()
        check_cut(model, cut_layer)
        self.norm_pre = nn.Identity() if cut_layer else copy.deepcopy(model.vit.norm_pre)
        self.blocks = copy.deepcopy(model.vit.blocks[cut_layer:])
        self.to(dtype).eval()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in model.frozen)

    def forward(self, tokens: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return T(z_ℓ), every token kept."""
        return self.blocks(self.norm_pre(tokens))


def check_cut(model: VictimModel, cut_layer: int) -> None:
    """Check that a cut leaves the server a block, and that blocks read tokens alone.

    Raises:
        PrivlabError: if it does not, or the blocks share a rotary embedding or a bias of relative places, of which
            each party would train its own.
    """
    if told := told_of_places(model.vit.blocks[-1]):
        raise PrivlabError(
            f"Split learning hands over blocks that read tokens alone. Found {type(model.vit).__name__}, whose blocks "
            f"are told of places by {first(sorted(told))}: take a ViT with position embeddings or a bias in each block."
        )
    depth = len(model.vit.blocks)
    if not 0 <= cut_layer < depth:
        raise PrivlabError(
            f"The server holds one of the {depth} blocks or more: the cut layer must be in 0 … {depth - 1}. "
            f"Found {cut_layer}."
        )


def own_parameters(model: VictimModel, cut_layer: int = 0) -> dict[str, nn.Parameter]:
    """Return the parameters that the client trains, by name: those of F₁, its ℓ blocks and F₂, E_unk included."""
    depth = len(model.vit.blocks)
    theirs = (*(() if cut_layer else ("vit.norm_pre.",)), *(f"vit.blocks.{i}." for i in range(cut_layer, depth)))
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.startswith(theirs) and name.removeprefix("vit.") not in model.frozen
    }

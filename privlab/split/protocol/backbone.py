"""The cut through a victim: T, which the server holds, and F₁ and F₂, which the client keeps."""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from privlab.victims import VictimModel

__all__ = ["Backbone", "own_parameters"]

_SERVERS = ("vit.norm_pre.", "vit.blocks.")


class Backbone(nn.Module):
    """T: a trainable copy of a victim's blocks and of the norm before them, with timm's names.

    Dropout and drop path stay off, since a step that is computed again must give the same result.
    """

    def __init__(self, model: VictimModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm_pre = copy.deepcopy(model.vit.norm_pre)
        self.blocks = copy.deepcopy(model.vit.blocks)
        self.to(dtype).eval()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in model.frozen)

    def forward(self, tokens: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return T(z₀), every token kept."""
        return self.blocks(self.norm_pre(tokens))


def own_parameters(model: VictimModel) -> dict[str, nn.Parameter]:
    """Return the parameters that the client trains, by name: those of F₁ and F₂, E_unk included."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.startswith(_SERVERS) and name.removeprefix("vit.") not in model.frozen
    }

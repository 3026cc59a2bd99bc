"""Masked patches are put in the order in which their borders fit."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from privlab.patches import patchify
from privlab.reassembly import assemble
from privlab.reassembly.border_costs import border_costs
from privlab.victims import VictimModel

__all__ = ["place_patches"]


def place_patches(
    model: VictimModel,
    image: Float[Tensor, "c h w"],
    masked: Bool[Tensor, " n"],
    lost: Bool[Tensor, " n"] | None = None,
) -> Int[Tensor, " n"]:
    """Return the order that puts the masked patches where their borders fit best.

    Args:
        model: the victim, whose grid and patch size count.
        image: the reconstruction with its masked patches in any order, in [0, 1].
        masked: slots whose patches are to be put in order; all others stay.
        lost: slots whose patches were not recovered, and get the same border cost everywhere; None stands for none.
    """
    patches = patchify(image[None], model.patch)[0].unflatten(1, (image.shape[0], model.patch, model.patch))
    costs = border_costs(patches)
    if lost is not None and bool(lost.any()) and not bool(lost.all()):  # a mean over none would be nan
        costs = torch.where(lost | lost[:, None], costs[:, ~lost][..., ~lost].mean(), costs)
    return assemble(costs, model.grid, ~masked).to(image.device)

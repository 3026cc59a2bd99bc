"""DAL: dense absolute localization, the regression of a slot's place from its position embedding."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from privlab.base import check_name

DALS = ("pca", "linear", "nonlinear")
"""The regressors g of Eq. 1: two principal components, a linear layer, or an MLP of three layers."""

Kind = Literal["pca", "linear", "nonlinear"]


class Dal(nn.Module):
    """L_DAL = E ‖(i, j) − g(E_pos^{i,j})‖₁ over the unmasked slots of all images, with (i, j) from 1, row first.

    Places are raw grid coordinates, 1 ≤ i, j ≤ √N, as Eq. 2 has them: λ = 0.01 is meant for these.

    PCA has no parameters: the two leading components are aligned with the places by least squares, since signs, order
    and scale of components are arbitrary; no gradient goes through that alignment.

    Raises:
        PrivlabError: for an unknown regressor.

    Source: MJP (CVPR 2023), Section 4.2, Eq. 1 and 2.
    """

    places: Float[Tensor, "n 2"]

    def __init__(self, kind: str, width: int, grid: tuple[int, int]) -> None:
        super().__init__()
        check_name("DAL regressor", kind, DALS)
        self.kind = kind
        rows, columns = (torch.arange(1, side + 1, dtype=torch.float32) for side in grid)
        self.register_buffer("places", torch.cartesian_prod(rows, columns), persistent=False)
        if kind == "linear":
            self.regressor: nn.Module = nn.Linear(width, 2)
        elif kind == "nonlinear":
            hidden = (nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
            self.regressor = nn.Sequential(*hidden, nn.Linear(width, 2))

    def forward(self, pe: Float[Tensor, "n d"], unmasked: Bool[Tensor, "b n"]) -> Float[Tensor, ""]:
        """Return the loss; slots that an image masks do not count for it."""
        found = self._components(pe) if self.kind == "pca" else self.regressor(pe)
        weight = unmasked.float().sum(0)
        return ((found - self.places).abs().sum(1) * weight).sum() / weight.sum().clamp(min=1)

    def _components(self, pe: Float[Tensor, "n d"]) -> Float[Tensor, "n 2"]:
        """Return the projections on two principal components, aligned with the places."""
        centred = pe - pe.mean(0)
        _, _, axes = torch.linalg.svd(centred.detach(), full_matrices=False)
        scores = centred @ axes[:2].mT
        fitted = torch.linalg.lstsq(scores.detach(), self.places - self.places.mean(0)).solution
        return scores @ fitted + self.places.mean(0)

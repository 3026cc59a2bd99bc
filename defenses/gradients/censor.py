"""`censor`: every layer's gradient is replaced by a random one that is orthogonal to it and as long."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import Checked
from privlab.threat import Effects, Gradients


@dataclass(frozen=True)
class Censor(Checked):
    """Release ‖g‖ o / ‖o‖ for the gradient g of each parameter, o = r − (r·g / ‖g‖²) g, with r random and of norm 1.

    Idea: The client draws a random gradient for each layer, takes its part along the true one away, and makes it as
    long. Its authors release the one of 20 such draws that lowers the loss most. Two numbers of each layer are left.

    Steps: gradient g → random, orthogonal to g → as long as g

    Algorithm: So what is released of a parameter is orthogonal to its gradient, and reveals its norm. A gradient of
    zero stays zero.

    The authors draw T = 20 such candidates, and release the one whose step lowers the client's loss most. That needs
    the client's image and loss, which no defense of released gradients has here: one candidate is drawn. The choice
    among T reveals at most log₂ T = 4.3 bits of the image more. What they release where no candidate lowers the loss
    is, in their code, the gradient itself; that is not done here either, and would only help an adversary.

    Fails if: one image is released several times: one release reveals two numbers of each parameter's gradient, and as
    many releases at the same weights as a parameter has entries reveal its gradient up to sign. What is released has no
    part along the gradient, so that it teaches nothing to first order.

    Cost: It changes what the server trains with, and may slow training down.

    Studies: published

    Args:
        projection: "paper", as above, or "code": their published code divides r·g by ‖g‖ alone, so that o is
            orthogonal to g only where ‖g‖ = 1, and has the part (1 − ‖g‖) (r·g) / ‖g‖ along it otherwise.

    Source: CENSOR (Zhang et al., NDSS 2025), abstract, with T, the norms and "code" from the authors' published code
    (MIT), defense.py; "paper" is what both its abstract and its name say. [@zhang2025censor]
    """

    name: ClassVar[str] = "censor"
    paper: ClassVar[str] = "CENSOR (Zhang et al., NDSS 2025), without its choice among 20 draws"
    order: ClassVar[int] = 190

    acts_as: ClassVar[Effects] = Effects(gradients="noisy")

    projection: Annotated[str, ("paper", "code")] = "paper"

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Gradients:
        """Return the random gradients; an image's generator draws for the parameters in the order of their names."""
        return {name: self._of_parameter(gradients[name], draws) for name in sorted(gradients)}

    def _of_parameter(self, g: Float[Tensor, "b ..."], draws: Sequence[Generator]) -> Float[Tensor, "b ..."]:
        r = torch.stack([torch.randn(g.shape[1:], generator=draw, dtype=torch.float64) for draw in draws])
        r, flat = r.to(g.device).flatten(1), g.flatten(1).double()
        r, norm = r / r.norm(dim=1, keepdim=True), flat.norm(dim=1, keepdim=True)
        along = (r * flat).sum(1, keepdim=True) * flat / norm.clamp_min(torch.finfo(g.dtype).tiny)
        o = r - (along / norm.clamp_min(torch.finfo(g.dtype).tiny) if self.projection == "paper" else along)
        return (norm * o / o.norm(dim=1, keepdim=True)).view_as(g).to(g)

    def variance(self, released: Gradients) -> Gradients:
        """Return ‖g‖² / p for each of p entries: no part of a release is along g, so that all of it is noise."""
        squares = {name: g.flatten(1).square().mean(1) for name, g in released.items()}
        return {name: squares[name].view(-1, *[1] * (g.ndim - 1)).expand_as(g) for name, g in released.items()}

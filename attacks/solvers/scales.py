"""The body that U-Nets of attacks share: maps of an image at several scales, from fine to coarse and back."""

from collections.abc import Callable
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn


class Scales(nn.Module):
    """Halve the sides from scale to scale, then double them again, and add what was kept at each scale.

    Source: U-Net (Ronneberger et al. 2015).
    """

    def add_scales(self, widths: tuple[int, ...], residual: Callable[[int], nn.Module]) -> None:
        """Make the layers, with the channels of each scale and a maker of x + g(x) with so many channels."""
        pairs = list(pairwise(widths))
        self.before = nn.ModuleList(residual(fine) for fine, _ in pairs)
        self.down = nn.ModuleList(nn.Conv2d(fine, coarse, 2, 2) for fine, coarse in pairs)
        self.coarsest = nn.Sequential(residual(widths[-1]), residual(widths[-1]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(coarse, fine, 2, 2) for fine, coarse in pairs)
        self.after = nn.ModuleList(nn.Sequential(residual(fine), residual(fine)) for fine, _ in pairs)

    def through_scales(self, h: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d h w"]:
        """Return the map after all scales; its sides are multiples of the coarsest scale."""
        finer = []
        for before, down in zip(self.before, self.down, strict=True):
            # Downwards: keep the map of this scale, then halve its sides.
            finer.append(before(h))
            h = down(finer[-1])
        h = self.coarsest(h)
        for kept, up, after in reversed(list(zip(finer, self.up, self.after, strict=True))):
            # Upwards: double the sides and add the map that was kept at this scale.
            h = after(kept + up(h))
        return h

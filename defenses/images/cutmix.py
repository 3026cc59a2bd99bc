"""`cutmix`: a rectangle of another image covers that of each image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import Checked, Positive
from privlab.threat import Effects, Feed


@dataclass(frozen=True)
class CutMix(Checked):
    """Paste into each image a random rectangle, of area (1 − λ)·h·w, of another image of the batch, at the same place.

    Idea: The client pastes a rectangle of another image of its batch into each image. What is released is a function of
    the mixture. The adversary may recover the mixture exactly, and still lacks what lies under the rectangle.

    Steps: draw λ and a rectangle → paste from another image

    Algorithm: λ ~ Beta(alpha, alpha), one draw per image; the rectangle has the image's aspect ratio and is cut at its
    border.

    Fails if: the adversary recovers the mixture, which may come back exactly, with all of the image that the rectangle
    leaves. A batch of one image is not changed at all.

    Cost: It changes the outputs, and so the accuracy (`correct` in the records of released features).

    Args:
        alpha: the parameter of the Beta distribution, above 0; 1 in Yun et al. (uniform λ).

    Source: CutMix (Yun et al., ICCV 2019), Equations 1 and 2; as a defense of split learning, Baek et al. (2022).
    [@yun2019cutmix; @baek2022cutmix]
    """

    name: ClassVar[str] = "cutmix"
    paper: ClassVar[str] = "CutMix (Yun et al. 2019), Eq. 1 and 2; in split learning, Baek et al. (2022)"
    order: ClassVar[int] = 60
    mixes: ClassVar[bool] = True  # the release of an image depends on other images of the batch

    acts_as: ClassVar[Effects] = Effects(other=True)

    alpha: Positive = 1.0

    def __call__(self, images: Float[Tensor, "b c h w"], patch: int, draws: Sequence[Generator]) -> Feed:
        """Return the mixed images."""
        b, _, h, w = images.shape
        chosen = [self._draw(i, b, draw) for i, draw in enumerate(draws)]
        other, share, down, across = (
            torch.tensor(values, device=images.device) for values in zip(*chosen, strict=True)
        )
        half = share.sqrt() / 2
        rows, columns = ((torch.arange(n, device=images.device) + 0.5) / n for n in (h, w))
        inside = ((rows - down[:, None]).abs() < half[:, None])[:, :, None]
        inside = inside & ((columns - across[:, None]).abs() < half[:, None])[:, None, :]
        mixed = torch.where(inside[:, None], images[other], images) if b > 1 else images
        return Feed.undefended(mixed, patch)

    def _draw(self, i: int, b: int, draw: Generator) -> tuple[int, float, float, float]:
        """Return another image, the rectangle's share 1 − λ of the area, and its centre relative to the sides."""
        step, down, across = torch.rand(3, generator=draw, dtype=torch.float64).tolist()
        seed = int(torch.randint(2**62, (), generator=draw))
        λ = float(np.random.default_rng(seed).beta(self.alpha, self.alpha))
        return (i + 1 + int(step * (b - 1))) % b, 1 - λ, down, across

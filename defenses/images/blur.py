"""`blur`: a Gaussian blur of the image."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Generator, Tensor
from torchvision.transforms.v2.functional import gaussian_blur

from privlab.base import Checked, Positive, PrivlabError
from privlab.threat import Effects, Feed


@dataclass(frozen=True)
class Blur(Checked):
    """Convolve the image with a Gaussian of standard deviation sigma, cut at 3 sigma; the image is reflected outside.

    Idea: The client blurs its image with a Gaussian before it feeds it. What is released is a function of the blurred
    image alone. The finer a detail is, the more it is weakened.

    Steps: Gaussian blur, sigma

    Fails if: the blurred image shows enough: it may come back exactly, and what it still shows is leaked.

    Cost: It changes the outputs, and so the accuracy (`correct` in the records of released features).

    Args:
        sigma: the standard deviation in pixels, above 0.

    Source: a baseline of the frameworks that Table 6 of Permutation Equivariance (CVPR 2024) follows; no number given.
    [@xu2024permutation]
    """

    name: ClassVar[str] = "blur"
    paper: ClassVar[str] = "baseline of split learning; cf. Permutation Equivariance (2024), Section 5.3"
    order: ClassVar[int] = 50

    acts_as: ClassVar[Effects] = Effects(other=True)

    sigma: Positive = 3.0

    def __call__(self, images: Float[Tensor, "b c h w"], patch: int, draws: Sequence[Generator]) -> Feed:
        """Return the blurred images.

        Raises:
            PrivlabError: if the Gaussian is wider than the image.
        """
        radius, side = math.ceil(3 * self.sigma), min(images.shape[2:])
        if radius >= side:
            most = (side - 1) // 3
            raise PrivlabError(f"sigma of blur must be at most {most} for {side} pixels. Found {self.sigma}.")
        return Feed.undefended(gaussian_blur(images, [2 * radius + 1] * 2, [self.sigma] * 2).clamp(0, 1), patch)

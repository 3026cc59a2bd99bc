"""`low-pass`: only the low frequencies of an image are embedded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import Checked, PositiveShare
from privlab.threat import Effects, Feed


@dataclass(frozen=True)
class LowPass(Checked):
    """Keep the frequencies f of the image with ‖f‖ ≤ radius, in cycles per pixel, and clip the image to [0, 1].

    Idea: The client removes the high frequencies of its image before it feeds it. What is released is a function of the
    blurred image alone. Details are gone both for the model and for the adversary.

    Steps: Fourier transform → keep ‖f‖ ≤ radius

    Fails if: the filtered image shows enough: it may come back exactly, and what it still shows is leaked.

    Cost: It changes the outputs, and so the accuracy (`correct` in the records of released features).

    Studies: permutation

    Args:
        radius: the largest frequency kept, in (0, 1]; 0.05 in Table 6, 0.01 to 0.05 in Figure 7. 0.5 · √2 keeps all.

    Source: Jeong et al. (AISafety 2022); "LP" in Table 6 of Permutation Equivariance (CVPR 2024). [@jeong2022frequency;
    @xu2024permutation]
    """

    name: ClassVar[str] = "low-pass"
    paper: ClassVar[str] = "Jeong et al. (2022); LP in Permutation Equivariance (2024), Table 6 and Figure 7"
    order: ClassVar[int] = 40

    acts_as: ClassVar[Effects] = Effects(other=True)

    radius: PositiveShare = 0.05

    def __call__(self, images: Float[Tensor, "b c h w"], patch: int, draws: Sequence[Generator]) -> Feed:
        """Return the images without their high frequencies."""
        h, w = images.shape[2:]
        down = torch.fft.fftfreq(h, device=images.device)[:, None]
        across = torch.fft.rfftfreq(w, device=images.device)
        passed = down.square() + across.square() <= self.radius**2
        smooth = torch.fft.irfft2(torch.fft.rfft2(images) * passed, s=(h, w))
        return Feed.undefended(smooth.clamp(0, 1), patch)

"""A learned image prior: a small network that removes Gaussian noise of any strength, D(y, σ) ≈ E[x | x + σn = y].

Known are public photographs alone, which a network learned from; sought is the likeliest image that a release allows.

1. `Denoiser`: the network. `denoise` applies the one that comes with privlab, to grey images too.
2. `plug_and_play` alternates between the denoiser and the release, while σ falls.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn

from privlab.attacks.solvers.scales import Scales
from privlab.base import PrivlabError, sha256_of

WEIGHTS = Path(__file__).with_name("denoiser.safetensors")
"""The weights that come with privlab; `denoiser.json` states what they were trained on, and how."""

SHA256 = "ca19483bbeeb5c75164e84bc7ab2325a076d060ae1a4b83e9d72275cc2577a7b"

MOST_PIXELS = 1 << 20
"""Pixels that the network reads at once."""

WIDTHS = (32, 64, 112, 112)
"""Channels of the network at each scale, from the images' size down to an eighth of it."""

SIGMA_DATA = 0.27
"""Standard deviation of pixels in [0, 1] about grey, over the public photographs."""


class Denoiser(Scales):
    """D(y, σ) = ½ + c_skip (y − ½) + c_out F(c_in (y − ½), ln σ / 4), the posterior mean of an image in [0, 1].

    c_skip = s² / (σ² + s²), c_out = σ s / √(σ² + s²), c_in = 1 / √(σ² + s²) with s = `SIGMA_DATA`: F's input and target
    have unit variance at each σ.

    Source: Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models", 2022, equation 7.
    """

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        self.scale = 2 ** (len(widths) - 1)
        self.inwards = nn.Conv2d(3 + 1, widths[0], 3, padding=1)
        self.add_scales(widths, _Residual)
        self.outwards = nn.Conv2d(widths[0], 3, 3, padding=1)
        nn.init.zeros_(self.outwards.weight)

    def forward(self, y: Float[Tensor, "b 3 h w"], sigma: Float[Tensor, " b"]) -> Float[Tensor, "b 3 h w"]:
        """Return E[x | x + σn = y].

        Args:
            y: images in [0, 1] with white Gaussian noise, of at least 1 × 1 pixels.
            sigma: the standard deviation of each image's noise, > 0.
        """
        height, width = y.shape[2:]
        sigma = sigma.view(-1, 1, 1, 1)
        spread = (sigma**2 + SIGMA_DATA**2).sqrt()
        # F reads the image at unit variance, and how strong the noise is as a constant fourth channel.
        level = (sigma.log() / 4).expand(-1, 1, height, width)
        h = torch.cat([(y - 0.5) / spread, level], 1)
        h = self.inwards(F.pad(h, (0, -width % self.scale, 0, -height % self.scale), mode="replicate"))
        out = self.outwards(self.through_scales(h))[:, :, :height, :width].to(y.dtype)
        # Equation 7: what is certain of y, and the network's correction at the scale that it has under this noise.
        return 0.5 + (SIGMA_DATA / spread) ** 2 * (y - 0.5) + sigma * SIGMA_DATA / spread * out


class _Residual(nn.Module):
    """x + g(x), with two convolutions and no norm, which would forget how strong the noise is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(x)))


@lru_cache(maxsize=2)
def _trained(device: torch.device) -> Denoiser:
    """Return the network that comes with privlab."""
    if (found := sha256_of(WEIGHTS)) != SHA256:
        raise PrivlabError(
            f"{WEIGHTS.name} is not the file that came with privlab. Found SHA-256 {found}: install again."
        )
    network = Denoiser()
    network.load_state_dict({name: value.float() for name, value in load_file(WEIGHTS).items()})
    return network.requires_grad_(False).to(device)


@torch.no_grad()
def denoise(images: Float[Tensor, "b c h w"], sigma: float) -> Float[Tensor, "b c h w"]:
    """Return the posterior mean of images in [0, 1], given them with white noise, by the network of privlab.

    Args:
        images: noisy images; those of one colour are denoised as grey photographs.
        sigma: standard deviation of the noise, > 0.

    Raises:
        PrivlabError: if images have neither one nor three colours, or the network's file has changed.
    """
    c, h, w = images.shape[1:]
    if c not in (1, 3):
        raise PrivlabError(f"The learned prior knows images of one or three colours. Found {c}.")
    network, some = _trained(images.device), max(1, MOST_PIXELS // (h * w))
    y = images.float().expand(-1, 3, -1, -1)
    clean = torch.cat([network(each, each.new_full((len(each),), sigma)) for each in y.split(some)])
    return (clean if c == 3 else clean.mean(1, keepdim=True)).to(images)


def plug_and_play(
    nearest: Callable[[Float[Tensor, "b c h w"], float], Float[Tensor, "b c h w"]],
    start: Float[Tensor, "b c h w"],
    sigmas: Float[Tensor, " k"],
) -> Float[Tensor, "b c h w"]:
    """Return about the likeliest images under a release and the learned prior, by half-quadratic splitting.

    For each σ of a falling sequence: u = D(x, σ), then x = argmin −log p(release | x) + ‖x − u‖² / 2σ². The last u is
    returned.

    Args:
        nearest: (u, σ) ↦ that argmin, images in [0, 1].
        start: the first x, such as the best estimate without a prior.
        sigmas: standard deviations, from that of the start's errors to one below which nothing is to be seen.

    Source: Zhang et al., "Plug-and-Play Image Restoration with Deep Denoiser Prior", 2021, equations 6 and 7.
    """
    x = u = start
    for sigma in sigmas.tolist():
        # Equation 7: the denoiser is the step of the prior at this σ. Equation 6: the release draws the image back.
        u = denoise(x, sigma)
        x = nearest(u, sigma)
    return u

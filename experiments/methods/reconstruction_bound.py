"""The bound of differential privacy on reconstruction: the share of successes that no attack exceeds.

The prior π is uniform over m images that the adversary has; one of them, z, is the image of the client. The release
is N(g_z, (σC)² I) with ‖g_z‖ ≤ C, as `gradient-noise` makes it of one image, T times. Without the image it would be
N(0, (σC)² I), whatever z is: every attack would have to guess, with at most the success κ of the best fixed guess. So
the sensitivity is that of an image's presence, C and not 2C, although the secret is which image it is.
"""

import math
from collections.abc import Mapping
from statistics import NormalDist

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from privlab.base import PrivlabError


def success_bound(prior: float, multiplier: float, releases: int = 1) -> float:
    """Return Φ(Φ⁻¹(κ) + √T / σ): no attack succeeds more often, even if it knows everything except the image.

    It is the power of the best test of level κ between N(0, σ²) and N(1, σ²), by T draws.

    Args:
        prior: κ in [0, 1], the success of the best guess that does not see the release (see `fixed_guess`).
        multiplier: σ, at least 0; the noise in units of the clipping norm C.
        releases: T, at least 1; each may be chosen after the outcomes of those before.

    Raises:
        PrivlabError: if a number is out of range.

    Source: Hayes, Mahloujifar & Balle (2023), "Bounding Training Data Reconstruction in DP-SGD": the blow-up function
        of the Gaussian mechanism, with every example in every step; in closed form, Kaissis, Hayes, Ziller & Rueckert
        (2023), "Bounding data reconstruction attacks with the hypothesis testing interpretation of differential
        privacy"; its composition, Dong, Roth & Su (2022).
    """
    if not (0 <= prior <= 1 and multiplier >= 0 and releases >= 1):
        raise PrivlabError(
            "The reconstruction bound takes a prior in [0, 1], a multiplier ≥ 0 and releases ≥ 1. "
            f"Found {prior:g}, {multiplier:g} and {releases}."
        )
    if prior in (0, 1):
        return float(prior)
    if multiplier == 0:
        return 1.0
    normal = NormalDist()
    return normal.cdf(normal.inv_cdf(prior) + math.sqrt(releases) / multiplier)


def fixed_guess(images: Float[Tensor, "m ..."], psnr: float) -> float:
    """Return κ, an upper bound on the share of the images that one guess reaches at `psnr` dB or more.

    If a guess is within the distance r of k images (r = 10^(−psnr/20), root mean square, for pixels in [0, 1]), these
    images are within 2r of each other: each of the k has k − 1 others that near. The greatest k for which k images
    satisfy this among themselves is the greatest core number of the graph of images within 2r, plus one. κ ≥ 1/m.

    Raises:
        PrivlabError: if there are no images.
    """
    if not len(images):
        raise PrivlabError("The reconstruction bound needs at least one image of the prior. Found none.")
    flat = images.flatten(1).double()
    rms = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist") / math.sqrt(flat.shape[1])
    near = rms <= 2 * 10 ** (-psnr / 20)
    k = 1
    while len(near):
        fewest, i = near.sum(1).min(0)  # the count includes image i itself
        k = max(k, int(fewest))
        rest = torch.arange(len(near)) != i
        near = near[rest][:, rest]
    return k / len(images)


def gram(gradients: Mapping[str, Float[Tensor, "m ..."]]) -> Float[Tensor, "m m"]:
    """Return the inner products ⟨g_j, g_k⟩ of the gradients of m images, over all parameters."""
    total = torch.zeros(())
    for g in gradients.values():
        flat = g.flatten(1).double()
        total = total + flat @ flat.mT
    return total


def identify(products: Float[Tensor, "m m"], std: float, draws: int, generator: Generator) -> Int[Tensor, "m draws"]:
    """Return the image that the best attack chooses for each noisy release of the gradient of each of m images.

    The attack has the m gradients g_j as they are released but without noise, and chooses the likeliest j: the greatest
    ⟨G, g_j⟩ − ‖g_j‖² / 2 of G = g_i + noise. G matters only through these m products, and the noise in them has the
    covariance std² · ⟨g_j, g_k⟩: so no gradient has to be drawn.

    Args:
        products: ⟨g_j, g_k⟩, as `gram` returns them.
        std: the standard deviation of the noise on an entry of the gradient, above 0.
        draws: the number of noisy releases drawn for each image.
        generator: the random generator, on the CPU, that the noise is drawn from.
    """
    λ, Q = torch.linalg.eigh(products.double())
    root = Q * λ.clamp_min(0).sqrt()
    noise = torch.randn(len(products), draws, len(products), generator=generator, dtype=torch.float64) @ root.mT
    scores = products.double()[:, None] + std * noise - products.diagonal().double() / 2
    return scores.argmax(2)

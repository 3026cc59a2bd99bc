"""The linear inversion of embedded patches that the white-box attacks on features share.

Known are the rows y = W x + β + ε of patches x, without their position embeddings; sought are the patches.

1. `patch_statistics`: mean μ and covariance S of patches of public images, kept for the next batch.
2. `invert_rows`: Wiener's estimate from μ, S and the noise, with S = L Lᵀ.
"""

import math
from typing import Literal, get_args
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.solvers.linear import ridge_inverse
from privlab.base import PrivlabError, check_name
from privlab.victims import VictimModel

Prior = Literal["ridge", "wiener"]
PRIORS: tuple[str, ...] = get_args(Prior)
"""What is assumed of a patch x: white with unit variance, or the mean and covariance of public patches."""

MOST_IMAGES = 32  # the most images from which patch statistics are taken; a hundred would give 0.1 dB more

_STATISTICS: WeakKeyDictionary[VictimModel, tuple[ref[Tensor], int, tuple[Tensor, Tensor]]] = WeakKeyDictionary()
"""For each living victim the public images that it was last attacked with, their version, and their statistics."""


def invert_rows(
    model: VictimModel,
    embedded: Float[Tensor, "b n d"],
    public: Float[Tensor, "m c h w"],
    *,
    prior: str = "wiener",
    noise: float = 0.0,
) -> Float[Tensor, "b n k"]:
    """Estimate normalised patches x from rows y = W x + β + ε, in float64.

    x̂ = μ + S Wᵀ (W S Wᵀ + noise² I)⁻¹ (y − β − W μ), the linear estimate of least mean squared error for patches of
    mean μ and covariance S. `wiener` takes both from the windows of the public images, `ridge` assumes μ = 0 and S = I.
    Without noise, a square projection of full rank is inverted exactly under either.

    Args:
        model: whose W and β embed the patches.
        embedded: the rows without their position embeddings.
        public: images in [0, 1]; `wiener` needs one or more.
        prior: one of `PRIORS`.
        noise: standard deviation of ε, white, in the units of the rows.

    Raises:
        PrivlabError: for an unknown prior, or `wiener` without public images.

    Source: Wiener's estimate of x in z = W x + β + e (the embedding of ViT, Dosovitskiy et al. 2021, Equation 1).
    """
    proj = model.vit.patch_embed.proj
    W = proj.weight.detach().flatten(1).double()  # d × k
    β = 0 if proj.bias is None else proj.bias.detach().double()
    μ, L = _prior(model, public, prior)
    # With M = W L the estimate is μ + L Mᵀ (M Mᵀ + noise² I)⁻¹ (y − β − W μ), because S
    # Wᵀ = L Mᵀ. In the code each y is a row.
    M = W @ L
    return μ + (embedded.double() - β - W @ μ) @ (L @ _gain(M, noise)).mT


def patch_statistics(
    model: VictimModel, public: Float[Tensor, "m c h w"]
) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
    """Return the mean and the covariance of normalised patches of public images, in float64.

    The statistics of photographs do not depend on the place, so all windows at half a patch's stride count, and their
    mirror images; only the first `MOST_IMAGES` images are used. The covariance is shrunk towards a multiple of I by the
    oracle approximating shrinkage, so that it has full rank for any number of images.

    Source: Chen, Wiesel, Eldar and Hero, IEEE Trans. Signal Processing 58 (2010), Equation 23.
    """
    # In double precision: float32's rounding would leave S without rank.
    images = model.normalise(public[:MOST_IMAGES].to(model.mean)).double()
    # Each window becomes a column of c · patch² entries, in the order of W's input.
    X = F.unfold(torch.cat([images, images.flip(3)]), model.patch, stride=max(1, model.patch // 2))
    X = X.mT.flatten(0, 1)  # windows × k
    S, (n, k) = X.mT.cov(correction=0), X.shape
    # Equation 23, with n windows of k entries: ρ = ((1 − 2/k) tr S² + tr² S) /
    # ((n + 1 − 2/k) (tr S² − tr² S / k)), at most 1.
    square, trace = S.square().sum(), S.trace().clamp(min=torch.finfo(X.dtype).tiny)
    ρ = ((1 - 2 / k) * square + trace**2) / ((n + 1 - 2 / k) * (square - trace**2 / k)).clamp(min=0)
    # The quotient is 0 / 0 if S = 0: the shrunk covariance is then the multiple of I alone.
    ρ = ρ.nan_to_num(1).clamp(max=1)
    return X.mean(0), (1 - ρ) * S + ρ * trace / k * torch.eye(k, dtype=S.dtype, device=S.device)


def _prior(model: VictimModel, public: Tensor, prior: str) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
    """Return μ and the Cholesky factor L of S = L Lᵀ."""
    check_name("prior", prior, PRIORS)
    if prior == "wiener":
        if not len(public):
            raise PrivlabError("The wiener prior needs public images. Found none: give some, or use ridge.")
        return _kept_statistics(model, public)
    k = math.prod(model.vit.patch_embed.proj.weight.shape[1:])
    eye = torch.eye(k, dtype=torch.float64, device=model.mean.device)
    return eye.new_zeros(k), eye


def _kept_statistics(
    model: VictimModel, public: Float[Tensor, "m c h w"]
) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
    """Return μ and L; they are cached, because all batches are attacked with the same victim and public images.

    The cache keeps neither of these alive: a study has one victim after another, and thousands of public images.
    """
    # The statistics are valid for the same tensor, as long as nothing was written into it since (`_version`).
    kept = _STATISTICS.get(model)
    if kept is None or kept[0]() is not public or kept[1] != public._version:
        μ, S = patch_statistics(model, public)
        kept = _STATISTICS[model] = (ref(public), public._version, (μ, torch.linalg.cholesky(S)))
    return kept[2]


def _gain(M: Float[Tensor, "d k"], noise: float) -> Float[Tensor, "k d"]:
    """Return Mᵀ (M Mᵀ + noise² I)⁻¹; without noise, the pseudo-inverse."""
    if noise == 0:
        return ridge_inverse(M)
    # A⁻¹ M is D × K; its transpose is Mᵀ A⁻¹.
    A = M @ M.mT + noise**2 * torch.eye(len(M), dtype=M.dtype, device=M.device)
    return torch.cholesky_solve(M, torch.linalg.cholesky(A)).mT

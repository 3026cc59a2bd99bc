"""`deconvolution`: an image that was filtered before it was embedded, by an adversary that knows the filter.

Known are the rows of filtered images y = B x + error; sought are the images x. The filter B is measured, μ, Φ and S are
fitted to public photographs, and x = μ + Φ S^½ v is Wiener's estimate of each principal colour separately.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from scipy.fft import dct
from torch import Generator, Tensor

from privlab.attacks.rows import WHITE_BOX, effects, known_tokens, undone, warn_of_moves
from privlab.attacks.solvers import invert_rows
from privlab.patches import unpatchify
from privlab.threat import Capability, FeatureObservation, Reconstruction, Stack

MOST_IMAGES = 32  # the most public photographs on which the error of what the rows tell is measured

SWING = 0.1
"""How far a pixel is from mid-grey when the filter is measured: far enough from 0 and 1 that nothing is clipped."""

LINEAR = 1e-6
"""The largest difference of an image by which a filter counts as linear, equal for all channels, and without draws."""


@dataclass(frozen=True)
class Deconvolution:
    """Minimise ‖B x − y‖² / σ² + ‖v‖² over x = μ + Φ S^½ v, with the client's public filter B.

    Idea: A filter of images, such as a blur, is a matrix that the attack measures by running the defense on single
    pixels. The rows give the filtered image. The attack finds the image that is likeliest as a photograph among those
    that the filter turns into it.

    Steps: invert the rows → measure the filter → undo it under a power law

    Algorithm: y is the image that `least-squares` reads from the rows, and σ² the mean square of B x − y for public
    photographs, to which noise and clipping add. Φ are cosines in the principal colours of public photographs, μ is
    their mean colour, and S their power, a power law of the frequency for each colour. What B removes altogether comes
    back as the prior's mean, and what it weakens as far as σ allows.

    Exact if: the filter keeps every frequency and W has full column rank, except for rounding.

    Fails if: the filter removes frequencies altogether: these stay lost. Images have at most 64 × 64 pixels. It takes
    rows in the order in which they were sent.

    Studies: published

    Source: ours, Wiener's filter behind the embedding of ViT (Dosovitskiy et al. 2021), Equation 1.
    [@dosovitskiy2021vit]
    """

    name: ClassVar[str] = "deconvolution"
    paper: ClassVar[str] = "ours, Wiener's filter against filtered images"
    order: ClassVar[int] = 320
    knows: ClassVar[frozenset[str]] = frozenset({"blur", "low-pass", "gaussian-noise"})
    requires: ClassVar[frozenset[Capability]] = WHITE_BOX | {Capability.FILTERED_IMAGES}
    undefended: ClassVar[str] = "least-squares"

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Reconstruct the images before the filter."""
        warn_of_moves(self.name, seen)
        # B acts on the p = h · w pixels of each channel; `deviation` holds the roots of
        # S, one row for each principal colour.
        B = linear_filter(seen)
        y, σ = _filtered(seen, B)
        μ, colours, Φ, deviation = _prior(seen.public.to(y))
        misfit = (y.flatten(2) - μ[:, None] @ B.sum(1)[None]).mT @ colours / σ  # b × pixels × colours
        found = []
        # In colour k: minimise ‖A v − misfit‖² + ‖v‖² with A = B Φ diag(s) / σ, so v = (Aᵀ A + I)⁻¹ Aᵀ misfit (p × b).
        for k, s in enumerate(deviation):
            A = B @ (Φ * s) / σ
            G = A.mT @ A + torch.eye(len(s), dtype=A.dtype, device=A.device)
            found.append(Φ @ (s[:, None] * torch.cholesky_solve(A.mT @ misfit[:, :, k].mT, torch.linalg.cholesky(G))))
        # From principal colours back to channels, and the mean colour added.
        x = torch.einsum("kpb,ck->bcp", torch.stack(found), colours) + μ[:, None]
        return Reconstruction(x.view_as(y).clamp(0, 1).to(seen.features.dtype))


def linear_filter(seen: FeatureObservation) -> Float[Tensor, "p p"]:
    """Return the matrix B that a client's defenses of images apply to each channel, by their response to each pixel.

    The defenses F are run: column p of B is (F(½ + t e_p) − F(½)) / t. B is the identity where that is not F, since it
    is not linear near mid-grey, treats channels unlike, or depends on a draw.
    """
    shape, device = seen.model.image_shape, seen.model.mean.device
    given = (Stack(Stack(seen.defense).on_images), shape, seen.model.patch, device)
    try:
        return _measured_filter(*given)
    except TypeError:  # the defense has an option that cannot be hashed
        return _measured_filter.__wrapped__(*given)


@lru_cache(maxsize=2)
def _measured_filter(
    defense: Stack, shape: tuple[int, int, int], patch: int, device: torch.device
) -> Float[Tensor, "p p"]:
    """Return the matrix of `linear_filter`, kept from batch to batch: it depends on no observation."""
    c, h, w = shape
    pixels = torch.eye(h * w, dtype=torch.float64, device=device)

    def apply(images: Tensor, seed: int = 0) -> Tensor:
        # The difference from grey, per unit of the change: for a linear filter this is B applied to the image.
        grey = _feed(defense, 0.5 + 0 * images[:1], patch, seed)
        return (_feed(defense, 0.5 + SWING * images, patch, seed) - grey) / SWING

    # Rows of the identity are images of one pixel; their responses become the columns of B.
    B = torch.cat([apply(part.view(-1, 1, h, w).expand(-1, c, h, w))[:, 0] for part in pixels.split(256)]).flatten(1).mT
    # A random colour image under another seed: B explains it only if F is linear, equal
    # for all channels and without draws.
    image = torch.rand(1, c, h, w, dtype=torch.float64, generator=Generator().manual_seed(0)).to(device)
    apart = (apply(image, seed=1).flatten(2) - image.flatten(2) @ B.mT).abs().max()
    return B if float(apart) < LINEAR else pixels


def _feed(defense: Stack, images: Float[Tensor, "b c h w"], patch: int, seed: int = 0) -> Float[Tensor, "b c h w"]:
    """Return what a client would embed of other images, with draws of the adversary's own."""
    draws = [Generator().manual_seed(seed) for _ in images]
    return defense.feed(images, patch, draws, key=Generator().manual_seed(seed)).images


def _filtered(seen: FeatureObservation, B: Float[Tensor, "p p"]) -> tuple[Float[Tensor, "b c h w"], float]:
    """Return what the client embedded, as the rows tell, and by how much that is not B x for public images x."""
    model, noise = seen.model, effects(seen).noise_std
    prefix, pe = known_tokens(model)

    def read(rows: Tensor) -> Tensor:
        patches = invert_rows(model, rows[:, len(prefix) :] - pe, seen.public, noise=noise)
        return unpatchify(patches, model.image_shape) * model.std + model.mean

    public = seen.public[:MOST_IMAGES].to(model.mean)
    # σ: public images take the client's way (filter, embedding, noise), are read from the rows, and compared with B x.
    rows = model.embed(_feed(Stack(seen.defense), public, model.patch)).detach()
    rows = rows + noise * torch.randn(rows.shape, generator=Generator().manual_seed(0)).to(rows)
    error = (read(rows).flatten(2) - public.double().flatten(2) @ B.mT).square().mean().sqrt()
    return read(undone(seen)), max(float(error), torch.finfo(model.mean.dtype).eps)


def _prior(
    public: Float[Tensor, "m c h w"],
) -> tuple[Float[Tensor, " c"], Float[Tensor, "c k"], Float[Tensor, "p p"], Float[Tensor, "k p"]]:
    """Return the mean colour, the principal colours, the cosines, and each cosine's deviation in each colour."""
    h, w = public.shape[2:]
    μ = public.mean((0, 2, 3))
    centred = public - μ[:, None, None]
    # Principal colours: eigenvectors of the colours' second moments, c × k.
    _, colours = torch.linalg.eigh(torch.einsum("bchw,bdhw->cd", centred, centred))
    # The columns of Φ (p × p) are orthonormal cosine images, products of one cosine down and one across.
    down, across = (torch.from_numpy(dct(np.eye(n), norm="ortho")).to(public) for n in (h, w))
    Φ = torch.kron(down, across)
    power = (torch.einsum("bcp,ck->bkp", centred.flatten(2), colours) @ Φ).square().mean(0)
    # A power law: log power = a + b log frequency, fitted by least squares for each colour. The
    # constant gets half the lowest frequency.
    i, j = torch.meshgrid(torch.arange(h) / h, torch.arange(w) / w, indexing="ij")
    frequency = (i.square() + j.square()).sqrt().clamp_min(0.5 / max(h, w)).log().to(public).flatten()
    design = torch.stack([torch.ones_like(frequency), frequency], 1)
    logs = power.clamp_min(torch.finfo(power.dtype).tiny).log().mT
    # Half the fitted log power is the logarithm of the standard deviation, k × p.
    return μ, colours, Φ, (design @ torch.linalg.lstsq(design, logs).solution / 2).exp().mT

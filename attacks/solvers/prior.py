"""The image priors of attacks: photographs are smooth except at edges, and their colours change together."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.attacks.solvers.linear import Map, conjugate_gradients
from privlab.images import photographs
from privlab.patches import patchify, slots_to_pixels, unpatchify
from privlab.victims import VictimModel

Names = tuple[str, ...] | None

Prior = Literal["quadratic", "sparse", "covariance", "cauchy"]
PRIORS: tuple[str, ...] = get_args(Prior)  # names of image priors: see `photograph_windows`

_RIDGE = 1e-5
"""Is added to the variances of colour differences, in squared pixels of [0, 1], because some photographs are grey."""

_ROUNDING_VARIANCE = 1 / 12 / 255**2  # variance of rounding to 8 bits, below which photographs say nothing

EDGE_WIDTH = 0.07
"""Differences of adjacent pixels, in their standard deviations, below which the sparse prior is quadratic."""


def total_variation(images: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Return the mean absolute difference of neighbouring pixels, across and down, of each image."""
    return images.diff(dim=2).abs().mean((1, 2, 3)) + images.diff(dim=3).abs().mean((1, 2, 3))


def photograph_gradients(model: VictimModel, names: Names = None) -> Float[Tensor, "c c"]:
    """Return the colour covariance of differences between adjacent normalised pixels, over the bundled photographs.

    `names` are the photographs that may be learned from (`Observation.photographs`); without it, all of them.
    """
    std = model.std.double().flatten()
    return _gradients(model.image_shape, names).to(std) / (std[:, None] * std)


def colour_gradients(model: VictimModel, images: Float[Tensor, "m c h w"]) -> Float[Tensor, "c c"]:
    """Return the colour covariance of differences between adjacent normalised pixels, over images in [0, 1]."""
    std = model.std.double().flatten()
    return _of_differences(images.to(model.mean).double()) / (std[:, None] * std)


@lru_cache(maxsize=32)
def _gradients(shape: tuple[int, int, int], names: Names) -> Float[Tensor, "c c"]:
    return _of_differences(photographs(shape[1:], names, shape[0]))


def _of_differences(images: Float[Tensor, "m c h w"]) -> Float[Tensor, "c c"]:
    δ = torch.cat([images.diff(dim=dim).transpose(0, 1).flatten(1) for dim in (3, 2)], 1)
    return δ @ δ.mT / δ.shape[1] + _RIDGE * torch.eye(len(δ), dtype=δ.dtype, device=δ.device)


@dataclass(frozen=True, eq=False)
class Smoothness:
    """The energy Σ_p w_p δ_pᵀ Γ⁻¹ δ_p of the differences δ_p between adjacent pixels, across and down.

    `shape` is the shape of an image, `covariance` is Γ.
    """

    shape: tuple[int, int, int]
    covariance: Float[Tensor, "c c"]

    def fill(
        self,
        X: Float[Tensor, "b n k"],
        Y: Float[Tensor, "b m k"],
        *,
        free: Bool[Tensor, "b n"],
        inside: Bool[Tensor, "b n"],
        steps: int,
        epsilon: float | None = None,
    ) -> Float[Tensor, "b n k"]:
        """Return X + C Y of least energy over C, in the rows that are `free`, by conjugate gradients from C = 0.

        Args:
            X: normalised patches, of which those that are not free stay as they are.
            Y: rows that span the changes allowed to a patch, the same for all patches of an image.
            free: slots whose patches may change.
            inside: slots whose pixels count: a difference counts only if both of its pixels are in them.
            steps: steps of conjugate gradients.
            epsilon: if given, w_p = 1 / √(ε² + δ_pᵀ Γ⁻¹ δ_p) of X, one round of reweighted least squares; else w_p = 1.
        """
        patch = round((X.shape[2] / self.shape[0]) ** 0.5)
        grid = (self.shape[1] // patch, self.shape[2] // patch)
        pixels = slots_to_pixels(inside, grid, patch)[:, None].to(X)
        across, down = pixels[..., 1:] * pixels[..., :-1], pixels[..., 1:, :] * pixels[..., :-1, :]
        precision = torch.linalg.inv(self.covariance).to(X)
        if epsilon is not None:
            _, of_across, of_down = self._weights(X, epsilon)
            across, down = across * of_across, down * of_down
        rows = free[..., None].to(X)

        def slope(X: Tensor) -> Tensor:
            """Return half the gradient of the energy by C."""
            return (self._slope(X, precision, across, down) * rows) @ Y.mT

        C = conjugate_gradients(lambda C: slope((C @ Y) * rows), -slope(X), steps)
        return X + (C @ Y) * rows

    def sparse_energy(self, X: Float[Tensor, "b n k"], epsilon: float) -> Float[Tensor, " b"]:
        """Return Σ_p √(ε² + δ_pᵀ Γ⁻¹ δ_p), which is small for photographs; `fill` with reweighting minimises it."""
        _, across, down = self._weights(X, epsilon)
        return across.reciprocal().sum((1, 2, 3)) + down.reciprocal().sum((1, 2, 3))

    def curvature(self, at: Float[Tensor, "b n k"], epsilon: float) -> Map:
        """Return the map X ↦ H X that bounds the Hessian of `sparse_energy` at a point, where H X is its gradient."""
        precision, across, down = self._weights(at, epsilon)
        return lambda X: self._slope(X, precision, across, down)

    def _weights(self, X: Float[Tensor, "b n k"], epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return Γ⁻¹, and the weights w_p = 1 / √(ε² + δ_pᵀ Γ⁻¹ δ_p) of the differences of X, across and down."""
        image, precision = unpatchify(X, self.shape), torch.linalg.inv(self.covariance).to(X)
        across, down = (
            (torch.einsum("bchw,cd,bdhw->bhw", δ, precision, δ) + epsilon**2).rsqrt()[:, None]
            for δ in (image.diff(dim=3), image.diff(dim=2))
        )
        return precision, across, down

    def _slope(self, X: Tensor, precision: Tensor, across: Tensor, down: Tensor) -> Tensor:
        """Return half the gradient of the energy by X, with these weights of its differences."""
        image = torch.einsum("cd,bdhw->bchw", precision, unpatchify(X, self.shape))
        back = _adjoint(image.diff(dim=3) * across, 3) + _adjoint(image.diff(dim=2) * down, 2)
        return patchify(back, round((X.shape[2] / self.shape[0]) ** 0.5))


@dataclass(frozen=True, eq=False)
class Windows:
    """The energy Σ_p Σ_f φ(|F_f x_p|²) over the windows x_p of an image, at every pixel.

    `filters` holds one F_f per group of responses, which share a weight; `tail` is q ↦ 2 φ′(q).
    """

    shape: tuple[int, int, int]
    filters: tuple[Float[Tensor, "_ _ _ _"], ...]
    tail: Map

    def fill(
        self,
        X: Float[Tensor, "b n k"],
        Y: Float[Tensor, "b m k"],
        *,
        free: Bool[Tensor, "b n"],
        inside: Bool[Tensor, "b n"],
        rounds: int,
        steps: int,
    ) -> Float[Tensor, "b n k"]:
        """Return X + C Y of least energy over C, in the rows that are `free`.

        Each round of reweighted least squares takes `steps` of conjugate gradients from the last C. Before the first
        round, 4 · `steps` solve for φ(q) = q / 2.

        Args:
            X: normalised patches, of which those that are not free stay as they are.
            Y: rows that span the changes allowed to a patch, the same for all patches of an image; some may be zero.
            free: slots whose patches may change.
            inside: slots whose pixels count: a window counts only if it lies wholly in them.
            rounds: rounds of reweighting, ≥ 0.
            steps: steps of conjugate gradients in each round.
        """
        patch = round((X.shape[2] / self.shape[0]) ** 0.5)
        pixels = slots_to_pixels(inside, (self.shape[1] // patch, self.shape[2] // patch), patch)[:, None].to(X)
        whole = [-F.max_pool2d(-pixels, bank.shape[2:], 1) for bank in self.filters]
        own, rows = torch.linalg.inv(self._of_patches(Y, patch).double()).to(X), free[..., None].to(X)
        X = X + self._step(X, Y, rows, own, whole, 4 * steps)
        for _ in range(rounds):
            weights = [w * self.tail(q) for w, q in zip(whole, self._squares(X), strict=True)]
            X = X + self._step(X, Y, rows, own, weights, steps)
        return X

    def _step(
        self,
        X: Float[Tensor, "b n k"],
        Y: Float[Tensor, "b m k"],
        rows: Float[Tensor, "b n 1"],
        own: Float[Tensor, "b m m"],
        weights: list[Tensor],
        steps: int,
    ) -> Float[Tensor, "b n k"]:
        """Return the change C Y of the rows that minimises the weighted energy.

        The preconditioner is the inverse of a patch's energy alone, `own`, over the mean weight of its windows.
        """
        patch = round((X.shape[2] / self.shape[0]) ** 0.5)
        _, height, width = self.shape
        at_first_pixels = [F.pad(w, (0, width - w.shape[3], 0, height - w.shape[2])) for w in weights]
        share = F.avg_pool2d(torch.stack(at_first_pixels).mean(0), patch).flatten(1)[..., None].clamp_min(1e-6)

        def slope(X: Tensor) -> Tensor:
            """Return half the gradient of the energy by C."""
            image = unpatchify(X, self.shape)
            back = torch.zeros_like(image)
            for bank, w in zip(self.filters, weights, strict=True):
                padding = (bank.shape[2] - 1, bank.shape[3] - 1)
                turned = bank.transpose(0, 1).flip(2, 3)  # `conv_transpose2d` takes several times as long
                back = back + F.conv2d(F.conv2d(image, bank) * w, turned, padding=padding)
            return (patchify(back, patch) * rows) @ Y.mT

        C = conjugate_gradients(lambda C: slope((C @ Y) * rows), -slope(X), steps, lambda r: r @ own / share)
        return (C @ Y) * rows

    def _squares(self, X: Float[Tensor, "b n k"]) -> list[Float[Tensor, "b 1 _ _"]]:
        image = unpatchify(X, self.shape)
        return [F.conv2d(image, bank).square().sum(1, keepdim=True) for bank in self.filters]

    def _of_patches(self, Y: Float[Tensor, "b m k"], patch: int) -> Float[Tensor, "b m m"]:
        """Return the matrix in C of the quadratic energy of a patch C Y amid zeros; zero rows of Y count as 1."""
        images = Y.reshape(-1, self.shape[0], patch, patch)
        H = torch.diag_embed((Y == 0).all(2).to(Y))
        for bank in self.filters:
            h, w = (side - 1 for side in bank.shape[2:])
            z = F.conv2d(F.pad(images, (w, w, h, h)), bank).reshape(*Y.shape[:2], -1)
            H = H + z @ z.mT
        return H


def photograph_windows(model: VictimModel, name: str, names: Names = None) -> Windows:
    """Return a prior whose covariances are those of the bundled photographs, in normalised pixels.

    The priors are

    - `quadratic`: φ(q) = q / 2 of the differences of adjacent pixels, q = δᵀ Γ⁻¹ δ, Γ their colour covariance;
    - `sparse`: φ(q) = √(ε² + q) of them: total variation, across and down, of colours together;
    - `covariance`: φ(q) = q / 2 of 3×3 windows without their mean colour, q = xᵀ Σ⁻¹ x: a Gaussian model;
    - `cauchy`: φ(q) = 2 log(1 + q) of each of the three cosines in 2×2 windows other than the mean, over colours, with
      Σ of greatest likelihood: Cauchy's distribution has one scale for both flat areas and edges.

    Args:
        model: the victim, whose normalisation and image shape count.
        name: one of `PRIORS`.
        names: the photographs that may be learned from (`Observation.photographs`); without it, all of them.
    """
    std = model.std.double().flatten()
    banks = _banks(name, model.image_shape, names)
    filters = tuple((bank.to(std) * std[:, None, None]).to(model.mean) for bank in banks)
    return Windows(model.image_shape, filters, _TAILS[name])


_TAILS: dict[str, Map] = {
    "quadratic": torch.ones_like,
    "sparse": lambda q: (EDGE_WIDTH**2 + q).rsqrt(),
    "covariance": torch.ones_like,
    "cauchy": lambda q: 4 / (1 + q),
}


@lru_cache(maxsize=32)
def _banks(name: str, shape: tuple[int, int, int], names: Names) -> tuple[Float[Tensor, "_ _ _ _"], ...]:
    images = photographs(shape[1:], names, shape[0])
    if name in ("quadratic", "sparse"):
        step = torch.tensor([-1.0, 1.0]).double()
        return tuple(_whitening(_gradients(shape, names), f[None]) for f in (step[None], step[:, None]))
    if name == "covariance":
        cosines = torch.stack(_cosines(3)[1:])
        return (_whitening(_covariance(_responses(images, cosines)), cosines),)
    return tuple(_whitening(_cauchy_scale(_responses(images, f[None])), f[None]) for f in _cosines(2)[1:])


def _cosines(side: int) -> list[Float[Tensor, "s s"]]:
    """Return the orthonormal basis of the discrete cosine transform of square windows, the mean first."""
    k = torch.arange(side, dtype=torch.float64)
    B = torch.cos(torch.pi * (k + 0.5) * k[:, None] / side)
    B = F.normalize(B, dim=1)
    return [torch.outer(a, b) for a in B for b in B]


def _responses(images: Float[Tensor, "m c h w"], filters: Float[Tensor, "f s t"]) -> Float[Tensor, "fc p"]:
    """Return the responses of the filters for each colour, filter by filter, over the windows of photographs."""
    z = F.conv2d(images.flatten(0, 1)[:, None], filters[:, None])
    return z.unflatten(0, images.shape[:2]).permute(2, 1, 0, 3, 4).flatten(0, 1).flatten(1)


def _covariance(z: Float[Tensor, "r p"]) -> Float[Tensor, "r r"]:
    return z @ z.mT / z.shape[1] + _ROUNDING_VARIANCE * torch.eye(len(z), dtype=z.dtype)


def _cauchy_scale(z: Float[Tensor, "r p"], rounds: int = 30) -> Float[Tensor, "r r"]:
    """Return the scale matrix under which Cauchy's distribution makes z most likely, by expectation maximisation."""
    scale = _covariance(z)
    for _ in range(rounds):
        q = (z * (torch.linalg.inv(scale) @ z)).sum(0)
        scale = _covariance(z * ((len(z) + 1) / (1 + q)).sqrt())
    return scale


def _whitening(covariance: Float[Tensor, "r r"], filters: Float[Tensor, "f s t"]) -> Float[Tensor, "r c s t"]:
    """Return a convolution after which responses of filters, each of every colour, have covariance I."""
    λ, Q = torch.linalg.eigh(covariance)
    return torch.einsum("rfc,fst->rcst", (Q / λ.sqrt()).mT.unflatten(1, (len(filters), -1)), filters)


def _adjoint(δ: Tensor, dim: int) -> Tensor:
    """Return the adjoint of `diff` along a dimension."""
    edge = δ.new_zeros(*(1 if d == dim else n for d, n in enumerate(δ.shape)))
    return -torch.cat([edge, δ, edge], dim).diff(dim=dim)

"""The image prior that attacks complete with: photographs are smooth, and their colours change together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.images import Preprocessing, open_images
from privlab.model import VictimModel
from privlab.patches import patchify, slots_to_pixels, unpatchify

__all__ = ["Smoothness", "conjugate_gradients", "photograph_gradients"]

Map = Callable[[Tensor], Tensor]

_RIDGE = 1e-5
"""Added to the variances of colour differences, in pixels of [0, 1] squared: some photographs are grey."""


def photograph_gradients(model: VictimModel) -> Float[Tensor, "c c"]:
    """Return the colour covariance of differences between adjacent normalised pixels, over the bundled photographs."""
    side = tuple(model.image_shape[1:])
    std = model.std.double().flatten()
    return _gradients((side[0], side[1])).to(std) / (std[:, None] * std)


@lru_cache(maxsize=4)
def _gradients(size: tuple[int, int]) -> Float[Tensor, "c c"]:
    cut = Preprocessing(size=size, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic")
    images = torch.stack([cut(picture.pixels) for picture in open_images("samples") if picture.pixels]).double()
    δ = torch.cat([images.diff(dim=dim).transpose(0, 1).flatten(1) for dim in (3, 2)], 1)
    return δ @ δ.mT / δ.shape[1] + _RIDGE * torch.eye(len(δ), dtype=δ.dtype)


@dataclass(frozen=True, eq=False)
class Smoothness:
    """The energy Σ_p w_p δ_pᵀ Γ⁻¹ δ_p of the differences δ_p between adjacent pixels, across and down.

    `shape` is that of an image, `covariance` is Γ.
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

        Only differences between two pixels `inside` count. With `epsilon`, w_p = 1 / √(ε² + δ_pᵀ Γ⁻¹ δ_p) of X: one
        round of reweighted least squares.
        """
        patch = round((X.shape[2] / self.shape[0]) ** 0.5)
        grid = (self.shape[1] // patch, self.shape[2] // patch)
        pixels = slots_to_pixels(inside, grid, patch)[:, None].to(X)
        across, down = pixels[..., 1:] * pixels[..., :-1], pixels[..., 1:, :] * pixels[..., :-1, :]
        precision = torch.linalg.inv(self.covariance).to(X)
        if epsilon is not None:
            image = unpatchify(X, self.shape)
            across = across * _weight(image.diff(dim=3), precision, epsilon)
            down = down * _weight(image.diff(dim=2), precision, epsilon)
        rows = free[..., None].to(X)

        def slope(X: Tensor) -> Tensor:
            """Return half the gradient of the energy by C."""
            image = torch.einsum("cd,bdhw->bchw", precision, unpatchify(X, self.shape))
            back = _adjoint(image.diff(dim=3) * across, 3) + _adjoint(image.diff(dim=2) * down, 2)
            return (patchify(back, patch) * rows) @ Y.mT

        C = conjugate_gradients(lambda C: slope((C @ Y) * rows), -slope(X), steps)
        return X + (C @ Y) * rows

    def sparse_energy(self, X: Float[Tensor, "b n k"], epsilon: float) -> Float[Tensor, " b"]:
        """Return Σ_p √(ε² + δ_pᵀ Γ⁻¹ δ_p): what photographs keep small, and what reweighting lets `fill` minimise."""
        image = unpatchify(X, self.shape)
        precision = torch.linalg.inv(self.covariance).to(X)
        across, down = (_weight(image.diff(dim=dim), precision, epsilon) for dim in (3, 2))
        return across.reciprocal().sum((1, 2, 3)) + down.reciprocal().sum((1, 2, 3))

    def curvature(self, at: Float[Tensor, "b n k"], epsilon: float) -> Map:
        """Return the map X ↦ H X that bounds the Hessian of `sparse_energy` at a point; there H X is its gradient."""
        image, patch = unpatchify(at, self.shape), round((at.shape[2] / self.shape[0]) ** 0.5)
        precision = torch.linalg.inv(self.covariance).to(at)
        across, down = (_weight(image.diff(dim=dim), precision, epsilon) for dim in (3, 2))

        def product(X: Tensor) -> Tensor:
            image = torch.einsum("cd,bdhw->bchw", precision, unpatchify(X, self.shape))
            return patchify(_adjoint(image.diff(dim=3) * across, 3) + _adjoint(image.diff(dim=2) * down, 2), patch)

        return product


def _weight(δ: Float[Tensor, "b c h w"], precision: Float[Tensor, "c c"], epsilon: float) -> Float[Tensor, "b 1 h w"]:
    squares = torch.einsum("bchw,cd,bdhw->bhw", δ, precision, δ)
    return (squares + epsilon**2).rsqrt()[:, None]


def _adjoint(δ: Tensor, dim: int) -> Tensor:
    """Return the adjoint of `diff` along a dimension."""
    edge = δ.new_zeros(*(1 if d == dim else n for d, n in enumerate(δ.shape)))
    return -torch.cat([edge, δ, edge], dim).diff(dim=dim)


def conjugate_gradients(
    product: Map, target: Float[Tensor, "b n k"], steps: int, precondition: Map = lambda r: r
) -> Float[Tensor, "b n k"]:
    """Return an approximate solution V of product(V) = target, for each of the batch, from V = 0."""
    least = torch.finfo(target.dtype).tiny
    V, r = torch.zeros_like(target), target
    p = z = precondition(r)
    square = _dot(r, z)
    for _ in range(steps):
        q = product(p)
        α = square / _dot(p, q).clamp_min(least)
        V, r = V + α * p, r - α * q
        z = precondition(r)
        now = _dot(r, z)
        p, square = z + now / square.clamp_min(least) * p, now
    return V


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2), keepdim=True)

"""The image priors of attacks: photographs are smooth except at edges, and their colours change together.

Gradients and features often leave directions of an image open. An attack closes them with the image of least energy
−log p(image) among those that the release allows, X + C Y, and this file has the energies and that minimisation.

1. Statistics: the covariance of differences of adjacent pixels, or of window responses, over public photographs.
2. An energy with these statistics: `Smoothness` of the differences, `Windows` of the responses of filters.
3. Its minimum over C, by conjugate gradients. An energy that is not quadratic is replaced by a quadratic upper bound at
   the last image, whose weights are computed again in each round (iteratively reweighted least squares).
"""

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
    # A normalised pixel is (pixel − mean) / std, so Γ_cd is divided by std_c · std_d.
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
    # δ is c × P: one column for each pair of adjacent pixels, across and down. Their mean is
    # close to zero and is not taken off.
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
        # A row of X has k = c · patch² entries, so this is the side of a patch.
        patch = round((X.shape[2] / self.shape[0]) ** 0.5)
        grid = (self.shape[1] // patch, self.shape[2] // patch)
        pixels = slots_to_pixels(inside, grid, patch)[:, None].to(X)
        # A difference counts 1 if both of its pixels are inside, else 0: b × 1 × h × (w − 1) and b × 1 × (h − 1) × w.
        across, down = pixels[..., 1:] * pixels[..., :-1], pixels[..., 1:, :] * pixels[..., :-1, :]
        precision = torch.linalg.inv(self.covariance).to(X)
        # w_p = 1 / √(ε² + δ_pᵀ Γ⁻¹ δ_p) makes the quadratic energy, halved and shifted by a constant, an upper bound of
        # the sparse one that touches it at X.
        if epsilon is not None:
            _, of_across, of_down = self._weights(X, epsilon)
            across, down = across * of_across, down * of_down
        rows = free[..., None].to(X)

        def slope(X: Tensor) -> Tensor:
            """Return half the gradient of the energy by C."""
            return (self._slope(X, precision, across, down) * rows) @ Y.mT

        # The energy is quadratic, so its slope is linear: slope(X + C Y) = 0 becomes slope(C Y) =
        # −slope(X), a linear system for C (b × n × m).
        C = conjugate_gradients(lambda C: slope((C @ Y) * rows), -slope(X), steps)
        return X + (C @ Y) * rows

    def sparse_energy(self, X: Float[Tensor, "b n k"], epsilon: float) -> Float[Tensor, " b"]:
        """Return Σ_p √(ε² + δ_pᵀ Γ⁻¹ δ_p), which is small for photographs; `fill` with reweighting minimises it."""
        # The weights are the reciprocals of the roots that are summed up here.
        _, across, down = self._weights(X, epsilon)
        return across.reciprocal().sum((1, 2, 3)) + down.reciprocal().sum((1, 2, 3))

    def curvature(self, at: Float[Tensor, "b n k"], epsilon: float) -> Map:
        """Return the map X ↦ H X that bounds the Hessian of `sparse_energy` at a point, where H X is its gradient."""
        # √(ε² + q) is concave in q: its tangent at q₀ bounds it by a quadratic function of
        # X, with the constant weights of `at`.
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
        # Half the gradient is Dᵀ w Γ⁻¹ D X, with D the differences. Γ⁻¹ is the same at all
        # pixels, so it may be applied before D.
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
        # A window counts if the smallest of its pixels' marks is 1; −max of −pixels is that minimum, b × 1 × windows.
        pixels = slots_to_pixels(inside, (self.shape[1] // patch, self.shape[2] // patch), patch)[:, None].to(X)
        whole = [-F.max_pool2d(-pixels, bank.shape[2:], 1) for bank in self.filters]
        # `own` (b × m × m) is the inverse of one patch's energy matrix in C, the preconditioner of all rounds.
        own, rows = torch.linalg.inv(self._of_patches(Y, patch).double()).to(X), free[..., None].to(X)
        # The first solution is that of φ(q) = q / 2, where all windows have weight 1.
        # It is where the reweighting starts.
        X = X + self._step(X, Y, rows, own, whole, 4 * steps)
        for _ in range(rounds):
            # Near the last q, φ(q) is bounded by φ′ q + constant = ½ w q + constant, with w = 2 φ′(q), for a concave φ.
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
        # The weight of a window is put at the window's upper left pixel, so that all groups have maps of h × w.
        at_first_pixels = [F.pad(w, (0, width - w.shape[3], 0, height - w.shape[2])) for w in weights]
        # `share` (b × n × 1) is the mean weight over the pixels of each patch: it scales the curvature of this patch.
        share = F.avg_pool2d(torch.stack(at_first_pixels).mean(0), patch).flatten(1)[..., None].clamp_min(1e-6)

        def slope(X: Tensor) -> Tensor:
            """Return half the gradient of the energy by C."""
            # For each group the slope is Fᵀ (w · F x): filter, weigh the responses, and
            # filter back with the mirrored filters.
            image = unpatchify(X, self.shape)
            back = torch.zeros_like(image)
            for bank, w in zip(self.filters, weights, strict=True):
                # The adjoint of a convolution without padding is one with the filter turned by 180° and full padding.
                padding = (bank.shape[2] - 1, bank.shape[3] - 1)
                turned = bank.transpose(0, 1).flip(2, 3)  # `conv_transpose2d` takes several times as long
                back = back + F.conv2d(F.conv2d(image, bank) * w, turned, padding=padding)
            # The chain rule from X to C: rows that are not free have no slope, and d(C Y)/dC contributes Yᵀ.
            return (patchify(back, patch) * rows) @ Y.mT

        # As in `Smoothness.fill`: slope(C Y) = −slope(X). A preconditioner of one matrix per
        # patch replaces the inverse of the whole.
        C = conjugate_gradients(lambda C: slope((C @ Y) * rows), -slope(X), steps, lambda r: r @ own / share)
        return (C @ Y) * rows

    def _squares(self, X: Float[Tensor, "b n k"]) -> list[Float[Tensor, "b 1 _ _"]]:
        # q_p = |F x_p|² for each group: the sum of squared responses over the r channels of its filter bank.
        image = unpatchify(X, self.shape)
        return [F.conv2d(image, bank).square().sum(1, keepdim=True) for bank in self.filters]

    def _of_patches(self, Y: Float[Tensor, "b m k"], patch: int) -> Float[Tensor, "b m m"]:
        """Return the matrix in C of the quadratic energy of a patch C Y amid zeros; zero rows of Y count as 1."""
        # Every row of Y is drawn as a patch image, (b · m) × c × patch × patch.
        images = Y.reshape(-1, self.shape[0], patch, patch)
        # A zero row of Y changes no image and would make H singular: its diagonal entry is 1.
        H = torch.diag_embed((Y == 0).all(2).to(Y))
        for bank in self.filters:
            # The zeros around the patch let every window that overlaps it count. z (b × m × responses) holds F x of
            # each row of Y, and H_ij = ⟨z_i, z_j⟩.
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
    # The filters were fitted to pixels in [0, 1]. x = std · x_norm + mean, and no filter responds to the constant mean.
    filters = tuple((bank.to(std) * std[:, None, None]).to(model.mean) for bank in banks)
    return Windows(model.image_shape, filters, _TAILS[name])


_TAILS: dict[str, Map] = {
    "quadratic": torch.ones_like,
    "sparse": lambda q: (EDGE_WIDTH**2 + q).rsqrt(),
    "covariance": torch.ones_like,
    # −log of Cauchy's density of r channels is (r + 1) / 2 · log(1 + q): twice the log for colours. It is once the log
    # for grey, but the prior is minimised alone, where a factor changes nothing.
    "cauchy": lambda q: 4 / (1 + q),
}


@lru_cache(maxsize=32)
def _banks(name: str, shape: tuple[int, int, int], names: Names) -> tuple[Float[Tensor, "_ _ _ _"], ...]:
    images = photographs(shape[1:], names, shape[0])
    if name in ("quadratic", "sparse"):
        # The filters are [−1, 1] across and down; after whitening by Γ their squared response is q = δᵀ Γ⁻¹ δ.
        step = torch.tensor([-1.0, 1.0]).double()
        return tuple(_whitening(_gradients(shape, names), f[None]) for f in (step[None], step[:, None]))
    if name == "covariance":
        # Without the mean, 8 cosines of c colours each have one joint covariance: one
        # group, whose responses share a weight.
        cosines = torch.stack(_cosines(3)[1:])
        return (_whitening(_covariance(_responses(images, cosines)), cosines),)
    # Each of the 3 cosines other than the mean is a group with a c × c scale matrix,
    # and so with weights specific to it.
    return tuple(_whitening(_cauchy_scale(_responses(images, f[None])), f[None]) for f in _cosines(2)[1:])


def _cosines(side: int) -> list[Float[Tensor, "s s"]]:
    """Return the orthonormal basis of the discrete cosine transform of square windows, the mean first."""
    # Row k of B is cos(π (j + ½) k / side) over j: the one-dimensional cosine transform, with rows of length 1.
    k = torch.arange(side, dtype=torch.float64)
    B = torch.cos(torch.pi * (k + 0.5) * k[:, None] / side)
    B = F.normalize(B, dim=1)
    return [torch.outer(a, b) for a in B for b in B]


def _responses(images: Float[Tensor, "m c h w"], filters: Float[Tensor, "f s t"]) -> Float[Tensor, "fc p"]:
    """Return the responses of the filters for each colour, filter by filter, over the windows of photographs."""
    # Colours are filtered as separate images: z is (m · c) × f × h' × w', and then (f · c) × all windows.
    z = F.conv2d(images.flatten(0, 1)[:, None], filters[:, None])
    return z.unflatten(0, images.shape[:2]).permute(2, 1, 0, 3, 4).flatten(0, 1).flatten(1)


def _covariance(z: Float[Tensor, "r p"]) -> Float[Tensor, "r r"]:
    return z @ z.mT / z.shape[1] + _ROUNDING_VARIANCE * torch.eye(len(z), dtype=z.dtype)


def _cauchy_scale(z: Float[Tensor, "r p"], rounds: int = 30) -> Float[Tensor, "r r"]:
    """Return the scale matrix under which Cauchy's distribution makes z most likely, by expectation maximisation."""
    scale = _covariance(z)
    for _ in range(rounds):
        # E step: a Cauchy vector z of r entries is normal with a random precision, of mean
        # (r + 1) / (1 + q) given z, where q = zᵀ Σ⁻¹ z.
        q = (z * (torch.linalg.inv(scale) @ z)).sum(0)
        # M step: Σ is the covariance of z weighted by these precisions.
        scale = _covariance(z * ((len(z) + 1) / (1 + q)).sqrt())
    return scale


def _whitening(covariance: Float[Tensor, "r r"], filters: Float[Tensor, "f s t"]) -> Float[Tensor, "r c s t"]:
    """Return a convolution after which responses of filters, each of every colour, have covariance I."""
    # With covariance Q Λ Qᵀ, the map Λ^(−½) Qᵀ (r × fc) whitens responses: |F x|² = zᵀ
    # covariance⁻¹ z. It is folded into the filters.
    λ, Q = torch.linalg.eigh(covariance)
    return torch.einsum("rfc,fst->rcst", (Q / λ.sqrt()).mT.unflatten(1, (len(filters), -1)), filters)


def _adjoint(δ: Tensor, dim: int) -> Tensor:
    """Return the adjoint of `diff` along a dimension."""
    # (Dᵀ δ)_i = δ_{i−1} − δ_i, with δ = 0 beyond both ends.
    edge = δ.new_zeros(*(1 if d == dim else n for d, n in enumerate(δ.shape)))
    return -torch.cat([edge, δ, edge], dim).diff(dim=dim)

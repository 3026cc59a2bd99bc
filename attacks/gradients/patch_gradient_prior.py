"""`patch-gradient-prior`: an image prior and integer grey levels, for more patches than a gradient has equations."""

# Known are A = ∂ℓ/∂E_pos (N × D) and G = ∂ℓ/∂W = Aᵀ X (D × K). Sought are the patches X (N × K), where A has too small
# a rank, or singular values too small, to determine all of X.
# 1. A ridge solve gives what the equations determine. `Free.of` finds the combinations Vᵀ X that they leave open.
# 2. `_smoothest` chooses these by an image prior.
# 3. `_whole` tests which columns of pixels (one place in all patches) become whole grey levels, and keeps those.
# 4. Columns that are settled help the prior with the others, in further passes.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from privlab.attacks.solvers import (
    ONE_IMAGE,
    RTOL,
    Smoothness,
    conjugate_gradients,
    photograph_gradients,
    ridge_inverse,
    slot_gradients,
    warn_of_limits,
    zero_rows,
)
from privlab.attacks.solvers.linear import Map
from privlab.base import AtLeast0, AtLeast1, Checked, Positive
from privlab.threat import Capability, Observation
from privlab.victims import VictimModel

_FREE_CHANGE = 1 / 255
"""A combination of patches is free if rounding changes it by more than this, in units of a pixel's range."""

_ASSUMED_ERROR = 8.0  # assumed root mean square error of the smoothest image, in grey levels: that of 30 dB
_LEAST_ERROR = 0.03  # least error, in grey levels, that is assumed of an integer value
_WINDOW = 4  # integers tried on either side of the expected value, whose error must not be larger
_INTEGER_DISTANCE = 0.15  # a column of pixels counts as integers below this root mean square distance from integers

_MOST_FREE = 4
"""The largest N − D for which step 2 was measured, on trained weights: N = 196, D = 192.

See experiments/notes/gradients.md.
"""

_LEAST_CHECKS = 40
"""Fewest equations left over: as many random values are as close to integers with a probability of 4e-10."""


class Free(NamedTuple):
    """What Aᵀ X = G leaves open: the combinations Vᵀ X of patches, orthonormal, and zero beyond their number.

    The little that G says of them has the likelihood exp(−gain · (Vᵀ X)² / 2 + heard · Vᵀ X). `noise` is the standard
    deviation of the error of each patch without its free combinations.
    """

    V: Float[Tensor, "b n f"]
    gain: Float[Tensor, "b f 1"]
    heard: Float[Tensor, "b f k"]
    noise: Float[Tensor, "b n"]

    @classmethod
    def of(cls, A: Float[Tensor, "b n d"], G: Float[Tensor, "b d k"], coarse: float) -> "Free":
        """Return the combinations of patches whose error exceeds `coarse`.

        Args:
            A: ∂ℓ/∂E_pos of the patch slots; an image with a row of zeros, as under MJP, has no free combinations.
            G: ∂ℓ/∂W of the patch embedding, D × K for each image; its rounding makes the error.
            coarse: standard deviation of the error, in normalised pixels, above which a combination is free, > 0.
        """
        # With A = U s Vᴴ, Aᵀ X = G becomes s (Uᵀ X) = Vᴴ G, with errors of the size σ of G's rounding.
        # Divided by σ, the errors have variance one.
        n, d = A.shape[1:]
        σ = (G.square().mean((1, 2)).sqrt() * RTOL).clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        U, s, Vh = torch.linalg.svd(A, full_matrices=n > d)
        more = max(0, n - d)
        # For N > D the last N − D rows of Uᵀ X are in no equation: s = 0 there.
        said, s = pad(Vh @ G, (0, 0, 0, more)) / σ[..., None], pad(s, (0, more)) / σ
        # The error of row i of Uᵀ X is σ / s_i. A row is free if that is more than
        # `coarse`. Under MJP nothing is completed.
        free = (s * coarse < 1) & ~zero_rows(A).any(1, keepdim=True)
        # Errors of all other rows together, for each patch: the root of Σ_i (U_ni σ / s_i)².
        noise = (U / s.clamp_min(1e-9)[:, None]).masked_fill(free[:, None], 0).square().sum(2).sqrt()
        # Singular values are sorted, so that the free rows are the last ones; images with fewer have zeros in V.
        last = slice(n - int(free.sum(1).max()), n)
        V, s = U[..., last] * free[:, None, last], (s * free)[:, last, None]
        return cls(V, s.square(), s * said[:, last], noise)


@dataclass(frozen=True)
class PatchGradientPrior(Checked):
    """Solve Aᵀ X = ∂ℓ/∂W as `patch-gradient` does, and find what that leaves open if N ≥ D or A is ill conditioned.

    Idea: The linear system of `patch-gradient` has too few equations where there are at least as many patches as
    channels. The attack solves what can be solved, and knows which few combinations of patches are left open. It
    completes these by the smoothest image, and then tests which whole grey levels fit.

    Steps: solve Aᵀ X = ∂ℓ/∂W → complete by an image prior → round to grey levels that fit

    Algorithm: A = ∂ℓ/∂E_pos has rank D − 1 at most, so N − D + 1 combinations V of the patches are in no equation: X =
    X₀ + V C.

    1. C is that of the smoothest image: it minimises Σ_p √(ε² + δ_pᵀ Γ⁻¹ δ_p), as in `mjp-subspace`, plus ‖G −
       Aᵀ X‖² / 2σ², with σ the rounding error of G, for combinations of which G says a little.
    2. Pixels of eight bits are integers. The N values at one place of all patches have N − D + 1 unknowns: these are
       found one after the other (`_integers`), and the remaining values test that they are right.

    If no combination is free this is `patch-gradient`.

    Exact if: `patch-gradient` would be; for an image of eight bits also for a few patches more than that (measured:
    trained weights, D = 192, N = 196).

    Fails if: there are many more patches than equations (N = 225, D = 192), the pixels are not whole grey levels, or
    the rounding error is as large as a level, as it may be with random weights: only its image prior is left then.
    Under MJP it is `patch-gradient`.

    Cost: 1.0 s an image (ViT-Ti, 224 pixels, one shared core).

    Studies: gradients, table5

    Args:
        rounds: rounds of reweighting.
        steps: steps of conjugate gradients in each round.
        epsilon: ε, in standard deviations of the differences.
        levels: grey levels above black, 255 for eight bits; 0 leaves out step 2.
        kept: number of hypotheses that are kept for each column of pixels.
        passes: the most passes of both steps; columns that step 2 has settled help step 1 with the others.
    """

    name: ClassVar[str] = "patch-gradient-prior"
    paper: ClassVar[str] = "ours: the chain rule at z = Wx + b + e, an image prior, whole grey levels"
    order: ClassVar[int] = 50
    short: ClassVar[Mapping[str, Any]] = {"rounds": 1, "steps": 1, "passes": 1}
    requires: ClassVar[frozenset[Capability]] = ONE_IMAGE
    effort: ClassVar[str] = "quick"
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed", "patch_embed.proj.weight")

    rounds: AtLeast1 = 6
    steps: AtLeast1 = 10
    epsilon: Positive = 0.1
    levels: AtLeast0 = 255
    kept: AtLeast1 = 16
    passes: AtLeast1 = 4

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition N ≤ D + 4 with its numbers if it does not hold; step 2 was measured up to there."""
        _, n, d = slot_gradients(seen).shape
        return None if n <= d + _MOST_FREE else f"N = {n} > D + {_MOST_FREE} = {d + _MOST_FREE}"

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed."""
        model, A = seen.model, slot_gradients(seen).double()
        G = seen.gradients["patch_embed.proj.weight"].flatten(2).double()
        warn_of_limits(self.name, A, most=A.shape[1])
        # Step 1: the solution of the equations, about zero in the free combinations.
        X = ridge_inverse(A.mT) @ G
        Γ = photograph_gradients(model, seen.photographs)
        free = Free.of(A, G, _FREE_CHANGE / float(model.std.max()))
        # Images with a free combination have all their K columns open.
        left = free.V.any(1).any(1)[:, None].repeat(1, X.shape[2])  # columns of pixels that are not settled
        for _ in range(self.passes):
            todo = left.any(1)
            if not todo.any():
                break
            # Steps 2 and 3, on the images that are not done. Settled columns stay as they are,
            # and are the neighbours of others.
            part, open_ = Free(*(each[todo] for each in free)), left[todo]
            X[todo], fits = self._whole(self._smoothest(X[todo], part, open_, model, Γ), part, open_, model)
            left[todo] = open_ & ~fits & fits.any(1, keepdim=True)  # a pass that settles nothing is the last one
        return model.to_images(X)

    def _smoothest(
        self,
        X: Float[Tensor, "b n k"],
        free: Free,
        left: Bool[Tensor, "b k"],
        model: VictimModel,
        Γ: Float[Tensor, "c c"],
    ) -> Float[Tensor, "b n k"]:
        """Return the smoothest X + V C that changes only the columns in `left`, by reweighted least squares."""
        dtype = model.mean.dtype
        prior, precondition = Smoothness(model.image_shape, Γ), _preconditioner(model.patch, Γ, free.gain, dtype)
        V, gain, heard = free.V.to(dtype), free.gain.to(dtype), free.heard.to(dtype)
        inside = left[:, None].to(dtype)
        for _ in range(self.rounds):
            # The energy is Σ √(ε² + δᵀ Γ⁻¹ δ) + gain (Vᵀ X)² / 2 − heard · Vᵀ X. H is its quadratic bound at X, renewed
            # in each round: (Vᵀ H V + gain) C = −slope is solved in the open columns.
            H = prior.curvature(X.to(dtype), self.epsilon)
            slope = (V.mT @ H(X.to(dtype)) + gain * (V.mT @ X.to(dtype)) - heard) * inside

            def product(C: Tensor, H: Map = H) -> Tensor:
                return (V.mT @ H(V @ C) + gain * C) * inside

            C = conjugate_gradients(product, -slope, self.steps, lambda r: precondition(r) * inside)
            X = X + free.V @ C.double()
        return X

    def _whole(
        self, X: Float[Tensor, "b n k"], free: Free, left: Bool[Tensor, "b k"], model: VictimModel
    ) -> tuple[Float[Tensor, "b n k"], Bool[Tensor, "b k"]]:
        """Return X with integer grey levels in the columns of `left` that they explain, and which columns these are."""
        if not self.levels:
            return X, torch.zeros_like(left)
        # f unknowns of N values: pixels in grey levels are X · scale + dark, with one
        # scale and offset for each channel.
        area, n, unknowns = model.patch**2, X.shape[1], free.V.square().sum((1, 2)).round()[:, None]
        scale, dark = ((self.levels * t).double().flatten().repeat_interleave(area) for t in (model.std, model.mean))
        coarse = scale.max()
        # The smoothest image is assumed to be 8 levels off: N · 8² in all, shared by f
        # combinations. What G says adds precision.
        variance = 1 / (unknowns.clamp_min(1) / (n * _ASSUMED_ERROR**2) + free.gain[..., 0] / coarse**2)
        found, fits = _integers(X * scale + dark, free.V, free.noise * coarse, variance, self.kept)
        # N − f values test the f that are fitted: with too few, random values would be near integers by chance.
        fits = fits & left & (n - unknowns >= _LEAST_CHECKS)
        return torch.where(fits[:, None], (found - dark) / scale, X), fits


def _preconditioner(patch: int, Γ: Float[Tensor, "c c"], gain: Float[Tensor, "b f 1"], dtype: torch.dtype) -> Map:
    """Return the inverse of Vᵀ H V + gain, for weights of one and without the links of neighbouring patches in V.

    Each combination of patches is then a patch surrounded by zeros, and the modes of the Laplacian are sines.
    """
    # The Laplacian of a patch surrounded by zeros has the modes sin(π i j / (p + 1)) across and down, whose eigenvalues
    # 2 − 2 cos(π i / (p + 1)) add up. They are multiplied by those of Γ⁻¹, whose eigenvectors mix the channels.
    place = torch.arange(1, patch + 1, dtype=torch.float64, device=gain.device)
    sines = (torch.pi / (patch + 1) * place[:, None] * place).sin() * (2 / (patch + 1)) ** 0.5
    curvature = 2 - 2 * (torch.pi / (patch + 1) * place).cos()
    precision, colours = torch.linalg.eigh(torch.linalg.inv(Γ.double()))
    modes = precision.view(-1, 1, 1) * (curvature[:, None] + curvature)
    inverse = (1 / (modes + gain[..., None, None])).to(dtype)
    sines, colours = sines.to(dtype), colours.to(dtype)

    def apply(r: Tensor) -> Tensor:
        # To the modes, division by eigenvalue + gain, and back: the sines are their own inverse.
        square = r.unflatten(2, (-1, patch, patch))
        heights = torch.einsum("bfcij,cd->bfdij", sines @ square @ sines, colours) * inverse
        return torch.einsum("bfdij,cd->bfcij", sines @ heights @ sines, colours).flatten(2)

    return apply


def _integers(
    X: Float[Tensor, "b n k"],
    V: Float[Tensor, "b n f"],
    noise: Float[Tensor, "b n"],
    variance: Float[Tensor, "b f"],
    kept: int,
) -> tuple[Float[Tensor, "b n k"], Bool[Tensor, "b k"]]:
    """Return the integers X + V C of the likeliest C of each column, and which columns they explain.

    A value with a small error, once rounded, determines a part of C, and so reduces the errors of the other values: a
    Kalman filter over the rows, the least uncertain first, with the `kept` likeliest hypotheses of each column. All
    columns share V, and with it the order of the rows, the covariance of C and the gains.
    """
    b, n, k = X.shape
    f, images = V.shape[2], torch.arange(b, device=X.device)
    # Values X + V C of a column have the variance vᵀ P v of C in row v of V, and `blur` of all other errors.
    blur = noise.square() + _LEAST_ERROR**2
    P, left = torch.diag_embed(variance), torch.ones_like(blur, dtype=torch.bool)
    C, cost = X.new_zeros(b, k, 1, f), X.new_zeros(b, k, 1)
    window = torch.arange(-_WINDOW, _WINDOW + 1, device=X.device).to(X)
    for _ in range(n):
        # The next row is the least uncertain one whose uncertainty by C is more than twice its other errors.
        unknown = ((V @ P) * V).sum(2)
        error, i = torch.where(left & (unknown > 4 * blur), unknown + blur, torch.inf).min(1)
        going = error < _WINDOW**2  # beyond that the right integer is hardly among those tried
        if not going.any():
            break
        left[images, i] = False
        # Kalman's update: gain = P v / (vᵀ P v + blur), P ← P − gain (vᵀ P), the same for all columns and hypotheses.
        v = V[images, i] * going[:, None]
        gain = (P @ v[..., None])[..., 0] / error[:, None]
        P = P - gain[..., None] * (v[:, None] @ P)
        # Each hypothesis expects a value (b × k × kept), and the integers around it are tried.
        # The surprise is what C must explain.
        expected = X[images, i][..., None] + (C @ v[:, None, :, None])[..., 0]
        surprise = expected.round()[..., None] + window - expected[..., None]
        # −2 log of the likelihood adds surprise² / error. Of kept · 9 hypotheses the likeliest
        # are kept, each with its parent's C.
        costs = (cost[..., None] + surprise.square() / error.view(b, 1, 1, 1)).flatten(2)
        best = costs.topk(min(kept, costs.shape[2]), 2, largest=False)
        parent = (best.indices // len(window))[..., None].expand(-1, -1, -1, f)
        moved = surprise.flatten(2).gather(2, best.indices)
        C = C.gather(2, parent) + moved[..., None] * gain[:, None, None]
        cost = best.values
    # The likeliest C gives the integers. Then C is solved for again by least squares
    # from all of them (V is orthonormal).
    C = C.gather(2, cost.argmin(2)[..., None, None].expand(-1, -1, 1, f))[:, :, 0]
    rounded = (X + V @ C.mT).round()
    found = (X + V @ (V.mT @ (rounded - X))).round()
    # found − X must lie in the span of V, as V C does. The mean square of what does not is the distance from integers.
    apart = found - X
    return found, (apart - V @ (V.mT @ apart)).square().mean(1) < _INTEGER_DISTANCE**2

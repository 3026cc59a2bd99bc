"""`patch-gradient-prior`: an image prior and integer grey levels, for more patches than a gradient has equations."""

# Known are A = ∂ℓ/∂E_pos (N × D) and G = ∂ℓ/∂W = Aᵀ X (D × K). Sought are the patches X (N × K), where A has too small
# a rank, or singular values too small, to determine all of X.
# 1. A ridge solve gives what the equations determine. `Free.of` finds the combinations Vᵀ X that they leave open.
# 2. `_smoothest` chooses these by an image prior.
# 3. `_whole` tests which columns of pixels (one place in all patches) become whole grey levels, and keeps those.
# 4. Columns that are settled help the prior with the others, in further passes.
# `of_update` does the same for updates, where A has errors too: columns that are settled show these.

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

MOST_FREE = 4
"""The largest N − D for which step 2 was measured, on trained weights: N = 196, D = 192.

See experiments/notes/gradients.md.
"""

_DIFFERENCE_DISTANCE = 0.1
"""The same for entries of an update, whose A is known less well: 0.02 to 0.09 if right, 0.15 to 0.27 if no integers."""

_UPDATE_ERRORS = (_ASSUMED_ERROR, 2.0)  # errors of the smoothest image that are assumed in turn: those of flat ones

_OUTLIER = 4.0  # a column is wrong if its squared errors in the equations are so many times their median

_UPDATE_PASSES = 8  # the most passes over the columns of an update, of differences and then of pixels

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
    def of(
        cls, A: Float[Tensor, "b n d"], G: Float[Tensor, "b d k"], coarse: float, error: float | None = None
    ) -> "Free":
        """Return the combinations of patches whose error exceeds `coarse`.

        Args:
            A: ∂ℓ/∂E_pos of the patch slots; an image with a row of zeros, as under MJP, has no free combinations.
            G: ∂ℓ/∂W of the patch embedding, D × K for each image; its rounding makes the error.
            coarse: standard deviation of the error, in normalised pixels, above which a combination is free, > 0.
            error: standard deviation of the error of each entry of G; None for that of float32's rounding.
        """
        # With A = U s Vᴴ, Aᵀ X = G becomes s (Uᵀ X) = Vᴴ G, with errors of the size σ of G's rounding.
        # Divided by σ, the errors have variance one.
        n, d = A.shape[1:]
        σ = (G.square().mean((1, 2)).sqrt() * RTOL).clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        σ = σ if error is None else torch.full_like(σ, error)
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
        return None if n <= d + MOST_FREE else f"N = {n} > D + {MOST_FREE} = {d + MOST_FREE}"

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
        n, unknowns = X.shape[1], free.V.square().sum((1, 2)).round()[:, None]  # f unknowns of N values
        scale, dark = self._grey_levels(model)
        coarse = scale.max()
        # The smoothest image is assumed to be 8 levels off: N · 8² in all, shared by f
        # combinations. What G says adds precision.
        variance = 1 / (unknowns.clamp_min(1) / (n * _ASSUMED_ERROR**2) + free.gain[..., 0] / coarse**2)
        found, distance = _integers(X * scale + dark, free.V, free.noise * coarse, variance, self.kept)
        # N − f values test the f that are fitted: with too few, random values would be near integers by chance.
        fits = (distance < _INTEGER_DISTANCE**2) & left & (n - unknowns >= _LEAST_CHECKS)
        return torch.where(fits[:, None], (found - dark) / scale, X), fits

    def _grey_levels(self, model: VictimModel) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """Return the scale and offset of each entry of a patch: pixels in grey levels are X · scale + dark."""
        area = model.patch**2
        scale, dark = ((self.levels * t).double().flatten().repeat_interleave(area) for t in (model.std, model.mean))
        return scale, dark

    def of_update(
        self,
        model: VictimModel,
        A: Float[Tensor, "n d"],
        G: Float[Tensor, "d k"],
        errors: tuple[Float[Tensor, "n d"], Float[Tensor, "d k"]],
        Γ: Float[Tensor, "c c"],
    ) -> list[Float[Tensor, "n k"]]:
        """Return patches X with (A − E)ᵀ X = G, where the errors E of A and those of G have known variances.

        There are two: those on grey levels, and the smoothest ones; the former come first if all columns are settled.

        E is the same in all columns. Columns that have become integers show it, and the next pass solves for all
        columns with what it has learned of E, those that are settled too: a few wrong ones become right. Differences of
        adjacent pixels of a patch come first. They are integers too, and E is multiplied by numbers that are a few
        times smaller than pixels. The pixels themselves follow, when most of E is known.

        Args:
            model: the victim.
            A: what moved the position embeddings of N patches, as released, with N ≥ D.
            G: what moved the patch projection, as released.
            errors: the variances of the entries of A and of G.
            Γ: the colour covariance of differences of adjacent pixels (`photograph_gradients`).
        """
        (variance_A, variance_G), (scale, dark) = errors, self._grey_levels(model)
        coarse = _FREE_CHANGE / float(model.std.max())
        X = smoothest = ridge_inverse(A.mT) @ G
        are_whole = False
        # Until columns are settled A is as released, and row d of its errors has the covariance diag(Var A_nd).
        exact, covariance = A, torch.diag_embed(variance_A.mT)  # D × N × N
        differences, pixels = _differences(model), torch.eye(len(scale), dtype=A.dtype, device=A.device)
        for basis in (differences, pixels):
            # In this basis the unknowns are Y = X B, and the equations (A − E)ᵀ Y = G B. A difference has two
            # errors of G, and no offset: one pixel of each channel is not a difference.
            H, offset, back = G @ basis, dark @ basis, torch.linalg.inv(basis).round()
            is_sought = (basis.sum(0) == 0) | (basis is pixels)
            noise = variance_G.mean(1) * basis.square().sum(0).max()
            Y, fits = X @ basis, torch.zeros_like(is_sought)
            for round_ in range(_UPDATE_PASSES):
                # The smoothest image that the equations allow, with the columns that are settled, is the prior's mean.
                if not fits.all() and (round_ or basis is differences):
                    left = ~fits[None] if basis is pixels else torch.ones_like(fits[None])
                    determined, free, _ = _determined(exact, G, X, covariance, variance_G.mean(1), coarse)
                    determined = torch.where(left, determined, X)
                    X = self._smoothest(determined[None], free, left, model, Γ)[0]
                    X = torch.where(fits, Y, X @ basis) @ back
                if basis is differences and not round_:
                    smoothest = X
                if not self.levels:
                    return [smoothest]
                # Combinations whose error is a fifth of that are open too, since all errors but theirs count as noise.
                determined, free, root = _determined(exact, H, X @ basis, covariance, noise, coarse / 5)
                last, (Y, fits) = Y, self._nearest(determined * scale + offset, free, scale.max())
                Y, fits = (Y - offset) / scale, fits & is_sought
                are_whole = bool(fits.all())
                # One wrong integer in many hardly changes the distance, but it leaves a large error in the equations.
                off = ((H - exact.mT @ Y) * root[:, None]).square().mean(0)
                fits &= off <= _OUTLIER * off[fits].median() if fits.any() else fits
                X = torch.where(fits, Y, X @ basis) @ back
                if not fits.any() or torch.equal(Y, last):
                    break
                exact, covariance = _without_errors(A, H[:, fits], Y[:, fits], variance_A, noise)
        return [X, smoothest] if are_whole else [smoothest, X]

    def _nearest(self, X: Float[Tensor, "n k"], free: Free, coarse: Tensor) -> tuple[Tensor, Bool[Tensor, " k"]]:
        """Return integers of one image near X + V C, and in which columns they are nearly X + V C."""
        found, least = X, torch.full_like(X[0], torch.inf)
        for error in _UPDATE_ERRORS:
            if bool((least < _DIFFERENCE_DISTANCE**2).all()):
                break
            # As in `_whole`: the smoothest image is assumed to be `error` levels off, shared by f combinations.
            f = max(1, free.V.shape[2])
            variance = 1 / (f / (len(X) * error**2) + free.gain[..., 0] / coarse**2)
            new, distance = _integers(X[None], free.V, free.noise * coarse, variance, self.kept)
            found, least = torch.where(distance[0] < least, new[0], found), torch.minimum(distance[0], least)
        enough = len(X) - free.V.shape[2] >= _LEAST_CHECKS
        return found, (least < _DIFFERENCE_DISTANCE**2) & enough


def _differences(model: VictimModel) -> Float[Tensor, "k k"]:
    """Return B so that column k of X B is the entry k of a patch less the one on its left, in the first column above.

    The upper left pixel of each channel stays as it is, so that the inverse of B has integers.
    """
    channels, patch = model.image_shape[0], model.patch
    place = torch.arange(channels * patch**2, device=model.mean.device).view(channels, patch, patch)
    basis = torch.eye(place.numel(), dtype=torch.float64, device=model.mean.device)
    basis[place[:, :, :-1], place[:, :, 1:]] = -1
    basis[place[:, :-1, 0], place[:, 1:, 0]] = -1
    return basis


def _determined(
    exact: Float[Tensor, "n d"],
    H: Float[Tensor, "d k"],
    Y: Float[Tensor, "n k"],
    covariance: Float[Tensor, "d n n"],
    noise: Float[Tensor, " d"],
    coarse: float,
) -> tuple[Float[Tensor, "n k"], Free, Float[Tensor, " d"]]:
    """Return the solution of exactᵀ Y = H by weighted least squares, the given Y in what is free; that, and weights.

    Args:
        exact: A, less what is known of its errors.
        H: the right-hand side.
        Y: an estimate of the unknowns.
        covariance: the covariances of the errors that are left in the columns of `exact`.
        noise: the variances of the errors of the rows of H.
        coarse: standard deviation above which a combination is free, in normalised pixels, > 0.
    """
    # Equation d has the variance noise_d + y_kᵀ Cov_d y_k in column k; all columns get its mean, ⟨Cov_d, Y Yᵀ⟩ / K.
    variance = noise + torch.einsum("dnm,nm->d", covariance, Y @ Y.mT / Y.shape[1])
    root = variance.rsqrt()
    weighed, right = exact * root, H * root[:, None]  # errors have variance one now
    free = Free.of(weighed[None], right[None], coarse, error=1.0)
    V, found = free.V[0], ridge_inverse(weighed.mT, 0.0) @ right  # weights differ by more than float32 does
    return found + V @ (V.mT @ (Y - found)), free, root


def _without_errors(
    A: Float[Tensor, "n d"],
    H: Float[Tensor, "d k"],
    Y: Float[Tensor, "n k"],
    variance: Float[Tensor, "n d"],
    noise: Float[Tensor, " d"],
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "d n n"]]:
    """Return A less its likeliest errors E where (A − E)ᵀ Y = H with known Y, and the covariances of what is left.

    Args:
        A: as released.
        H: the right-hand side of the columns that are known.
        Y: the unknowns of these columns.
        variance: the variances of E.
        noise: the variances of the errors of the rows of H.
    """
    # Row d of H − Aᵀ Y is −e_dᵀ Y with noise, e_d ~ N(0, diag Var): the precision of e_d is Y Yᵀ / noise + 1 / Var.
    precision = (Y @ Y.mT) / noise[:, None, None] + torch.diag_embed(1 / variance.mT)
    covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
    slope = -(Y @ (H - A.mT @ Y).mT) / noise  # N × D
    return A - torch.einsum("dij,jd->id", covariance, slope), covariance


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
) -> tuple[Float[Tensor, "b n k"], Float[Tensor, "b k"]]:
    """Return the integers X + V C of the likeliest C of each column, and the mean square of what C leaves of them.

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
    return found, (apart - V @ (V.mT @ apart)).square().mean(1)

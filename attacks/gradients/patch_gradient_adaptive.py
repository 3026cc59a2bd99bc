"""`patch-gradient-adaptive`: the image from a gradient that is noisy, lacks entries, or is rounded to few bits."""

# Known are Ã = A + E₁ (N × D) and G̃ = Aᵀ X + E₂ (D × K), with the variances of E₁ and E₂, and bounds on
# missing entries. Sought are the patches X (N × K).
# 1. The start is the ridge solution of Ãᵀ X = G̃, clamped to black and white behind a defense on gradients.
# 2. `_improve` takes a Gauss-Newton step of total least squares with an image prior.
# 3. `NoisyGradients.complete` computes missing entries from A and X. Both steps alternate.
# Under MJP the slots of nothing but noise are masked, and `mjp-subspace` does the rest.

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.gradients.mjp_subspace import MjpSubspace, subspace
from privlab.attacks.solvers import (
    NoisyGradients,
    Smoothness,
    conjugate_gradients,
    hides_places,
    photograph_gradients,
    posterior,
    ridge_inverse,
    too_many,
    warn_of_limits,
)
from privlab.base import AtLeast0, AtLeast1, Checked, Positive
from privlab.threat import Capability, GradientDefense, Observation


@dataclass(frozen=True)
class PatchGradientAdaptive(Checked):
    """Find the smooth X that explains ∂ℓ/∂W = Aᵀ X best, where both A = ∂ℓ/∂E_pos and ∂ℓ/∂W have errors of known size.

    Idea: Noise, pruning or rounding puts errors on both sides of the linear system of `patch-gradient`. The attack
    knows how large these errors are, and weighs every equation by them. It then looks for the smooth image that
    explains the released gradient best.

    Steps: weigh equations by their errors → fill in missing entries → smoothest X that explains G

    Algorithm: An error in A is multiplied by the patches: R = G̃ − Ãᵀ X has rows of covariance Var E₂ · (I + ρ Xᵀ X),
    which is far more than the error of G̃ alone, and lies within the span of the patches. So R is whitened by it:
    minimise ½ tr R (I + ρ Xᵀ X)⁻¹ Rᵀ / Var E₂ + ½ D log det(I + ρ X Xᵀ) + Σ_p √(ε² + δ_pᵀ Γ⁻¹ δ_p), total least squares
    with the prior of `mjp-subspace`, by Gauss-Newton steps. Between them, missing entries (pruned, or rounded to zero)
    are computed from A and X, within their known bounds. Without a defense on gradients this is `patch-gradient`.

    Under MJP with noise, the slots whose row is nothing but noise are masked; the rest is `mjp-subspace`.

    `gradient-sign` leaves neither the scale of A's rows nor that of the image, and little is recovered (14.3 dB,
    experiments/notes/gradients.md).

    Exact if: `patch-gradient` would be, and under MJP `mjp-subspace`, in the limit of released errors of zero.

    Fails if: what the defense leaves of the two gradients of the embedding does not suffice: it reads no others, so
    that its failure says nothing about attacks by all layers.

    Studies: gradients

    Args:
        rounds: Gauss-Newton steps.
        steps: steps of conjugate gradients in each round.
        epsilon: ε, in standard deviations of the differences of adjacent pixels.
    """

    name: ClassVar[str] = "patch-gradient-adaptive"
    paper: ClassVar[str] = "ours: total least squares with an image prior, against gradient defenses"
    order: ClassVar[int] = 60
    knows: ClassVar[frozenset[str]] = frozenset(
        {
            *("mjp", "gradient-noise", "gradient-pruning", "gradient-quantisation", "gradient-sign"),
            *("percentile-privacy", "svt-privacy", "binary-weights"),
        }
    )
    undefended: ClassVar[str] = "patch-gradient"
    requires: ClassVar[frozenset[Capability]] = MjpSubspace.requires | {
        Capability.KNOWS_DEFENSE,
        Capability.GRADIENT_DEFENSE,
    }
    effort: ClassVar[str] = "quick"
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed", "patch_embed.proj.weight")
    updates_of: ClassVar[tuple[str, ...]] = ("sgd",)

    rounds: AtLeast0 = 6
    steps: AtLeast1 = 30
    epsilon: Positive = 0.1

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition N < D with its numbers if it does not hold, or the decay that it does not undo."""
        found = [too_many(seen)]
        if seen.client is not None and seen.client.weight_decay:
            found.append(f"weight decay {seen.client.weight_decay:g} in the update")
        return " and ".join(filter(None, found)) or None

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed."""
        model, release = seen.model, NoisyGradients.of(seen)
        warn_of_limits(self.name, release.A, most=release.A.shape[2] - 1, knows_mask=True)
        # Masked slots are those whose row is no larger than its noise. Zero rows show them to `subspace`.
        if hides_places(seen):
            found = subspace(release.A.masked_fill(release.silent_slots[..., None], 0), release.G)
            return model.to_images(MjpSubspace().complete(found, seen))
        X = ridge_inverse(release.A.mT) @ release.G
        if any(isinstance(part, GradientDefense) for part in seen.defense):
            # The normalised black and white differ by channel. No start is outside of what pixels can be.
            channel = X.shape[2] // model.image_shape[0]
            ends = (((end - model.mean) / model.std).double().flatten() for end in (0.0, 1.0))
            X = X.clamp(*(end.repeat_interleave(channel) for end in ends))
            prior = Smoothness(model.image_shape, photograph_gradients(model, seen.photographs).double())
            for _ in range(self.rounds):
                # After each step missing entries follow from the new X, within their bounds.
                X = _improve(X, release, prior, self.epsilon, self.steps)
                release = release.complete(X)
        return model.to_images(X)


def _improve(
    X: Float[Tensor, "b n k"], release: NoisyGradients, prior: Smoothness, epsilon: float, steps: int
) -> Float[Tensor, "b n k"]:
    """Take one Gauss-Newton step, of the tried length that gives each image the least objective, times Var E₂.

    With A the posterior one, the gradient is −A R W + D ρ Var E₂ (I + ρ X Xᵀ)⁻¹ X + Var E₂ H X, and the Hessian about
    V ↦ A Aᵀ V W + Var E₂ H V, with W = (I + ρ Xᵀ X)⁻¹ and H the curvature of the prior.
    """
    # With X = U s Y, W = (I + ρ Xᵀ X)⁻¹ (K × K) has the eigenvalues ω along the rows of
    # Y and 1 elsewhere. W is never made.
    ρ, noise, D = release.ratio, release.noise_weight, release.A.shape[2]
    U, s, Y = torch.linalg.svd(X, full_matrices=False)
    ω = 1 / (1 + ρ[:, 0] * s.square())  # the eigenvalues of W on the span of the patches; 1 beyond

    def whiten(V: Tensor) -> Tensor:
        return V - ((V @ Y.mT) * (1 - ω)[:, None]) @ Y

    H = prior.curvature(X, epsilon)
    # With the A that explains Ã and G̃ best for this X, the slope has the three parts of the docstring: data,
    # log-determinant and prior, all times Var E₂.
    A = posterior(release.A, release.G, X, ρ)
    slope = A @ whiten(release.A.mT @ X - release.G)
    slope = slope + D * release.noise_pe * (U * (ω * s)[:, None]) @ Y + noise * H(X)
    # The preconditioner takes I for the prior's H. In the eigenbases of A Aᵀ and of W the matrix is λ_i ω_j + Var E₂,
    # and λ_i + Var E₂ outside of the span of the patches.
    λ, Q = torch.linalg.eigh(A @ A.mT)
    inside = λ[:, :, None] * ω[:, None] + noise
    beyond = λ[:, :, None] + noise

    def precondition(V: Tensor) -> Tensor:
        V = Q.mT @ V
        C = V @ Y.mT
        return Q @ ((V - C @ Y) / beyond + (C / inside) @ Y)

    def product(V: Tensor) -> Tensor:
        return A @ (A.mT @ whiten(V)) + noise * H(V)

    step = conjugate_gradients(product, -slope, steps, precondition)
    # Of six lengths, 0 among them, each image takes the one of least objective, so that none gets worse.
    tried = torch.stack([X + share * step for share in (1.0, 0.5, 0.25, 0.1, 0.03, 0.0)])
    values = torch.stack([_objective(each, release, prior, epsilon) for each in tried])
    return tried[values.argmin(0), torch.arange(len(X), device=X.device)]


def _objective(
    X: Float[Tensor, "b n k"], release: NoisyGradients, prior: Smoothness, epsilon: float
) -> Float[Tensor, " b"]:
    """Return the objective of `PatchGradientAdaptive`, times Var E₂."""
    ρ, noise = release.ratio, release.noise_weight.flatten()
    # R = G̃ − Ãᵀ X is D × K. By Woodbury, tr R W Rᵀ = ‖R‖² − ρ ‖L⁻¹ X Rᵀ‖² with L Lᵀ = I + ρ X Xᵀ (N × N).
    # Half its log-determinant is Σ_n log L_nn.
    R = release.G - release.A.mT @ X
    L = torch.linalg.cholesky(torch.eye(X.shape[1], dtype=X.dtype, device=X.device) + ρ * X @ X.mT)
    S = torch.linalg.solve_triangular(L, X @ R.mT, upper=False)
    fit = (R.square().sum((1, 2)) - ρ.flatten() * S.square().sum((1, 2))) / 2
    log_det = release.A.shape[2] * L.diagonal(dim1=1, dim2=2).log().sum(1)
    return fit + noise * (log_det + prior.sparse_energy(X, epsilon))

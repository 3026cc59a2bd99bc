"""What tokens tell of patches, and leave open: linear equations, the law of patches, and the smoothest that agree.

Tokens determine patches up to some directions, and some tokens are missing. These are the parts that attacks share: the
linear equations between a normalised token and its patch (`normalised_tokens`), a Gaussian prior of one patch
(`patch_prior`), the smoothest image that agrees with what is known (`complete_image`), and the order of patches that
have none, by their borders (`place_patches`).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from privlab.attacks.solvers import Smoothness, photograph_gradients
from privlab.attacks.tokens.slots import projection
from privlab.patches import patchify
from privlab.reassembly import assemble
from privlab.reassembly.border_costs import exact_costs, in_grains
from privlab.victims import VictimModel

_ROUNDS, _STEPS, _EPSILON = 5, 40, 0.07
"""Options of the image prior, as in `mjp-subspace`: rounds, steps of conjugate gradients, and ε."""


def normalised_tokens(model: VictimModel) -> tuple[Float[Tensor, "d k1"], Float[Tensor, "n d"], Float[Tensor, "p d"]]:
    """Return F and g of σ_n u_n = F (x_n, σ_n) + g_n, and the u of prefix tokens, with u what attention reads first.

    u_n = γ ⊙ (z_n − mean z_n) / σ_n + β, with z_n = W x_n + e_n and e_n the token of a patch of zeros, is linear in the
    normalised patch x_n and the deviation σ_n once it is multiplied by σ_n.
    """
    norm, (W, _) = model.vit.blocks[0].get_submodule("norm1"), projection(model)
    assert isinstance(norm, nn.LayerNorm)
    γ, β = norm.weight.detach().double(), norm.bias.detach().double()
    # A grey image shows e, the part of z = W x + e that does not depend on the patch, prefix tokens included.
    grey = model.mean.expand(1, *model.image_shape)  # its normalised patches are zero
    z, p = model.embed(grey)[0].detach(), model.vit.num_prefix_tokens
    e = z[p:].double()
    # σ u = γ ⊙ (W − mean W) x + β σ + γ ⊙ (e − mean e); means are over the D entries of a token.
    F = torch.cat([γ[:, None] * (W - W.mean(0)), β[:, None]], 1)
    return F, γ * (e - e.mean(1, keepdim=True)), norm(z[:p]).detach().double()


def patch_prior(model: VictimModel, Γ: Float[Tensor, "c c"]) -> Float[Tensor, "k k"]:
    """Return L of S = L Lᵀ = Γ ⊗ (Δ + κ I)⁻¹, with Δ the Laplacian of a patch, and κ for pixels of variance one."""
    p = model.patch
    # `path` is the Laplacian of p pixels in a row, and Δ (p² × p²) that of a patch: xᵀ Δ x is the sum of all squared
    # differences between adjacent pixels.
    step = torch.eye(p).to(Γ).diff(dim=0)
    path, eye = step.mT @ step, torch.eye(p).to(Γ)
    Δ = torch.kron(path, eye) + torch.kron(eye, path)
    # κ limits the mean of a patch, which differences leave open, to the variance Γ / (κ p²): one, averaged over
    # colours.
    κ = Γ.diagonal().mean() / p**2
    S = torch.kron(Γ, torch.linalg.inv(Δ + κ * torch.eye(p * p).to(Γ)).contiguous())
    return torch.linalg.cholesky(S)


def complete_image(
    model: VictimModel,
    X: Float[Tensor, "b n k"],
    found: Bool[Tensor, "b n"],
    names: tuple[str, ...] | None,
    *,
    frozen: bool,
) -> Float[Tensor, "b n k"]:
    """Return X with its unknown parts as smooth as possible: directions that no gradient holds, and lost patches.

    Args:
        model: the victim.
        X: normalised patches.
        found: slots whose patches are known.
        names: the photographs that the prior may learn from (`Observation.photographs`).
        frozen: whether known patches are known by their embeddings alone, less a constant, of no more entries than
            they have pixels.
    """
    prior = Smoothness(model.image_shape, photograph_gradients(model, names))
    if frozen and bool(found.any()):
        # W x less a constant has rank D − 1, so the other right singular vectors Y are open: K − D + 1 if D ≤ K.
        W, _ = projection(model)
        Y = torch.linalg.svd(W - W.mean(0)).Vh[len(W) - 1 :].expand(len(X), -1, -1)
        # The smoothest completion comes first; rounds of reweighting then allow sharp edges.
        X = prior.fill(X, Y, free=found, inside=found, steps=3 * _STEPS)
        for _ in range(_ROUNDS):
            X = prior.fill(X, Y, free=found, inside=found, steps=_STEPS, epsilon=_EPSILON)
    # Lost patches have no equation: every direction of theirs is open, and they continue their neighbours. Without
    # position embeddings their neighbours are unknown, so they stay as they are.
    if model.vit.pos_embed is not None and bool(found.any()) and not bool(found.all()):
        eye = torch.eye(X.shape[2]).to(X).expand(len(X), -1, -1)
        X = prior.fill(X, eye, free=~found, inside=torch.ones_like(found), steps=3 * _STEPS)
    return X


def place_patches(
    model: VictimModel,
    image: Float[Tensor, "c h w"],
    masked: Bool[Tensor, " n"],
    lost: Bool[Tensor, " n"] | None = None,
) -> Int[Tensor, " n"]:
    """Return the order that puts the masked patches where their borders fit best.

    Args:
        model: the victim, whose grid and patch size count.
        image: the reconstruction with its masked patches in any order, in [0, 1].
        masked: slots whose patches are to be put in order; all others stay.
        lost: slots whose patches were not recovered, and get the same border cost everywhere; None stands for none.
    """
    # The cost of a pair of patches measures how badly their borders continue each other.
    patches = patchify(image[None], model.patch)[0].unflatten(1, (image.shape[0], model.patch, model.patch))
    costs = exact_costs(patches)
    # Lost patches fit everywhere equally, at the mean cost of the others, so that they take what is left over.
    if lost is not None and bool(lost.any()) and not bool(lost.all()):  # a mean over none would be nan
        costs = torch.where(lost | lost[:, None], in_grains(costs[:, ~lost][..., ~lost].mean()), costs)
    return assemble(costs, model.grid, ~masked).to(image.device)

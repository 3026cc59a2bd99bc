"""What tokens tell of patches, and leave open: linear equations, the law of patches, and the smoothest that agree."""

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
    grey = model.mean.expand(1, *model.image_shape)  # its normalised patches are zero
    z, p = model.embed(grey)[0].detach(), model.vit.num_prefix_tokens
    e = z[p:].double()
    F = torch.cat([γ[:, None] * (W - W.mean(0)), β[:, None]], 1)
    return F, γ * (e - e.mean(1, keepdim=True)), norm(z[:p]).detach().double()


def patch_prior(model: VictimModel, Γ: Float[Tensor, "c c"]) -> Float[Tensor, "k k"]:
    """Return L of S = L Lᵀ = Γ ⊗ (Δ + κ I)⁻¹, with Δ the Laplacian of a patch, and κ for pixels of variance one."""
    p = model.patch
    step = torch.eye(p).to(Γ).diff(dim=0)
    path, eye = step.mT @ step, torch.eye(p).to(Γ)
    Δ = torch.kron(path, eye) + torch.kron(eye, path)
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
        W, _ = projection(model)
        Y = torch.linalg.svd(W - W.mean(0)).Vh[len(W) - 1 :].expand(len(X), -1, -1)
        X = prior.fill(X, Y, free=found, inside=found, steps=3 * _STEPS)
        for _ in range(_ROUNDS):
            X = prior.fill(X, Y, free=found, inside=found, steps=_STEPS, epsilon=_EPSILON)
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
    patches = patchify(image[None], model.patch)[0].unflatten(1, (image.shape[0], model.patch, model.patch))
    costs = exact_costs(patches)
    if lost is not None and bool(lost.any()) and not bool(lost.all()):  # a mean over none would be nan
        costs = torch.where(lost | lost[:, None], in_grains(costs[:, ~lost][..., ~lost].mean()), costs)
    return assemble(costs, model.grid, ~masked).to(image.device)

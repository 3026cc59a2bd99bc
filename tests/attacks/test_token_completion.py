"""What `token-separation` adds to its tokens: the law of patches, and the smoothest completion."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from privlab.attacks.gradients import token_separation
from privlab.attacks.gradients.token_separation import _invert
from privlab.attacks.solvers import Smoothness, photograph_gradients
from privlab.attacks.tokens import complete_image, patch_prior, projection
from privlab.patches import patchify, unpatchify
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]


def variation(model: VictimModel, X: Tensor) -> Tensor:
    """Return Σ √(0.07² + δᵀ Γ⁻¹ δ) of each image."""
    image, L = unpatchify(X, model.image_shape), torch.linalg.cholesky(photograph_gradients(model))
    steps = torch.cat([image.diff(dim=dim).flatten(2) for dim in (2, 3)], 2)
    return (torch.linalg.solve(L, steps).square().sum(1) + 0.07**2).sqrt().sum(1)


@pytest.mark.slow
def test_a_frozen_embedding_is_completed_to_nearly_the_least_total_variation(tiny_model: Model, crops: Tensor) -> None:
    """Within a half of a thousandth of Σ √(0.07² + δᵀ Γ⁻¹ δ), which ten times the work hardly lowers any more."""
    model, images = tiny_model(embed_dim=32), crops[[3, 100, 200]].double()
    x = patchify(model.normalise(images), model.patch)
    W, _ = projection(model)
    Y = torch.linalg.svd(W - W.mean(0)).Vh[31:]  # 17 directions that no embedded patch, less its mean, tells
    found, prior = torch.ones(3, 16, dtype=torch.bool), Smoothness(model.image_shape, photograph_gradients(model))
    known = x - (x @ Y.mT) @ Y
    done = best = complete_image(model, known, found, None, frozen=True)
    assert_close(done - (done @ Y.mT) @ Y, known)
    for _ in range(20):
        best = prior.fill(best, Y.expand(3, -1, -1), free=found, inside=found, steps=100, epsilon=0.07)
    before, after, least = (variation(model, each) for each in (known, done, best))
    assert_close(prior.sparse_energy(done, 0.07), after)
    assert (after < (1 + 5e-4) * least).all()
    assert (before > 1.1 * least).all()


def test_patches_without_a_token_are_nearly_the_smoothest_beside_the_others(tiny_model: Model, crops: Tensor) -> None:
    model, images = tiny_model(), crops[[3, 100, 200]].double()
    x = patchify(model.normalise(images), model.patch)
    found = torch.rand(3, 16, generator=torch.Generator().manual_seed(0)) < 0.6
    prior = Smoothness(model.image_shape, photograph_gradients(model))
    eye = torch.eye(48).double().expand(3, -1, -1)
    best = prior.fill(x, eye, free=~found, inside=torch.ones_like(found), steps=600)
    done = complete_image(model, x, found, None, frozen=False)
    assert torch.equal(done[found], x[found])
    assert (done - best).abs().max() < 0.1 < (x - best).abs().max()


def test_patches_have_a_mean_of_variance_one_and_differences_like_photographs(tiny_model: Model) -> None:
    """S = Γ ⊗ (Δ + κ I)⁻¹, pixel by pixel."""
    model = tiny_model()
    Γ = photograph_gradients(model)
    L, p = patch_prior(model, Γ), model.patch
    S = (L @ L.mT).view(3, p * p, 3, p * p)
    means = S.mean((1, 3))
    assert means.diagonal().mean() == pytest.approx(1)
    Δ = torch.zeros(p * p, p * p, dtype=torch.float64)
    for a in range(p * p):
        for b in range(p * p):
            if abs(a // p - b // p) + abs(a % p - b % p) == 1:
                Δ[a, a] += 1
                Δ[a, b] -= 1
    within = torch.linalg.inv(Δ + Γ.diagonal().mean() / p**2 * torch.eye(p * p).double())
    assert_close(S, torch.einsum("ij,ab->iajb", Γ, within))


@pytest.mark.parametrize(("faint", "strong", "own"), [(0.5, 1.0, True), (2.0, 1.0, False)])
def test_a_token_is_off_by_a_ten_thousandth_of_the_mean_variance_where_patches_have_none(
    faint: float, strong: float, *, own: bool, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots: z is off from its own by what no patch makes, from the other by what patches make.

    Both in units of what the law allows there: the lesser one decides.
    """
    model = tiny_model(embed_dim=8, num_heads=2)
    W, b = projection(model)
    Γ = photograph_gradients(model)
    V = W - W.mean(0)
    U, σ, _ = torch.linalg.svd(V @ patch_prior(model, Γ))
    assert σ[-1] < 1e-12  # the mean of a token is not known, and no patch makes it
    monkeypatch.setattr(token_separation, "patch_prior", lambda _, __: torch.linalg.pinv(V) @ (U[:, :1] * 3.0))
    variance = 9.0  # along the first direction alone: of eight, the mean variance is an eighth
    off = faint * (1e-4 * variance / 8) ** 0.5 * U[:, 3], strong * (variance * (1 + 1e-4 / 8)) ** 0.5 * U[:, 0]
    pe = 5 * U[:, 1]
    near = torch.stack([pe, pe + off[0] - off[1] + 5])  # z is off[0] from slot 0, and off[1] and a constant from slot 1
    ns, _ = _invert(model, b + near[:1] + off[0], near, Γ)
    assert ns.tolist() == [0 if own else 1]

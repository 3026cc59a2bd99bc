"""The adaptive closed form: its algebra, and that to know the defense is no disadvantage."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import MjpSubspace, PatchGradient, PatchGradientAdaptive
from privlab.attacks.gradients.patch_gradient_adaptive import _improve, _objective
from privlab.attacks.solvers import NoisyGradients, Smoothness, posterior
from privlab.base import PrivlabError, draw_for
from privlab.defenses import GradientNoise, GradientPruning, GradientQuantisation, GradientSign, Mjp
from privlab.metrics import psnr, psnr_region
from privlab.patches import slots_to_pixels
from privlab.release import observe
from privlab.threat import GradientDefense, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]


def under(model: VictimModel, images: Tensor, *defense: GradientDefense) -> Observation:
    draws = [draw_for(0, str(i), "release") for i in range(len(images))]
    labels = torch.arange(len(images)) % model.vit.num_classes
    return observe(model, images, labels, PatchGradientAdaptive.parameters, defense, draws)


def test_posterior_is_the_least_squares_solution() -> None:
    draw = Generator().manual_seed(0)
    A, G, X = (torch.randn(2, *s, dtype=torch.float64, generator=draw) for s in ((4, 6), (6, 9), (4, 9)))
    ρ = torch.tensor([0.5, 3.0], dtype=torch.float64).view(2, 1, 1)
    found = posterior(A, G, X, ρ).requires_grad_()
    cost = (A - found).square().sum() + (ρ * (G - found.mT @ X).square()).sum()
    (slope,) = torch.autograd.grad(cost, found)
    assert_close(slope, torch.zeros_like(slope), atol=1e-10, rtol=0)


def test_curvature_gives_the_gradient_of_the_energy() -> None:
    draw = Generator().manual_seed(0)
    covariance = torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 0.5]], dtype=torch.float64)
    prior = Smoothness((3, 8, 8), covariance)
    X = torch.randn(2, 4, 48, dtype=torch.float64, generator=draw, requires_grad=True)
    (slope,) = torch.autograd.grad(prior.sparse_energy(X, 0.1).sum(), X)
    assert_close(prior.curvature(X.detach(), 0.1)(X.detach()), slope)


def test_without_a_gradient_defense_it_is_the_plain_closed_form(
    tiny_model: Model, photographs: Callable[[int, int], Tensor]
) -> None:
    model, images = tiny_model(), photographs(2, 16).double()
    seen = under(model, images)
    assert_close(PatchGradientAdaptive()(seen), PatchGradient()(seen))
    assert (psnr(PatchGradientAdaptive()(seen), images) > 80).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*received no gradient:privlab.base.warnings.PrivlabWarning")
@pytest.mark.parametrize(
    ("defense", "gain"),
    [
        (GradientNoise(clip=1.0, multiplier=1e-4), 0.5),
        (GradientNoise(clip=1.0, multiplier=1e-3), 0.5),
        (GradientPruning(keep=0.7), 0.5),
        (GradientPruning(keep=0.9), 0.5),
        (GradientPruning(keep=0.97), 9.0),
        (GradientQuantisation(dtype="int8"), 0.5),
        (GradientQuantisation(dtype="bf16"), -0.1),
        (GradientSign(), -0.1),
    ],
    ids=repr,
)
def test_to_know_the_defense_is_no_disadvantage(
    defense: GradientDefense, gain: float, tiny_model: Model, photographs: Callable[[int, int], Tensor]
) -> None:
    model, images = tiny_model(img_size=28), photographs(6, 28).double()
    seen = under(model, images, defense)
    plain, adaptive = (psnr(attack(seen), images).mean() for attack in (PatchGradient(), PatchGradientAdaptive()))
    assert adaptive > plain + gain


def test_an_image_is_attacked_alike_in_any_batch(tiny_model: Model, photographs: Callable[[int, int], Tensor]) -> None:
    model, images = tiny_model(), photographs(3, 16).double()
    together = PatchGradientAdaptive()(under(model, images, GradientNoise(multiplier=1e-3)))
    alone = PatchGradientAdaptive()(under(model, images[:1], GradientNoise(multiplier=1e-3)))
    assert_close(together[:1], alone, atol=1e-5, rtol=0)


def test_missing_entries_are_filled_in_and_others_left_alone(tiny_model: Model) -> None:
    """From the true X, what was pruned comes back within its bound, and closer than zero."""
    model = tiny_model()
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64, generator=Generator().manual_seed(0))
    true = NoisyGradients.of(under(model, images))
    pruned = NoisyGradients.of(under(model, images, GradientPruning(keep=0.6)))
    X = torch.linalg.lstsq(true.A.mT, true.G).solution
    filled = pruned.complete(X)
    missing = pruned.edge_pe > 0
    least = min(g[g != 0].abs().min() for g in (pruned.A[:1], pruned.G[:1]))  # of what was released of the first
    assert missing.any()
    assert_close(pruned.edge_pe[0][missing[0]], least.expand(int(missing[0].sum())))
    assert torch.equal(filled.A[~missing], pruned.A[~missing])
    assert (filled.A.abs()[missing] <= pruned.edge_pe[missing] * (1 + 1e-9)).all()
    assert (filled.A - true.A)[missing].norm() < 0.7 * true.A[missing].norm()
    assert (filled.G - true.G).norm() < 0.7 * (pruned.G - true.G).norm()


def test_errors_of_several_defenses_add_up(tiny_model: Model) -> None:
    images = torch.rand(1, 3, 16, 16, dtype=torch.float64, generator=Generator().manual_seed(0))
    seen = under(tiny_model(), images, GradientNoise(multiplier=0.1), GradientQuantisation())
    step = seen.gradients["pos_embed"].abs().max() / 127
    assert_close(NoisyGradients.of(seen).noise_pe.flatten()[0], 0.01 + step**2 / 12)


class OnOne(GradientNoise):
    """Noise on position embeddings alone."""

    def variance(self, released: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return it: none of the other gradient."""
        return {name: torch.full_like(g, 1e-8 if name == "pos_embed" else 0) for name, g in released.items()}


def test_a_gradient_without_noise_is_not_taken_for_exact(
    tiny_model: Model, photographs: Callable[[int, int], Tensor]
) -> None:
    """But for one that has a hundredth of the other's: else what is inverted has no inverse in float64."""
    seen = under(tiny_model(img_size=28), photographs(2, 28).double())
    seen = replace(seen, defense=(OnOne(multiplier=1e-4),))
    assert_close(NoisyGradients.of(seen).ratio.flatten(), torch.full((2,), 1e4).double())
    assert PatchGradientAdaptive()(seen).isfinite().all()


def test_rows_of_noise_are_told_from_rows_that_say_as_much_again() -> None:
    draw = Generator().manual_seed(0)
    A = torch.randn(2, 5000, 64, dtype=torch.float64, generator=draw) * torch.tensor([1, 3**0.5]).view(2, 1, 1)
    one, G = torch.ones(2, 1, 1).double(), torch.zeros(2, 64, 3).double()
    release = NoisyGradients(A, G, one, one, torch.zeros_like(A), G)
    shares = release.silent_slots.double().mean(1)
    assert shares[0] > 0.998
    assert shares[1] < 0.01


def test_of_rows_of_which_entries_are_missing_only_those_without_any_are_not_heard() -> None:
    A = torch.full((1, 3, 8), 0.01, dtype=torch.float64)
    A[0, 1, 2:], A[0, 2] = 0, 0
    one, G = torch.ones(1, 1, 1).double(), torch.zeros(1, 8, 3).double()
    release = NoisyGradients(A, G, one, one, (A == 0).to(A), G)
    assert release.silent_slots.tolist() == [[True, False, True]]


def noisy(seed: int = 0) -> tuple[NoisyGradients, Tensor, Smoothness]:
    """Return a release of two images of 8 × 8 pixels with noise of either kind, patches to start from, and a prior."""
    draw = Generator().manual_seed(seed)
    A, G, X = (torch.randn(2, *s, dtype=torch.float64, generator=draw) for s in ((4, 6), (6, 48), (4, 48)))
    pe, weight = (torch.tensor(v, dtype=torch.float64).view(2, 1, 1) for v in ([0.02, 0.05], [0.2, 0.4]))
    none_A, none_G = torch.zeros_like(A), torch.zeros_like(G)
    covariance = torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 0.5]], dtype=torch.float64)
    return NoisyGradients(A, G, pe, weight, none_A, none_G), X, Smoothness((3, 8, 8), covariance)


def naive(X: Tensor, release: NoisyGradients, prior: Smoothness) -> Tensor:
    """Return ½ tr R (I + ρ Xᵀ X)⁻¹ Rᵀ / Var E₂ + ½ D log det(I + ρ X Xᵀ) + the energy, times Var E₂, densely."""
    values = []
    for i in range(len(X)):
        ρ, noise = release.noise_pe[i] / release.noise_weight[i], release.noise_weight[i]
        R = release.G[i] - release.A[i].mT @ X[i]
        W = torch.linalg.inv(torch.eye(48).double() + ρ * X[i].mT @ X[i])
        log_det = torch.logdet(torch.eye(4).double() + ρ * X[i] @ X[i].mT)
        energy = prior.sparse_energy(X[i : i + 1], 0.1)
        values.append((R @ W @ R.mT).trace() / 2 + noise.squeeze() * (6 * log_det / 2 + energy.squeeze()))
    return torch.stack(values)


def test_the_objective_is_that_of_dense_algebra() -> None:
    release, X, prior = noisy()
    assert_close(_objective(X, release, prior, 0.1), naive(X, release, prior))


@pytest.mark.slow
def test_its_steps_end_where_the_objective_has_no_slope() -> None:
    """So each term of the gradient that they take is right; and no step makes it worse."""
    release, X, prior = noisy()

    def slope(X: Tensor) -> Tensor:
        X = X.clone().requires_grad_()
        return torch.autograd.grad(naive(X, release, prior).sum(), X)[0]

    first, values = slope(X), [naive(X, release, prior)]
    for _ in range(30):
        X = _improve(X, release, prior, 0.1, 40)
        values.append(naive(X, release, prior))
    assert (torch.stack(values).diff(dim=0) < 1e-9).all()
    assert (slope(X).norm(dim=(1, 2)) < 1e-3 * first.norm(dim=(1, 2))).all()


@pytest.mark.parametrize("options", [{"rounds": -1}, {"steps": 0}, {"epsilon": 0.0}])
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(PrivlabError, match="of patch-gradient-adaptive must be"):
        PatchGradientAdaptive(**options)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*received no gradient:privlab.base.warnings.PrivlabWarning")
@pytest.mark.parametrize(
    "defense",
    [GradientNoise(multiplier=1e-6), GradientQuantisation(dtype="bf16"), GradientPruning(keep=0.99)],
    ids=repr,
)
def test_the_mask_of_mjp_is_heard_through_the_noise(
    defense: GradientDefense, tiny_model: Model, photographs: Callable[[int, int], Tensor]
) -> None:
    model, images = tiny_model(img_size=28), photographs(4, 28).double()
    mjp, draws = Mjp(gamma=0.27), [draw_for(0, str(i), "defense") for i in range(4)]
    feed = mjp(images, model.patch, draws)
    fresh = [draw_for(0, str(i), "release") for i in range(4)]
    seen = observe(model, feed, torch.arange(4), MjpSubspace.parameters, (mjp, defense), fresh)
    assert feed.masked_pe is not None
    assert torch.equal(NoisyGradients.of(seen).silent_slots, feed.masked_pe)
    kept = ~slots_to_pixels(feed.moved, model.grid, model.patch)
    scores = {
        a.name: psnr_region(a(seen), feed.images, kept).mean() for a in (PatchGradient(), PatchGradientAdaptive())
    }
    assert scores["patch-gradient-adaptive"] > scores["patch-gradient"] + 3
    clean = observe(model, feed, torch.arange(4), MjpSubspace.parameters, (mjp,))
    assert_close(PatchGradientAdaptive()(clean), MjpSubspace()(clean))

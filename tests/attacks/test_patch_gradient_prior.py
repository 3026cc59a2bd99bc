"""Where patches outnumber equations: what is free, what an image prior and whole grey levels make of it."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import PatchGradient, PatchGradientPrior
from privlab.attacks.gradients.patch_gradient_prior import (
    _INTEGER_DISTANCE,
    _LEAST_CHECKS,
    Free,
    _determined,
    _differences,
    _integers,
    _preconditioner,
    _without_errors,
)
from privlab.attacks.solvers import RTOL, Smoothness, photograph_gradients, slot_gradients
from privlab.base import PrivlabError, PrivlabWarning, draw_for
from privlab.defenses import Mjp
from privlab.images import open_images
from privlab.metrics import psnr
from privlab.patches import patchify
from privlab.release import observe
from privlab.threat import Observation
from privlab.victims import VictimModel, victim

Model = Callable[..., VictimModel]
Photographs = Callable[[int, int], Tensor]

LIMITS = pytest.mark.filterwarnings("ignore:.*determine at most:privlab.base.warnings.PrivlabWarning")


def of(model: VictimModel, images: Tensor) -> Observation:
    return observe(model, images, torch.arange(len(images)), PatchGradientPrior.parameters)


@pytest.fixture(scope="module")
def narrow(tiny_model: Model) -> VictimModel:
    """Return a model of 49 patches in a width of 48: rank A is 47."""
    return tiny_model(img_size=28, embed_dim=48)


def matrices(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return A of 9 × 6 with singular values from 1 to 1e-3, the last of the six 1e-9; X; and G = Aᵀ X."""
    draw = Generator().manual_seed(seed)
    U, V, X = (torch.randn(1, *s, dtype=torch.float64, generator=draw) for s in ((9, 9), (6, 6), (9, 5)))
    U, V = torch.linalg.qr(U).Q, torch.linalg.qr(V).Q
    A = (U[..., :6] * torch.tensor([1, 0.5, 0.1, 1e-2, 1e-3, 1e-9], dtype=torch.float64)) @ V
    return A, X, A.mT @ X


def test_what_is_free_is_in_no_equation_and_nothing_else_is() -> None:
    A, X, G = matrices()
    free = Free.of(A, G, coarse=1 / 255)
    assert free.V.shape == (1, 9, 4)
    assert_close(free.V.mT @ free.V, torch.eye(4, dtype=torch.float64)[None])
    assert (A.mT @ free.V).abs().max() < 1e-8
    X0 = torch.linalg.pinv(A.mT, rtol=1e-6) @ G
    assert_close(X0 + free.V @ (free.V.mT @ X), X)


def test_noise_is_that_of_rounding() -> None:
    """Against a thousand drawn errors of G."""
    A, _, G = matrices()
    free = Free.of(A, G, coarse=1 / 255)
    draw = Generator().manual_seed(1)
    errors = torch.randn(1, 6, 1000, dtype=torch.float64, generator=draw) * G.square().mean().sqrt() * RTOL
    spread = (torch.linalg.pinv(A.mT, rtol=1e-6) @ errors).square().mean(2).sqrt()
    assert_close(free.noise, spread, rtol=0.15, atol=0)


def test_rows_of_zeros_leave_nothing_free() -> None:
    A, X, _ = matrices()
    A = torch.cat([A, A])
    A[1, 3] = 0
    free = Free.of(A, A.mT @ X, coarse=1 / 255)
    assert free.V[0].any()
    assert not free.V[1].any()


def test_the_preconditioner_is_exact_for_a_patch_among_zeros() -> None:
    Γ = torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 0.5]], dtype=torch.float64)
    V, gain = torch.zeros(1, 9, 1, dtype=torch.float64), torch.full((1, 1, 1), 0.7, dtype=torch.float64)
    V[0, 4] = 1
    H = Smoothness((3, 12, 12), Γ).curvature(torch.zeros(1, 9, 48, dtype=torch.float64), 1.0)  # weights of one
    r = torch.randn(1, 1, 48, dtype=torch.float64, generator=Generator().manual_seed(0))
    C = _preconditioner(4, Γ, gain, torch.float64)(r)
    assert_close(V.mT @ H(V @ C) + gain * C, r)


@pytest.mark.slow
def test_the_smoothest_image_has_no_slope_along_what_is_free(tiny_model: Model) -> None:
    """Of the energy and of what is heard faintly, together; columns of pixels that are settled are left alone."""
    model, draw = tiny_model(img_size=12), Generator().manual_seed(0)
    X, V, heard = (torch.randn(1, *s, dtype=torch.float64, generator=draw) for s in ((9, 48), (9, 2), (2, 48)))
    V, gain = torch.linalg.qr(V).Q, torch.tensor([[[0.5], [300.0]]], dtype=torch.float64)
    free = Free(V, gain, 20 * heard, torch.zeros(1, 9).double())
    left = torch.rand(1, 48, generator=draw) < 0.7
    Γ = photograph_gradients(model)
    found = PatchGradientPrior(rounds=80, steps=40)._smoothest(X, free, left, model, Γ)
    prior = Smoothness(model.image_shape, Γ)

    def slope(X: Tensor) -> Tensor:
        X = X.detach().requires_grad_()
        at = V.mT @ X
        energy = prior.sparse_energy(X, 0.1).sum() + (gain * at.square()).sum() / 2 - (free.heard * at).sum()
        return (V.mT @ torch.autograd.grad(energy, X)[0])[0][:, left[0]]

    assert slope(found).norm() < 1e-3 * slope(X).norm()
    assert torch.equal(found[..., ~left[0]], X[..., ~left[0]])
    assert not torch.equal(found, X)


@pytest.mark.parametrize("unknowns", [1, 3, 5])
def test_whole_numbers_are_found_and_others_are_not(unknowns: int) -> None:
    draw = Generator().manual_seed(unknowns)
    V = torch.linalg.qr(torch.randn(2, 120, unknowns, dtype=torch.float64, generator=draw)).Q
    truth = torch.randint(0, 256, (2, 120, 30), generator=draw).double()
    off = 5 * V @ torch.randn(2, unknowns, 30, dtype=torch.float64, generator=draw)
    still, variance = torch.zeros(2, 120).double(), torch.full((2, unknowns), 25.0).double()
    found, distance = _integers(truth + off, V, still, variance, 16)
    assert (distance < _INTEGER_DISTANCE**2).all()
    assert torch.equal(found, truth)
    uneven = truth + torch.rand(2, 120, 30, dtype=torch.float64, generator=draw) + off
    assert not (_integers(uneven, V, still, variance, 16)[1] < _INTEGER_DISTANCE**2).any()


def told(unknowns: int, off: float, unannounced: float = 0.0, seed: int = 1) -> float:
    """Return the share of 200 columns of 60 whole numbers that are found, from ones that are `off` along V."""
    draw = Generator().manual_seed(seed)
    V = torch.linalg.qr(torch.randn(1, 60, unknowns, dtype=torch.float64, generator=draw)).Q
    truth = torch.randint(0, 256, (1, 60, 200), generator=draw).double()
    C = off * torch.randn(1, unknowns, 200, dtype=torch.float64, generator=draw)
    noise = unannounced * torch.randn(1, 60, 200, dtype=torch.float64, generator=draw)
    still, variance = torch.zeros(1, 60).double(), torch.full((1, unknowns), off**2).double()
    found, distance = _integers(truth + V @ C + noise, V, still, variance, 16)
    fits = distance < _INTEGER_DISTANCE**2
    right = (found == truth).all(1)
    assert not (fits & ~right).any()
    return float((fits & right).double().mean())


def test_a_thirtieth_of_a_grey_level_that_was_not_announced_misleads_no_column() -> None:
    assert told(3, 8.0) > 0.98
    assert told(3, 8.0, unannounced=0.03) > 0.95
    assert told(3, 20.0) > 0.85


def test_whole_values_are_tried_as_far_as_the_error_of_the_first_goes() -> None:
    """The surest of sixty values is off by 2.4; where it is off by 600, all stay what they round to."""
    assert told(3, 40.0) > 0.2
    V, X = (
        torch.full((1, 49, 1), 1 / 7).double(),
        255 * torch.rand(1, 49, 8, generator=Generator().manual_seed(0)).double(),
    )
    rounded, far = X.round(), torch.full((1, 1), 4200.0**2).double()
    expected = (X + V @ (V.mT @ (rounded - X))).round()
    assert torch.equal(_integers(X, V, torch.zeros(1, 49).double(), far, 16)[0], expected)


@pytest.mark.parametrize(("off", "fits"), [(0.13, True), (0.17, False)])
def test_what_is_a_seventh_of_a_level_off_passes_for_whole(off: float, *, fits: bool) -> None:
    V = torch.nn.functional.normalize(torch.randn(1, 80, 1, generator=Generator().manual_seed(0)).double(), dim=1)
    X = torch.full((1, 80, 2), 100.0).double()
    X[:, ::2] += off
    X[:, 1::2] -= off
    distance = _integers(X, V, torch.zeros(1, 80).double(), torch.ones(1, 1).double(), 16)[1]
    assert (distance < _INTEGER_DISTANCE**2).all() == fits


def test_differences_of_pixels_are_undone_by_integers(tiny_model: Model) -> None:
    model = tiny_model()
    basis = _differences(model)
    back = torch.linalg.inv(basis)
    assert_close(back, back.round())
    patches = patchify(torch.randint(0, 256, (1, *model.image_shape)).double(), model.patch)[0]
    Y = (patches @ basis).unflatten(1, (-1, model.patch, model.patch))
    square = patches.unflatten(1, (-1, model.patch, model.patch))
    assert torch.equal(Y[..., 1:], square.diff(dim=3))
    assert torch.equal(Y[..., 1:, 0], square[..., 0].diff(dim=2))
    assert torch.equal(Y[..., 0, 0], square[..., 0, 0])


def test_known_columns_show_the_errors_of_the_matrix() -> None:
    """Without noise and with as many known columns as patches, E is found; without any it stays unknown."""
    draw = Generator().manual_seed(0)
    A, E, Y = (torch.randn(*s, dtype=torch.float64, generator=draw) for s in ((9, 6), (9, 6), (9, 12)))
    variance, noise = torch.ones(9, 6, dtype=torch.float64), torch.full((6,), 1e-16, dtype=torch.float64)
    exact, covariance = _without_errors(A + E, A.mT @ Y, Y, variance, noise)
    assert_close(exact, A)
    assert covariance.abs().max() < 1e-12
    unknown, covariance = _without_errors(A + E, A.mT @ Y[:, :0], Y[:, :0], variance, noise)
    assert torch.equal(unknown, A + E)
    assert_close(covariance, torch.eye(9, dtype=torch.float64).expand(6, 9, 9))


def test_what_equations_determine_is_solved_and_the_rest_is_kept() -> None:
    A, X, G = matrices()
    covariance, noise = torch.zeros(6, 9, 9, dtype=torch.float64), torch.full((6,), 1e-16, dtype=torch.float64)
    estimate = torch.zeros_like(X[0])
    found, free, _ = _determined(A[0], G[0], estimate, covariance, noise, 1 / 255)
    V = free.V[0]
    assert V.shape == (9, 4)
    assert_close(found, X[0] - V @ (V.mT @ X[0]), rtol=1e-4, atol=1e-4)
    assert_close(V.mT @ _determined(A[0], G[0], X[0], covariance, noise, 1 / 255)[0], V.mT @ X[0])


@pytest.mark.slow
@pytest.mark.parametrize("error", [1e-4, 1e-3])
def test_errors_of_the_matrix_are_found_with_the_image(
    tiny_model: Model, photographs: Photographs, error: float
) -> None:
    """Of 64 patches and 60 equations each; every entry of A has an error, and the image is exact."""
    model, draw = tiny_model(img_size=64, patch_size=8), Generator().manual_seed(0)
    X = patchify(model.normalise(photographs(1, 64).double()), model.patch)[0]
    exact, E = (torch.randn(64, 60, dtype=torch.float64, generator=draw) for _ in range(2))
    errors = torch.full((64, 60), error**2).double(), torch.full((60, 192), 1e-16).double()
    A, G = exact + error * E, exact.mT @ X
    Γ = photograph_gradients(model)
    found, smoothest = PatchGradientPrior().of_update(model, A, G, errors, Γ)
    assert (found - X).abs().max() < 1e-6  # photographs are of float32
    assert (smoothest - X).abs().max() > 0.01
    assert_close(PatchGradientPrior(levels=0).of_update(model, A, G, errors, Γ)[0], smoothest)


def test_random_values_do_not_pass_for_whole() -> None:
    """Chernoff's bound on the mean square of so many that are uniform within half a level: below 1e-8."""
    u = torch.linspace(-0.5, 0.5, 10001, dtype=torch.float64)
    bounds = [
        _LEAST_CHECKS * (slope * _INTEGER_DISTANCE**2 + (-slope * u.square()).exp().mean().log())
        for slope in torch.arange(1.0, 100.0)
    ]
    assert min(bounds) < math.log(1e-8)


def test_pixels_that_are_eight_levels_off_are_found(tiny_model: Model) -> None:
    """The error of 30 dB is what is assumed of the smoothest image."""
    model, draw = tiny_model(), Generator().manual_seed(0)
    V = torch.linalg.qr(torch.randn(1, 60, 2, dtype=torch.float64, generator=draw)).Q.expand(4, -1, -1)
    truth = torch.randint(0, 256, (4, 60, 3, 16), generator=draw).double() / 255
    truth = ((truth - model.mean.view(3, 1)) / model.std.view(3, 1)).flatten(2)
    C = torch.randn(4, 2, 3, 16, dtype=torch.float64, generator=draw) * 8 / 255 / model.std.view(3, 1) * (60 / 2) ** 0.5
    free = Free(V, *[torch.zeros(4, 2, 1).double()] * 2, torch.zeros(4, 60).double())
    found, fits = PatchGradientPrior()._whole(truth + V @ C.flatten(2), free, torch.ones(4, 48).bool(), model)
    assert fits.double().mean() > 0.97
    assert_close(found.mT[fits], truth.mT[fits])


@pytest.mark.parametrize(("n", "fit"), [(43, True), (42, False)])
def test_forty_values_must_be_left_over(n: int, tiny_model: Model, *, fit: bool) -> None:
    model, draw = tiny_model(), Generator().manual_seed(0)
    free = Free(
        torch.linalg.qr(torch.randn(1, n, 3, generator=draw).double()).Q, *[torch.zeros(1, 3, 1)] * 2, torch.zeros(1, n)
    )
    pixels = torch.randint(0, 256, (1, n, 3, 16), generator=draw).double() / 255
    X = ((pixels - model.mean.view(3, 1)) / model.std.view(3, 1)).flatten(2)
    left = torch.ones(1, 48, dtype=torch.bool)
    found, fits = PatchGradientPrior()._whole(X, free, left, model)
    assert fits.all() == fit
    assert_close(found, X)


def test_where_nothing_is_free_it_is_the_plain_closed_form(tiny_model: Model, photographs: Photographs) -> None:
    seen = of(tiny_model(), photographs(2, 16).double())
    assert torch.equal(PatchGradientPrior()(seen), PatchGradient()(seen))


@pytest.mark.parametrize(("levels", "free"), [(3.0, True), (0.3, False)])
def test_what_rounding_moves_by_more_than_a_level_is_free(
    levels: float, tiny_model: Model, photographs: Photographs, *, free: bool
) -> None:
    """One combination of fewer patches than D, heard but for an error of so many levels of the most varied colour."""
    model, draw = tiny_model(img_size=28), Generator().manual_seed(0)
    images = photographs(1, 28).double()
    X = patchify(model.normalise(images), model.patch)
    U, V = (torch.linalg.qr(torch.randn(1, *s, dtype=torch.float64, generator=draw)).Q for s in ((49, 49), (64, 49)))
    s = torch.ones(49, dtype=torch.float64)
    σ = ((V * s) @ (U.mT @ X)).square().mean().sqrt() * RTOL
    s[-1] = 255 * 0.3 * σ / levels
    A = (U * s) @ V.mT
    G = A.mT @ X + σ * torch.randn(1, 64, 48, dtype=torch.float64, generator=draw)
    seen = of(model, images)
    gradients = dict(seen.gradients)
    gradients["pos_embed"] = torch.cat([torch.zeros(1, 1, 1, 64).double(), A[:, None]], 2)
    gradients["patch_embed.proj.weight"] = G.view(1, 64, 3, 4, 4)
    seen = replace(seen, gradients=gradients)
    found, plain = PatchGradientPrior()(seen), PatchGradient()(seen)
    assert torch.equal(found, plain) == (not free)
    assert (psnr(found, images) > 100) == free


@LIMITS
def test_photographs_are_exact_where_patches_outnumber_equations(narrow: VictimModel, photographs: Photographs) -> None:
    images = photographs(4, 28).double()
    seen = of(narrow, images)
    ridge, prior = psnr(PatchGradient()(seen), images), psnr(PatchGradientPrior(levels=0)(seen), images)
    assert prior.mean() > ridge.mean() + 3
    assert (psnr(PatchGradientPrior()(seen), images) > 120).all()


def test_images_that_are_not_whole_get_the_prior(narrow: VictimModel, photographs: Photographs) -> None:
    """And all of the answer agrees with the gradient, within float32's rounding of it."""
    images = photographs(3, 28).double() * 0.61 + 0.2
    seen = of(narrow, images)
    found = PatchGradientPrior()(seen)
    assert torch.equal(found, PatchGradientPrior(levels=0)(seen))
    assert not torch.equal(found, images)
    A, G = slot_gradients(seen), seen.gradients["patch_embed.proj.weight"].flatten(2)
    apart = A.mT @ patchify(narrow.normalise(found), narrow.patch) - G
    assert (apart.norm(dim=(1, 2)) < 10 * RTOL * G.norm(dim=(1, 2))).all()


def test_a_flat_image_is_exact_without_levels(narrow: VictimModel) -> None:
    images = torch.tensor([0.31, 0.52, 0.73], dtype=torch.float64).view(1, 3, 1, 1).expand(1, 3, 28, 28)
    assert psnr(PatchGradientPrior(levels=0)(of(narrow, images)), images) > 100


def test_an_image_is_attacked_alike_in_any_batch(tiny_model: Model, photographs: Photographs) -> None:
    images = photographs(3, 28).double()
    for model in (tiny_model(img_size=28, embed_dim=48), tiny_model(img_size=28, embed_dim=32)):
        together, alone = (PatchGradientPrior()(of(model, some)) for some in (images, images[:1]))
        assert_close(together[:1], alone, atol=1e-6, rtol=0)


def test_under_mjp_it_is_the_plain_closed_form(narrow: VictimModel, photographs: Photographs) -> None:
    images = photographs(2, 28).double()
    feed = Mjp(gamma=0.27)(images, narrow.patch, [draw_for(0, str(i), "defense") for i in range(2)])
    seen = observe(narrow, feed, torch.arange(2), PatchGradientPrior.parameters)
    with pytest.warns(PrivlabWarning, match="does not know"):
        found = PatchGradientPrior()(seen)
    with pytest.warns(PrivlabWarning, match="patch-gradient"):
        assert torch.equal(found, PatchGradient()(seen))


@pytest.mark.parametrize("options", [{"rounds": 0}, {"steps": 0}, {"epsilon": 0.0}, {"levels": -1}, {"kept": 0}])
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(PrivlabError, match="of patch-gradient-prior must be"):
        PatchGradientPrior(**options)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@LIMITS
def test_trained_weights_at_224_pixels(shared: Callable[[str], Path]) -> None:
    """196 patches in a width of 192: five combinations of them are in no equation."""
    trained = victim("vit_ti", weights=shared("weights/vit_tiny_patch16_224.safetensors"))
    pictures = open_images(shared("data/imagenet_samples"), limit=2)
    images = torch.stack([trained.preprocessing(each.pixels) for each in pictures if each.pixels])
    with torch.no_grad():
        labels = trained.model(images).argmax(1)
    seen = observe(trained.model, images, labels, PatchGradientPrior.parameters)
    plain, ridge, prior, exact = (
        psnr(attack(seen), images)
        for attack in (PatchGradient(rtol=0.0), PatchGradient(), PatchGradientPrior(levels=0), PatchGradientPrior())
    )
    assert (ridge > plain).all()
    assert (prior > plain + 8).all()
    assert (exact > 140).all()

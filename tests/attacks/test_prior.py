"""The image priors: exact against dense algebra, and what they learn of photographs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from privlab.attacks.solvers import Smoothness, Windows, photograph_gradients, photograph_windows
from privlab.attacks.solvers.prior import PRIORS, _cauchy_scale, _covariance
from privlab.patches import slots_to_pixels, unpatchify
from privlab.victims import VictimModel

INSIDE = torch.tensor([[True, True, True, False], [True, False, True, True]])


@pytest.fixture
def patches() -> tuple[Tensor, Tensor]:
    """Return patches of two images of 2 × 2 patches, and directions in which they are open."""
    draw = torch.Generator().manual_seed(1)
    X, Y = (torch.randn(2, n, 48, dtype=torch.float64, generator=draw) for n in (4, 3))
    return X, torch.linalg.qr(Y.mT).Q.mT.contiguous()


def small(model: VictimModel, name: str) -> Windows:
    learned = photograph_windows(model, name)
    return Windows((3, 8, 8), tuple(bank.double() for bank in learned.filters), learned.tail)


def squares(prior: Windows, X: Tensor) -> list[Tensor]:
    """Return q of each window that lies inside wholly, for each image's filters."""
    image, kept = unpatchify(X, prior.shape), slots_to_pixels(INSIDE, (2, 2), 4)[:, None].double()
    made = []
    for bank in prior.filters:
        whole = F.conv2d(kept, torch.ones_like(bank[:1, :1])) == bank[0, 0].numel()
        made.append(F.conv2d(image, bank).square().sum(1, keepdim=True)[whole])
    return made


@pytest.mark.parametrize("name", ["quadratic", "covariance"])
def test_a_gaussian_prior_is_filled_as_dense_algebra_has_it(
    name: str, patches: tuple[Tensor, Tensor], tiny_model: Callable[..., VictimModel]
) -> None:
    (X, Y), prior = patches, small(tiny_model(), name)
    found = prior.fill(X, Y, free=INSIDE, inside=INSIDE, rounds=0, steps=40)
    rows = INSIDE[..., None].double()

    def energy(C: Tensor) -> Tensor:
        return torch.stack([q.sum() for q in squares(prior, X + (C @ Y) * rows)]).sum()

    zero = torch.zeros(2, 4, 3, dtype=torch.float64)
    g = torch.as_tensor(torch.autograd.functional.jacobian(energy, zero)).flatten()
    H = torch.as_tensor(torch.autograd.functional.hessian(energy, zero)).reshape(24, 24)
    C = torch.linalg.lstsq(H, -g, driver="gelsd").solution.view(2, 4, 3)
    assert_close(found, X + (C @ Y) * rows, atol=1e-6, rtol=1e-6)


def test_the_quadratic_windows_are_the_smoothness(
    patches: tuple[Tensor, Tensor], tiny_model: Callable[..., VictimModel]
) -> None:
    (X, Y), model = patches, tiny_model()
    smooth = Smoothness((3, 8, 8), photograph_gradients(model).double())
    expected = smooth.fill(X, Y, free=INSIDE, inside=INSIDE, steps=60)
    found = small(model, "quadratic").fill(X, Y, free=INSIDE, inside=INSIDE, rounds=0, steps=40)
    assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse", "cauchy"])
def test_reweighting_ends_where_the_energy_has_no_slope(
    name: str, patches: tuple[Tensor, Tensor], tiny_model: Callable[..., VictimModel]
) -> None:
    (X, Y), prior = patches, small(tiny_model(), name)
    φ = {"sparse": lambda q: (0.07**2 + q).sqrt(), "cauchy": lambda q: 2 * torch.log1p(q)}[name]

    def energy(C: Tensor, X: Tensor) -> Tensor:
        return torch.stack([φ(q).sum() for q in squares(prior, X + (C @ Y) * INSIDE[..., None])]).sum()

    zero = torch.zeros(2, 4, 3, dtype=torch.float64)
    values, found = [], X
    for rounds in (0, 1, 5, 300):
        found = prior.fill(X, Y, free=INSIDE, inside=INSIDE, rounds=rounds, steps=20)
        values.append(float(energy(zero, found)))
    assert values == sorted(values, reverse=True)
    start = torch.autograd.functional.jacobian(lambda C: energy(C, X), zero)
    end = torch.autograd.functional.jacobian(lambda C: energy(C, found), zero)
    assert end.abs().max() < 1e-3 * start.abs().max()


@pytest.mark.parametrize("name", PRIORS)
def test_rows_outside_and_directions_beyond_y_stay(
    name: str, patches: tuple[Tensor, Tensor], tiny_model: Callable[..., VictimModel]
) -> None:
    X, Y = patches
    found = small(tiny_model(), name).fill(X, Y, free=INSIDE, inside=INSIDE, rounds=3, steps=5)
    assert torch.equal(found[~INSIDE], X[~INSIDE])
    moved = found - X
    assert_close((moved @ Y.mT) @ Y, moved)
    assert moved[INSIDE].norm(dim=1).min() > 0


def test_images_of_a_batch_with_fewer_masked_patches_are_filled_alike(
    patches: tuple[Tensor, Tensor], tiny_model: Callable[..., VictimModel]
) -> None:
    (X, Y), prior = patches, small(tiny_model(), "cauchy")
    padded = torch.cat([Y[:1], torch.zeros_like(Y[:1])], 1)
    alone = prior.fill(X[:1], Y[:1], free=INSIDE[:1], inside=INSIDE[:1], rounds=3, steps=10)
    assert_close(prior.fill(X[:1], padded, free=INSIDE[:1], inside=INSIDE[:1], rounds=3, steps=10), alone)


@pytest.mark.parametrize(
    ("name", "φ"),
    [
        ("quadratic", lambda q: q / 2),
        ("sparse", lambda q: (0.07**2 + q).sqrt()),
        ("covariance", lambda q: q / 2),
        ("cauchy", lambda q: 2 * torch.log1p(q)),
    ],
)
def test_weights_are_twice_the_slopes_of_what_is_minimised(
    name: str, φ: Callable[[Tensor], Tensor], tiny_model: Callable[..., VictimModel]
) -> None:
    q = torch.logspace(-6, 4, 30, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(φ(q).sum(), q)
    assert_close(small(tiny_model(), name).tail(q), 2 * slope)


def test_a_flat_image_has_the_variance_of_rounding() -> None:
    """Rounded to 8 bits, values are off from what they were by 1/12 of a level squared."""
    values = torch.rand(200000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rounding = ((values * 255).round() / 255 - values).square().mean()
    found = _covariance(torch.zeros(2, 50, dtype=torch.float64))
    assert_close(found, rounding * torch.eye(2, dtype=torch.float64), rtol=0.02, atol=0)


def test_the_scale_of_cauchys_law_is_that_of_what_was_drawn() -> None:
    """Of the multivariate law in three dimensions, in 20000 draws; and no further round changes it."""
    draw = torch.Generator().manual_seed(0)
    L = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=draw)).Q * torch.tensor([0.1, 1.0, 5.0])
    normal, one = (torch.randn(n, 20000, dtype=torch.float64, generator=draw) for n in (3, 1))
    z = L.double() @ normal / one.abs()
    found = _cauchy_scale(z)
    white = torch.linalg.solve(L, torch.linalg.solve(L, found).mT)
    assert_close(white, torch.eye(3, dtype=torch.float64), rtol=0, atol=0.1)
    assert_close(_cauchy_scale(z, rounds=100), found, rtol=0.02, atol=1e-3)


def test_windows_of_photographs_are_white_to_the_covariance(
    photographs: Callable[[int, int], Tensor], tiny_model: Callable[..., VictimModel]
) -> None:
    """The bundled photographs are those that it was learned from; rounding to 8 bits is added to their variance."""
    model = tiny_model(img_size=32)
    (bank,) = photograph_windows(model, "covariance").filters
    images = model.normalise(photographs(14, 32).to(model.mean))
    z = F.conv2d(images, bank).transpose(0, 1).flatten(1)
    covariance = z @ z.mT / z.shape[1]
    off = covariance - covariance.diagonal().diag()
    assert off.abs().max() < 0.05
    assert float(covariance.diagonal().max()) < 1.05


def test_cauchy_is_the_likeliest_scale_of_photographs(
    photographs: Callable[[int, int], Tensor], tiny_model: Callable[..., VictimModel]
) -> None:
    """At it 4 q / (1 + q) is 3 on average, the number of colours, but for rounding; a Gaussian's scale is far wider."""
    model = tiny_model(img_size=32)
    images = model.normalise(photographs(14, 32).to(model.mean))
    for bank in photograph_windows(model, "cauchy").filters:
        q = F.conv2d(images, bank).square().sum(1)
        assert 2.6 < (4 * q / (1 + q)).mean() < 3.001
        assert q.mean() > 5 * q.median()

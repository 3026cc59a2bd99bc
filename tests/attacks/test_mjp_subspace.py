"""The subspace identity of MJP's gradients, and the completion by a prior, against dense algebra."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from privlab.attacks.gradients.mjp_subspace import MjpSubspace, Subspace, subspace, without_moved
from privlab.attacks.gradients.patch_gradient import PatchGradient
from privlab.attacks.solvers import Smoothness, conjugate_gradients, photograph_gradients
from privlab.attacks.solvers.prior import PRIORS
from privlab.base import PrivlabError, PrivlabWarning, draw_for
from privlab.defenses import Mjp
from privlab.metrics import psnr_region
from privlab.patches import patchify, slots_to_pixels, unpatchify
from privlab.release import observe, observe_updates
from privlab.threat import Client, ClientData, Feed, Observation
from privlab.victims import VictimModel


def seen_under(model: VictimModel, images: Tensor, gamma: float) -> tuple[Feed, Observation]:
    draws = [draw_for(0, str(i), "defense") for i in range(len(images))]
    feed = Mjp(gamma=gamma)(images, model.patch, draws)
    return feed, observe(model, feed, torch.arange(len(images)), MjpSubspace.parameters)


def found_in(model: VictimModel, seen: Observation) -> Subspace:
    A = seen.gradients["pos_embed"].squeeze(1)[:, -model.grid[0] * model.grid[1] :]
    return subspace(A, seen.gradients["patch_embed.proj.weight"].flatten(2))


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_direction_of_rounding_is_not_taken() -> None:
    """Where nothing is left of a target, its products are rounding, and may have any sign."""
    target, scale = torch.ones(3, 2, 1), torch.tensor([2.0, -1e-9, 0.0]).view(3, 1, 1)
    found = conjugate_gradients(lambda V: scale * V, target, 20)
    assert_close(found, torch.tensor([0.5, 0.0, 0.0]).view(3, 1, 1).expand_as(target))


@pytest.mark.parametrize("gamma", [0.27, 0.5, 0.9])
def test_span_of_the_masked_patches_and_the_others_modulo_it(
    gamma: float, images: Tensor, tiny_model: Callable[..., VictimModel]
) -> None:
    model = tiny_model()
    feed, seen = seen_under(model, images, gamma)
    found = found_in(model, seen)
    X = patchify(model.normalise(feed.images), model.patch)
    assert feed.masked_pe is not None
    assert torch.equal(found.masked, feed.masked_pe)
    outside = X - (X @ found.Y.mT) @ found.Y
    assert_close(outside[found.masked], torch.zeros_like(outside[found.masked]), atol=1e-6, rtol=0)
    assert_close(found.known[~found.masked], outside[~found.masked], atol=1e-5, rtol=1e-5)
    count = found.masked.sum(1)
    for Y, n in zip(found.Y, count, strict=True):
        assert_close(Y[:n] @ Y[:n].mT, torch.eye(int(n), dtype=Y.dtype))
        assert not Y[n:].any()


def test_a_mixture_with_an_unmasked_patch_is_not_in_the_span(
    images: Tensor, tiny_model: Callable[..., VictimModel]
) -> None:
    model = tiny_model()
    feed, seen = seen_under(model, images, 0.27)
    found = found_in(model, seen)
    X = patchify(model.normalise(feed.images), model.patch)
    for x, masked, Y in zip(X, found.masked, found.Y, strict=True):
        mixed = x[masked][0] + x[~masked][0]
        assert (mixed - (mixed @ Y.mT) @ Y).norm() > 0.1 * mixed.norm()


def test_rows_of_patches_that_were_moved_while_it_mattered_are_left_out() -> None:
    """A_j = B_j for a patch that stayed; other rows are no combination of B. A small difference counts as none."""
    draw = torch.Generator().manual_seed(5)
    B = torch.randn(2, 10, 24, dtype=torch.float64, generator=draw)
    X = torch.randn(2, 10, 40, dtype=torch.float64, generator=draw)
    other = torch.randn(2, 10, 24, dtype=torch.float64, generator=draw)
    for share, counts in ((0.0, False), (0.05, False), (0.9, True)):
        A = B.clone()
        A[:, 3:5] += share * other[:, 3:5]
        found = without_moved(A, B.mT @ X)
        assert (found[:, 3:5] == 0).all() == counts
        assert torch.equal(found[:, 5:], A[:, 5:])


@pytest.mark.slow
def test_an_update_of_one_step_is_read_as_its_gradient(images: Tensor, tiny_model: Callable[..., VictimModel]) -> None:
    """Decay is undone, and the slots without a gradient are found where no row is zero any more."""
    model, mjp = tiny_model(), Mjp(gamma=0.2)
    for decay in (0.0, 0.1):
        data = [ClientData(x[None], torch.tensor([i]), draw_for(0, str(i), "c")) for i, x in enumerate(images)]
        client = Client(lr=0.5, weight_decay=decay)
        of_update = MjpSubspace()(observe_updates(model, client, data, MjpSubspace.parameters, (mjp,)))
        draws = [draw_for(0, str(i), "c") for i in range(len(images))]
        for draw in draws:
            torch.randint(2**62, (), generator=draw)
            torch.randperm(1, generator=draw)
        feed = mjp(images, model.patch, draws)
        of_gradient = MjpSubspace()(observe(model, feed, torch.arange(3), MjpSubspace.parameters, (mjp,)))
        assert (of_update - of_gradient).abs().max() < 1e-3


def test_more_masked_patches_than_values_in_each(tiny_model: Callable[..., VictimModel]) -> None:
    """They span everything: nothing of the others is known modulo them, and every patch is left to the prior."""
    model = tiny_model(img_size=32, embed_dim=96)
    images = torch.rand(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, seen = seen_under(model, images, 0.9)
    found = found_in(model, seen)
    assert (found.masked.sum(1) > 48).all()
    assert_close(found.Y @ found.Y.mT, torch.eye(48).double().expand(2, -1, -1))
    assert_close(found.known, torch.zeros_like(found.known), atol=1e-6, rtol=0)
    assert MjpSubspace()(seen).isfinite().all()


def test_without_a_mask_it_is_the_plain_closed_form(images: Tensor, tiny_model: Callable[..., VictimModel]) -> None:
    seen = observe(tiny_model(), images, torch.arange(3), MjpSubspace.parameters)
    assert_close(MjpSubspace()(seen), PatchGradient()(seen))


@pytest.mark.slow
def test_photographs_come_out_better_than_by_the_plain_closed_form(
    photographs: Callable[[int, int], Tensor], tiny_model: Callable[..., VictimModel]
) -> None:
    model = tiny_model(img_size=28)
    feed, seen = seen_under(model, photographs(4, 28).double(), 0.27)
    kept = ~slots_to_pixels(feed.moved, model.grid, model.patch)
    with pytest.warns(PrivlabWarning, match="does not know"):
        plain = PatchGradient()(seen)
    reconstruction = {"plain": plain} | {name: MjpSubspace(prior=name)(seen) for name in PRIORS}
    scores = {name: float(psnr_region(each, feed.images, kept).mean()) for name, each in reconstruction.items()}
    assert scores["plain"] + 3 < scores["quadratic"] < scores["cauchy"] + 1
    assert all(scores[name] > scores["plain"] for name in PRIORS)


@pytest.mark.parametrize("prior", PRIORS)
def test_the_prior_of_the_unmasked_region_does_not_see_the_masked_one(
    prior: str, images: Tensor, tiny_model: Callable[..., VictimModel]
) -> None:
    """Whatever stands in the masked slots, the others come out the same, to the last bit."""
    model, attack = tiny_model(), MjpSubspace(prior=prior, rounds=2, steps=3)
    seen = seen_under(model, images, 0.4)[1]
    found = found_in(model, seen)
    noise = torch.randn(found.known.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    other = found._replace(known=torch.where(found.masked[..., None], noise, found.known))
    here, there = (attack.complete(each, seen)[~found.masked] for each in (found, other))
    assert torch.equal(here, there)


def test_masked_patches_are_the_smoothest_of_their_span_beside_all_others(
    images: Tensor, tiny_model: Callable[..., VictimModel]
) -> None:
    """At the answer the energy of all differences has no slope along the span in the masked slots."""
    model = tiny_model()
    seen = seen_under(model, images, 0.4)[1]
    found = found_in(model, seen)
    X = MjpSubspace().complete(found, seen).requires_grad_()
    image, precision = unpatchify(X, model.image_shape), torch.linalg.inv(photograph_gradients(model))
    energy = sum(torch.einsum("bchw,cd,bdhw->", δ, precision, δ) for δ in (image.diff(dim=2), image.diff(dim=3)))
    (slope,) = torch.autograd.grad(torch.as_tensor(energy), X)
    assert (slope @ found.Y.mT)[found.masked].norm() < 1e-6 * (slope @ found.Y.mT)[~found.masked].norm()


@pytest.mark.slow
def test_the_defaults_are_the_best_on_photographs(
    photographs: Callable[[int, int], Tensor], tiny_model: Callable[..., VictimModel]
) -> None:
    """By a decibel and more before every other prior, a single round, and rounds of a single step."""
    model = tiny_model(img_size=40, patch_size=8, embed_dim=48, depth=1)
    feed, seen = seen_under(model, photographs(4, 40).double(), 0.27)
    kept = ~slots_to_pixels(feed.moved, model.grid, model.patch)
    default = MjpSubspace()
    others = [MjpSubspace(prior=name) for name in PRIORS if name != default.prior]
    others += [MjpSubspace(rounds=1), MjpSubspace(steps=1)]
    best, *rest = (float(psnr_region(each(seen), feed.images, kept).mean()) for each in (default, *others))
    assert best > max(rest) + 1


def test_fill_is_the_least_energy_over_the_coefficients() -> None:
    """Against a dense solve of the same least squares, pixel pair by pixel pair."""
    draw = torch.Generator().manual_seed(1)
    X, Y = (torch.randn(2, n, 12, dtype=torch.float64, generator=draw) for n in (4, 3))  # 2 × 2 patches of 2 × 2
    Γ = torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 0.5]], dtype=torch.float64)
    inside = torch.tensor([[True, True, True, False], [True, False, True, True]])
    prior = Smoothness((3, 4, 4), Γ)
    found = prior.fill(X, Y, free=inside, inside=inside, steps=60)
    for i in range(2):
        count = int(inside[i].sum())

        def energy(c: Tensor, i: int = i, count: int = count) -> Tensor:
            x = X[i].clone()
            x[inside[i]] = x[inside[i]] + c.view(count, 3) @ Y[i]
            image = x.view(2, 2, 3, 2, 2).permute(2, 0, 3, 1, 4).reshape(3, 4, 4)
            mask = inside[i].view(2, 1, 2, 1).expand(2, 2, 2, 2).reshape(4, 4).double()
            total = torch.zeros((), dtype=torch.float64)
            for dim in (1, 2):
                δ = image.diff(dim=dim)
                both = mask.narrow(dim - 1, 0, 3) * mask.narrow(dim - 1, 1, 3)
                total = total + (torch.einsum("chw,cd,dhw->hw", δ, torch.linalg.inv(Γ), δ) * both).sum()
            return total

        zero = torch.zeros(count * 3, dtype=torch.float64)
        H = torch.autograd.functional.hessian(energy, zero)
        g = torch.autograd.functional.jacobian(energy, zero)
        c = torch.linalg.lstsq(H, -g).solution
        moved = (found[i] - X[i])[inside[i]]
        assert_close(moved, c.view(count, 3) @ Y[i], atol=1e-6, rtol=1e-6)
        assert not (found[i] - X[i])[~inside[i]].any()


@pytest.mark.parametrize("options", [{"rounds": -1}, {"steps": 0}])
def test_options_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(PrivlabError, match="of mjp-subspace must be at least"):
        MjpSubspace(**options)  # pyright: ignore[reportArgumentType]


def test_an_unknown_prior_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(PrivlabError, match="cauchy"):
        MjpSubspace(prior="couchy")

"""`adam-update`: what Adam's first step shows of a gradient, and the image from it."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from privlab.attacks import AdamUpdate, PatchGradient
from privlab.attacks.solvers import (
    Shown,
    distance,
    expected_value,
    largest_step,
    likelihood_of_shares,
    shown_by_adam,
    shown_by_round,
)
from privlab.base import PrivlabError
from privlab.defenses import DEFENSES
from privlab.metrics import psnr
from privlab.release import each_release, observe, observe_updates
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
ADAMW = Client(optimiser="adamw", lr=1e-2, weight_decay=0.05, steps=1)


def sent(model: VictimModel, images: Tensor, client: Client) -> Observation:
    """Return the updates of clients with one image each."""
    clients = [
        ClientData(image[None].to(model.mean), torch.tensor([i % 7]), torch.Generator().manual_seed(i))
        for i, image in enumerate(images)
    ]
    return observe_updates(model, client, clients)


def score(attack: AdamUpdate | PatchGradient, seen: Observation, images: Tensor) -> list[float]:
    return psnr(attack(seen), images.to(seen.model.mean)).tolist()


def test_a_share_of_a_full_step_shows_the_gradient() -> None:
    """Exact for exact shares; with an error, known entries are off by their deviation, others above their bound."""
    draw = torch.Generator().manual_seed(0)
    g = torch.randn(30, 40, generator=draw, dtype=torch.float64) * 10 ** (
        6 * torch.rand(30, 40, generator=draw, dtype=torch.float64) - 9
    )
    u = g / (g.abs() + 1e-8)
    exact = shown_by_adam(u, torch.full_like(u, 1e-12), 1e-8)
    assert exact.known.all()
    torch.testing.assert_close(exact.value, g, rtol=1e-6, atol=0)
    off = 1e-3 * (2 * torch.rand(u.shape, generator=draw, dtype=torch.float64) - 1)
    shown = shown_by_adam(u + off, torch.full_like(u, 1e-3 / math.sqrt(3)), 1e-8)
    errors = (shown.value - g).abs()[shown.known] / shown.deviation[shown.known]
    assert 0.2 < float(shown.known.double().mean()) < 0.8
    assert 0.5 < float(errors.square().mean().sqrt()) < 2
    assert bool((g.abs() >= shown.least).all())
    assert float(shown.least[~shown.known].min()) > 1e-6
    assert torch.equal(shown.value.sign()[~shown.known], g.sign()[~shown.known])


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_no_fresh_state_moves_a_weight_further(steps: int) -> None:
    """The gradients of greatest move, a_ti / b_ti up to scale, reach the bound of the last step."""
    client = Client(optimiser="adam", lr=0.1, steps=steps, beta1=0.8, beta2=0.9)
    draw = torch.Generator().manual_seed(0)
    t = steps
    worst = [client.beta1 ** (t - i) / client.beta2 ** (t - i) for i in range(1, t + 1)]
    gradients = torch.randn(t, 1000, generator=draw, dtype=torch.float64)
    gradients[:, 0] = torch.tensor(worst, dtype=torch.float64)
    weights = torch.zeros(1000, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weights], lr=client.lr, betas=(client.beta1, client.beta2), eps=1e-30)
    before = weights.detach().clone()
    for g in gradients:
        before = weights.detach().clone()
        weights.grad = g.clone()
        adam.step()
    last = largest_step(client) - (largest_step(replace(client, steps=t - 1)) if t > 1 else 0)
    assert float((weights.detach() - before)[0].abs()) == pytest.approx(last, rel=1e-9)
    assert float(weights.detach().abs().max()) <= largest_step(client) * (1 + 1e-9)


@pytest.mark.parametrize(
    "client", [ADAMW, replace(ADAMW, weight_decay=0.0), replace(ADAMW, optimiser="adam", weight_decay=0.0)]
)
def test_least_squares_is_exact_where_epsilon_shows_every_magnitude(
    tiny_model: Model, crops: Tensor, client: Client
) -> None:
    """With ε as large as gradients are, no magnitude is lost; float32 in the release is all of the error."""
    images, client = crops[:260:130], replace(client, eps=1.0)
    seen = sent(tiny_model(), images, client)
    assert min(score(AdamUpdate(steps=0, rounds=0), seen, images)) > 80
    assert max(score(PatchGradient(), seen, images)) < 40


HALF = replace(ADAMW, eps=1e-6, lr=1e-3)
"""A client of which half of the magnitudes are known."""

SIGNS = replace(ADAMW, lr=1e-4, steps=3)
"""One of which none is."""


def off(shown: Shown, made: Tensor) -> Tensor:
    """Return how far a gradient is from what is shown of it."""
    scale = shown_by_adam(torch.full((1, 1), 0.5).double(), torch.full((1, 1), 1e-3).double(), shown.eps)
    likelihood = likelihood_of_shares({"g": shown, "scale": scale}, made)
    released, edge = likelihood.released["g"], likelihood.edge["g"]
    return shown.eps * distance(made.flatten()[None] / shown.eps, released, edge).view_as(made)


def test_unknown_entries_count_where_their_sign_or_bound_is_violated() -> None:
    """A gradient at its bounds costs nothing, and one of the opposite sign twice its bound in each entry."""
    shown = shown_by_adam(torch.tensor([[1.0, -1.0], [1.0, 1.0]]).double(), torch.full((2, 2), 1e-3).double(), 1e-8)
    assert not shown.known.any()
    assert not off(shown, 1.5 * shown.value).any()
    torch.testing.assert_close(off(shown, -shown.value), -2 * shown.value)


def test_a_sign_is_told_where_no_size_is() -> None:
    """Errors of a third of a step and more leave no bound: all magnitudes are expected at ε, and signs still count."""
    share = torch.tensor([[0.9, -0.8, 0.1], [-1.4, 0.5, -0.3]]).double()
    shown = shown_by_adam(share, torch.full((2, 3), 0.4).double(), 1e-8)
    assert not shown.known.any()
    assert not shown.least.any()
    torch.testing.assert_close(expected_value(shown), 1e-8 * share.sign(), rtol=1e-12, atol=0)
    assert not off(shown, expected_value(shown)).any()
    some = shown_by_adam(share, torch.full((2, 3), 0.25).double(), 1e-8)
    assert bool((some.known | (some.least > 0)).any())
    assert not bool((some.known | (some.least > 0)).all())
    assert torch.equal(expected_value(some).sign(), share.sign())


@pytest.mark.slow
def test_moves_of_every_size_still_show_signs(tiny_model: Model, crops: Tensor) -> None:
    """The moves of many steps may be spread so far that no magnitude is known and none is bounded."""
    images, draw = crops[1:2], torch.Generator().manual_seed(0)
    seen = sent(tiny_model().float(), images, SIGNS)
    moves = {
        name: M.sign() * SIGNS.lr * (0.02 + 2.98 * torch.rand(M.shape, generator=draw))
        for name, M in seen.gradients.items()
    }
    seen = replace(seen, gradients=moves, client=replace(SIGNS, weight_decay=0.0))
    start, found = (score(AdamUpdate(steps=steps, rounds=0), seen, images)[0] for steps in (0, 40))
    assert found > start + 0.2


def test_blocks_are_read_where_less_than_a_third_of_the_magnitudes_is_known(tiny_model: Model, crops: Tensor) -> None:
    """Where more is known the number of blocks changes no pixel; where less is, it does."""
    images, model = crops[:1], tiny_model().float()
    for client, same in ((HALF, True), (SIGNS, False)):
        seen = sent(model, images, client)
        some, none = (AdamUpdate(steps=2, stage_steps=1, blocks=blocks, rounds=0)(seen) for blocks in (2, 0))
        assert torch.equal(some, none) == same


def test_the_signs_of_two_blocks_improve_on_least_squares(tiny_model: Model, crops: Tensor) -> None:
    images = crops[:1]
    seen = sent(tiny_model().float(), images, SIGNS)
    start, found = (score(AdamUpdate(steps=steps, rounds=0), seen, images)[0] for steps in (0, 40))
    assert found > start + 1


@pytest.mark.slow
def test_a_fit_to_magnitudes_and_bounds_gains_on_the_search_by_signs(tiny_model: Model, crops: Tensor) -> None:
    images = crops[:260:130]
    seen = sent(tiny_model().float(), images, HALF)
    settings = {"least squares": (0, 0), "first": (40, 0), "fit": (40, 4)}
    attacks = {
        name: AdamUpdate(steps=steps, rounds=rounds, solver_steps=20) for name, (steps, rounds) in settings.items()
    }
    found = {name: sum(score(attack, seen, images)) for name, attack in attacks.items()}
    assert found["first"] > found["least squares"] + 2
    assert found["fit"] > found["first"] + 1


def test_a_carried_state_or_another_rate_is_refused_where_it_shows(tiny_model: Model, crops: Tensor) -> None:
    """A plain loop of AdamW whose state is that of rounds on other images moves some weights by more than η."""
    model, image = tiny_model(), crops[:1]
    seen = sent(model, image, ADAMW)
    names = list(seen.gradients)
    weights = [model.vit.get_parameter(name).detach().clone().requires_grad_() for name in names]
    adam = torch.optim.AdamW(weights, lr=ADAMW.lr, weight_decay=0.05)
    own = observe(model, image.to(model.mean), torch.tensor([0]), names).gradients
    for _ in range(200):
        for w, name in zip(weights, names, strict=True):
            w.grad = 1e-3 * own[name][0]
        adam.step()
    before = [w.detach().clone() for w in weights]
    for w, name in zip(weights, names, strict=True):
        w.grad = own[name][0]
    adam.step()
    # The server's weights are those before the round: the same moves from them.
    moves = {
        name: (b * (1 - ADAMW.lr * 0.05) - w.detach() + ADAMW.lr * 0.05 * model.vit.get_parameter(name).detach())[None]
        for name, b, w in zip(names, before, weights, strict=True)
    }
    with pytest.raises(PrivlabError, match=r"carried.*client\.lr"):
        AdamUpdate()(replace(seen, gradients=moves))
    with pytest.raises(PrivlabError, match=r"client\.lr is another one"):
        AdamUpdate()(replace(seen, client=replace(ADAMW, lr=ADAMW.lr / 2)))


def test_what_is_behind_the_searched_blocks_is_checked_and_no_more(tiny_model: Model, crops: Tensor) -> None:
    model = tiny_model(depth=2)
    (update,) = each_release(sent(model, crops[:1], ADAMW))
    whole, few = (shown_by_round(model, ADAMW, update, blocks) for blocks in (None, 1))
    assert few.keys() == {name for name in whole if not name.startswith(("blocks.1.", "norm.", "head."))}
    assert all(torch.equal(a, b) for name in few for a, b in zip(few[name][:5], whole[name][:5], strict=True))
    with pytest.raises(PrivlabError, match="fresh state"):
        shown_by_round(model, ADAMW, {**update, "head.bias": 3 * update["head.bias"]}, 1)


def test_what_is_refused_is_one_line(tiny_model: Model, crops: Tensor) -> None:
    model = tiny_model()
    with pytest.raises(PrivlabError, match=r"client\.optimiser=sgd"):
        AdamUpdate()(sent(model, crops[:1], Client()))
    with pytest.raises(PrivlabError, match=r"0\.05.*division.*no"):
        AdamUpdate()(sent(model, crops[:1], replace(ADAMW, optimiser="adam")))
    seen = sent(model, crops[:1], ADAMW)
    with pytest.raises(PrivlabError, match="gradient-noise"):
        AdamUpdate()(replace(seen, defense=(DEFENSES["gradient-noise"](),)))
    with pytest.raises(PrivlabError, match=r"adam-update.*0"):
        AdamUpdate(steps=-1)
    with pytest.raises(PrivlabError, match=r"adam-update.*0"):
        AdamUpdate(blocks=-1)
    with pytest.raises(PrivlabError, match=r"adam-update.*0"):
        AdamUpdate(prior=-1.0)
    with pytest.raises(PrivlabError, match=r"adam-update.*1"):
        AdamUpdate(solver_steps=0)

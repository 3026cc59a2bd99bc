"""`fedavg-matching`: its simulation is the client's round, the search finds images of one, and passes are joined."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from privlab.attacks import FedavgMatching
from privlab.attacks.baselines.fedavg_matching import Simulation, agree, join_passes
from privlab.attacks.baselines.rounds import Round, labels_of_round, mean_gradient, rate_sum
from privlab.attacks.gradients.gradient_matching import twice_derivable
from privlab.base import PrivlabError
from privlab.metrics import psnr
from privlab.release import observe, observe_updates, released_parameters, undecayed
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel

pytestmark = pytest.mark.usefixtures("cache")

Model = Callable[..., VictimModel]
ONE = {"img_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2}
"""One patch: the objective has no other minima in the way."""

CLIENTS = {
    "two steps": Client(lr=0.1, steps=2),
    "momentum and decay": Client(lr=0.1, steps=3, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": Client(lr=0.05, steps=3, momentum=0.5, nesterov=True, schedule="cosine"),
    "clipped and smoothed": Client(lr=0.1, steps=2, clip=0.5, label_smoothing=0.1),
    "batches": Client(lr=0.1, images=5, batch_size=2, epochs=2, shuffle=False),
    "accumulated": Client(lr=0.1, images=5, batch_size=2, accumulation=2, epochs=1, shuffle=False),
    "norms": Client(lr=0.1, steps=2, trains="norms"),
}


def pictures(n: int, side: int = 4) -> Tensor:
    return torch.rand(n, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sent(model: VictimModel, client: Client, images: Tensor, labels: list[int]) -> Observation:
    data = ClientData(images, torch.tensor(labels), torch.Generator().manual_seed(0))
    return observe_updates(model, client, [data])


@pytest.mark.parametrize("name", CLIENTS)
def test_the_round_is_the_one_that_torch_makes(tiny_model: Model, name: str) -> None:
    model, client = tiny_model(unknown=False, **ONE), CLIENTS[name]
    images, labels = pictures(client.images), list(range(client.images))
    seen = sent(model, client, images, labels)
    made = Round(twice_derivable(model), client, list(seen.gradients))(images[None], torch.tensor(labels))
    wanted = undecayed(model, {name: u[0] for name, u in seen.gradients.items()}, client)
    assert_close(made, wanted, rtol=1e-6, atol=1e-8)  # fused attention rounds more


def test_the_rates_add_up_to_what_a_gradient_of_one_becomes(tiny_model: Model) -> None:
    """Of the head's bias alone: its gradient hardly changes from step to step where the rate is tiny."""
    model = tiny_model(unknown=False, **ONE)
    image = pictures(1)
    g = observe(model, image, torch.tensor([2]), ["head.bias"]).gradients["head.bias"][0]
    for client in CLIENTS.values():
        if client.images == 1 and client.trains == "all" and client.clip is None:
            slow = replace(client, lr=1e-9, weight_decay=0.0)
            u = sent(model, slow, image, [2]).gradients["head.bias"][0]
            assert_close(u / rate_sum(slow), g, rtol=1e-5, atol=1e-6)
            assert_close(mean_gradient(model, {"head.bias": u}, slow)["head.bias"], u / rate_sum(slow))
    assert rate_sum(Client(lr=0.5, steps=2, weight_decay=1.0)) == pytest.approx(0.5 * 0.5 + 0.5)


def test_the_true_images_have_no_distance_and_the_slope_is_the_differences(tiny_model: Model) -> None:
    model, client = tiny_model(unknown=False, **ONE), Client(lr=0.1, images=2, steps=4, shuffle=False)
    images = pictures(2)
    simulation = Simulation.of(sent(model, client, images, [1, 4]), tv=0.1, invariance=1.0)
    number = torch.tensor([0])
    exact = replace(simulation, tv=0.0)(images.flatten()[None], number)
    assert float(exact[0]) < 1e-12
    assert simulation.labels[0].tolist() == [1, 4]
    point = pictures(3)[1:].flatten()[None]
    value, slope = simulation(point, number)
    step = torch.zeros_like(point)
    step[0, 7] = 1e-5
    up, down = (simulation(point + sign * step, number)[0] for sign in (1, -1))
    assert_close((up - down) / 2e-5, slope[:, 7], rtol=1e-4, atol=1e-6)
    assert float(value) > 0.1


@pytest.mark.slow
def test_an_image_of_two_steps_comes_back_from_nothing(tiny_model: Model) -> None:
    """160 dB; the same after three evaluations is no image yet."""
    model, image = tiny_model(unknown=False, **ONE), pictures(1)
    seen = sent(model, CLIENTS["two steps"], image, [3])
    attack = FedavgMatching(tv=0.0, steps=150)
    assert psnr(attack(seen), image).min() > 100
    assert psnr(replace(attack, steps=3)(seen), image).max() < 50


@pytest.mark.slow
def test_two_images_in_their_own_steps_come_apart(tiny_model: Model) -> None:
    model, images = tiny_model(unknown=False, **ONE), pictures(2)
    seen = sent(model, Client(lr=0.1, images=2, steps=4, shuffle=False), images, [1, 4])
    made = FedavgMatching(tv=0.0, steps=200)(seen)
    assert psnr(made, images).min() > 30


def test_passes_agree_on_what_no_order_changes() -> None:
    images = pictures(3)
    passes = torch.stack([images, images[[2, 0, 1]], images[[1, 2, 0]]])
    assert float(agree(passes)) < 1e-30
    first = pictures(4)[3:]
    other = torch.stack([images, torch.cat([images[:2], first])])
    pair = [torch.stack([of.mean(0), of.amax(0)]) for of in other]
    assert_close(agree(other), (pair[0] - pair[1]).square().mean() / 2)  # of two passes, the variance is a quarter


def test_joined_passes_are_means_of_what_belongs_together() -> None:
    images = pictures(3)
    noisy = images + 0.01 * pictures(4)[1:]
    labels = torch.tensor([1, 1, 4])
    joined = join_passes(torch.stack([images, noisy[[1, 0, 2]]]), labels)
    assert_close(joined, (images + noisy) / 2)
    other = join_passes(torch.stack([images, images[[2, 1, 0]]]), labels)  # the third is of another label
    assert_close(other[1], (images[1] + images[1]) / 2)
    assert_close(other[0], (images[0] + images[2]) / 2)


@pytest.mark.parametrize(
    ("client", "passes", "whole"),
    [
        (Client(images=4, epochs=3), 3, 3),
        (Client(images=4, steps=6), 2, 1),
        (Client(images=4, steps=2), 1, 1),
        (Client(images=4, epochs=3, shuffle=False), 1, 1),
        (Client(images=4, batch_size=4, epochs=3), 1, 1),
    ],
)
def test_passes_have_images_of_their_own_where_an_order_tells_them_apart(
    tiny_model: Model, client: Client, passes: int, whole: int
) -> None:
    own = Round(tiny_model(**ONE), client, [])
    assert (own.passes, own.whole_passes) == (passes, whole)


def test_labels_of_a_round(tiny_model: Model) -> None:
    model = tiny_model(unknown=False, **ONE)
    client = Client(lr=0.01, images=3, batch_size=1, epochs=2)
    seen = sent(model, client, pictures(3), [5, 2, 2])
    assert labels_of_round(model, {name: u[0] for name, u in seen.gradients.items()}, client) == [2, 2, 5]
    with pytest.raises(PrivlabError, match=r"head\.bias"):
        labels_of_round(model, {"pos_embed": seen.gradients["pos_embed"][0]}, client)


def test_what_it_refuses(tiny_model: Model) -> None:
    model, image = tiny_model(unknown=False, **ONE), pictures(1)
    with pytest.raises(PrivlabError, match=r"Found client\.optimiser=adam"):
        FedavgMatching()(sent(model, Client(optimiser="adam"), image, [1]))
    with pytest.raises(PrivlabError, match=r"Found client\.dropout=0\.1"):
        FedavgMatching()(sent(model, Client(dropout=0.1), image, [1]))
    with pytest.raises(PrivlabError, match=r"Found client\.drop_path=0\.1"):
        FedavgMatching()(sent(model, Client(drop_path=0.1), image, [1]))
    with pytest.raises(PrivlabError, match="update"):
        FedavgMatching()(observe(model, image, torch.tensor([1]), released_parameters(model)))
    with pytest.raises(PrivlabError, match=r"start=grey.*2"):
        FedavgMatching(start="grey")(sent(model, Client(images=2), pictures(2), [1, 2]))
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"optimiser": "sgd"}, "optimiser of fedavg-matching"),
        ({"start": "auto"}, "start of fedavg-matching"),
        ({"steps": -1}, "steps of fedavg-matching must be at least 0"),
        ({"lr": 0.0}, "lr of fedavg-matching must be above 0"),
        ({"tv": -1.0}, "tv of fedavg-matching must be at least 0"),
        ({"invariance": float("inf")}, "invariance of fedavg-matching must be at least 0"),
    )
    for options, message in wrong:
        with pytest.raises(PrivlabError, match=message):
            FedavgMatching(**options)

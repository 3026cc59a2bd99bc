"""A rate or a decay of Adam and AdamW that cannot be is refused with the one that fits, and the true one never is."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from privlab.attacks.solvers import largest_step, least_step
from privlab.base import PrivlabError
from privlab.release import observe_updates
from privlab.release.labels import label_of_update
from privlab.runs.adam_diagnosis import check_adam, looks_like_adam
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
ADAM = Client(optimiser="adam", lr=1e-3, steps=1)
ADAMW = replace(ADAM, optimiser="adamw", weight_decay=0.01)


def sent(model: VictimModel, image: Tensor, client: Client) -> Observation:
    """Return the update of a client with one image of label 3."""
    data = ClientData(image.to(model.mean), torch.tensor([3]), torch.Generator().manual_seed(0))
    return observe_updates(model, client, [data])


def said_of(seen: Observation) -> str:
    """Return why an update is refused; nothing if it is not."""
    try:
        check_adam(seen, label_of_update(seen), "files")
    except PrivlabError as refused:
        return str(refused)
    return ""


def told(seen: Observation, stated: Client) -> str:
    """Return what is said of an update under other settings than its own."""
    said = said_of(replace(seen, client=stated))
    assert said
    return said


@pytest.mark.parametrize("client", [ADAM, ADAMW, replace(ADAM, steps=5), replace(ADAMW, steps=5, schedule="cosine")])
@pytest.mark.parametrize("factor", [10, 0.1])
def test_a_rate_that_is_ten_times_too_high_or_too_low_is_told(
    tiny_model: Model, crops: Tensor, client: Client, factor: float
) -> None:
    """The bounds hold the true rate between them, within a factor of 2."""
    seen = sent(tiny_model().float(), crops[:1], client)
    said = told(seen, replace(client, lr=client.lr * factor))
    assert said.startswith(f"files does not match client.lr={client.lr * factor:g}: ")
    found = re.search(r"client\.lr from (\S+) to (\S+) fits, or the state was carried", said)
    assert found is not None
    low, high = float(found[1]), float(found[2])
    assert low * 0.995 <= client.lr <= high < 2 * low  # three digits are printed


@pytest.mark.parametrize(
    "client",
    [
        *(ADAM, ADAMW, replace(ADAM, weight_decay=0.05, steps=3), replace(ADAMW, steps=4, weight_decay=0.3)),
        replace(ADAM, eps=1e-2),
        replace(ADAMW, lr=1e-6, steps=5),
        replace(ADAM, beta1=0.5, beta2=0.6, steps=4, schedule="step", lr_every=2),
        replace(ADAM, beta1=0.0, beta2=0.0, steps=3),
        replace(ADAM, clip=0.1, label_smoothing=0.1, steps=3),
        replace(ADAM, steps=3, sent_as="bf16"),
        replace(ADAM, steps=12, lr=1e-2),
    ],
)
def test_the_true_settings_are_never_refused(tiny_model: Model, crops: Tensor, client: Client) -> None:
    assert said_of(sent(tiny_model().float(), crops[:1], client)) == ""


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_gradients_of_one_sign_move_a_weight_no_less(steps: int) -> None:
    """Those of one step alone come down to the bound of the last step."""
    client = replace(ADAM, lr=0.1, steps=steps, beta1=0.8, beta2=0.9, eps=1e-30)
    g = torch.rand(steps, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 8 + 1e-9
    g[:, :steps] = torch.eye(steps, dtype=torch.float64)
    weights = torch.zeros(1000, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weights], lr=0.1, betas=(0.8, 0.9), eps=1e-30)
    before = weights.detach().clone()
    for each in g:
        before = weights.detach().clone()
        weights.grad = each.clone()
        adam.step()
    last = least_step(client) - (least_step(replace(client, steps=steps - 1)) if steps > 1 else 0)
    moved = (before - weights.detach())[: 1000 if steps == 1 else steps]
    assert float(moved.min()) == pytest.approx(last, rel=1e-9)
    assert float(-weights.detach()[steps:].max()) >= least_step(client) * (1 - 1e-9)
    assert least_step(client) <= largest_step(client)
    assert least_step(replace(client, optimiser="adamw", weight_decay=0.5)) < least_step(client)


def test_a_decay_that_is_left_out_or_too_large_is_named_with_its_value(tiny_model: Model, crops: Tensor) -> None:
    """Not a carried state: weights moved too far in proportion to their size alone."""
    model = tiny_model().float()
    seen = sent(model, crops[:1], replace(ADAMW, weight_decay=0.3))
    said = told(seen, replace(ADAMW, weight_decay=0.0))
    assert said.startswith("files does not match client.weight_decay=0: weights moved by ")
    assert said.endswith("it is that of client.weight_decay=0.3.")
    assert "it is that of client.weight_decay=0.3." in told(seen, replace(ADAMW, weight_decay=0.9))
    seen = sent(model, crops[:1], replace(ADAMW, weight_decay=0.0))
    said = told(seen, replace(ADAMW, weight_decay=0.3))
    assert float(re.findall(r"client\.weight_decay must be from 0 to (\S+)\.$", said)[0]) < 0.05


def test_a_decay_of_some_parameters_is_named_and_a_carried_state_is_not_called_decay(
    tiny_model: Model, crops: Tensor
) -> None:
    model, client = tiny_model().float(), replace(ADAMW, weight_decay=0.0)
    decayed, plain = (sent(model, crops[:1], replace(ADAMW, weight_decay=λ)) for λ in (0.3, 0.0))
    mixed = {  # weights of 1 that did not decay agree with no λ
        name: plain.gradients[name] if "norm" in name else u for name, u in decayed.gradients.items()
    }
    said = told(replace(decayed, gradients=mixed), client)
    assert said.endswith("client.weight_decay is larger, of some of the parameters.")
    carried = {name: 1.5 * u for name, u in plain.gradients.items()}
    said = told(replace(plain, gradients=carried), client)
    assert "does not match client.lr=0.001" in said
    assert "or the state was carried from other rounds" in said


def test_weights_of_two_models_are_called_that(tiny_model: Model, crops: Tensor) -> None:
    model = tiny_model().float()
    seen = sent(model, crops[:1], ADAM)
    others = {
        name: torch.randn(u.shape, generator=torch.Generator().manual_seed(0)) for name, u in seen.gradients.items()
    }
    assert told(replace(seen, gradients=others), ADAM).startswith("files look like weights of two models, not of one ")


def test_gradients_as_small_as_epsilon_make_no_rate_too_high(tiny_model: Model, crops: Tensor) -> None:
    """With ε as large as gradients are, moves are small at the true rate."""
    for eps in (0.3, 100.0):
        assert said_of(sent(tiny_model().float(), crops[:1], replace(ADAM, eps=eps))) == ""
    seen = sent(tiny_model().float(), crops[:1], replace(ADAM, eps=100.0))
    assert said_of(replace(seen, client=ADAM)) == ""  # the update shows that moves add up as gradients do


def test_sgd_and_several_images_are_left_to_others(tiny_model: Model, crops: Tensor) -> None:
    """Of several images no label is told, and the bound from below says nothing."""
    model = tiny_model().float()
    seen = sent(model, crops[:1], ADAM)
    check_adam(replace(seen, client=Client()), 3, "files")
    check_adam(replace(seen, client=replace(ADAM, lr=0.1, images=2, batch_size=2)), None, "files")


@pytest.mark.parametrize(
    "client", [ADAM, ADAMW, replace(ADAM, steps=5), replace(ADAMW, steps=5), replace(ADAM, lr=1e-5)]
)
def test_an_update_of_adam_is_recognised_where_sgd_is_stated(tiny_model: Model, crops: Tensor, client: Client) -> None:
    seen = sent(tiny_model().float(), crops[:1], client)
    rate = looks_like_adam(replace(seen, client=Client(lr=0.01, steps=client.steps)))
    assert rate == pytest.approx(client.lr, rel=0.15)


@pytest.mark.parametrize("client", [Client(lr=0.01), Client(lr=0.01, momentum=0.9, steps=5), Client(clip=0.1, steps=2)])
def test_neither_sgd_nor_noise_looks_like_adam(tiny_model: Model, crops: Tensor, client: Client) -> None:
    seen = sent(tiny_model().float(), crops[:1], client)
    draw = torch.Generator().manual_seed(0)
    noise = {name: 1e-3 * torch.randn(u.shape, generator=draw) for name, u in seen.gradients.items()}
    noisy = {name: u + noise[name].to(u) for name, u in seen.gradients.items()}
    still = {name: 0 * u for name, u in seen.gradients.items()}
    assert [looks_like_adam(replace(seen, gradients=of)) for of in (seen.gradients, noise, noisy, still)] == [None] * 4

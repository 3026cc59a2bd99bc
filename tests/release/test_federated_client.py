"""A client's settings as data: their ranges, their rates, and the share of the weights that decay keeps."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from privlab.base import PrivlabError, configure, read_options
from privlab.threat import CLIENT_PRESETS, Client

BAD: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, r"client.steps must be at least 1. Found 0."),
    ({"epochs": 0}, r"client.epochs must be at least 1. Found 0."),
    ({"steps": 2, "epochs": 3}, r"Found 2 and 3: give one of them."),
    ({"lr": -0.1}, r"client.lr must be a finite number > 0. Found -0.1."),
    ({"lr": 0.0}, r"client.lr must be a finite number > 0. Found 0."),
    ({"lr": math.nan}, r"client.lr must be a finite number > 0. Found nan."),
    ({"optimiser": "adamv"}, r"Unknown optimiser 'adamv'. Did you mean .*adamw"),
    ({"schedule": "cosin"}, r"Unknown schedule 'cosin'. Did you mean cosine or"),
    ({"trains": "heads"}, r"Unknown set of trained parameters 'heads'. Did you mean head or adapters\?"),
    ({"sends": "gradient"}, r"Unknown kind of update 'gradient'."),
    ({"sent_as": "int4"}, r"Unknown number format of what is sent 'int4'. Did you mean int8"),
    ({"autocast": "int8"}, r"Unknown number format of autocast 'int8'."),
    ({"autocast": "tf32"}, r"Unknown number format of autocast 'tf32'."),
    ({"momentum": 1.0}, r"client.momentum must be in \[0, 1\). Found 1."),
    ({"momentum": 0.9, "dampening": 1.5}, r"client.dampening must be in \[0, 1\]. Found 1.5."),
    ({"nesterov": True}, r"client.nesterov needs client.momentum > 0 and client.dampening = 0. Found 0 and 0."),
    ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, r"Found 0.9 and 0.1."),
    ({"optimiser": "adamw", "momentum": 0.9}, r"client.momentum=0.9 needs sgd. Found client.optimiser=adamw."),
    ({"optimiser": "adam", "beta1": 1.0}, r"client.beta1 must be in \[0, 1\). Found 1."),
    ({"optimiser": "adam", "beta2": -0.1}, r"client.beta2 must be in \[0, 1\). Found -0.1."),
    ({"optimiser": "adam", "eps": 0.0}, r"client.eps must be a finite number > 0. Found 0."),
    ({"weight_decay": -1e-4}, r"client.weight_decay must be ≥ 0. Found -0.0001."),
    ({"schedule": "cosine", "lr_min": 0.1}, r"client.lr_min must be in \[0, lr = 0.01\]. Found 0.1."),
    ({"schedule": "step", "lr_every": 0}, r"client.lr_every must be at least 1. Found 0."),
    ({"schedule": "step", "lr_factor": 0.0}, r"client.lr_factor must be in \(0, 1\]. Found 0."),
    ({"images": 0}, r"client.images must be at least 1. Found 0."),
    ({"clients": 0}, r"client.clients must be at least 1. Found 0."),
    ({"batch_size": 0}, r"client.batch_size must be at least 1. Found 0."),
    ({"accumulation": 0}, r"client.accumulation must be at least 1. Found 0."),
    ({"clip": 0.0}, r"client.clip must be a finite number > 0. Found 0.0."),
    ({"label_smoothing": 1.0}, r"client.label_smoothing must be in \[0, 1\). Found 1."),
    ({"dropout": 1.0}, r"client.dropout must be in \[0, 1\). Found 1."),
    ({"drop_path": -0.1}, r"client.drop_path must be in \[0, 1\). Found -0.1."),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[" ".join(f"{k}={v}" for k, v in g.items()) for g, _ in BAD])
def test_a_bad_setting_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivlabError, match=message) as found:
        Client(**given)
    assert "\n" not in str(found.value)


def test_steps_are_counted() -> None:
    """ceil(ceil(images / batch) / accumulation) steps in a pass; one pass where nothing else is said."""
    assert Client().total_steps == 1
    ten = Client(images=10, batch_size=4)  # batches of 4, 4 and 2
    assert (ten.steps_per_epoch, ten.total_steps) == (3, 3)
    assert replace(ten, accumulation=2, epochs=5).total_steps == 10
    assert replace(ten, accumulation=2, steps=5).total_steps == 5


def test_rates_are_those_of_torchs_schedulers() -> None:
    for client, make in (
        (Client(lr=0.3), lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=1)),
        (
            Client(lr=0.3, schedule="cosine", lr_min=0.02),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 7, 0.02),
        ),
        (
            Client(lr=0.3, schedule="step", lr_every=3, lr_factor=0.5),
            lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        ),
    ):
        optimiser = torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=0.3)
        scheduler, rates = make(optimiser), []
        for _ in range(7):
            rates.append(optimiser.param_groups[0]["lr"])
            optimiser.step()
            scheduler.step()
        assert replace(client, steps=7).rates == pytest.approx(rates, rel=1e-12)


def simulated(client: Client) -> float:
    """Return what torch's own optimiser leaves of a scalar 1 without any gradient: the naive twin of `kept_share`."""
    theta = nn.Parameter(torch.ones((), dtype=torch.float64))
    if client.optimiser == "sgd":
        optimiser: torch.optim.Optimizer = torch.optim.SGD(
            [theta],
            lr=client.lr,
            momentum=client.momentum,
            dampening=client.dampening,
            nesterov=client.nesterov,
            weight_decay=client.weight_decay,
        )
    else:
        kind = torch.optim.AdamW if client.optimiser == "adamw" else torch.optim.Adam
        optimiser = kind([theta], lr=client.lr, weight_decay=client.weight_decay)
    for rate in client.rates:
        optimiser.param_groups[0]["lr"] = rate
        theta.grad = torch.zeros_like(theta)
        optimiser.step()
    return theta.item()


@given(
    optimiser=st.sampled_from(["sgd", "adamw"]),
    lr=st.floats(1e-4, 1.0),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.05, 0.5]),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    dampening=st.sampled_from([0.0, 0.3, 1.0]),
    nesterov=st.booleans(),
    schedule=st.sampled_from(["constant", "cosine", "step"]),
    steps=st.integers(1, 25),
)
def test_what_decay_keeps_is_what_torch_keeps(optimiser: str, nesterov: bool, **settings: Any) -> None:
    if optimiser == "adamw":
        settings |= {"momentum": 0.0, "dampening": 0.0}
    elif nesterov and settings["momentum"]:
        settings |= {"nesterov": True, "dampening": 0.0}
    client = Client(optimiser=optimiser, lr_factor=0.7, lr_every=2, lr_min=1e-5, **settings)
    assert client.kept_share == pytest.approx(simulated(client), rel=1e-12, abs=1e-14)


def test_adam_couples_its_decay_and_keeps_no_share() -> None:
    assert Client(optimiser="adam", steps=3).kept_share == 1 == simulated(Client(optimiser="adam", steps=3))
    with pytest.raises(PrivlabError, match=r"client.weight_decay=0.1"):
        _ = Client(optimiser="adam", weight_decay=0.1).kept_share


def test_options_of_the_command_line_make_a_client() -> None:
    options = ["client.lr=0.5", "client.steps=5", "client.nesterov=true", "client.momentum=0.9", "client.clip=none"]
    read_options(options, [Client])
    assert configure(Client, options) == Client(lr=0.5, steps=5, nesterov=True, momentum=0.9)
    with pytest.raises(PrivlabError, match=r"'mometum'.*prompts\?"):
        read_options(["client.mometum=1"], [Client])


def test_presets_are_what_their_sources_say() -> None:
    found = {name: (c.optimiser, c.lr, c.momentum, c.weight_decay) for name, c in CLIENT_PRESETS.items()}
    assert found == {
        "flower-default": ("sgd", 0.1, 0.9, 0),
        "nvflare-default": ("sgd", 0.01, 0.9, 0),
        "flowertune-vit": ("adam", 0.01, 0, 0),
        "mediswarm": ("adamw", 1e-6, 0, 0.01),
    }
    assert {name: (c.trains, c.batch_size, c.total_steps, c.sends) for name, c in CLIENT_PRESETS.items()} == {
        "flower-default": ("all", 32, 1, "weights"),
        "nvflare-default": ("all", 32, 1, "weights"),
        "flowertune-vit": ("head", 32, 1, "weights"),
        "mediswarm": ("all", 32, 5, "difference"),
    }

"""`client-unrolling` against means of clients whose images are known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from privlab.attacks.updates.client_unrolling import ClientUnrolling
from privlab.base import PrivlabError, PrivlabWarning
from privlab.evaluation import unread
from privlab.metrics import psnr
from privlab.release import observe_updates
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
QUICK: dict[str, int] = {"starts": 24, "rounds": 12, "passes": 1}


def seen_of(model: VictimModel, images: Tensor, **settings: Any) -> Observation:
    """Return the mean of clients that train on one of these images each."""
    given: dict[str, Any] = {"clients": len(images)} | settings
    client = Client(**given)
    clients = [ClientData(x[None], torch.tensor([2 * k % 7]), Generator()) for k, x in enumerate(images)]
    return observe_updates(
        model, client, clients, {*ClientUnrolling.parameters, *ClientUnrolling.if_released, "head.bias"}
    )


def stored(crops: Tensor, count: int, side: int) -> Tensor:
    """Return images of 256 grey levels, of the most contrast: patches that are alike have one token."""
    cut = crops[..., :side, :side]
    return cut[cut.std((1, 2, 3)).argsort(descending=True)[: 9 * count : 9]].double()


def nearest(found: Tensor, images: Tensor) -> Tensor:
    """Return the PSNR of each image with the reconstruction that is nearest to it: clients have no order."""
    return torch.stack([psnr(found, image.expand_as(found)).amax() for image in images])


SETTINGS = {
    "one step": {"lr": 0.1},
    "two steps": {"lr": 0.1, "steps": 2},
    "momentum and decay": {"lr": 0.01, "steps": 2, "momentum": 0.9, "weight_decay": 0.05},
    "all else": {"lr": 0.1, "steps": 2, "schedule": "cosine", "clip": 0.5, "label_smoothing": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_images_of_all_clients_are_exact(tiny_model: Model, crops: Tensor, name: str) -> None:
    images = stored(crops, 2, 8)
    seen = seen_of(tiny_model(img_size=8), images, **SETTINGS[name])
    found = ClientUnrolling(**QUICK)(seen)
    assert found.tokens is not None
    assert found.tokens.max() == 5
    assert (nearest(found.images, images) > 150).all()


@pytest.mark.slow
def test_images_without_grey_levels(tiny_model: Model, crops: Tensor) -> None:
    images = stored(crops, 2, 8)
    images = images + 0.002 * torch.rand(images.shape, generator=Generator().manual_seed(0), dtype=images.dtype)
    seen = seen_of(tiny_model(img_size=8), images, lr=0.1, steps=2)
    for levels in (0, 255):  # the levels are tried, and leave more of the update
        assert (nearest(ClientUnrolling(**QUICK, levels=levels)(seen).images, images) > 70).all()


@pytest.mark.slow
def test_each_mean_is_read_by_itself(tiny_model: Model, crops: Tensor) -> None:
    images = stored(crops, 4, 8)
    seen = seen_of(tiny_model(img_size=8), images, lr=0.1, steps=2, clients=2)
    assert len(seen.gradients["pos_embed"]) == 2
    found = ClientUnrolling(**QUICK)(seen).images
    assert (nearest(found[:2], images[:2]) > 150).all()
    assert (nearest(found[2:], images[2:]) > 150).all()


def test_more_tokens_than_the_width_are_grey_and_are_reported(tiny_model: Model, crops: Tensor) -> None:
    images = stored(crops, 4, 16)
    seen = seen_of(tiny_model(), images, steps=2)
    assert ClientUnrolling().beyond(seen) == "K·(N + 1) = 68 ≥ D = 64"
    assert ClientUnrolling().beyond(seen_of(tiny_model(), images[:3])) is None
    with pytest.warns(PrivlabWarning, match="68 tokens"):
        found = ClientUnrolling()(seen)
    assert (found.images == 0.5).all()
    assert len(found.images) == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clients": 1}, "reads the mean of several clients, and here the update of one is released"),
        ({"images": 2}, "reads clients of one image each, and here each has client.images=2"),
        ({"dropout": 0.1}, "dropout is private"),
        ({"autocast": "bf16"}, "here they are in bf16"),
        (
            {"optimiser": "adam"},
            "reads updates of sgd, and this run releases the update of a client that trains by adam",
        ),
    ],
)
def test_other_means_are_refused_with_the_reason(settings: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"clients": 2, "steps": 2} | settings
    refusal = unread(ClientUnrolling, Client(**given))
    assert refusal is not None
    assert said in refusal
    assert refusal.endswith("no evidence of privacy.")


def test_means_of_several_steps_are_read(tiny_model: Model, crops: Tensor) -> None:
    assert unread(ClientUnrolling, Client(clients=4, steps=5)) is None
    with pytest.raises(PrivlabError, match="several"):
        ClientUnrolling()(seen_of(tiny_model(img_size=8), stored(crops, 1, 8)))


@pytest.mark.slow
def test_one_client_with_frozen_position_embeddings_is_exact_after_several_steps(
    tiny_model: Model, crops: Tensor
) -> None:
    images = stored(crops, 1, 8)
    seen = seen_of(tiny_model(img_size=8), images, lr=0.1, steps=2, trains="blocks.*,head.*,norm.*,patch_embed.*")
    assert "pos_embed" not in seen.gradients
    assert unread(ClientUnrolling(**QUICK), seen.client) is None
    assert (nearest(ClientUnrolling(**QUICK)(seen).images, images) > 150).all()


def test_one_client_is_left_to_the_closed_form_and_to_token_separation() -> None:
    assert ClientUnrolling.refuses(Client(steps=2)) is not None
    assert ClientUnrolling.refuses(Client(trains="blocks.*,patch_embed.*")) is not None

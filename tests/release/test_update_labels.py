"""Labels that an update tells: all that are beyond chance, and none from noise."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from privlab.release import observe_updates
from privlab.release.labels import Told, labels_of_update
from privlab.release.noise_estimate import noise_of_head, noise_of_update
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]


@pytest.fixture(scope="module")
def model(tiny_model: Model) -> VictimModel:
    """Return a small model of 16 patches and 11 classes with weights of float32."""
    return tiny_model(unknown=False, num_classes=11).float()


def seen_of(model: VictimModel, images: Tensor, labels: list[int], **settings: Any) -> Observation:
    given: dict[str, Any] = {"lr": 0.01, "images": len(labels), "batch_size": len(labels)} | settings
    data = ClientData(images[: len(labels)].to(model.mean), torch.tensor(labels), Generator().manual_seed(0))
    return observe_updates(model, Client(**given), [data])


def noisy(seen: Observation, deviation: float, seed: int = 0, names: tuple[str, ...] = ()) -> Observation:
    draw = Generator().manual_seed(seed)
    noise = {name: deviation * torch.randn(u.shape, generator=draw).to(u) for name, u in seen.gradients.items()}
    return replace(seen, gradients={n: u + noise[n] * (n in (names or noise)) for n, u in seen.gradients.items()})


def signs_alone(seen: Observation, seed: int) -> Observation:
    """Return the update of Adam's first step on noise: signs by chance."""
    draw = Generator().manual_seed(seed)
    of = {n: (torch.randint(2, u.shape, generator=draw) * 2 - 1).to(u) * 1e-3 for n, u in seen.gradients.items()}
    return replace(seen, gradients=of)


ONE: dict[str, dict[str, Any]] = {
    "one step": {},
    "many steps": {"steps": 5, "momentum": 0.9},
    "decay": {"steps": 3, "weight_decay": 0.05},
    "smoothing": {"label_smoothing": 0.1},
    "adam": {"optimiser": "adam", "lr": 1e-3},
    "adamw": {"optimiser": "adamw", "lr": 1e-3, "steps": 3, "weight_decay": 0.01},
    "binary": {"loss": "binary"},
    "head": {"trains": "head"},
    "adam, head": {"trains": "head", "optimiser": "adam", "lr": 1e-3},
    "binary, head": {"trains": "head", "loss": "binary"},
    "biases": {"trains": "*.bias"},
}


@pytest.mark.parametrize("name", ONE)
def test_the_label_of_one_image_is_told(model: VictimModel, crops: Tensor, name: str) -> None:
    assert labels_of_update(seen_of(model, crops, [7], **ONE[name])) == Told((7,), (7,))


@pytest.mark.parametrize("settings", [{}, {"steps": 3}, {"optimiser": "adam"}, {"label_smoothing": 0.1}, {"steps": 2}])
def test_the_labels_of_several_images_are_told(model: VictimModel, crops: Tensor, settings: dict[str, Any]) -> None:
    assert labels_of_update(seen_of(model, crops[::90], [7, 2], **settings)) == Told((2, 7), (2, 7))


@pytest.mark.parametrize("settings", [{}, {"optimiser": "adamw", "lr": 1e-3, "weight_decay": 0.01}])
def test_more_images_than_stated_are_said(model: VictimModel, crops: Tensor, settings: dict[str, Any]) -> None:
    seen = seen_of(model, crops[::90], [7, 2], **settings)
    assert seen.client is not None
    as_one = replace(seen, client=replace(seen.client, images=1, batch_size=1), images_per_release=1)
    found = labels_of_update(as_one)
    assert found.labels == (2, 7)
    assert found.remark is not None
    assert "more images" in found.remark
    assert "--set client.loss=binary" in found.remark


def test_a_loss_for_each_class_is_named_where_no_bias_rises(model: VictimModel, crops: Tensor) -> None:
    """Under cross-entropy that of a label does; where the loss is stated so, nothing is named."""
    seen = seen_of(model, crops, [7])
    falling = replace(seen, gradients={n: u.abs() if n == "head.bias" else u for n, u in seen.gradients.items()})
    binary = replace(falling, client=Client(lr=0.01, loss="binary"))
    of_softmax, of_binary = labels_of_update(falling), labels_of_update(binary)
    assert of_softmax.labels == of_binary.labels == ()
    assert of_softmax.remark is not None
    assert of_binary.remark is not None
    assert "--set client.loss=binary" in of_softmax.remark
    assert of_softmax.remark.startswith(of_binary.remark)
    assert "binary" not in of_binary.remark


def test_every_bias_that_rises_under_a_sigmoid_is_a_label(model: VictimModel, crops: Tensor) -> None:
    """Several labels of one image, by hand: ∂ℓ/∂b is σ(z) − y over the classes."""
    seen = seen_of(model, crops, [7], loss="binary", steps=1)
    with torch.no_grad():
        z = model(crops[:1].to(model.mean))[0]
    y = torch.zeros(11).index_fill(0, torch.tensor([2, 5, 9]), 1.0)
    gradient = (z.sigmoid() - y) / 11 * 0.01
    own = replace(seen, gradients={**seen.gradients, "head.bias": gradient[None]})
    assert labels_of_update(own) == Told((2, 5, 9), (2, 5, 9))


@pytest.mark.slow
def test_noise_tells_no_label(model: VictimModel, crops: Tensor) -> None:
    """On noise alone 1 of 1,000 updates may name one; of 200 none does, and of the signs of Adam's none."""
    clean = seen_of(model, crops, [0])
    for seed in range(200):
        seen = noisy(clean, 0.5, seed, ("head.weight", "head.bias", "cls_token", "pos_embed"))
        assert labels_of_update(seen).labels == ()
    adam = seen_of(model, crops, [0], optimiser="adam")
    assert sum(bool(labels_of_update(signs_alone(adam, seed)).labels) for seed in range(200)) == 0
    head = seen_of(model, crops, [0], optimiser="adam", trains="head")
    assert sum(bool(labels_of_update(signs_alone(head, seed)).labels) for seed in range(200)) <= 2


def test_a_label_beyond_the_noise_is_told(model: VictimModel, crops: Tensor) -> None:
    clean = seen_of(model, crops, [7])
    rise = -float(clean.gradients["head.bias"].min())
    assert labels_of_update(noisy(clean, rise / 8)).labels == (7,)
    assert labels_of_update(noisy(clean, rise / 2)).labels == ()


@pytest.mark.parametrize("settings", [{}, {"steps": 3, "weight_decay": 0.1}, {"optimiser": "adam", "lr": 1e-3}])
@pytest.mark.parametrize("trains", ["all", "*.bias", "blocks.*", "pos_embed,cls_token"])
def test_the_size_of_noise_is_found(model: VictimModel, crops: Tensor, settings: dict[str, Any], trains: str) -> None:
    """However much there is, and also where decay is not known; Adam shows it in the class token alone."""
    if "optimiser" in settings and trains in ("*.bias", "blocks.*"):
        return
    clean = seen_of(model, crops, [7], trains=trains, **settings)
    assert clean.client is not None
    clean = replace(clean, client=replace(clean.client, weight_decay=0.0))
    found = noise_of_update(clean)
    assert found is not None
    assert not found.is_large
    for deviation in (0.01, 1.0):
        found = noise_of_update(noisy(clean, deviation))
        assert found is not None
        assert found.is_large
        assert found.deviation == pytest.approx(deviation, rel=0.25)


def test_other_differences_are_not_called_noise(model: VictimModel, crops: Tensor) -> None:
    """Entries whose size differs from layer to layer, as of two models, another loss, several images, a head alone."""
    clean = seen_of(model, crops, [7])
    draw = Generator().manual_seed(0)
    by_layer = {
        name: 10 ** -float(2 * torch.rand((), generator=draw)) * torch.randn(u.shape, generator=draw)
        for name, u in clean.gradients.items()
    }
    assert noise_of_update(replace(clean, gradients=by_layer)) is None
    assert labels_of_update(replace(clean, gradients=by_layer)).labels == ()
    binary = seen_of(model, crops, [7], loss="binary")
    as_softmax = replace(binary, client=clean.client)
    assert (found := noise_of_update(as_softmax)) is None or not found.is_large
    head = seen_of(model, crops, [7], loss="binary", trains="head")
    assert clean.client is not None
    assert noise_of_update(replace(head, client=replace(clean.client, trains="head"))) is None
    assert noise_of_head(head) is None
    several = seen_of(model, crops[::90], [7, 2, 7])
    assert (found := noise_of_update(several)) is not None
    assert not found.is_large

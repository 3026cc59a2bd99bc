"""What a client's settings leave open is fitted to its update, and weights of two models are called that."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from privlab.base import PrivlabWarning, collect_warnings
from privlab.release import is_explained, observe_updates
from privlab.release.labels import label_of_update
from privlab.runs.update_diagnosis import UpdateDiagnosis
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
SGD = Client(lr=0.04)
THREE = replace(SGD, steps=3)
CLASSES = 6


def update_of(model: VictimModel, client: Client, image: Tensor, target: int | Tensor = 3) -> Observation:
    """Return the update of a client with one image, of label 3 if no target is given."""
    labels = target[None] if isinstance(target, Tensor) else torch.tensor([target])
    return observe_updates(model, client, [ClientData(image.to(model.mean), labels, torch.Generator().manual_seed(0))])


def of(**shares: float) -> Tensor:
    """Return a target with these shares of the classes c0, c1 and so on."""
    return torch.tensor([shares.get(f"c{c}", 0.0) for c in range(CLASSES)])


MOMENTUM = {"momentum": 0.9}
NESTEROV = {"momentum": 0.9, "nesterov": True}
FITTED: dict[str, tuple[Client, Client, int | Tensor, dict[str, Any]]] = {
    "nothing": (THREE, THREE, 3, {}),
    "mixup": (SGD, SGD, of(c3=0.7, c5=0.3), {"label": {3: 0.7, 5: 0.3}}),
    "mixup of three steps": (THREE, THREE, of(c3=0.6, c1=0.4), {"label": {3: 0.6, 1: 0.4}}),
    "smoothing": (SGD, replace(SGD, label_smoothing=0.2), 3, {"label_smoothing": 0.2}),
    "smoothing of three steps": (THREE, replace(THREE, label_smoothing=0.1), 3, {"label_smoothing": 0.1}),
    "rate": (replace(THREE, lr=0.1), THREE, 3, {"lr": 0.04}),
    "decay": (THREE, replace(THREE, weight_decay=1e-3), 3, {"weight_decay": 0.001}),
    "rate and decay": (
        replace(SGD, lr=0.01, weight_decay=0.3),
        replace(SGD, weight_decay=0.05),
        3,
        {"lr": 0.04, "weight_decay": 0.05},
    ),
    "no momentum": (replace(THREE, **MOMENTUM), THREE, 3, {"momentum": 0.0}),
    "momentum": (THREE, replace(THREE, momentum=0.8), 3, {"momentum": 0.8}),
    "momentum and smoothing": (
        THREE,
        replace(THREE, label_smoothing=0.1, **MOMENTUM),
        3,
        {"momentum": 0.9, "label_smoothing": 0.1},
    ),
    "nesterov": (
        THREE,
        replace(THREE, weight_decay=1e-3, **NESTEROV),
        3,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.001},
    ),
    "steps": (SGD, replace(SGD, steps=5), 3, {"steps": 5}),
    "epochs": (replace(SGD, epochs=7), THREE, 3, {"steps": 3}),
    "cosine": (replace(SGD, steps=5), replace(SGD, steps=5, schedule="cosine"), 3, {"schedule": "cosine"}),
    "clip": (SGD, replace(THREE, clip=0.5), 3, {"steps": 3, "clip": 0.5}),
    "adam": (Client(optimiser="adam", lr=0.04, steps=3), THREE, 3, {"optimiser": "sgd"}),
    "several labels": (
        replace(SGD, loss="binary"),
        replace(SGD, loss="binary"),
        of(c1=1, c2=1, c4=1),
        {"label": {1: 1.0, 2: 1.0, 4: 1.0}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTED)
def test_what_is_not_stated_is_fitted_and_said(tiny_model: Model, crops: Tensor, name: str) -> None:
    """Later steps are no multiple of the first one, so that no other rate explains them."""
    stated, true, target, expected = FITTED[name]
    seen = replace(update_of(tiny_model(num_classes=CLASSES).float(), true, crops[:1], target), client=stated)
    found = None
    with collect_warnings(said := []):
        found = UpdateDiagnosis(seen, 3, "files").fitted()
    assert found is not None
    assert found.residual < 1e-3
    settings = found.settings(stated)
    label, of_label = settings.pop("label", {}), expected.get("label", {})
    assert {c: round(share, 2) for c, share in label.items()} == pytest.approx(of_label, abs=0.01)
    assert settings == pytest.approx({k: v for k, v in expected.items() if k != "label"})
    assert ["fitted to the update" in line for line in said] == [True] * bool(expected)


SEVERAL = of(c1=1, c4=1)
WEIGHTS = (1.0, 9.0, 1.0, 1.0, 0.25, 1.0)
LOSSES: dict[str, tuple[Client, Client, int | Tensor, dict[str, Any] | None]] = {
    "several labels": (SGD, replace(SGD, loss="binary"), SEVERAL, {"loss": "binary", "label": {1: 1.0, 4: 1.0}}),
    "positive weights": (
        replace(SGD, loss="binary"),
        replace(SGD, loss="binary", pos_weight=WEIGHTS),
        SEVERAL,
        {"pos_weight": WEIGHTS, "label": {1: 1.0, 4: 1.0}},
    ),
    "one label": (replace(SGD, loss="binary"), SGD, 3, {"loss": "cross-entropy"}),
    "class weights": (SGD, replace(SGD, class_weights=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)), 3, {}),
    "binary focal": (SGD, replace(SGD, loss="binary-focal"), SEVERAL, None),
    "numbers": (SGD, replace(SGD, loss="regression"), torch.tensor([0.5, -3.0, 2.0, 8.0, 1.0, 0.0]), None),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_stated_is_fitted_or_left_open(tiny_model: Model, crops: Tensor, name: str) -> None:
    """Where no target of a loss that is tried fits, the image explains the update all the same."""
    stated, true, target, expected = LOSSES[name]
    seen = replace(update_of(tiny_model(num_classes=CLASSES).float(), true, crops[:1], target), client=stated)
    label = label_of_update(seen)
    assert label is not None
    diagnosis = UpdateDiagnosis(seen, label, "files")
    with collect_warnings([]):
        found = diagnosis.fitted()
    assert diagnosis.of_any_loss
    if expected is None:
        assert found is None
        assert diagnosis.why_unexplained() is None
    else:
        assert found is not None
        assert found.settings(stated) == expected


def test_an_image_that_explains_nothing_is_of_no_loss(tiny_model: Model, crops: Tensor) -> None:
    seen = update_of(tiny_model(num_classes=CLASSES).float(), SGD, crops[:1])
    draw = torch.Generator().manual_seed(0)
    noisy = {name: u + u.std() * torch.randn(u.shape, generator=draw) for name, u in seen.gradients.items()}
    assert not UpdateDiagnosis(replace(seen, gradients=noisy), 3, "files").of_any_loss


@pytest.mark.parametrize("times", [0.1, 10])
def test_a_rate_of_the_head_alone_is_said_and_is_no_matter_of_the_normalisation(
    tiny_model: Model, crops: Tensor, times: float
) -> None:
    seen = update_of(tiny_model().float(), SGD, crops[:1])
    own = {name: times * u if name.startswith("head") else u for name, u in seen.gradients.items()}
    seen = replace(seen, gradients=own)
    with collect_warnings(said := []):
        found = UpdateDiagnosis(seen, 3, "files").fitted()
        assert UpdateDiagnosis(seen, 3, "files").normalisation() is None  # the pixels are those of an image as it is
    assert found is not None
    assert found.residual < 1e-3
    assert found.of_head == pytest.approx(times, rel=0.01)
    assert ["of its own" in line for line in said] == [True]


def test_only_under_autocast_a_residual_of_rounding_explains() -> None:
    bf16 = replace(SGD, autocast="bf16")
    expected = {0.049: (True, True), 0.06: (False, True), 0.1: (False, False)}
    assert {left: (is_explained(left, SGD), is_explained(left, bf16)) for left in expected} == expected
    assert not is_explained(0.06)


@pytest.mark.slow
def test_bf16_is_fitted_or_explained_without(tiny_model: Model, crops: Tensor) -> None:
    true = replace(THREE, autocast="bf16")
    found = UpdateDiagnosis(
        replace(update_of(tiny_model().float(), true, crops[:1]), client=THREE), 3, "files"
    ).fitted()
    assert found is not None
    assert found.residual < 0.05


def test_of_an_update_of_adam_nothing_is_fitted(tiny_model: Model, crops: Tensor) -> None:
    true = Client(optimiser="adamw", lr=1e-3, steps=2)
    assert UpdateDiagnosis(update_of(tiny_model().float(), true, crops[:1]), 3, "files").fitted() is None


@pytest.mark.slow
def test_what_is_as_large_as_the_weights_is_of_two_models_and_what_is_not_may_be(
    tiny_model: Model, crops: Tensor
) -> None:
    """Both are noise, which no image explains."""
    seen = update_of(tiny_model().float(), THREE, crops[:1])
    for size, said in ((1.0, r"^files look like weights of two models"), (0.01, r"^files: no image explains it")):
        noise = {
            name: size
            * torch.randn(u.shape, generator=torch.Generator().manual_seed(0))
            * (seen.model.vit.get_parameter(name).detach().square().mean().sqrt() + 1e-3)
            for name, u in seen.gradients.items()
        }
        noisy = replace(seen, gradients=noise)
        assert UpdateDiagnosis(noisy, 3, "files").fitted() is None
        assert re.search(said, str(UpdateDiagnosis(noisy, 3, "files").why_unexplained()))


@pytest.mark.parametrize(
    ("normalisation", "name", "said"),
    [
        ("0.485,0.456,0.406/0.229,0.224,0.225", "imagenet", r"fed pixels from -2.* --normalisation imagenet is taken"),
        ("0.5/0.05", None, r"fed pixels from -.*Give the client's by --normalisation MEAN/STD\.$"),
    ],
)
def test_another_normalisation_is_found(
    tiny_model: Model, crops: Tensor, normalisation: str, name: str | None, said: str
) -> None:
    half = torch.full((3, 1, 1), 0.5)
    stated, image = tiny_model().float().normalised_by(half, half), crops[:1]
    image = (image > image.mean()).to(image)  # of black and white, which the stated mean and deviation cut
    true = (torch.tensor([float(value) for value in part.split(",")]) for part in normalisation.split("/"))
    mean, std = (values.view(-1, 1, 1).expand_as(half) for values in true)
    seen = update_of(stated.normalised_by(mean, std), Client(lr=0.1), image)
    with pytest.warns(PrivlabWarning, match=said):
        assert UpdateDiagnosis(replace(seen, model=stated), 3, "files").normalisation() == name

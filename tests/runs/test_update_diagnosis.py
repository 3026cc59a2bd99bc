"""A decay that is not known is the one that the update shows, and weights of two models are called that."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from privlab.base import PrivlabError, PrivlabWarning
from privlab.release import observe_updates
from privlab.runs.update_diagnosis import check_settings
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
TRUE = Client(lr=0.01, momentum=0.9, weight_decay=0.05, steps=3)
STATED = replace(TRUE, weight_decay=0.0)


@pytest.fixture
def seen(tiny_model: Model, crops: Tensor) -> Observation:
    """Return the update of a client with one image of label 3, under settings without its decay."""
    model = tiny_model().float()
    data = ClientData(crops[:1].to(model.mean), torch.tensor([3]), torch.Generator().manual_seed(0))
    return replace(observe_updates(model, TRUE, [data]), client=STATED)


def test_a_decay_that_is_fitted_is_taken_and_one_that_is_stated_is_refused(seen: Observation) -> None:
    with pytest.raises(
        PrivlabError, match=r"not match client\.weight_decay=0: .* that of client\.weight_decay=0\.05\.$"
    ):
        check_settings(seen, 3, "files")
    with pytest.warns(
        PrivlabWarning, match=r"client\.weight_decay=0\.05 is fitted to the update, and taken in place of"
    ):
        found = check_settings(seen, 3, "files", fitted=True)
    assert found is not None
    assert found.weight_decay == pytest.approx(0.05, rel=1e-3)
    assert replace(found, weight_decay=0.0) == STATED
    assert check_settings(replace(seen, client=TRUE), 3, "files", fitted=True) == TRUE


def test_a_rate_is_refused_although_the_decay_is_fitted(seen: Observation) -> None:
    with pytest.raises(
        PrivlabError, match=r"does not match client\.lr=0\.1, .*client\.lr=0\.01 and client\.weight_decay=0\.05"
    ):
        check_settings(replace(seen, client=replace(STATED, lr=0.1)), 3, "files", fitted=True)


def test_what_is_as_large_as_the_weights_is_of_two_models_and_what_is_not_may_be(seen: Observation) -> None:
    """Both are noise, which no image explains."""
    for size, said in (
        (
            1.0,
            r"^files look like weights of two models.*1\d\d% of the weights, where a round .* 0\.\d%",
        ),
        (
            0.01,
            r"^files: no image explains it with these settings.*normalisation or loss than stated, weights of two",
        ),
    ):
        noise = {
            name: size
            * torch.randn(u.shape, generator=torch.Generator().manual_seed(0))
            * (seen.model.vit.get_parameter(name).detach().square().mean().sqrt() + 1e-3)
            for name, u in seen.gradients.items()
        }
        with pytest.warns(PrivlabWarning, match=said):
            assert check_settings(replace(seen, gradients=noise), 3, "files") == STATED


def update_of(model: VictimModel, client: Client, image: Tensor) -> Observation:
    """Return the update of a client with one image of label 3."""
    data = ClientData(image.to(model.mean), torch.tensor([3]), torch.Generator().manual_seed(0))
    return observe_updates(model, client, [data])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"momentum": 0.0}, r"does not match client\.momentum=0: its size is that of client\.momentum=0\.9\.$"),
        ({"steps": 7}, r"does not match client\.steps=7: its size is that of client\.steps=[2-4]\.$"),
        ({"steps": None, "epochs": 7}, r"does not match client\.steps=7: its size is that of client\.steps=[2-4]\.$"),
    ],
)
def test_another_momentum_and_other_steps_are_found(
    tiny_model: Model, crops: Tensor, changed: dict[str, Any], said: str
) -> None:
    """At a rate of 0.1 the later steps are no multiple of the first, so that no other rate explains them."""
    true = Client(lr=0.1, momentum=0.9, steps=3)
    seen = update_of(tiny_model().float(), true, crops[:1])
    assert check_settings(seen, 3, "files") == true
    with pytest.raises(PrivlabError, match=said):
        check_settings(replace(seen, client=replace(true, **changed)), 3, "files")


@pytest.mark.parametrize("true", [Client(lr=0.01, steps=3), Client(lr=0.01, momentum=0.9, weight_decay=0.1, steps=3)])
@pytest.mark.parametrize("stated", ["adam", "adamw"])
def test_an_update_of_sgd_is_none_of_adam(tiny_model: Model, crops: Tensor, true: Client, stated: Any) -> None:
    seen = update_of(tiny_model().float(), true, crops[:1])
    claim = Client(optimiser=stated, lr=0.01, weight_decay=0.0, steps=3)
    rate = r"0\.01, client\.momentum=0, client\.weight_decay=0" if not true.momentum else ".*"
    said = rf"does not match client\.optimiser={stated}: .* client\.lr={rate}\. State client\.optimiser=sgd\.$"
    with pytest.raises(PrivlabError, match=said):
        check_settings(replace(seen, client=claim), 3, "files")


def test_of_an_update_of_adam_nothing_is_said(tiny_model: Model, crops: Tensor) -> None:
    true = Client(optimiser="adamw", lr=1e-3, steps=2)
    seen = update_of(tiny_model().float(), true, crops[:1])
    assert check_settings(seen, 3, "files") == true


@pytest.mark.parametrize(
    ("normalisation", "said"),
    [
        (
            "0.485,0.456,0.406/0.229,0.224,0.225",
            r"by 0\.5,.*/0\.5,.*: the model was fed pixels from -2.* to 2.*, which .* Give --normalisation imagenet\.$",
        ),
        ("0.5/0.05", r"the model was fed pixels from -.*Give the client's by --normalisation MEAN/STD\.$"),
    ],
)
def test_another_normalisation_is_found(tiny_model: Model, crops: Tensor, normalisation: str, said: str) -> None:
    half = torch.full((3, 1, 1), 0.5)
    stated, image = tiny_model().float().normalised_by(half, half), crops[:1]
    image = (image > image.mean()).to(image)  # of black and white, which the stated mean and deviation cut
    true = (torch.tensor([float(value) for value in part.split(",")]) for part in normalisation.split("/"))
    mean, std = (values.view(-1, 1, 1).expand_as(half) for values in true)
    seen = update_of(stated.normalised_by(mean, std), Client(lr=0.1), image)
    with pytest.raises(PrivlabError, match=said):
        check_settings(replace(seen, model=stated), 3, "files")

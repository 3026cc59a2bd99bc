"""A decay that is not known is the one that the update shows, and weights of two models are called that."""

from collections.abc import Callable
from dataclasses import replace

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

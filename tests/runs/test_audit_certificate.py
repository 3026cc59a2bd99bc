"""What proves a reconstruction in an audit: the update or gradient that it gives, or grey levels; else nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from privlab.base import PrivlabWarning
from privlab.release import as_gradients, observe_updates
from privlab.runs.audit_certificate import certify
from privlab.runs.update_diagnosis import UpdateDiagnosis
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
MIXED = torch.tensor([[0.0, 0.6, 0.0, 0.4]])


def off_levels(images: Tensor) -> Tensor:
    """Return images that nobody stored."""
    return 0.9 * images + 0.05


def sent(model: VictimModel, images: Tensor, targets: Tensor, client: Client) -> Observation:
    return observe_updates(model, client, [ClientData(images.to(model.mean), targets, torch.Generator())])


@pytest.mark.parametrize("released", ["update", "gradient"])
def test_an_image_of_a_mixed_label_is_proven_by_what_it_gives(tiny_model: Model, crops: Tensor, released: str) -> None:
    model, client = tiny_model(num_classes=4), Client(lr=0.05)
    seen = sent(model, off_levels(crops[60:61]), MIXED, client)
    seen = seen if released == "update" else as_gradients(seen)
    image = off_levels(crops[60:61]).to(model.mean)
    found = certify(seen, image, 1)
    assert (found.proof, found.explained) == (released, True)
    assert found.residual is not None
    assert found.residual < 1e-5
    wrong = certify(seen, off_levels(crops[200:201]).to(model.mean), 1)
    assert (wrong.proof, wrong.explained) == (None, False)
    assert certify(seen, image, checked=False).explained is None
    assert certify(replace(seen, grants=frozenset()), image, 1).residual is None


@pytest.mark.parametrize("released", ["update", "gradient"])
def test_images_of_a_batch_are_proven_whatever_the_loss_is(tiny_model: Model, crops: Tensor, released: str) -> None:
    """Weights of classes that are not stated give each image its own share of the step."""
    model, images = tiny_model(num_classes=4), off_levels(crops[[10, 150, 300]]).to(tiny_model().mean)
    several, one = torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 0]]), torch.tensor([1, 0, 3])
    stated = Client(lr=0.05, images=3, batch_size=3)
    for true, targets in (
        (replace(stated, loss="binary", pos_weight=(3.0, 0.5, 1.0, 7.0)), several.to(model.mean)),
        (replace(stated, class_weights=(9.0, 0.1, 1.0, 3.0)), one),
        (replace(stated, loss="focal"), one),
        (replace(stated, loss="l1"), 9 * several.to(model.mean)),
    ):
        seen = replace(sent(model, images, targets, true), client=stated)
        seen = seen if released == "update" else as_gradients(seen)
        assert certify(seen, images[[2, 0, 1]]).proof == released
        assert certify(seen, images[[2, 0, 0]]).explained is False


def test_images_of_a_batch_are_proven_together(tiny_model: Model, crops: Tensor) -> None:
    model, client = tiny_model(), Client(lr=0.05, images=3, batch_size=3)
    images = off_levels(crops[[10, 150, 300]]).to(model.mean)
    seen = sent(model, images, torch.tensor([1, 0, 1]), client)
    assert certify(seen, images[[2, 0, 1]]).proof == "update"
    assert certify(seen, images[[2, 0, 0]]).explained is False
    assert certify(seen, images[:2]).explained is None


@pytest.mark.slow
def test_settings_that_are_fitted_prove_and_so_do_grey_levels(tiny_model: Model, crops: Tensor) -> None:
    """Where no setting explains the update, an image on grey levels is no chance all the same."""
    model, true = tiny_model().float(), Client(lr=0.05, steps=3, momentum=0.9)
    image = off_levels(crops[60:61]).to(model.mean)
    seen = replace(sent(model, image, torch.tensor([2]), true), client=replace(true, momentum=0.0))
    assert certify(seen, image, 2).proof is None
    with pytest.warns(PrivlabWarning, match=r"client\.momentum=0\.9 fitted"):
        fitted = UpdateDiagnosis(seen, 2, "files").fitted()
    assert fitted is not None
    assert certify(replace(seen, client=fitted.client), image, fitted.target).proof == "update"
    noise = 1e-4 / 255 * torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
    stored = (crops[60:61].double() + noise).clamp(0, 1)
    assert certify(seen, stored, 2).proof == "grey levels"
    assert certify(seen, stored, 2, of_levels=True).explained is False

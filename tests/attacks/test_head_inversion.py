"""`head-inversion`: features that the head read are matched, and what it cannot read is refused or said."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from privlab.attacks import HeadInversion
from privlab.base import PrivlabError, PrivlabWarning
from privlab.evaluation.scoring import explained_by
from privlab.release import observe, observe_updates
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
BRIEF = HeadInversion(steps=60, tv=0.0)


def sent(model: VictimModel, images: Tensor, labels: list[int], client: Client) -> Observation:
    data = ClientData(images.to(model.mean), torch.tensor(labels), torch.Generator().manual_seed(0))
    return observe_updates(model, client, [data], HeadInversion.parameters)


def mismatch(model: VictimModel, made: Tensor, images: Tensor) -> Tensor:
    """Return ‖f(x̂) − f(x)‖² / ‖f(x)‖² of each image."""
    own = model.features(images.to(model.mean))
    return ((model.features(made) - own).square().sum(1) / own.square().sum(1)).detach()


@pytest.mark.parametrize(
    "client",
    [
        Client(lr=0.1, trains="head"),
        Client(lr=0.05, momentum=0.9, weight_decay=0.05, steps=4, trains="head"),
        Client(lr=0.1),
    ],
    ids=["one step", "steps with decay", "all parameters"],
)
def test_the_features_of_one_image_are_matched(tiny_model: Model, crops: Tensor, client: Client) -> None:
    model, image = tiny_model(), crops[30:31]
    seen = sent(model, image, [3], client)
    made = BRIEF(seen)
    assert mismatch(model, made, image) < 0.05 * mismatch(model, torch.full_like(made, 0.5), image)
    assert explained_by(seen, made, 0) is None  # many images have these features


@pytest.mark.slow
def test_a_gradient_is_read_as_updates_are(tiny_model: Model, crops: Tensor) -> None:
    """Of one step, and of several with decay: the features are the same."""
    model, image = tiny_model(), crops[30:31]
    gradient = observe(model, image.to(model.mean), torch.tensor([3]), HeadInversion.parameters)
    made = BRIEF(gradient)
    for client in (Client(lr=0.1, trains="head"), Client(lr=0.05, weight_decay=0.05, steps=4, trains="head")):
        torch.testing.assert_close(BRIEF(sent(model, image, [3], client)), made, rtol=1e-4, atol=1e-4)


def test_images_of_one_step_are_told_apart_by_their_features(tiny_model: Model, crops: Tensor) -> None:
    model, images = tiny_model(), crops[[3, 200]]
    client = Client(lr=0.1, images=2, batch_size=2, trains="head")
    made = BRIEF(sent(model, images, [1, 5], client))
    assert (mismatch(model, made, images) < 0.1 * mismatch(model, torch.full_like(made, 0.5), images)).all()


def test_images_that_are_not_told_apart_stay_grey(tiny_model: Model, crops: Tensor) -> None:
    """Four images of seven classes are too many to be certain of any."""
    client = Client(lr=0.1, images=4, batch_size=4, trains="head")
    with pytest.warns(PrivlabWarning, match=r"0.*4.*images"):
        made = BRIEF(sent(tiny_model(), crops[:4], [1, 5, 0, 2], client))
    assert (made == 0.5).all()


def test_steps_that_train_more_than_the_head_are_beyond_its_range(tiny_model: Model, crops: Tensor) -> None:
    """What it reads then is a mixture: the features of the image are off by a third after five steps."""
    model, image = tiny_model(), crops[30:31]
    steps = [Client(lr=0.1), Client(lr=0.1, steps=5, trains="head"), Client(lr=0.1, steps=5)]
    found = [sent(model, image, [3], client) for client in steps]
    assert [HeadInversion().beyond(seen) is None for seen in found] == [True, True, False]
    own = model.features(image.to(model.mean))
    off = [float((HeadInversion()._features(seen)[0] - own).norm() / own.norm()) for seen in found]
    assert max(off[:2]) < 1e-6
    assert off[2] > 0.25


def test_what_it_refuses(tiny_model: Model, crops: Tensor) -> None:
    client = Client(lr=0.1, images=2, batch_size=2, steps=3, trains="head")
    with pytest.raises(PrivlabError, match=r"Found 2 images and client\.steps=3\."):
        BRIEF(sent(tiny_model(), crops[:2], [1, 5], client))
    seen = sent(tiny_model(), crops[:1], [1], Client(trains="head"))
    model = tiny_model()
    model.vit.add_module("head", torch.nn.Sequential(model.vit.head))
    with pytest.raises(PrivlabError, match="Found Sequential"):
        BRIEF(replace(seen, model=model))
    with pytest.raises(PrivlabError, match=r"head-inversion.*0"):
        HeadInversion(steps=-1)
    with pytest.raises(PrivlabError, match=r"head-inversion.*0"):
        HeadInversion(tv=float("inf"))

"""A client's own update, audited before it leaves: exact answers, limits, and what cannot be audited."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from privlab import victim
from privlab.base import PrivlabError
from privlab.release.local_training import run_client
from privlab.runs.own_update import OwnUpdateAudit
from privlab.threat import Client, ClientData
from privlab.victims import VictimModel

State = dict[str, Tensor]
SGD = Client(lr=0.01, steps=3)


def model_of(vit: VisionTransformer) -> VictimModel:
    """Return the model that an audit of this client is given."""
    return victim(vit).model


@pytest.fixture
def update(vit: VisionTransformer) -> Callable[[Client, Tensor], tuple[State, State]]:
    """Return the weights before and after a client's round on these images, with labels 0, 1, …."""
    before = copy.deepcopy(vit.state_dict())

    def train(client: Client, images: Tensor) -> tuple[State, State]:
        data = ClientData(images, torch.arange(len(images)), torch.Generator().manual_seed(0))
        moved = run_client(victim(vit).model, client, data)
        return before, {name: value + moved[name] for name, value in before.items()}

    return train


Update = Callable[[Client, Tensor], tuple[State, State]]


def test_an_update_of_one_image_leaks_and_a_higher_threshold_lets_it_pass(
    vit: VisionTransformer, update: Update, photographs: Callable[[int, int], Tensor]
) -> None:
    images = photographs(1, 64)
    files = update(SGD, images)
    found = OwnUpdateAudit(model_of(vit), SGD)(*files, images)
    assert found.psnr is not None
    assert found.psnr > 60
    assert (found.image, found.explained, found.limits, found.leaks) == (0, None, None, True)
    assert not OwnUpdateAudit(model_of(vit), SGD, max_psnr=found.psnr)(*files, images).leaks
    assert OwnUpdateAudit(model_of(vit), SGD, max_psnr=found.psnr - 1e-6)(*files, images).leaks


@pytest.mark.parametrize("stated", [0.0, 0.05, 0.3])
def test_a_decay_that_is_stated_wrongly_hides_nothing(
    vit: VisionTransformer, update: Update, photographs: Callable[[int, int], Tensor], stated: float
) -> None:
    images = photographs(1, 64)
    files = update(replace(SGD, weight_decay=0.05), images)
    found = OwnUpdateAudit(model_of(vit), replace(SGD, weight_decay=stated))(*files, images)
    assert found.psnr is not None
    assert found.psnr > 50


def test_the_decay_that_is_stated_counts_where_the_loss_hides_it(
    vit: VisionTransformer, photographs: Callable[[int, int], Tensor]
) -> None:
    """A squared loss moves the sum of the head's rows, from which the decay would be read."""
    images, before = photographs(1, 64), copy.deepcopy(vit.state_dict())
    optimiser = torch.optim.SGD(vit.parameters(), lr=0.01, weight_decay=0.05)
    model = victim(vit).model
    F.mse_loss(vit(model.normalise(images)), torch.ones(1, 10)).backward()
    optimiser.step()
    client = Client(lr=0.01, weight_decay=0.05)
    found = OwnUpdateAudit(model_of(vit), client)(before, vit.state_dict(), images)
    assert found.psnr is not None
    assert found.psnr > 60


def as_fed(vit: VisionTransformer, images: Tensor, mean: float, std: float) -> tuple[State, State]:
    """Return the weights before and after a step on images that the client normalises by this mean and deviation."""
    before, optimiser = copy.deepcopy(vit.state_dict()), torch.optim.SGD(vit.parameters(), lr=0.01)
    F.cross_entropy(vit((images - mean) / std), torch.arange(len(images))).backward()
    optimiser.step()
    return before, vit.state_dict()


@pytest.mark.parametrize(("mean", "std"), [(0.45, 0.225), (0.0, 1.0), (0.0, 0.25), (0.5, -0.5)])
def test_another_normalisation_hides_nothing(
    vit: VisionTransformer, photographs: Callable[[int, int], Tensor], mean: float, std: float
) -> None:
    images, audit = photographs(1, 64), OwnUpdateAudit(model_of(vit), Client(lr=0.01))
    files = as_fed(vit, images, mean, std)
    found = audit(*files, images)
    assert found.psnr is not None
    assert found.psnr_affine is not None
    assert found.psnr < 20
    assert found.psnr_affine > 45
    assert found.leaks
    certified = audit(*files)
    assert certified.explained is not None
    assert certified.explained > 0.9999


def test_pixels_outside_of_0_and_1_are_clipped_where_the_normalisation_is_right(
    vit: VisionTransformer, photographs: Callable[[int, int], Tensor]
) -> None:
    """What a client adds beyond black and white, no image has."""
    images = photographs(1, 64)
    beyond = images.clone()
    beyond[0, :, :8, :8], images[0, :, :8, :8] = 3.0, 1.0
    mean, std = model_of(vit).mean, model_of(vit).std
    files = as_fed(vit, (beyond - mean) / std, 0.0, 1.0)
    found = OwnUpdateAudit(model_of(vit), Client(lr=0.01))(*files, images)
    assert found.psnr is not None
    assert found.psnr > 60


def test_a_pale_image_does_not_leak_by_its_mean_colour(
    vit: VisionTransformer, update: Update, photographs: Callable[[int, int], Tensor]
) -> None:
    pale, other = photographs(2, 64).split(1)
    pale = 0.5 + 0.1 * (pale - 0.5)
    found = OwnUpdateAudit(model_of(vit), SGD)(*update(SGD, 1 - other.flip(2)), pale)
    assert found.psnr_affine is not None
    assert (found.psnr_affine > 25, found.leaks) == (True, False)


def test_a_small_explained_share_means_nothing(
    vit: VisionTransformer, update: Update, photographs: Callable[[int, int], Tensor]
) -> None:
    together = Client(lr=0.01, images=8, batch_size=8)
    found = OwnUpdateAudit(model_of(vit), SGD)(*update(together, photographs(8, 64)))
    assert found.explained is not None
    assert (found.explained < 0.5, found.leaks) == (True, False)
    assert found.limits == (
        "no single image explains it with these settings, which other settings and several images may do"
    )


def test_the_certificate_judges_without_an_image(
    vit: VisionTransformer, update: Update, photographs: Callable[[int, int], Tensor]
) -> None:
    audit = OwnUpdateAudit(model_of(vit), SGD)
    found = audit(*update(SGD, photographs(1, 64)))
    assert found.explained is not None
    assert (found.explained > 0.9999, found.psnr, found.leaks) == (True, None, True)
    assert not OwnUpdateAudit(model_of(vit), SGD, max_explained=1.0)(*update(SGD, photographs(1, 64))).leaks


def test_several_images_are_scored_by_the_nearest_and_said_to_be_beyond_range(
    vit: VisionTransformer, update: Update, photographs: Callable[[int, int], Tensor]
) -> None:
    images = photographs(3, 64)
    found = OwnUpdateAudit(model_of(vit), SGD)(*update(SGD, images[1:2]), images)
    assert (found.image, found.leaks) == (1, True)
    assert found.limits == "3 images in one update"
    together = Client(lr=0.01, images=3, batch_size=3)
    assert not OwnUpdateAudit(model_of(vit), together)(*update(together, images), images).leaks


def test_limits_name_the_optimiser_and_an_update_that_is_rounding(
    vit: VisionTransformer, update: Update, photographs: Callable[[int, int], Tensor]
) -> None:
    images, adam = photographs(1, 64), Client(optimiser="adamw", lr=1e-4)
    assert OwnUpdateAudit(model_of(vit), adam)(*update(adam, images), images).limits == (
        "adamw scales each entry separately"
    )
    small = Client(lr=1e-7)
    assert OwnUpdateAudit(model_of(vit), small)(*update(small, images), images).limits == (
        "patch_embed.proj.weight moved by little more than rounding"
    )


def test_the_callers_model_stays_as_it_is(
    vit: VisionTransformer, update: Update, photographs: Callable[[int, int], Tensor]
) -> None:
    images, model = photographs(1, 64), model_of(vit)
    held = copy.deepcopy(model.state_dict())
    before, after = update(SGD, images)
    OwnUpdateAudit(model, SGD)({name: value + 1 for name, value in before.items()}, after, images)
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_psnr": 0.0}, r"max_psnr must be a finite number of dB > 0. Found 0."),
        ({"max_psnr": math.inf}, r"max_psnr must be a finite number of dB > 0. Found inf."),
        ({"max_psnr": math.nan}, r"max_psnr must be a finite number of dB > 0. Found nan."),
        ({"max_explained": 0.0}, r"max_explained must be in \(0, 1\]. Found 0."),
        ({"max_explained": 1.5}, r"max_explained must be in \(0, 1\]. Found 1.5."),
        ({"client": Client(trains="head")}, r"reads .*pos_embed.* Found client.trains=head, .*no evidence of privacy"),
    ],
)
def test_an_audit_that_cannot_be_is_refused(vit: VisionTransformer, options: Any, said: str) -> None:
    with pytest.raises(PrivlabError, match=said):
        OwnUpdateAudit(model_of(vit), **{"client": SGD, **options})


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (Client(clients=2), "reads it before it is added to those of others. Found client.clients=2: take 1."),
        (Client(images=2), "needs client.images=1, .* Found client.images=2, .*: give the client's images."),
        (Client(optimiser="adam"), "Found client.images=1, client.optimiser=adam"),
        (Client(dropout=0.1), "client.dropout=0.1"),
    ],
)
def test_a_certificate_that_cannot_be_is_refused(vit: VisionTransformer, client: Client, said: str) -> None:
    with pytest.raises(PrivlabError, match=said):
        OwnUpdateAudit(model_of(vit), client).check_certificate()


def test_weights_that_do_not_fit_are_refused(
    vit: VisionTransformer, update: Update, photographs: Callable[[int, int], Tensor]
) -> None:
    images = photographs(1, 64)
    before, after = update(SGD, images)
    audit = OwnUpdateAudit(model_of(vit), SGD)
    old, new = ({f"model.{name}": value for name, value in state.items()} for state in (before, after))
    with pytest.raises(PrivlabError, match=r"pos_embed.*patch_embed.proj.weight.*2"):
        audit(old, new, images)
    with pytest.raises(PrivlabError, match=r"pos_embed.*\(1.*5.*64\)"):
        audit(before | {"pos_embed": torch.zeros(1, 5, 64)}, after, images)
    with pytest.raises(PrivlabError, match=r"'the.*weights'.*'the.*weights'"):
        audit(before, before, images)
    with pytest.raises(PrivlabError, match=r"NaN.*pos_embed"):
        audit(before, after | {"pos_embed": torch.full((1, 17, 64), torch.nan)}, images)
    with pytest.raises(PrivlabError, match=r"\(3.*64.*64\).*\(3.*32.*64"):
        audit(before, after, images[:, :, :32])

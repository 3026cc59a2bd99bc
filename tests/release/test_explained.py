"""How much of an update an image explains: all of it if it is the private one, and never near that if it is another."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from privlab.attacks import PatchUpdate
from privlab.release import EXPLAINED_RESIDUAL, observe_updates
from privlab.release.residual import explained_share, residual
from privlab.release.update_files import label_of_update
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel, victim

Model = Callable[..., VictimModel]
ROUND = Client(lr=0.01, momentum=0.9, weight_decay=0.05, steps=3)


def sent(model: VictimModel, images: Tensor, labels: list[int], client: Client = ROUND) -> list[Observation]:
    """Return the update of each image's client, each as a release of its own."""
    clients = [
        ClientData(image[None].to(model.mean), torch.tensor([label]), torch.Generator().manual_seed(0))
        for image, label in zip(images, labels, strict=True)
    ]
    return [observe_updates(model, client, [each]) for each in clients]


def test_the_share_is_that_of_the_square(tiny_model: Model, crops: Tensor) -> None:
    """1 − ‖Ĝ − G‖² / ‖G‖², by the definition: of the update of a lesser rate the half explains three quarters."""
    model = tiny_model()
    (seen,) = sent(model, crops[:1], [3], Client(lr=0.01))
    half = replace(seen, client=Client(lr=0.005))
    assert residual(half, crops[:1].to(model.mean), 3) == pytest.approx(0.5, rel=1e-4)
    assert explained_share(0.5) == 0.75
    assert explained_share(0.0) == 1
    assert explained_share(1.5) == explained_share(float("inf")) == 0


CLIENTS = {
    "sgd": ROUND,
    "adamw": Client(optimiser="adamw", lr=1e-3, weight_decay=0.1, steps=3),
    "adam": Client(optimiser="adam", lr=1e-3, weight_decay=0.1, steps=2),
    "smoothed": Client(lr=0.1, label_smoothing=0.3, steps=2),
    "clipped": Client(lr=0.1, clip=0.1, steps=2),
    "weights in half": Client(lr=0.1, steps=2, sends="weights", sent_as="bf16"),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_the_private_image_explains_all_and_its_label_is_told(tiny_model: Model, crops: Tensor, name: str) -> None:
    model, images, labels = tiny_model().float(), crops[:380:130], [5, 0, 2]
    for image, label, seen in zip(images, labels, sent(model, images, labels, CLIENTS[name]), strict=True):
        assert label_of_update(seen) == label
        assert explained_share(residual(seen, image[None], label)) > 0.9999
        assert explained_share(residual(seen, image[None], label + 1)) < 0.9975


def test_a_client_that_diverges_on_an_image_is_not_explained_by_it(tiny_model: Model, crops: Tensor) -> None:
    model = tiny_model().float()
    (seen,) = sent(model, crops[:1], [1], Client(lr=0.01, steps=9))
    assert residual(replace(seen, client=Client(lr=1e30, steps=9)), crops[:1], 1) == float("inf")


def test_decay_explains_nothing(tiny_model: Model, crops: Tensor) -> None:
    """Where decay is most of the update, another image still explains none of what the gradients moved."""
    model = tiny_model().float()
    (seen,) = sent(model, crops[:1], [1], Client(lr=0.01, weight_decay=20.0))
    moved = torch.stack([u.square().sum() for u in seen.gradients.values()]).sum()
    (plain,) = sent(model, crops[:1], [1], Client(lr=0.01))
    assert moved > 10 * torch.stack([u.square().sum() for u in plain.gradients.values()]).sum()
    assert explained_share(residual(seen, crops[:1], 1)) > 0.9999
    assert explained_share(residual(seen, crops[200:201], 1)) < 0.9


@pytest.mark.slow
def test_no_wrong_image_of_a_thousand_explains_an_update(photographs: Callable[[int, int], Tensor]) -> None:
    """On the trained victim: five updates, and against each 200 crops of other photographs with the label it tells."""
    base = victim("cifar_vit")
    tiles = photographs(14, 256).unfold(2, 32, 32).unfold(3, 32, 32).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
    own = tiles[::3, 27]
    with torch.no_grad():
        labels = base.model(own).argmax(1).tolist()
    right, wrong = [], []
    for i, seen in enumerate(sent(base.model, own, labels, replace(ROUND, steps=1))):
        assert label_of_update(seen) == labels[i]
        right.append(explained_share(residual(seen, PatchUpdate()(seen), labels[i])))
        others = torch.cat([tiles[: 3 * i], tiles[3 * i + 1 :]]).flatten(0, 1)[::4][:200]
        wrong += [explained_share(residual(seen, image[None], labels[i])) for image in others]
    assert len(wrong) == 1000
    assert min(right) > 0.9999
    assert max(wrong) < 0.95 < 1 - EXPLAINED_RESIDUAL**2

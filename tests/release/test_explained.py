"""How much of an update an image explains: all of it if it is the private one, and never near that if it is another."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from privlab.attacks import PatchUpdate
from privlab.defenses import AdaptiveClipping, ExcludeVars, GradientNoise, GradientPruning, PercentilePrivacy
from privlab.evaluation.client_updates import explained_by
from privlab.release import EXPLAINED_RESIDUAL, exact_entries, labels_that_rise, observe_updates, scale_of
from privlab.release.residual import explained_share, residual, residual_of_clients
from privlab.release.update_files import label_of_update
from privlab.threat import Client, ClientData, GradientDefense, Observation
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


def test_all_clients_of_a_mean_are_run_again(tiny_model: Model, crops: Tensor) -> None:
    """Images in any order explain their mean, each by its own label; one wrong image among them does not."""
    model, client = tiny_model().float(), replace(ROUND, clients=3)
    clients = [ClientData(crops[i * 130, None], torch.tensor([2 * i]), torch.Generator()) for i in range(3)]
    seen = observe_updates(model, client, clients)
    images, labels = crops[[260, 0, 130]], [[1, 4, 5], [3, 0], [2]]
    assert residual_of_clients(seen, images, labels) < 1e-3
    assert residual_of_clients(seen, images, [[1], [0], [2]]) > EXPLAINED_RESIDUAL
    assert residual_of_clients(seen, crops[[260, 0, 50]], labels) > EXPLAINED_RESIDUAL
    alone = observe_updates(model, ROUND, clients[:1])
    assert residual_of_clients(alone, crops[60:61], [[3], [0]][1:]) == residual(alone, crops[60:61], 0)


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


FILTERS: dict[str, tuple[GradientDefense, ...]] = {
    "clipping": (GradientNoise(clip=0.05, multiplier=0.0),),
    "adaptive": (AdaptiveClipping(0.01, rounds=3),),
    "percentile": (PercentilePrivacy(40.0, 1e-3),),
    "pruning": (GradientPruning(0.3),),
    "no head": (ExcludeVars("^head"),),
}


def filtered(
    model: VictimModel, image: Tensor, label: int, filters: tuple[GradientDefense, ...], client: Client = ROUND
) -> Observation:
    data = ClientData(image[None].to(model.mean), torch.tensor([label]), torch.Generator().manual_seed(0))
    return observe_updates(model, client, [data], None, filters)


@pytest.mark.parametrize("name", FILTERS)
def test_behind_filters_the_private_image_explains_what_they_left(tiny_model: Model, crops: Tensor, name: str) -> None:
    """With decay in the update, and the label that it tells, or one that rises."""
    model = tiny_model().float()
    seen = filtered(model, crops[0], 5, FILTERS[name])
    right, wrong = (explained_by(seen, crops[i : i + 1].to(model.mean), 0) for i in (0, 200))
    assert right is not None
    assert wrong is not None
    assert right > 0.9999
    assert wrong < 0.95


def test_nothing_is_stated_behind_noise(tiny_model: Model, crops: Tensor) -> None:
    model = tiny_model().float()
    seen = filtered(model, crops[0], 5, (GradientNoise(),))
    assert not any(exact.any() for exact in exact_entries(seen).values())
    assert explained_by(seen, crops[:1].to(model.mean), 0) is None


def test_labels_that_rise_are_those_of_the_step(tiny_model: Model, crops: Tensor) -> None:
    """Without the head's update too, and the model is left as it is."""
    model = tiny_model().float()
    for label in (1, 4):
        seen = filtered(model, crops[0], label, (ExcludeVars("^head"),))
        assert not any(name.startswith("head") for name in seen.gradients)
        before = {name: p.clone() for name, p in model.vit.named_parameters()}
        update = {name: u[0] for name, u in seen.gradients.items()}
        assert labels_that_rise(model, update, crops[:1].to(model.mean), 3)[0] == label
        assert all(torch.equal(p, before[name]) for name, p in model.vit.named_parameters())


def test_a_factor_is_that_of_least_squares_and_not_below_zero() -> None:
    u, every = {"a": torch.tensor([1.0, 2.0, 4.0])}, {"a": torch.tensor([True, True, False])}
    assert scale_of(u, {"a": torch.tensor([3.0, 6.0, 0.0])}, every) == pytest.approx(3)
    assert scale_of(u, {"a": -u["a"]}, every) == 0


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
@pytest.mark.parametrize("name", ["none", "clipping", "percentile", "no head"])
def test_no_wrong_image_of_a_thousand_explains_an_update(photographs: Callable[[int, int], Tensor], name: str) -> None:
    """On the trained victim: five updates, and against each 200 crops of other photographs, with labels they tell."""
    filters = {"none": (), "percentile": (PercentilePrivacy(),)}.get(name, FILTERS.get(name, ()))
    base, client = victim("cifar_vit"), replace(ROUND, steps=1)
    tiles = photographs(14, 256).unfold(2, 32, 32).unfold(3, 32, 32).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
    own = tiles[::3, 27]
    with torch.no_grad():
        labels = base.model(own).argmax(1).tolist()
    right, wrong = [], []
    for i, image in enumerate(own):
        seen = filtered(base.model, image, labels[i], filters, client)
        assert label_of_update(seen) == (None if name == "no head" else labels[i])
        found = image[None] if name == "percentile" else PatchUpdate()(seen)  # N ≥ D: too few entries are left for it
        right.append(explained_by(seen, found, 0))
        others = torch.cat([tiles[: 3 * i], tiles[3 * i + 1 :]]).flatten(0, 1)[::4][:200]
        wrong += [explained_by(seen, image[None], 0) for image in others]
    assert len(wrong) == 1000
    assert min(right) > 0.9999
    assert max(wrong) < 0.95 < 1 - EXPLAINED_RESIDUAL**2

"""The images of a batch from the head's gradient: labels and features are exact, or not claimed."""

import copy
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privlab.base import PrivlabError
from privlab.images import open_images
from privlab.release import observe_updates, told_images, told_labels, undecayed
from privlab.release.head_images import Head, find_images, negative_classes
from privlab.threat import Client, ClientData
from privlab.victims import VictimModel, victim


def head_of(classes: int, width: int, scale: float, seed: int = 0) -> nn.Linear:
    draw, head = torch.Generator().manual_seed(seed), nn.Linear(width, classes)
    with torch.no_grad():
        head.weight.copy_(scale * torch.randn(classes, width, generator=draw) / width**0.5)
        head.bias.copy_(0.1 * torch.randn(classes, generator=draw))
    return head


def released(head: nn.Linear, f: Tensor, labels: list[int]) -> dict[str, Tensor]:
    loss = F.cross_entropy(head(f), torch.tensor(labels))
    return dict(zip(("head.weight", "head.bias"), torch.autograd.grad(loss, [head.weight, head.bias]), strict=True))


def features(count: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


CLIENTS = {
    "one step": Client(lr=0.1, trains="head"),
    "many steps": Client(lr=0.05, momentum=0.9, weight_decay=0.05, steps=5, trains="head"),
    "schedule": Client(lr=0.1, schedule="cosine", nesterov=True, momentum=0.5, steps=4, trains="head"),
    "clipped and smoothed": Client(lr=0.1, clip=0.1, label_smoothing=0.2, steps=3, trains="head"),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_one_image_has_its_label_and_its_features_after_any_steps_of_sgd(
    tiny_model: Callable[..., VictimModel], crops: Tensor, name: str
) -> None:
    """The features stay the same while the head moves, so that the update stays r fᵀ."""
    model, client = tiny_model(), CLIENTS[name]
    image = crops[7:8].to(model.mean)
    data = ClientData(image, torch.tensor([3]), torch.Generator().manual_seed(0))
    seen = observe_updates(model, client, [data])
    assert set(seen.gradients) == {"head.weight", "head.bias"}
    update = undecayed(model, {name: u[0] for name, u in seen.gradients.items()}, client)
    assert isinstance(model.vit.head, nn.Linear)
    found = told_images(model.vit.head, update, 1)
    assert found.labels.tolist() == [3]
    torch.testing.assert_close(found.f, model.features(image).detach().double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("labels", [[4, 17, 20, 33, 39], [4, 4, 9, 30, 30]], ids=["distinct", "repeated"])
def test_the_images_of_a_batch_have_their_features(labels: list[int], scale: float) -> None:
    head, f = head_of(40, 24, scale).double(), features(5, 24).double()
    gradients = released(head, f, labels)
    found = told_images(head, gradients, 5)
    assert found.labels.tolist() == labels
    distance = torch.cdist(found.f, f)
    assert sorted(distance.argmin(1).tolist()) == list(range(5))
    assert distance.amin(1).max() < 1e-4
    torch.testing.assert_close(found.r, Head.of(head, gradients, 5)(found.f) - F.one_hot(found.labels, 40))


def test_more_than_32_images_are_told_together_and_a_hidden_label_by_what_they_leave() -> None:
    """The image of class 6 adds less to the bias than another one, which is taken for class 6, takes away."""
    head = head_of(100, 48, 2.0).double()
    f, labels = features(36, 48).double(), list(range(0, 72, 2))
    f[3] = 6 * head.weight[6].detach()
    f[4] = 0.3 * f[3] + 0.5 * f[4]
    gradients = released(head, f, labels)
    assert gradients["head.bias"][6] > 0
    found = told_images(head, gradients, 36)
    assert found.labels.tolist() == labels
    torch.testing.assert_close(found.f, f, rtol=1e-6, atol=1e-6)


def test_noise_leaves_no_certain_image() -> None:
    """Noise as large as the gradient itself: no class is negative beyond it, and nothing is found."""
    head, labels = head_of(40, 24, 3.0), [4, 17, 20, 33]
    noisy = {
        name: g + torch.randn(g.shape, generator=torch.Generator().manual_seed(5))
        for name, g in released(head, features(4, 24), labels).items()
    }
    of_noise = Head.of(head, noisy, 4)
    assert not negative_classes(of_noise).any()
    assert not len(find_images(of_noise).labels)


def test_a_gradient_of_zero_tells_no_image() -> None:
    head = head_of(8, 4, 1.0)
    nothing = {"head.weight": torch.zeros(8, 4), "head.bias": torch.zeros(8)}
    with pytest.raises(PrivlabError, match="gradient"):
        told_images(head, nothing, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "least", "sure"), [(None, 18, 635), (0.01, 17, 605)], ids=["gradient", "update"])
def test_batches_of_32_photographs_give_labels_and_features_away(
    shared: Callable[[str], Path], rate: float | None, least: int, sure: int
) -> None:
    """Of the trained ViT-Ti: 20 batches of 32 of 500 photographs, each of a class of its own.

    By the gradient, or by an update as stored weights round it, in most of them every label is right and every f is
    within 3 % of its own; in none is a label certain that is wrong, and of the gradient nearly all are certain.
    """
    f, labels, head = features_of_photographs(shared)
    before = {"head.weight": head.weight.detach(), "head.bias": head.bias.detach()}
    draw, exact, certain, off = torch.Generator().manual_seed(7), 0, 0, []
    for _ in range(20):
        rows = torch.randperm(len(f), generator=draw)[:32]
        rows = rows[labels[rows].argsort()]
        gradients = released(head, f[rows], labels[rows].tolist())
        if rate is not None:
            gradients = {name: (θ - (θ - rate * gradients[name])) / rate for name, θ in before.items()}
        told = told_labels(head, gradients, 32)
        assert told is not None
        assert set(told.certain) <= set(labels[rows].tolist())
        certain += len(told.certain)
        if list(told.labels) == labels[rows].tolist():
            exact += 1
            found = told_images(head, gradients, 32)
            off.append((found.f - f[rows]).norm(dim=1) / f[rows].norm(dim=1))
    logging.getLogger(__name__).info(
        "%d of 20 batches exact, %d of 640 labels certain; features off by %.1e (median), %.1e (most)",
        exact,
        certain,
        torch.cat(off).median(),
        torch.cat(off).max(),
    )
    assert exact >= least
    assert certain >= sure
    assert torch.cat(off).median() < 1e-4
    assert torch.cat(off).max() < 0.03


@functools.cache
def features_of_photographs(shared: Callable[[str], Path]) -> tuple[Tensor, Tensor, nn.Linear]:
    """Return what the head of the trained ViT-Ti reads of the photographs, and their labels."""
    base = victim("vit_ti", weights=shared("weights/vit_tiny_patch16_224.safetensors"), img_size=160)
    classes = pd.read_csv(shared("data/imagenet_samples.csv")).set_index("file")["class_index"]
    pictures = [each for each in open_images(shared("data/imagenet_samples")) if each.pixels is not None]
    images = [base.preprocessing(each.pixels) for each in pictures if each.pixels is not None]
    assert isinstance(base.model.vit.head, nn.Linear)
    with torch.no_grad():
        f = torch.cat([base.model.features(torch.stack(images[i : i + 20])) for i in range(0, len(images), 20)])
    head = copy.deepcopy(base.model.vit.head).requires_grad_()
    return f, torch.tensor([classes[Path(each.name).name] for each in pictures]), head

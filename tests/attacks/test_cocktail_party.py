"""`cocktail-party`: independent features come back exactly, those of trained ViTs do not."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from privlab.attacks import CocktailParty, HeadInversion
from privlab.attacks.baselines.cocktail_party import _unmix
from privlab.base import PrivlabError, linear_sum_assignment
from privlab.images import Preprocessing, open_images
from privlab.release import observe, observe_updates, told_images
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel, victim

Model = Callable[..., VictimModel]
BRIEF = CocktailParty(steps=8, tv=0.0)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def released(head: nn.Linear, f: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weight and of the bias, of the mean loss of a batch of features."""
    gradients = torch.autograd.grad(F.cross_entropy(head(f), labels), [head.weight, head.bias])
    return gradients[0], gradients[1]


def factorial(images: int) -> Tensor:
    """Return features of zeros and ones of which every combination occurs once: exactly independent of each other."""
    numbers = torch.arange(2**images)
    return torch.stack([(numbers >> i) & 1 for i in range(images)]).double()


def head_of(classes: int, width: int) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(width, classes).double()


def assigned(found: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Return the relative error, and the cosine beyond the batch's mean, of each image's features."""
    centred = [F.normalize(rows - f.mean(0), dim=1) for rows in (f, found)]
    rows, columns = linear_sum_assignment(-(centred[0] @ centred[1].mT).numpy())
    error = (found[columns] - f[rows]).norm(dim=1) / f[rows].norm(dim=1)
    return error, (centred[0][rows] * centred[1][columns]).sum(1)


def test_independent_features_come_back_with_scale_and_sign() -> None:
    f, labels = factorial(8), torch.randint(20, (8,), generator=draw())
    found = _unmix(*released(head_of(20, 256), f, labels), 8, draw(), 500)
    assert_close(assigned(found, f)[0], torch.zeros(8).double(), atol=1e-8, rtol=0)


def test_classes_that_occur_twice_are_no_obstacle() -> None:
    """`told_images` needs 2 B + 2 ≤ C; here are as many images as the rank of the gradient allows."""
    f, labels = factorial(8), torch.tensor([0, 0, 0, 1, 1, 2, 3, 4])
    head = head_of(9, 256)
    G, h = released(head, f, labels)
    assert len(told_images(head, {"head.weight": G, "head.bias": h}, 8).labels) == 0
    assert assigned(_unmix(G, h, 8, draw(), 500), f)[0].max() < 1e-8


def test_the_more_samples_the_nearer() -> None:
    errors = []
    for width in (200, 20000):
        f = -torch.rand(6, width, generator=draw(), dtype=torch.float64).log()
        found = _unmix(*released(head_of(12, width), f, torch.arange(6)), 6, draw(), 500)
        errors.append(float(assigned(found, f)[0].median()))
    assert errors[1] < 0.03 < errors[0] / 2


def test_normal_features_are_not_unmixed() -> None:
    f = torch.randn(6, 2000, generator=draw(), dtype=torch.float64)
    found = _unmix(*released(head_of(12, 2000), f, torch.arange(6)), 6, draw(), 500)
    assert assigned(found, f)[1].median() < 0.9


def test_no_more_sources_than_the_gradient_has_rank() -> None:
    f, labels = factorial(8), torch.arange(8) % 4
    assert len(_unmix(*released(head_of(4, 256), f, labels), 8, draw(), 500)) == 3  # C − 1


def seen_of(model: VictimModel, images: Tensor, labels: list[int], client: Client | None = None) -> Observation:
    if client is None:
        return observe(model, images, torch.tensor(labels), CocktailParty.parameters, images_per_release=len(labels))
    return observe_updates(model, client, [ClientData(images, torch.tensor(labels), draw())], CocktailParty.parameters)


def test_one_image_is_that_of_head_inversion(tiny_model: Model, crops: Tensor) -> None:
    model, image = tiny_model(), crops[30:31].double()
    for client in (None, Client(lr=0.05, weight_decay=0.05, steps=4, trains="head")):
        seen = seen_of(model, image, [3], client)
        assert_close(BRIEF(seen), HeadInversion(steps=8, tv=0.0)(seen), rtol=1e-4, atol=1e-4)


def test_many_steps_of_the_head_alone_are_one(tiny_model: Model, crops: Tensor) -> None:
    """Its features stay the same, and only the mixture changes."""
    model, images = tiny_model(), crops[[3, 200, 310]].double()
    many = Client(lr=0.05, images=3, batch_size=1, epochs=3, weight_decay=0.1, trains="head")
    of_one, of_many = (BRIEF._features(seen_of(model, images, [1, 5, 2], client))[0] for client in (None, many))
    assert_close(assigned(of_many, of_one)[0], torch.zeros(3).double(), atol=1e-3, rtol=0)


def test_beyond_the_rank(tiny_model: Model, crops: Tensor) -> None:
    model = tiny_model()
    assert CocktailParty().beyond(seen_of(model, crops[:6].double(), [0, 1, 2, 3, 4, 5])) is None
    eight = seen_of(model, crops[:8].double(), [0, 1, 2, 3, 4, 5, 6, 0])
    assert CocktailParty().beyond(eight) == "B = 8 ≥ C = 7"
    narrow = tiny_model(embed_dim=4, num_heads=1)
    assert CocktailParty().beyond(seen_of(narrow, crops[:5].double(), [0, 1, 2, 3, 4])) == "B = 5 > D = 4"


def test_what_it_refuses(tiny_model: Model, crops: Tensor) -> None:
    client = Client(lr=0.1, images=2, steps=3)
    with pytest.raises(PrivlabError, match=r"2.*client\.steps=3.*client\.trains=all"):
        BRIEF(seen_of(tiny_model(), crops[:2].double(), [1, 5], client))
    model = tiny_model()
    seen = seen_of(model, crops[:1].double(), [1])
    model.vit.add_module("head", nn.Sequential(model.vit.head))
    with pytest.raises(PrivlabError, match="Found Sequential"):
        BRIEF(seen)
    with pytest.raises(PrivlabError, match=r"cocktail-party.*1"):
        CocktailParty(iterations=0)
    with pytest.raises(PrivlabError, match=r"cocktail-party.*0"):
        CocktailParty(tv=-1.0)


@pytest.mark.slow
def test_features_of_a_trained_vit(shared: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    """Batches of ImageNet photographs of a class each: the figures of docs/studies/baselines.md."""
    caplog.set_level(logging.INFO)
    weights, folder = shared("weights/vit_tiny_patch16_224.safetensors"), shared("data/imagenet_samples")
    model = victim("vit_ti", weights=str(weights), img_size=160).model
    table = pd.read_csv(shared("data/imagenet_samples.csv"))
    classes = dict(zip(table["file"], table["class_index"], strict=True))
    cut = Preprocessing(size=(160, 160), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9, interpolation="bicubic")
    named = [(classes[Path(image.name).name], cut(image.pixels)) for image in open_images(str(folder)) if image.pixels]
    labels = torch.tensor([label for label, _ in named])
    with torch.no_grad():
        f = torch.cat([model.features(torch.stack([x for _, x in named[i : i + 50]])) for i in range(0, 500, 50)])
    f, head = f.double(), copy.deepcopy(model.vit.head).double().requires_grad_(True)
    assert isinstance(head, nn.Linear)
    log = logging.getLogger(__name__)
    for count, batches in ((4, 4), (16, 4), (32, 4), (64, 2), (128, 1), (180, 1)):
        scores: dict[str, list[Tensor]] = {}
        for number in range(batches):
            rows = torch.randperm(500, generator=draw(count + 1000 * number))[:count]
            G, h = released(head, f[rows], labels[rows])
            own = labels[rows]
            guesses = {"cocktail-party": _unmix(G, h, count, draw(), 500), "G_c / h_c": G[own] / h[own, None]}
            for name, guess in guesses.items():
                scores.setdefault(name, []).append(torch.stack(assigned(guess, f[rows])))
        for name, of in scores.items():
            error, cosine = torch.cat(of, 1).median(1).values.tolist()
            log.info("B = %d, %s: median error %.2g, median cosine %.3f", count, name, error, cosine)
        assert torch.cat(scores["cocktail-party"], 1)[1].median() < 0.9

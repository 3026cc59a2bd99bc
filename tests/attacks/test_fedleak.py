"""`fedleak`: which entries it compares, how it flattens, and that a planted image comes back."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from privlab.attacks import FedLeak, GradientMatching
from privlab.attacks.baselines.fedleak import Flat, largest
from privlab.base import PrivlabError
from privlab.metrics import psnr
from privlab.patches import patchify
from privlab.release import observe, observe_updates, released_parameters
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel

pytestmark = pytest.mark.usefixtures("cache")

Model = Callable[..., VictimModel]
ONE = {"img_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2}


def pictures(n: int, side: int = 4) -> Tensor:
    return torch.rand(n, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sent(model: VictimModel, client: Client, images: Tensor, labels: list[int]) -> Observation:
    data = ClientData(images, torch.tensor(labels), torch.Generator().manual_seed(0))
    return observe_updates(model, client, [data])


@pytest.mark.slow
def test_a_planted_image_comes_back_from_nothing(tiny_model: Model) -> None:
    """154 dB of a third of the entries; its slope's norm is zero there too, and keeps 69 dB in as many steps."""
    model, image = tiny_model(unknown=False, **ONE), pictures(1)
    seen = sent(model, Client(lr=0.1), image, [3])
    assert psnr(FedLeak(tv=0.0, flat=0.0, steps=150)(seen).images, image).min() > 100
    assert psnr(FedLeak(tv=0.0, flat=0.01, steps=150)(seen).images, image).min() > 50


def test_all_entries_without_flatness_is_gradient_matching(tiny_model: Model) -> None:
    model, image = tiny_model(unknown=False, **ONE), pictures(1)
    seen = observe(model, image, torch.tensor([3]), released_parameters(model))
    same = FedLeak(share=1.0, flat=0.0, tv=0.0, start="grey", steps=5)(seen).images
    assert_close(same, GradientMatching(start="grey", steps=5)(seen).images)


def test_an_update_of_one_step_is_its_gradient(tiny_model: Model) -> None:
    model, image = tiny_model(unknown=False, **ONE), pictures(1)
    gradient = observe(model, image, torch.tensor([3]), released_parameters(model))
    update = sent(model, Client(lr=0.1, weight_decay=0.5), image, [3])
    attack = FedLeak(start="grey", steps=1)
    assert_close(attack(update).images, attack(gradient).images, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("objective", ["cosine", "l2"])
def test_the_true_image_has_no_distance_in_the_entries_that_are_compared(tiny_model: Model, objective: str) -> None:
    model, images = tiny_model(unknown=False, **ONE), pictures(2)
    seen = observe(model, images, torch.tensor([3, 5]), released_parameters(model))
    match = FedLeak(objective=objective, tv=0.0)._match(seen)
    points = patchify(model.normalise(images), model.patch).flatten(1)
    assert float(match(points, torch.arange(2))[0].max()) < 1e-12
    assert float(match(points.flip(0), torch.arange(2))[0].min()) > 1e-3


def test_of_several_steps_the_true_image_keeps_a_distance(tiny_model: Model) -> None:
    model, image = tiny_model(unknown=False, **ONE), pictures(1)
    attack, point = FedLeak(tv=0.0), patchify(model.normalise(image), model.patch).flatten(1)
    one, many = (
        float(attack._match(sent(model, Client(lr=0.1, steps=n), image, [3]))(point, torch.tensor([0]))[0])
        for n in (1, 5)
    )
    assert one < 1e-12 < 1e-3 < many


def test_the_largest_entries_of_each_release() -> None:
    G = torch.tensor([[[3.0, -5.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, -2.0]]])
    assert largest(G, 0.5).tolist() == [[[True, True], [False, False]], [[False, False], [False, True]]]
    assert largest(G, 0.01).tolist() == [[[False, True], [False, False]], [[False, False], [False, True]]]
    assert largest(G, 1.0).sum() == 4


def test_flat_adds_the_slopes_norm() -> None:
    """Of ½ xᵀ A x the slope's norm is ‖A x‖, with slope A A x / ‖A x‖."""
    A = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A = A + A.mT

    def quadratic(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return (x * (x @ A)).sum(1) / 2, x @ A

    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    value, slope = Flat(quadratic, 0.7)(x, torch.arange(3))
    g = x @ A
    n = g.norm(dim=1, keepdim=True)
    assert_close(value, quadratic(x, torch.arange(3))[0] + 0.7 * n[:, 0] / 5**0.5)
    assert_close(slope, g + 0.7 / 5**0.5 * (g @ A) / n, rtol=1e-9, atol=1e-9)
    still, none = Flat(quadratic, 0.7)(torch.zeros(1, 5, dtype=torch.float64), torch.arange(1))
    assert float(still) == 0
    assert not none.any()


def test_several_images_of_a_round_are_as_many_as_they_were(tiny_model: Model) -> None:
    model, images = tiny_model(unknown=False, **ONE), pictures(3)
    client = Client(lr=0.01, images=3, epochs=2)
    made = FedLeak(steps=2)(sent(model, client, images, [5, 2, 2])).images
    assert made.shape == images.shape
    assert not torch.equal(made[0], made[1])


def test_what_it_refuses() -> None:
    for options, message in (
        ({"objective": "likelihood"}, "objective of fedleak"),
        ({"share": 0.0}, r"share of fedleak must be in \(0, 1\]"),
        ({"flat": -1.0}, "flat of fedleak must be at least 0"),
        ({"steps": -1}, "steps of fedleak must be at least 0"),
    ):
        with pytest.raises(PrivlabError, match=message):
            replace(FedLeak(), **options)

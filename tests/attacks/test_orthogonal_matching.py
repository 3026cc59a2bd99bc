"""`censor` against its own algebra, and `orthogonal-matching` against loops and small images."""

from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import OrthogonalMatching
from privlab.base import PrivlabError, draw_for
from privlab.defenses import Censor
from privlab.metrics import psnr
from privlab.release import observe, released_parameters
from privlab.threat import Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]
Photographs = Callable[[int, int], Tensor]
pytestmark = pytest.mark.usefixtures("cache")


def some(b: int = 2) -> dict[str, Tensor]:
    draw = Generator().manual_seed(0)
    shapes = {"w": (b, 6, 5), "e": (b, 1, 3, 4), "b": (b, 10)}
    return {name: 3 * torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def draws(b: int = 2, seed: int = 0) -> list[Generator]:
    return [Generator().manual_seed(seed + i) for i in range(b)]


def seen_of(model: VictimModel, images: Tensor) -> Observation:
    of_images = [draw_for(0, str(i), "release") for i in range(len(images))]
    labels = torch.arange(len(images)) % model.vit.num_classes
    return observe(model, images, labels, released_parameters(model), [Censor()], of_images)


@pytest.mark.parametrize("projection", ["paper", "code"])
def test_censor_is_its_formula(projection: str) -> None:
    g = some()
    released = Censor(projection).release(g, draws())
    for i, draw in enumerate(draws()):
        for name in sorted(g):
            r, own = torch.randn(g[name].shape[1:], generator=draw, dtype=torch.float64), g[name][i]
            r = r / (r**2).sum() ** 0.5
            dot, square = (r * own).sum(), (own**2).sum()
            o = r - dot / (square if projection == "paper" else square**0.5) * own
            assert_close(released[name][i], o * (square / (o**2).sum()) ** 0.5)


def test_a_release_is_orthogonal_and_as_long_parameter_by_parameter() -> None:
    g = some()
    for name, o in Censor().release(g, draws()).items():
        assert_close((o * g[name]).flatten(1).sum(1), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)
        assert_close(o.flatten(1).norm(dim=1), g[name].flatten(1).norm(dim=1))


def test_the_published_code_leaves_a_part_along_a_long_gradient() -> None:
    g = {"b": 1000 * some()["b"]}
    o = Censor("code").release(g, draws())["b"]
    assert (torch.cosine_similarity(o, g["b"]).abs() > 0.99).all()


def test_as_many_releases_as_entries_tell_the_gradient_but_for_its_sign() -> None:
    g = some(1)["b"]
    released = torch.cat([Censor().release({"b": g}, draws(1, seed))["b"] for seed in range(9)])
    direction = torch.linalg.svd(released).Vh[-1]
    found = direction * released[0].norm()
    assert_close(found * torch.sign(found[0] * g[0, 0]), g[0])


def test_nothing_is_added_to_a_gradient_of_zero() -> None:
    assert_close(Censor().release({"b": torch.zeros(2, 5)}, draws())["b"], torch.zeros(2, 5))


def test_all_of_a_release_is_noise() -> None:
    g = {"b": torch.randn(1, 30, dtype=torch.float64, generator=Generator().manual_seed(3))}
    many = [Censor().release(g, draws(1, 100 + seed))["b"] for seed in range(400)]
    off = torch.stack([o.square().mean() for o in many]).mean()
    assert_close(off, Censor().variance({"b": many[0]})["b"].mean(), rtol=1e-6, atol=0)


def test_an_unknown_projection_is_refused() -> None:
    with pytest.raises(PrivlabError, match="projection of censor"):
        Censor("none")


SMALL = {"img_size": 4, "depth": 3, "embed_dim": 16, "num_heads": 2, "unknown": False}


@pytest.mark.slow
def test_an_image_of_fewer_values_than_equations_comes_back(tiny_model: Model, photographs: Photographs) -> None:
    model, images = tiny_model(img_size=4, depth=6, unknown=False), photographs(2, 4).double()
    seen = seen_of(model, images)
    attack = OrthogonalMatching(starts=4)
    assert attack.beyond(seen) is None
    found = attack(seen)
    assert (psnr(found, images) > 100).all()
    assert torch.equal(attack(seen), found)


@pytest.mark.slow
def test_two_rounds_determine_what_one_does_not(tiny_model: Model, photographs: Photographs) -> None:
    images = photographs(1, 4).double()
    small = SMALL | {"depth": 1}
    rounds = [seen_of(tiny_model(seed=seed, **small), images) for seed in range(4)]
    attack = OrthogonalMatching(starts=4)
    assert attack.beyond(rounds[0]) == "40 equations of a release for 48 values of an image"
    assert psnr(attack(rounds[0]), images).item() < 30
    assert psnr(attack.of_rounds(rounds), images).item() > 100


def test_rounds_of_other_images_are_refused(tiny_model: Model, photographs: Photographs) -> None:
    model = tiny_model(**SMALL)
    rounds = [seen_of(model, photographs(n, 4).double()) for n in (1, 2)]
    with pytest.raises(PrivlabError, match=r"of_rounds.*\[1.*2\]"):
        OrthogonalMatching().of_rounds(rounds)
    with pytest.raises(PrivlabError, match="of_rounds"):
        OrthogonalMatching().of_rounds([])


@pytest.mark.parametrize("option", ["steps", "starts"])
def test_a_search_of_nothing_is_refused(option: str) -> None:
    with pytest.raises(PrivlabError, match=f"{option} of orthogonal-matching must be at least 1. Found 0"):
        OrthogonalMatching(**{option: 0})

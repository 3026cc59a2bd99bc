"""`cutmix-completion`: the origins of pixels, what other images show, and what nothing shows."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import CutMixCompletion, LeastSquares
from privlab.attacks.features.cutmix_completion import _origins, _Search, complete, fill, rectangles
from privlab.base import PrivlabError
from privlab.defenses import Blur, CutMix
from privlab.metrics import psnr
from privlab.release import feature_capabilities, observe_features, send
from privlab.threat import Capability, Draws, FeatureObservation, Stack
from privlab.victims import VictimModel

Photographs = Callable[[int, int], Tensor]
HALF = 0.5 / 255


@pytest.fixture
def model(tiny_model: Callable[..., VictimModel]) -> VictimModel:
    return tiny_model(img_size=16).double()


def generators(count: int, seed: int = 0) -> list[Generator]:
    return [Generator().manual_seed(100 * seed + i) for i in range(count)]


def mixed(images: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return what CutMix makes of images, and which image each pixel is of: it mixes images of their numbers alike."""
    shown = CutMix()(images, 8, generators(len(images), seed)).images
    numbers = torch.arange(len(images), dtype=images.dtype)[:, None, None, None].expand_as(images[:, :1])
    return shown, CutMix()(numbers, 8, generators(len(images), seed)).images[:, 0].long()


def observed(model: VictimModel, images: Tensor, public: Tensor, seed: int = 0, cut: int = 0) -> FeatureObservation:
    stack, draws = Stack((CutMix(),)), generators(len(images), seed)
    sent = send(model, stack.feed(images, model.patch, draws), stack, Draws(draws, Generator(), Generator()), cut)
    return observe_features(model, sent, stack, public, cut)


def likelihood(shown: Tensor, origin: Tensor, boxes: list[list[int] | None], σ: float, α: float, β: float) -> float:
    """The class's objective, pixel by pixel; where two images are compared, no less than -8 is said."""

    def laplace(x: float, scale: float) -> float:
        return -abs(x) / scale - math.log(2 * scale)

    def said(x: float) -> float:
        normal = -(x**2) / (4 * σ**2) - 0.5 * math.log(4 * math.pi * σ**2)
        return normal - laplace(x, β)

    (b, c, h, w), total = shown.shape, 0.0
    values = shown.tolist()
    for i in range(b):
        for k in range(i):
            for y in range(h):
                for x in range(w):
                    if origin[i, y, x] == origin[k, y, x]:
                        each = [said(values[i][n][y][x] - values[k][n][y][x]) for n in range(c)]
                        total += max(-8.0, sum(each) / c)
    for i, box in enumerate(boxes):
        if box is None:
            continue
        top, bottom, left, right = box
        edges = [((y, left), (y, left - 1)) for y in range(top, bottom) if left > 0]
        edges += [((y, right), (y, right - 1)) for y in range(top, bottom) if right < w]
        edges += [((top, x), (top - 1, x)) for x in range(left, right) if top > 0]
        edges += [((bottom, x), (bottom - 1, x)) for x in range(left, right) if bottom < h]
        for (y, x), (v, u) in edges:
            δ = [values[i][n][y][x] - values[i][n][v][u] for n in range(c)]
            total += sum(laplace(each, β) - laplace(each, α) for each in δ) / c
    return total


@pytest.mark.parametrize(("h", "w"), [(16, 16), (12, 20)])
def test_every_rectangle_that_cutmix_draws_is_tried(h: int, w: int) -> None:
    known = {tuple(box) for box in rectangles(h, w).mT.tolist()}
    assert len(known) == rectangles(h, w).shape[1]
    numbers = torch.arange(40.0)[:, None, None, None].expand(40, 1, h, w)
    for seed in range(20):
        shown = CutMix()(numbers, 4, generators(40, seed)).images[:, 0]
        for i, image in enumerate(shown):
            y, x = (image != i).nonzero(as_tuple=True)
            if len(y):
                assert (int(y.min()), int(y.max()) + 1, int(x.min()), int(x.max()) + 1) in known
    assert len(known) < math.comb(h + 1, 2) * math.comb(w + 1, 2) / 2


def test_the_objective_is_that_of_the_class(photographs: Photographs) -> None:
    shown, _ = mixed(photographs(3, 8).double())
    search = _Search.of(shown, 0.05, 0.1, 0.4)
    boxes = rectangles(8, 8)
    for found in ([None, None, None], [(1, 40), None, (0, 7)], [(2, 3), (0, 300), (1, 301)]):
        given = [None if each is None else boxes[:, each[1]].tolist() for each in found]
        wanted = likelihood(shown, search.origins(found), given, 0.05, 0.1, 0.4)
        assert search.likelihood(found) == pytest.approx(wanted)


def test_a_rectangle_is_set_to_the_best_over_those_of_the_others(photographs: Photographs) -> None:
    shown, _ = mixed(photographs(3, 6).double(), seed=2)
    search = _Search.of(shown, 0.05, 0.1, 0.4)
    others = [None, (2, 90), (0, 30)]
    gain, best = search._best(0, others, search.same)
    boxes = range(rectangles(6, 6).shape[1])
    choices = [None, *((j, box) for j in (1, 2) for box in boxes)]
    scores = [search.likelihood([choice, *others[1:]]) for choice in choices]
    assert search.likelihood([best, *others[1:]]) == pytest.approx(max(scores))
    assert gain == pytest.approx(max(scores) - scores[0])
    assert gain > 0


@pytest.mark.parametrize("seed", [1, 3, 4, 5])  # of the first six; in two it ends elsewhere
def test_the_origin_of_each_pixel_is_found(photographs: Photographs, seed: int) -> None:
    shown, true = mixed(photographs(4, 20).double(), seed)
    assert (true != torch.arange(4)[:, None, None]).any()
    assert torch.equal(_origins(shown, HALF, 0.07, 0.29, 15), true)


def test_more_starts_find_no_less_likely_origins(photographs: Photographs) -> None:
    shown, _ = mixed(photographs(4, 16).double(), 3)
    search = _Search.of(shown, HALF, 0.07, 0.29)
    ends = [search.run(start) for start in range(12)]
    assert len({str(end) for end in ends}) > 1
    best = max(ends, key=search.likelihood)
    assert torch.equal(_origins(shown, HALF, 0.07, 0.29, 12), search.origins(best))
    assert torch.equal(_origins(shown, HALF, 0.07, 0.29, 1), search.origins(ends[0]))


def test_there_is_a_start() -> None:
    with pytest.raises(PrivlabError, match=r"cutmix-completion.*1"):
        CutMixCompletion(starts=0)


def test_what_another_image_shows_comes_back_exactly(photographs: Photographs) -> None:
    images = photographs(3, 16).double()
    shown, origin = images.clone(), torch.arange(3)[:, None, None].repeat(1, 16, 16)
    for i, k, rows in ((0, 1, slice(0, 8)), (1, 2, slice(4, 12)), (2, 0, slice(2, 9))):
        shown[i, :, rows, :9], origin[i, rows, :9] = images[k, :, rows, :9], k
    made = complete(shown, origin)
    seen = torch.stack([(origin == i).any(0) for i in range(3)])
    assert not seen.all()
    for image, wanted, own in zip(made, images, seen, strict=True):
        assert torch.equal(image[:, own], wanted[:, own])


def test_what_nothing_shows_is_the_mean_of_its_neighbours() -> None:
    image = torch.rand(2, 7, 6, generator=Generator().manual_seed(0), dtype=torch.float64)
    known = torch.rand(7, 6, generator=Generator().manual_seed(1)) < 0.5
    made = fill(image, known)
    assert torch.equal(made[:, known], image[:, known])
    for y, x in (~known).nonzero().tolist():
        around = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
        near = [made[:, v, u] for v, u in around if 0 <= v < 7 and 0 <= u < 6]
        assert_close(made[:, y, x], torch.stack(near).mean(0))
    assert torch.equal(fill(image, torch.zeros_like(known)), image)
    assert torch.equal(fill(image, torch.ones_like(known)), image)


def test_the_attack_leaks_more_than_the_mixed_images(model: VictimModel, photographs: Photographs) -> None:
    images, public = photographs(4, 16).double(), photographs(8, 16).double()[4:]
    seen = observed(model, images, public)
    made, plain = CutMixCompletion()(seen).images, LeastSquares()(seen).images
    _, origin = mixed(images)
    shown = torch.stack([(origin == i).any(0) for i in range(4)])
    for i in range(4):
        assert_close(made[i][:, shown[i]], images[i][:, shown[i]], atol=1e-6, rtol=0)
    assert psnr(made, images).mean() > psnr(plain, images).mean() + 5


def test_behind_a_block_the_images_are_those_of_depth_optimisation(
    model: VictimModel, photographs: Photographs, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, public = photographs(3, 16).double(), photographs(6, 16).double()[3:]
    calls: list[tuple[int, int]] = []

    class Known:
        """Stands in for the search: it tells the public photographs, and the mixed images that are fed."""

        def __call__(self, seen: FeatureObservation) -> object:
            calls.append((seen.cut_layer, len(seen.defense)))
            fed = mixed(images)[0] if seen.defense else public
            return LeastSquares()(replace(seen, cut_layer=0, features=model.embed(fed).detach(), defense=()))

    monkeypatch.setattr("privlab.attacks.features.cutmix_completion.DepthOptimisation", Known)
    made = CutMixCompletion()(observed(model, images, public, cut=1)).images
    assert calls == [(1, 0), (1, 1)]
    assert_close(made, CutMixCompletion()(observed(model, images, public)).images)


def test_an_image_that_is_sent_alone_is_not_mixed(model: VictimModel, photographs: Photographs) -> None:
    image, public = photographs(1, 16).double(), photographs(3, 16).double()[1:]
    assert_close(CutMixCompletion()(observed(model, image, public)).images, image, atol=1e-6, rtol=0)


def test_without_a_photograph_that_varies_the_mixed_images_are_returned(
    model: VictimModel, photographs: Photographs
) -> None:
    seen = observed(model, photographs(3, 16).double(), torch.full((2, 3, 16, 16), 0.5, dtype=torch.float64))
    assert torch.equal(CutMixCompletion()(seen).images, LeastSquares()(seen).images)


def test_only_small_images_that_are_mixed_grant_it(tiny_model: Callable[..., VictimModel]) -> None:
    small, large = tiny_model(img_size=64), tiny_model(img_size=72)
    assert Capability.MIXED_IMAGES in feature_capabilities(small, 1, (CutMix(),))
    assert Capability.MIXED_IMAGES not in feature_capabilities(large, 1, (CutMix(),))
    assert Capability.MIXED_IMAGES not in feature_capabilities(small, 1, (Blur(sigma=1.0),))
    assert Capability.MIXED_IMAGES not in feature_capabilities(small, 1)

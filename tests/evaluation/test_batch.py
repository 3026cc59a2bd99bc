"""What a batch draws, and the controls, roundings and checks that every image of it gets."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import privlab
from privlab.base import PrivlabError, draw_for
from privlab.evaluation import Batch
from privlab.evaluation.check import check_reconstruction
from privlab.evaluation.controls import Public
from privlab.evaluation.records import CLASS_MEAN, CONTROLS
from privlab.images import NamedImage, Others

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


def batch(images: Tensor) -> Batch:
    """Return a batch of images that have names and hashes."""
    named = [NamedImage(f"image-{i}", f"{i:064x}", None) for i in range(len(images))]
    return Batch(named, images)


@pytest.mark.parametrize("B", [1, 2, 3])
def test_each_release_has_a_draw_of_its_own(B: int) -> None:
    """It depends on the images of the release, on the seed and on the number of the draw, and on nothing else."""
    whole = batch(torch.rand(6, 3, 8, 8))
    first = [draw.initial_seed() for draw in whole.release_draws(0, 0, B)]
    assert len({*first}) == 6 // B
    part = whole.take(list(range(B, 2 * B)))
    assert [draw.initial_seed() for draw in part.release_draws(0, 0, B)] == first[1:2]
    for seed, number in ((1, 0), (0, 1)):
        assert not {*first} & {draw.initial_seed() for draw in whole.release_draws(seed, number, B)}


def test_each_image_has_a_draw_of_its_own_for_each_purpose() -> None:
    whole = batch(torch.rand(4, 3, 8, 8))
    seeds = [[draw.initial_seed() for draw in whole.draws(0, purpose, 0)] for purpose in ("defense", "control")]
    assert len({*seeds[0], *seeds[1]}) == 8
    assert seeds[0][2] == draw_for(0, whole.named[2].sha256, "defense", 0).initial_seed()


def test_controls_know_nothing_of_the_private_image(photographs: Callable[[int, int], Tensor]) -> None:
    """Another private image behind the same names changes only the control that is made of it, shuffled patches."""
    public = Others({f"{100 + i:064x}": image for i, image in enumerate(photographs(5, 16))})
    made = [
        Public(public, torch.tensor([0.2, 0.5, 0.8]).view(3, 1, 1)).controls(
            batch(images), 4, [torch.Generator().manual_seed(i) for i in range(2)], together=False
        )
        for images in torch.rand(2, 2, 3, 16, 16)
    ]
    for name in (CONTROLS[0], CONTROLS[1], CONTROLS[3]):
        assert torch.equal(made[0][name], made[1][name]), name
    assert not torch.equal(made[0][CONTROLS[2]], made[1][CONTROLS[2]])
    assert made[0][CONTROLS[3]].flatten(2).std(2).max() == 0
    assert torch.equal(made[0][CONTROLS[3]][1, :, 0, 0], torch.tensor([0.2, 0.5, 0.8]))


@pytest.mark.parametrize("together", [False, True])
def test_the_class_mean_is_that_of_the_photographs_with_the_label(
    photographs: Callable[[int, int], Tensor], *, together: bool
) -> None:
    """The private image of name 0 is itself among the photographs, and left out; no photograph has class 9."""
    images, labels = photographs(6, 16), [3, 3, 7, 3, 7, None]
    keys = [f"{i:064x}" for i in (0, *range(101, 106))]
    public = Others(dict(zip(keys, images, strict=True)), {k: n for k, n in zip(keys, labels, strict=True) if n})
    private = batch(torch.rand(3, 3, 16, 16))
    named = [replace(image, label=label) for image, label in zip(private.named, (3, 7, 9), strict=True)]
    draws = [torch.Generator().manual_seed(i) for i in range(3)]
    made = Public(public, torch.zeros(3, 1, 1)).controls(replace(private, named=named), 4, draws, together=together)
    of_class = [images[[1, 3]], images[[2, 4]], images[1:] if together else images]
    assert torch.allclose(made[CLASS_MEAN], torch.stack([some.mean(0) for some in of_class]).to(made[CLASS_MEAN]))
    unlabelled = Public(Others(public.images), torch.zeros(3, 1, 1))
    assert CLASS_MEAN not in unlabelled.controls(private, 4, draws, together=together)


def test_eight_bit_scores_are_of_rounded_values(tmp_path: Path) -> None:
    """Cut values lie below the exact image by up to a level, and rounded ones on it: an exact image has no error."""
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / "image.png")
    given = {"images": str(tmp_path / "image.png"), "attacks": "patch-gradient", "metrics": "mse", "seed": 1}
    records = [
        privlab.attack("cifar_vit", settings="a", **given, eight_bit=rounded).records for rounded in (False, True)
    ]
    plain, rounded = (float(each[each.attack == "patch-gradient"].mse.iloc[0]) for each in records)
    assert 0 < plain < 1e-9
    assert rounded < 1e-14


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (1, 2, 7, 7)])
def test_one_value_that_is_not_finite_is_enough(wrong: float, place: tuple[int, ...]) -> None:
    images = torch.full((2, 3, 8, 8), 0.5)
    check_reconstruction(images, (2, 3, 8, 8))
    images[place] = wrong
    with pytest.raises(PrivlabError, match="finite"):
        check_reconstruction(images, (2, 3, 8, 8))


@pytest.mark.parametrize(("value", "shape"), [(1.01, (1, 3, 8, 8)), (-0.01, (1, 3, 8, 8)), (0.5, (2, 3, 8, 8))])
def test_values_and_shapes_must_be_those_of_images(value: float, shape: tuple[int, ...]) -> None:
    images = torch.full((1, 3, 8, 8), 0.5)
    images[0, 1, 2, 3] = value
    with pytest.raises(PrivlabError, match="instead of"):
        check_reconstruction(images, shape)

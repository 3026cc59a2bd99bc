"""`map-unet`: what the U-Net reads, how it is trained, and that it corrects noise it never saw."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.testing import assert_close

from privlab.attacks import MapInversion, MapUNet
from privlab.attacks.decoders import training
from privlab.attacks.features import map_unet
from privlab.attacks.features.map_unet import STARTS, UNet, _own_starts, _started
from privlab.base import PrivlabError, PrivlabWarning
from privlab.defenses import GaussianNoise, RowPermutation
from privlab.metrics import psnr
from privlab.release import observe_features, send
from privlab.threat import Draws, FeatureDefense, FeatureObservation, Feed, Reconstruction, Stack
from privlab.victims import VictimModel

Make = Callable[..., VictimModel]
NOISE = GaussianNoise(std=0.3)
ROWS = RowPermutation(per="batch", class_token=True)
SMALL = MapUNet(width=4, releases=32, steps=2, batch_size=16)

pytestmark = pytest.mark.filterwarnings("ignore:A decoder trained on")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVLAB_CACHE", str(tmp_path))
    return tmp_path / "decoders"


def seen_of(
    model: VictimModel, images: Tensor, public: Tensor, defense: tuple[FeatureDefense, ...] = (NOISE,)
) -> FeatureObservation:
    stack = Stack(defense)
    draws = [Generator().manual_seed(i) for i in range(len(images))]
    of_batch = Draws(draws, Generator().manual_seed(7), Generator())
    sent = send(model, Feed.undefended(images, model.patch), stack, of_batch)
    return observe_features(model, sent, stack, public)


@dataclass(frozen=True)
class OneColour(MapInversion):
    """An attack that keeps what it was given."""

    given: list[FeatureObservation] = field(default_factory=list)

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Return images of one colour."""
        self.given.append(seen)
        return Reconstruction(torch.full((len(seen.features), *seen.model.image_shape), 0.25))


# What the U-Net reads


def test_it_reads_the_likeliest_image_and_its_start(tiny_model: Make, crops: Tensor) -> None:
    seen = seen_of(tiny_model(), crops[:3].double(), crops[24:88].double())
    both = _started(STARTS, seen)
    assert both.dtype == torch.float32
    assert_close(both[:, :3].double(), MapInversion()(seen).images, atol=1e-6, rtol=0)
    assert_close(both[:, 3:].double(), MapInversion(rounds=0)(seen).images, atol=1e-6, rtol=0)


def test_starts_get_a_few_public_images(tiny_model: Make, crops: Tensor) -> None:
    start = OneColour()
    _started((start,), seen_of(tiny_model(), crops[:3].double(), crops[24:].double()))
    assert torch.equal(start.given[0].public, crops[24:88].double())


def test_own_releases_are_noisy_features_of_public_images(tiny_model: Make, crops: Tensor) -> None:
    """Each image comes in turn, and each time with new noise of the deviation that the defense has."""
    model, public, start = tiny_model(), crops[24:34].double(), OneColour()
    seen = seen_of(model, crops[:3].double(), public)
    inputs, images = _own_starts(seen, (start,), replace(SMALL, releases=40, augment=False))
    assert_close(images.double(), public[torch.arange(40) % 10], atol=1e-6, rtol=0)
    assert_close(inputs, torch.full_like(images, 0.25))
    features = torch.cat([given.features for given in start.given])
    assert features.dtype == seen.features.dtype
    noise = features - model.embed(images.double())
    assert 0.9 * 0.3 < noise.std() < 1.1 * 0.3
    assert (noise[10:20] - noise[:10]).abs().max() > 0.3
    assert [len(given.features) for given in start.given] == [32, 8]


def test_images_whose_rows_move_are_released_as_the_client_releases_them(tiny_model: Make, crops: Tensor) -> None:
    start = OneColour()
    seen = seen_of(tiny_model(), crops[:4].double(), crops[24:40].double(), (NOISE, ROWS))
    _own_starts(seen, (start,), replace(SMALL, releases=16, client_batch=5))
    assert [len(given.features) for given in start.given] == [5, 5, 5, 1]


def test_images_are_mirrored_and_rolled_from_their_second_release_on(tiny_model: Make, crops: Tensor) -> None:
    seen = seen_of(tiny_model(), crops[:1].double(), crops[24:56].double())
    _, images = _own_starts(seen, (OneColour(),), replace(SMALL, releases=64))
    assert_close(images[:32], crops[24:56].float(), atol=1e-6, rtol=0)
    assert not torch.equal(images[32:], images[:32])
    assert_close(images[32:].sum((2, 3)), images[:32].sum((2, 3)), rtol=1e-4, atol=1e-3)


# The U-Net


@pytest.mark.parametrize("size", [(16, 16), (9, 14)])
def test_it_begins_with_the_first_image(size: tuple[int, int]) -> None:
    both = torch.rand(2, 6, *size, generator=Generator().manual_seed(0))
    assert torch.equal(UNet(3, 2, 4)(both), both[:, :3])


def test_a_pixel_is_corrected_by_what_is_far_from_it() -> None:
    """The coarsest convolutions reach over the whole of a small image; the finest ones reach a pixel's neighbours."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet = UNet(1, 1, 4)
        for layer in unet.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.1)
    x = torch.zeros(1, 1, 16, 16, requires_grad=True)
    (slope,) = torch.autograd.grad(unet(x)[0, 0, 0, 0], x)
    assert (slope[0, 0].diagonal()[[1, 4, 10]] != 0).all()


@pytest.mark.slow
def test_it_corrects_what_it_never_saw(tiny_model: Make, crops: Tensor) -> None:
    """Images that it was not trained on come nearer under noise that it was not trained on, moved rows or not."""
    model = tiny_model()
    private, public = crops[:24].double(), crops[24:].double()
    for defense in ((NOISE,), (NOISE, ROWS)):
        seen = seen_of(model, private, public, defense)
        attack = MapUNet(width=16, releases=1440, client_batch=24, steps=300, batch_size=32)
        found, start = attack(seen), MapInversion()(seen)
        assert found.images.dtype == torch.float64
        assert found.images.min() >= 0
        assert found.images.max() <= 1
        assert found.rows is not None
        assert start.rows is not None
        assert torch.equal(found.rows, start.rows)
        assert psnr(found.images, private).mean() > psnr(start.images, private).mean() + 0.3


@pytest.mark.slow
def test_it_is_trained_once(tiny_model: Make, crops: Tensor, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all that shapes it: other noise, other public images or other starts have a U-Net of their own."""
    model, public = tiny_model(), crops[24:88].double()
    seen = seen_of(model, crops[:2].double(), public)
    first = SMALL(seen).images
    (path,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", lambda *_, **__: pytest.fail("it is trained again"))
        assert torch.equal(SMALL(seen).images, first)
        others = [replace(seen, public=public[1:]), replace(seen, defense=(GaussianNoise(std=0.2),))]
        for attack, other in ((SMALL, others[0]), (SMALL, others[1]), (replace(SMALL, steps=3), seen)):
            with pytest.raises(pytest.fail.Exception):
                attack(other)
        patch.setattr(map_unet, "STARTS", STARTS[:1])
        with pytest.raises(pytest.fail.Exception):
            SMALL.network(seen)
    path.write_bytes(path.read_bytes()[:-1])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(SMALL(seen).images, first)
    assert any("damaged or foreign" in str(each.message) for each in told)


def test_without_noise_there_is_nothing_to_correct(tiny_model: Make, crops: Tensor, cache: Path) -> None:
    seen = seen_of(tiny_model(), crops[:2].double(), crops[24:88].double(), (ROWS,))
    assert_close(SMALL(seen).images, crops[:2].double(), atol=1e-6, rtol=0)
    assert not cache.exists()


def test_it_warns_of_few_images(tiny_model: Make, crops: Tensor) -> None:
    with pytest.warns(PrivlabWarning, match=r"trained.*64"):
        SMALL(seen_of(tiny_model(), crops[:1].double(), crops[24:88].double()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"releases": 8}, r"releases of map-unet must be at least batch_size\. Found 8"),
        ({"width": 0}, r"width of map-unet must be at least 1\. Found 0"),
        ({"client_batch": 0}, r"client_batch of map-unet must be at least 1\. Found 0"),
    ],
)
def test_numbers_out_of_range(options: dict[str, int], said: str) -> None:
    with pytest.raises(PrivlabError, match=said):
        MapUNet(**options)  # type: ignore[arg-type]

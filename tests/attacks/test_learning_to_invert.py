"""`learning-to-invert`: its own releases against single ones, what a slot reads against a loop, and that it learns."""

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import LearningToInvert
from privlab.attacks.decoders import Shape, training
from privlab.attacks.published.learning_to_invert import READ, GradientDecoder, _own_releases, _slots_of
from privlab.base import PrivlabError, PrivlabWarning
from privlab.defenses import GradientNoise, GradientSign, Mjp
from privlab.metrics import psnr
from privlab.patches import patchify
from privlab.release import gradient_capabilities, observe, released_gradients
from privlab.threat import Feed, Observation, check_capabilities
from privlab.victims import VictimModel

Make = Callable[..., VictimModel]
SMALL = LearningToInvert(width=32, depth=1, releases=64, steps=2, batch_size=32)

pytestmark = pytest.mark.filterwarnings("ignore:A decoder trained on")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIVLAB_CACHE", str(tmp_path))
    return tmp_path / "decoders"


def seen_of(
    model: VictimModel, images: Tensor, public: Tensor | None, defense: tuple = (GradientSign(),)
) -> Observation:
    labels = model(images).argmax(1).detach()
    draws = [Generator().manual_seed(i) for i in range(len(images))]
    return observe(model, images, labels, READ, defense, draws, public=public)


# What the adversary makes itself


def test_own_releases_are_those_of_clients(tiny_model: Make, crops: Tensor) -> None:
    """They are of the class that the model predicts; each image comes in turn."""
    model, public = tiny_model(), crops[:5].double()
    slots, images = _own_releases(
        seen_of(model, public[:1], public, (GradientSign(),)), LearningToInvert(releases=64, augment=False)
    )
    assert_close(images.double(), public[torch.arange(64) % 5], atol=1e-6, rtol=0)
    for i in (0, 3, 8):
        image = public[i % 5 : i % 5 + 1]
        plain = released_gradients(model, Feed.undefended(image, model.patch), model(image).argmax(1), READ)
        A, G = plain["pos_embed"][0, 0, 1:].sign(), plain["patch_embed.proj.weight"][0].flatten(1).sign()
        D = A.shape[1]
        assert_close(slots[i, :, :D].double(), A)
        assert_close(slots[i, :, D : D + 48].double(), A @ G / D**0.5, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_own_releases_have_draws_of_their_own(tiny_model: Make, crops: Tensor) -> None:
    """New ones each time an image comes, the same ones for the same seed."""
    model, public = tiny_model(), crops[:2].double()
    noise = (GradientNoise(clip=1.0, multiplier=1.0),)
    plans = [LearningToInvert(releases=64, augment=False, seed=seed) for seed in (0, 0, 1)]
    (one, _), (again, _), (other, _) = (
        _own_releases(seen_of(model, public[:1], public, noise), plan) for plan in plans
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[2])


def test_images_are_mirrored_and_rolled_from_their_second_release_on(tiny_model: Make, crops: Tensor) -> None:
    public = crops[:64].double()
    _, images = _own_releases(
        seen_of(tiny_model(), public[:1], public, (GradientSign(),)), LearningToInvert(releases=128)
    )
    assert_close(images[:64].double(), public, atol=1e-6, rtol=0)
    assert not torch.equal(images[64:], images[:64])
    assert_close(images[64:].sum((2, 3)), images[:64].sum((2, 3)), rtol=1e-4, atol=1e-3)


def test_defenses_on_images_act_before_the_step(tiny_model: Make, crops: Tensor) -> None:
    """Masked slots have no gradient of a position embedding; the wanted image is the one before the defense."""
    model, public = tiny_model(), crops[:8].double()
    slots, images = _own_releases(
        seen_of(model, public[:1], public, (Mjp(gamma=0.5), GradientSign())),
        LearningToInvert(releases=64, augment=False),
    )
    assert ((slots[:, :, : model.vit.embed_dim] == 0).all(2).float().mean(1) > 0).all()
    assert_close(images[:8].double(), public, atol=1e-6, rtol=0)


# The decoder


def test_a_slot_reads_its_gradients_and_a_ridge_solution(tiny_model: Make, crops: Tensor) -> None:
    seen = seen_of(tiny_model(), crops[:3].double(), None, ())
    found = _slots_of(seen.model, seen.gradients).numpy()
    for i in range(3):
        a = seen.gradients["pos_embed"][i, 0, 1:].numpy()
        g = seen.gradients["patch_embed.proj.weight"][i].flatten(1).numpy()
        sizes = [np.sqrt((part**2).mean()) for part in (a, g)]
        a, g = a / sizes[0], g / sizes[1]
        D = a.shape[1]
        sums = np.stack([sum(a[n, d] * g[d] for d in range(D)) for n in range(len(a))]) / np.sqrt(D)
        ridge = np.linalg.inv(a @ a.T / D + 0.3 * np.eye(len(a))) @ sums
        logs = np.log(np.array(sizes))[None].repeat(len(a), 0)
        np.testing.assert_allclose(found[i], np.concatenate([a, sums, ridge, logs], 1), rtol=1e-4, atol=1e-4)


def untrained(model: VictimModel, crops: Tensor) -> tuple[GradientDecoder, Tensor]:
    """Return a new decoder, which takes mean and deviation from own releases, and what slots read of these."""
    slots, _ = _own_releases(seen_of(model, crops[:1].double(), crops[:64].double()), SMALL)
    decoder = GradientDecoder(Shape.of(model), SMALL.width, SMALL.depth)
    decoder.fit(slots)
    return decoder, slots


def test_what_a_slot_reads_is_standardised(tiny_model: Make, crops: Tensor) -> None:
    decoder, slots = untrained(tiny_model(), crops)
    slots = (slots - decoder.mean) / decoder.deviation
    assert_close(slots.mean((0, 1)), torch.zeros(slots.shape[2]), atol=1e-3, rtol=0)
    assert slots.std((0, 1)).max() < 1.01


def test_a_decoder_puts_patches_into_their_slots(tiny_model: Make, crops: Tensor) -> None:
    """It starts at grey; slot n of what the last layer returns is patch n of the image."""
    decoder, slots = untrained(tiny_model(), crops)
    assert torch.equal(decoder(slots[:2]), torch.full((2, 3, 16, 16), 0.5))
    decoder.outwards.bias.data = torch.arange(48.0)
    patches = patchify(decoder(slots[:2]), 4)
    assert_close(patches, (0.5 + torch.arange(48.0)).expand(2, 16, 48))


@pytest.mark.slow
def test_it_learns_what_signs_tell(tiny_model: Make, crops: Tensor) -> None:
    """Images that it never saw come back better than the mean of the public ones."""
    model = tiny_model()
    private, public = crops[:24].double(), crops[24:].double()
    made = LearningToInvert(width=64, depth=2, releases=1024, steps=150, batch_size=32)(seen_of(model, private, public))
    assert made.dtype == torch.float64
    assert made.min() >= 0
    assert made.max() <= 1
    mean = public.mean(0).expand_as(private)
    assert psnr(made, private).mean() > psnr(mean, private).mean() + 3


def test_a_decoder_is_trained_once(
    tiny_model: Make, crops: Tensor, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all that shapes it: another defense or other public images have a decoder of their own."""
    model, public = tiny_model(), crops[24:88].double()
    seen = seen_of(model, crops[:2].double(), public)
    first = SMALL(seen)
    (path,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", lambda *_, **__: pytest.fail("it is trained again"))
        assert torch.equal(SMALL(seen), first)
        for other in (seen_of(model, crops[:2].double(), public[1:]), seen_of(model, crops[:2].double(), public, ())):
            with pytest.raises(pytest.fail.Exception):
                SMALL(other)
    path.write_bytes(path.read_bytes()[:-1])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(SMALL(seen), first)
    assert any("damaged or foreign" in str(each.message) for each in told)


def test_it_warns_of_few_images(tiny_model: Make, crops: Tensor) -> None:
    with pytest.warns(PrivlabWarning, match=r"trained.*64"):
        SMALL(seen_of(tiny_model(), crops[:1].double(), crops[24:88].double()))


# What it refuses


def test_it_needs_images_of_its_own(tiny_model: Make) -> None:
    model = tiny_model()
    with pytest.raises(PrivlabError, match="auxiliary_images"):
        check_capabilities(SMALL, gradient_capabilities(model, (GradientSign(),)))
    check_capabilities(SMALL, gradient_capabilities(model, (GradientSign(),), public=1))


def test_it_refuses_fewer_releases_than_a_batch() -> None:
    with pytest.raises(PrivlabError, match=r"learning-to-invert.*batch_size=64.*8"):
        LearningToInvert(releases=8)


def test_it_refuses_grey_images(tiny_vit: Callable[..., VisionTransformer]) -> None:
    model = VictimModel(tiny_vit(in_chans=1), (0.5,), (0.5,)).double().requires_grad_(False)
    images = torch.rand(1, 1, 16, 16, generator=Generator().manual_seed(0), dtype=torch.float64)
    with pytest.raises(PrivlabError, match=r"RGB.*1"):
        SMALL(seen_of(model, images, images))

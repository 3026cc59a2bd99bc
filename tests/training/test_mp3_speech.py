"""MP3's speech configuration on chirps that the tests make."""

import math

import pytest
import torch
from torch import Generator, Tensor

from privlab.base import PrivlabError
from privlab.images import Augmentation, Examples
from privlab.reassembly import PositionPredictor, tiles
from privlab.training import Plan, train
from privlab.training.objectives import ObjectiveRecipe
from privlab.training.objectives.mp3_speech import SPEECH, as_images, log_mel, speech_model
from privlab.training.position_accuracy import position_accuracy

RATE = 8000


def chirps(n: int, seed: int, frames: int = 32) -> Tensor:
    """Return sounds whose pitch goes from one random frequency up to another, with noise."""
    draw = Generator().manual_seed(seed)
    low, high = 100 + 500 * torch.rand(n, 1, generator=draw), 2000 + 1500 * torch.rand(n, 1, generator=draw)
    share = torch.arange(frames * 80)[None] / (frames * 80)
    turns = (low * share + (high - low) * share**2 / 2) * frames / 100
    return (2 * math.pi * turns).sin() + 0.05 * torch.randn(turns.shape, generator=draw)


def heard(n: int, seed: int) -> Examples:
    pictures = as_images(log_mel(chirps(n, seed), RATE))
    return Examples(pictures, torch.full((n,), -1), 0, f"chirps {n} {seed}")


def test_the_loudest_band_is_that_of_the_tone() -> None:
    tones = torch.stack([(2 * math.pi * hertz * torch.arange(16_000) / 16_000).sin() for hertz in (300.0, 3000.0)])
    found = log_mel(tones)
    assert found.shape == (2, 100, 40)
    top = 2595 * math.log10(1 + 8000 / 700)
    for row, hertz in zip(found[:, 5:-5], (300.0, 3000.0), strict=True):
        band = 2595 * math.log10(1 + hertz / 700) / top * 41 - 1
        assert set(row.argmax(1).tolist()) <= {math.floor(band), math.ceil(band)}


def test_a_frame_is_a_patch() -> None:
    frames = torch.rand(2, 7, 40, generator=Generator().manual_seed(0))
    pictures = as_images(frames)
    assert pictures.shape == (2, 3, 4, 28)
    held = tiles(pictures.float() / 255, 4).flatten(2)
    low, high = frames.amin((1, 2), keepdim=True), frames.amax((1, 2), keepdim=True)
    torch.testing.assert_close(held[..., :40], (frames - low) / (high - low), atol=0.5 / 255 + 1e-6, rtol=0)
    assert not held[..., 40:].any()
    with pytest.raises(PrivlabError, match=r"at most 48 numbers.*Found 49"):
        as_images(torch.rand(1, 2, 49))


def test_the_model_is_the_papers() -> None:
    model = speech_model()
    assert model.grid == (1, 100)
    size = sum(part.numel() for part in model.vit.parameters())
    assert 65_000 < size < 80_000  # "around 70K"


@pytest.mark.slow
def test_it_learns_the_order_of_chirps() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = speech_model(frames=32, depth=2)
        recipe = ObjectiveRecipe(model, heard(512, 0), SPEECH, Augmentation(flip=False, shift=0))
    train(recipe, Plan(steps=200, batch_size=64, learning_rate=3e-3, warmup=20))
    (found,) = [part for part in recipe.model.modules() if isinstance(part, PositionPredictor)]
    accuracy = position_accuracy(found, heard(200, 1), hidden=(0.0,))
    assert accuracy["accuracy_gamma_0_pos_0.95"] > 0.3  # chance is 1/32

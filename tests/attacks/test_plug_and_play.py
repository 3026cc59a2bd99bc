"""`plug-and-play` and the learned prior: what the network is, where its rounds end, and what it gains under noise."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import LeastSquares, MapInversion, PlugAndPlay
from privlab.attacks.solvers import denoise, denoiser, plug_and_play
from privlab.base import PrivlabError
from privlab.defenses import GaussianNoise, RowPermutation
from privlab.metrics import psnr
from privlab.release import observe_features, send
from privlab.threat import Draws, FeatureDefense, FeatureObservation, Feed, Stack
from privlab.victims import VictimModel

Make = Callable[..., VictimModel]


def seen_of(model: VictimModel, images: Tensor, public: Tensor, *defense: FeatureDefense) -> FeatureObservation:
    draws = [Generator().manual_seed(i) for i in range(len(images))]
    of_batch = Draws(draws, Generator().manual_seed(7), Generator())
    stack = Stack(defense)
    return observe_features(model, send(model, Feed.undefended(images, model.patch), stack, of_batch), stack, public)


# The learned prior


def test_the_weights_are_those_of_the_recipe() -> None:
    recipe = json.loads(denoiser.WEIGHTS.with_suffix(".json").read_text())
    assert recipe["sha256"] == denoiser.SHA256
    assert len(recipe["data"]["twins"]) == 3


@pytest.mark.parametrize(("sigma", "least"), [(0.03, 34), (0.1, 25), (0.3, 19)])
def test_noise_of_any_strength_is_removed_from_photographs(crops: Tensor, sigma: float, least: float) -> None:
    images = crops[:380:40]
    noisy = images + sigma * torch.randn(images.shape, generator=Generator().manual_seed(0))
    assert psnr(denoise(noisy, sigma).clamp(0, 1), images).mean() > least
    assert psnr(denoise(noisy, sigma).clamp(0, 1), images).mean() > psnr(noisy.clamp(0, 1), images).mean() + 3


def test_grey_images_are_denoised_as_grey_photographs(crops: Tensor) -> None:
    grey = crops[:2].mean(1, keepdim=True)
    assert_close(denoise(grey, 0.1), denoise(grey.expand(-1, 3, -1, -1), 0.1).mean(1, keepdim=True))
    with pytest.raises(PrivlabError, match="one or three colours"):
        denoise(crops[:1, :2], 0.1)


def test_a_foreign_file_of_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denoiser, "SHA256", "0" * 64)
    with pytest.raises(PrivlabError, match="SHA-256"):
        denoiser._trained.__wrapped__(torch.device("cpu"))


def test_sides_need_not_be_multiples_of_the_coarsest_scale(crops: Tensor) -> None:
    assert denoise(crops[:1, :, :13, :9], 0.1).shape == (1, 3, 13, 9)


def test_rounds_denoise_first_and_draw_back_after(crops: Tensor) -> None:
    levels = []

    def nearest(u: Tensor, sigma: float) -> Tensor:
        levels.append(sigma)
        return u

    images = crops[:1]
    found = plug_and_play(nearest, images, torch.tensor([0.5, 0.1]))
    assert levels == pytest.approx([0.5, 0.1])
    assert_close(found, denoise(denoise(images, 0.5), 0.1))


# The attack


@pytest.mark.parametrize("moved", [(), (RowPermutation(per="batch", class_token=True),)])
def test_it_beats_the_prior_written_by_hand(
    tiny_model: Make, photographs: Callable[[int, int], Tensor], moved: tuple[FeatureDefense, ...]
) -> None:
    model, images = tiny_model(img_size=32), photographs(6, 64)
    # Other quarters of the same photographs are the adversary's own.
    seen = seen_of(model, images[:, :, :32, :32], images[:, :, 32:, 32:], GaussianNoise(std=0.3), *moved)
    images = images[:, :, :32, :32]
    learned, written = PlugAndPlay()(seen), MapInversion()(seen)
    assert psnr(learned.images, images).mean() > psnr(written.images, images).mean() + 0.5
    assert torch.equal(learned.rows, written.rows)


def test_without_noise_it_is_the_closed_form(tiny_model: Make, crops: Tensor) -> None:
    seen = seen_of(tiny_model(), crops[:2], crops[40:50])
    assert torch.equal(PlugAndPlay()(seen).images, LeastSquares()(seen).images)

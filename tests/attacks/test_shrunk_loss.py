"""`shrunk-loss`: one image from the first step of Adam, exactly, where honest weights show signs alone."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch

import privlab
from privlab.attacks.dishonest.shrunk_loss import ShrunkLoss
from privlab.base import PrivlabError
from privlab.evaluation import as_read, unread
from privlab.metrics import psnr
from privlab.threat import Observation


def make(**options: Any) -> privlab.Victim:
    """Return a random ViT with N = 16 patches and D = 48."""
    given: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 4,
        "num_classes": 10,
    }
    torch.manual_seed(0)
    return privlab.victim(timm.create_model("vit_tiny_patch16_224", **(given | options)), normalisation="imagenet")


RELEASES = {
    "gradient": privlab.Gradient(),
    "sgd": privlab.Update(privlab.Client(lr=0.1)),
    "adam": privlab.Update(privlab.Client(optimiser="adam", lr=1e-4)),
    "adamw": privlab.Update(privlab.Client(optimiser="adamw", lr=1e-3, weight_decay=0.05)),
    "large ε": privlab.Update(privlab.Client(optimiser="adamw", lr=1e-3, eps=1e-6)),
}


@pytest.mark.parametrize("name", RELEASES)
def test_one_image_is_exact_whatever_the_optimiser(name: str, photographs: Callable[[int, int], torch.Tensor]) -> None:
    images = photographs(2, 16)
    seen = privlab.observe(make(), images, torch.tensor([3, 8]), release=RELEASES[name], server=ShrunkLoss())
    read = as_read(ShrunkLoss(), seen)
    assert isinstance(read, Observation)
    assert ShrunkLoss().beyond(read) is None
    assert (psnr(ShrunkLoss()(read), images) > 100).all()


def test_gradients_that_are_not_small_beside_epsilon_are_warned_of(
    photographs: Callable[[int, int], torch.Tensor],
) -> None:
    adam = privlab.Client(optimiser="adam", lr=1e-3)
    honest = privlab.observe(make(), photographs(1, 16), torch.tensor([3]), release=privlab.Update(adam))
    assert isinstance(honest, Observation)
    with pytest.warns(match="not small next to ε"):
        ShrunkLoss()(honest)


def test_more_steps_of_adam_and_a_model_without_class_token_are_refused() -> None:
    adam = privlab.Client(optimiser="adam", lr=1e-3)
    assert unread(ShrunkLoss(), adam) is None
    assert "one step of Adam" in str(unread(ShrunkLoss(), privlab.Client(optimiser="adam", steps=2)))
    with pytest.raises(PrivlabError, match="class token"):
        ShrunkLoss().choose(make(class_token=False, global_pool="avg").model, 1, adam)


def test_the_model_that_is_given_may_have_as_many_patches_as_channels() -> None:
    seen = privlab.observe(make(embed_dim=16), torch.rand(1, 3, 16, 16), torch.tensor([1]), server=ShrunkLoss())
    assert isinstance(seen, Observation)
    assert ShrunkLoss().beyond(seen) == "N = 16 >= D = 16"
    assert ShrunkLoss()(seen).isfinite().all()

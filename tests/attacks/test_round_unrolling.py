"""`round-unrolling` against rounds whose images are known, and its parts against naive twins."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks.gradients.round_unrolling import RoundUnrolling
from privlab.attacks.rows import known_tokens
from privlab.attacks.tokens import FC1, FC2, Embeddings, ImageTokens, Mlp, Reads, Spans, complete_tokens, separate
from privlab.attacks.tokens import row_space, slots_by_law
from privlab.base import PrivlabError, PrivlabWarning
from privlab.evaluation import unread
from privlab.metrics import psnr
from privlab.release import observe, observe_updates
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel, first_block

Model = Callable[..., VictimModel]
PATCH = "patch_embed.proj.weight"


def seen_of(model: VictimModel, images: Tensor, **settings: Any) -> Observation:
    """Return a round of batches of one on these images, in their order."""
    client = Client(**({"images": len(images), "shuffle": False} | settings))
    labels = torch.arange(len(images)) * 2 % 7
    return observe_updates(model, client, [ClientData(images, labels, Generator())], RoundUnrolling.parameters)


def stored(crops: Tensor, count: int, side: int) -> Tensor:
    """Return images of 256 grey levels, of the most contrast: patches that are alike have one token."""
    cut = crops[..., :side, :side]
    return cut[cut.std((1, 2, 3)).argsort(descending=True)[: 9 * count : 9]].double()


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1},
        {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.05},
        {"lr": 0.1, "schedule": "cosine", "clip": 0.5, "label_smoothing": 0.1, "momentum": 0.5, "nesterov": True},
    ],
)
def test_all_images_of_a_round_are_exact(tiny_model: Model, crops: Tensor, settings: dict[str, Any]) -> None:
    images = stored(crops, 3, 8)
    found = RoundUnrolling()(seen_of(tiny_model(img_size=8), images, **settings))
    assert found.tokens is not None
    assert found.tokens.tolist() == [5, 5, 0]  # the last image needs none
    assert (psnr(found.images, images) > 150).all()

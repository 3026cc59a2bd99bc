"""Accuracy and Consistency of classifiers: against naive loops, one image at a time."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from privlab.base import PrivlabError, draw_for
from privlab.experiments.methods.consistency import consistency_by_gamma, measure_consistency
from privlab.experiments.training.examples import Examples
from privlab.patches import blockwise_mask, permute, shuffle_within
from privlab.victims import VictimModel


@pytest.fixture(scope="module")
def data() -> Examples:
    """Return eleven images of noise, of 16 × 16 pixels."""
    draw = torch.Generator().manual_seed(5)
    images = torch.randint(256, (11, 3, 16, 16), generator=draw, dtype=torch.uint8)
    return Examples(images, torch.randint(7, (11,), generator=draw), 7, "")


@pytest.mark.parametrize("unknown", [True, False])
def test_consistency_is_that_of_one_image_after_the_other(
    tiny_model: Callable[..., VictimModel], data: Examples, unknown: bool
) -> None:
    model = tiny_model(unknown=unknown)
    got = measure_consistency(model, data, gamma=0.5, seed=3, batch=4)
    right = stays = moved_right = 0
    norms = []
    for place, label in enumerate(data.labels.tolist()):
        image = data.pixels(torch.tensor([place])).double()
        draw = draw_for(3, str(place), "worth")
        mask = blockwise_mask(model.grid, 0.5, draw)
        shuffled = permute(image, shuffle_within(mask, draw)[None], model.patch)
        masked = mask[None] if unknown else None
        plain, moved = (model.vit.norm(model.backbone(t)) for t in (model.embed(image), model.embed(shuffled, masked)))
        norms.append(float((plain[0, 0] - moved[0, 0]).square().sum()))
        first, second = int(model(image).argmax()), int(model(shuffled, masked).argmax())
        right, stays, moved_right = right + (first == label), stays + (first == second), moved_right + (second == label)
    assert got.diff_norm == pytest.approx(np.mean(norms), rel=1e-6)
    assert got.diff_norm > 0
    assert (got.images, got.gamma) == (11, 0.5)
    assert (got.accuracy, got.consistency, got.shuffled_accuracy) == pytest.approx(
        (right / 11, stays / 11, moved_right / 11)
    )


def test_each_gamma_is_evaluated_as_alone(tiny_model: Callable[..., VictimModel], data: Examples) -> None:
    model, batches = tiny_model(), [(torch.arange(11), data.pixels(torch.arange(11)), data.labels)]
    several = consistency_by_gamma(model, batches, (0.0, 0.27, 0.9), seed=1)
    assert several[1:] == [measure_consistency(model, data, gamma=gamma, seed=1) for gamma in (0.27, 0.9)]
    assert (several[0].diff_norm, several[0].consistency) == (0, 1)
    assert several[0].shuffled_accuracy == several[0].accuracy
    assert several[2].diff_norm > several[1].diff_norm


def test_no_image_to_evaluate_on_is_an_error(tiny_model: Callable[..., VictimModel]) -> None:
    with pytest.raises(PrivlabError, match="no image"):
        consistency_by_gamma(tiny_model(), [], (0.1,))

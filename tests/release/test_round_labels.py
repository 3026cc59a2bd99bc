"""How often the head's update of a round tells the label counts of its images: a measurement on trained weights."""

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Generator

from privlab.images import open_images
from privlab.release import run_client, told_labels
from privlab.threat import Client, ClientData
from privlab.victims import victim

_LOG = logging.getLogger(__name__)


@pytest.mark.slow
@pytest.mark.parametrize(("images", "rate"), [(4, 0.1), (4, 0.01), (4, 0.001), (8, 0.01)])
def test_label_counts_of_rounds(shared: Callable[[str], Path], images: int, rate: float) -> None:
    weights = shared("weights/vit_tiny_patch16_224.safetensors")
    model = victim("vit_ti", weights=weights, img_size=96)
    folder, labels = shared("data/imagenet_samples"), shared("data/imagenet_samples.csv")
    photographs = list(open_images(folder, offset=22, every=25, limit=20, labels=labels))
    draw, client = Generator().manual_seed(0), Client(images=images, lr=rate, trains="all")
    exact, certain, wrong, groups = 0, 0, 0, 5
    for _ in range(groups):
        chosen = [photographs[i] for i in torch.randperm(len(photographs), generator=draw)[:images].tolist()]
        data = ClientData(
            torch.stack([model.preprocessing(each.pixels) for each in chosen if each.pixels]),
            torch.tensor([each.label for each in chosen]),
            draw,
        )
        moved = run_client(model.model, client, data)
        mean = {name: -moved[name] / (rate * images) for name in ("head.weight", "head.bias")}
        told = told_labels(model.model.vit.head, mean, images)
        assert told is not None
        private = sorted(data.labels.tolist())
        exact += list(told.labels) == private
        certain += len(told.certain)
        wrong += len(Counter(told.certain) - Counter(private))
    found = f"{exact} of {groups} rounds exact, {certain} of {groups * images} labels certain, {wrong} of these wrong"
    _LOG.info("%d images, rate %g: %s", images, rate, found)
    assert wrong == 0

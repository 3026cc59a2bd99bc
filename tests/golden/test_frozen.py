"""A few frozen numbers: what must not drift unnoticed, since records of different versions are compared."""

import hashlib

import pytest
import torch

from privlab.base import draw_for
from privlab.images import open_images
from privlab.patches import blockwise_mask, shuffle_within

SHA = hashlib.sha256(b"privlab").hexdigest()


def test_mask_and_order_of_an_image() -> None:
    """The mask of γ = 0.27 on 14 × 14 patches, drawn for one image hash and seed 0."""
    draw = draw_for(0, SHA, "defense")
    mask = blockwise_mask((14, 14), 0.27, draw)
    order = shuffle_within(mask, draw)
    assert int(mask.sum()) == 52
    assert hashlib.sha256(bytes(order.tolist())).hexdigest()[:16] == "8da269b9de8e7082"


def test_first_bundled_photograph() -> None:
    (first,) = open_images("samples", limit=1)
    assert first.name == "samples/astronaut-0"
    assert first.sha256[:16] == "2bb0b6195c47ef78"


@pytest.mark.parametrize(("purpose", "number"), [("defense", 227083), ("control", 739768)])
def test_draws(purpose: str, number: int) -> None:
    assert int(torch.randint(1_000_000, (), generator=draw_for(0, SHA, purpose))) == number

"""`mjp-unrolling` against clients that train under MJP, with a fresh mask in each step, on images that are known."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from privlab.attacks.tokens import Near
from privlab.attacks.updates.mjp_unrolling import MjpUnrolling, first_mask
from privlab.base import PrivlabError
from privlab.defenses import Mjp
from privlab.evaluation import unread
from privlab.metrics import in_best_order, psnr
from privlab.release import observe, observe_updates
from privlab.threat import Client, ClientData, Feed, Observation
from privlab.victims import VictimModel

Model = Callable[..., VictimModel]


class Recorded(Mjp):
    """MJP that keeps the masks that it drew."""

    def __call__(self, images: Tensor, patch: int, draws: Sequence[Generator]) -> Feed:
        """Return the feed, and keep its mask."""
        feed = super().__call__(images, patch, draws)
        MASKS.append(feed.masked_pe)
        return feed


MASKS: list[Tensor | None] = []


def seen_of(model: VictimModel, images: Tensor, gamma: float = 0.27, **settings: Any) -> Observation:
    """Return updates of clients whose first step, at this rate, learns the image: later ones hardly move a weight."""
    given: dict[str, Any] = {"lr": 0.5, "steps": 3} | settings
    clients = [ClientData(x[None], torch.tensor([3]), Generator().manual_seed(1)) for x in images]
    defense = (Recorded(gamma=gamma),) if gamma else ()
    return observe_updates(model, Client(**given), clients, set(MjpUnrolling.parameters), defense)


def stored(crops: Tensor, count: int) -> Tensor:
    """Return images of 256 grey levels, of the most contrast: equal patches have one token."""
    return crops[crops.std((1, 2, 3)).argsort(descending=True)[: 9 * count : 9]].double()


def test_the_mask_of_the_first_step_is_in_the_update(tiny_model: Model, crops: Tensor) -> None:
    MASKS.clear()
    seen = seen_of(tiny_model(), stored(crops, 1))
    first, *later = MASKS
    assert first is not None
    found = first_mask(seen, seen.gradients["pos_embed"][0, 0, -16:])
    assert torch.equal(found, first[0])
    assert any(mask is not None and not torch.equal(mask, first) for mask in later)


@pytest.mark.slow
def test_the_image_is_exact_up_to_the_order_of_masked_patches(tiny_model: Model, crops: Tensor) -> None:
    images = stored(crops, 2)[1:, :, :8, :8]  # of the first image one token of five is not found
    found = MjpUnrolling(starts=24, rounds=20)(seen_of(tiny_model(img_size=8), images, gamma=0.5))
    assert found.tokens is not None
    assert found.loose is not None
    assert found.loose.sum(1).tolist() == [2]
    assert found.tokens.tolist() == [5]
    assert (psnr(in_best_order(found.images, images, found.loose, 4), images) > 150).all()


def test_without_a_mask_the_image_solves_the_linear_system(tiny_model: Model, crops: Tensor) -> None:
    images = stored(crops, 1)
    found = MjpUnrolling()(seen_of(tiny_model(), images, gamma=0))
    assert (psnr(found.images, images) > 150).all()


def test_guesses_of_which_no_span_is_known_are_never_off(tiny_model: Model) -> None:
    u = torch.rand(3, 8, generator=Generator().manual_seed(0)).double()
    near = Near.alone(u)
    assert (near.off(u[None]).abs() < 1e-12).all()
    assert not near.base.any()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 1}, "reads several steps"),
        ({"images": 2, "batch_size": 1}, "client.images=2"),
        ({"dropout": 0.1}, "dropout is private"),
        ({"autocast": "bf16"}, "here they are in bf16"),
        ({"optimiser": "adam"}, "trains by adam"),
        ({"clients": 2}, "client.clients=2"),
    ],
)
def test_other_updates_are_refused_with_the_reason(settings: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"steps": 2} | settings
    refusal = unread(MjpUnrolling, Client(**given))
    assert refusal is not None
    assert said in refusal
    assert refusal.endswith("no evidence of privacy.")


def test_gradients_are_refused_and_too_many_tokens_are_reported(tiny_model: Model, crops: Tensor) -> None:
    images = stored(crops, 1)
    with pytest.raises(PrivlabError, match="several steps"):
        MjpUnrolling()(observe(tiny_model(), images, torch.tensor([3]), MjpUnrolling.parameters))
    assert MjpUnrolling().beyond(seen_of(tiny_model(), images)) is None
    wide = images.repeat(1, 1, 2, 2)
    assert MjpUnrolling().beyond(seen_of(tiny_model(img_size=32), wide)) == "1.2·(N + 1) = 78 ≥ D = 64"

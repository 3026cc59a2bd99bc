"""`qkv-span`: exact where its equations suffice, nearer with the density of row spaces where they do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.testing import assert_close

from privlab.attacks import QkvSpan
from privlab.attacks.tokens import normalised_tokens
from privlab.attacks.updates import qkv_span
from privlab.base import PrivlabError, PrivlabWarning
from privlab.evaluation import unread
from privlab.metrics import psnr
from privlab.patches import patchify
from privlab.release import observe_updates
from privlab.threat import Client, ClientData, Observation
from privlab.victims import VictimModel, victim

Model = Callable[..., VictimModel]


def seen_of(model: VictimModel, images: Tensor, **settings: Any) -> Observation:
    """Return what clients of one image each send that train LoRA, or what the settings say."""
    client = Client(**({"trains": "lora", "lr": 0.1} | settings))
    data = [ClientData(image[None], torch.tensor([n % 7]), Generator()) for n, image in enumerate(images)]
    return observe_updates(model, client, data)


@pytest.fixture(scope="module")
def nine() -> VictimModel:
    """Return a trained model of 9 patches of 48 values, whose tokens have 128."""
    return victim("cifar_vit", img_size=12).model


@pytest.fixture(scope="module")
def sixteen() -> VictimModel:
    return victim("cifar_vit", img_size=16).model


def test_a_token_times_its_deviation_is_linear_in_the_patch_and_the_deviation(nine: VictimModel, crops: Tensor) -> None:
    x = crops[:1, :, :12, :12].float()
    (z,) = nine.embed(x).double()
    norm = nine.vit.blocks[0].get_submodule("norm1")
    assert isinstance(norm, nn.LayerNorm)
    σ = (z.var(1, correction=0) + norm.eps).sqrt()
    F, g, prefix = normalised_tokens(nine)
    (patches,) = patchify(nine.normalise(x), nine.patch).double()
    u = norm(nine.embed(x))[0].double()
    assert_close((torch.cat([patches, σ[1:, None]], 1) @ F.mT + g) / σ[1:, None], u[1:], rtol=1e-4, atol=1e-4)
    assert_close(prefix, u[:1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"rank": 64}, {"trains": "attention"}, {"trains": "no-embedding"}])
def test_it_is_exact_where_the_equations_suffice(nine: VictimModel, crops: Tensor, settings: dict[str, Any]) -> None:
    """At r = 64 there are 54 equations for 49 numbers, and 118 where queries, keys and values are trained whole."""
    x = crops[[0, 100], :, :12, :12].float()
    seen = seen_of(nine, x, **settings)
    assert QkvSpan().beyond(seen) is None
    assert (psnr(QkvSpan()(seen), x) > (90 if settings == {"rank": 64} else 45)).all()


def test_it_finds_one_image_whatever_else_is_in_the_batch(nine: VictimModel, crops: Tensor) -> None:
    seen = seen_of(nine, crops[[0, 100], :, :12, :12].float(), rank=64)
    one = QkvSpan()(seen_of(nine, crops[:1, :, :12, :12].float(), rank=64))
    assert_close(QkvSpan()(seen)[:1], one, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_density_of_row_spaces_brings_the_image_nearer(
    sixteen: VictimModel, photographs: Callable[[int, int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At r = 48 there are 31 equations for 49 numbers."""
    x = photographs(3, 16).float()
    seen = seen_of(sixteen, x, rank=48)
    found = psnr(QkvSpan(steps=100)(seen), x)
    assert (found > psnr(x.mean((2, 3), keepdim=True).expand_as(x), x)).all()
    monkeypatch.setattr(qkv_span, "_STAGES", tuple((0, ε) for _, ε in qkv_span._STAGES))
    assert found.mean() > psnr(QkvSpan(steps=100)(seen), x).mean() + 1


def test_a_rank_of_no_more_than_the_tokens_says_nothing(sixteen: VictimModel, crops: Tensor) -> None:
    seen = seen_of(sixteen, crops[:2].float(), rank=16)
    assert QkvSpan().beyond(seen) == "N + 1 = 17 ≥ r = 16"
    with pytest.warns(PrivlabWarning, match=r"1.*17.*16.*nothing"):
        made = QkvSpan()(seen)
    assert_close(made, sixteen.mean.expand(2, 3, 16, 16))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"trains": "all"}, "behind a frozen embedding, and here client.trains=all"),
        ({"trains": "adapters"}, "client.trains=adapters"),
        ({"trains": "lora", "steps": 2}, "one step of SGD, and here there are 2 steps"),
    ],
)
def test_updates_that_it_does_not_read(settings: dict[str, Any], reason: str) -> None:
    told = unread(QkvSpan, Client(**settings))
    assert told is not None
    assert told.startswith("Attack 'qkv-span' reads the update of ")
    assert reason in told
    assert unread(QkvSpan, Client(trains="lora", rank=64)) is None


def test_what_it_cannot_use_is_said_in_one_line(nine: VictimModel, crops: Tensor) -> None:
    with pytest.raises(PrivlabError, match=r"qkv-span.*1"):
        QkvSpan(steps=0)
    without = victim("cifar_vit_nope", img_size=12).model
    seen = seen_of(without, crops[:1, :, :12, :12].float(), rank=64)
    with pytest.raises(PrivlabError, match="embeddings"):
        QkvSpan()(seen)

"""`spear`: exact where an MLP has ReLU and few tokens, refused where it has not, and what GELU leaves of its zeros."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from privlab.attacks import Spear, TokenSeparation
from privlab.attacks.tokens import Mlp
from privlab.base import PrivlabError, PrivlabWarning
from privlab.images import Preprocessing, open_images
from privlab.metrics import psnr
from privlab.release import observe
from privlab.threat import Observation
from privlab.victims import VictimModel, victim

Model = Callable[..., VictimModel]
FEW = {"img_size": 8, "unknown": False}
"""N = 4 patches, and a class token."""


def seen_of(model: VictimModel, images: Tensor) -> Observation:
    return observe(model, images, torch.arange(len(images)), (*Spear.parameters, "patch_embed.proj.weight"))


def pictures(n: int, side: int = 8) -> Tensor:
    return torch.rand(n, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def planted(seed: int = 0, tokens: int = 6, width: int = 16, hidden: int = 120) -> tuple[Mlp, Tensor, Tensor]:
    """Return an MLP with ReLU, tokens u that it reads, and the gradients δ of its hidden units at them."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    one, zero = torch.ones(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    mlp = Mlp(one, zero, normal(hidden, width), 0.1 * normal(hidden), normal(width, hidden), nn.ReLU())
    u = normal(tokens, width)
    return mlp, u, ((u @ mlp.W1.mT + mlp.b1) > 0) * (normal(tokens, width) @ mlp.W2)


def found_of(mlp: Mlp, u: Tensor, δ: Tensor, rounds: int = 40, **options: Any) -> Tensor:
    settings = {"zeros": 0.2, "tolerance": 1e-6, "sure": 1e-3} | options
    draw = torch.Generator().manual_seed(3)
    return Spear(starts=1000, rounds=rounds, **settings)._disaggregate(mlp, δ.mT @ u, δ.sum(0), len(u), draw).u


def test_planted_tokens_come_back_with_their_lengths() -> None:
    mlp, u, δ = planted()
    found = found_of(mlp, u, δ)
    assert len(found) == len(u)
    nearest = torch.cdist(u, found).argmin(1)
    assert sorted(nearest.tolist()) == list(range(len(u)))
    assert_close(found[nearest], u, rtol=1e-6, atol=1e-6)


def test_no_token_has_zeros_for_nine_in_ten() -> None:
    assert len(found_of(*planted(), zeros=0.9, rounds=3)) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_images_of_a_victim_with_relu_are_exact(tiny_model: Model, dtype: torch.dtype) -> None:
    model = tiny_model(act_layer=nn.ReLU, **FEW).to(dtype)
    images = pictures(1).to(dtype)
    seen = seen_of(model, images)
    attack = Spear(starts=512)
    assert attack.beyond(seen) is None
    made = attack(seen)
    assert made.tokens is not None
    assert made.tokens.tolist() == [5]
    assert psnr(made.images, images).min() > 100


def test_gelu_has_no_zeros_and_is_refused(tiny_model: Model) -> None:
    seen = seen_of(tiny_model(**FEW), pictures(1))
    assert Spear().beyond(seen) == "GELU leaves no exact zeros in a gradient"
    with pytest.raises(PrivlabError, match=r"MLP.*ReLU.*GELU"):
        Spear()(seen)


def test_missing_tokens_are_said(tiny_model: Model) -> None:
    model = tiny_model(act_layer=nn.ReLU, **FEW)
    seen = seen_of(model, pictures(1))
    with pytest.warns(PrivlabWarning, match=r"0.*5.*tokens"):
        made = Spear(starts=1, rounds=1)(seen)
    assert made.tokens is not None
    assert made.tokens.tolist() == [0]
    narrow = tiny_model(act_layer=nn.ReLU, embed_dim=4, num_heads=1, **FEW)
    with pytest.warns(PrivlabWarning, match=r"0.*5.*tokens"):
        Spear()(seen_of(narrow, pictures(1)))


@pytest.mark.parametrize("name", ["starts", "rounds", "inner", "sharpen", "tolerance", "sure", "zeros"])
def test_what_it_refuses(name: str) -> None:
    options: dict[str, Any] = {name: -1.0 if name in ("tolerance", "sure", "zeros") else -1}
    with pytest.raises(PrivlabError, match=f"{name} of spear must be"):
        Spear(**options)


@contextmanager
def swapped(model: VictimModel, act: type[nn.Module]) -> Iterator[None]:
    """Put another activation into all MLPs of a victim."""
    mlps = [model.vit.get_submodule(f"blocks.{i}.mlp") for i in range(len(model.vit.blocks))]
    before = [mlp.get_submodule("act") for mlp in mlps]
    for mlp in mlps:
        mlp.add_module("act", act())
    try:
        yield
    finally:
        for mlp, old in zip(mlps, before, strict=True):
            mlp.add_module("act", old)


def zero_share(model: VictimModel, images: Tensor, least: float) -> float:
    """Return the share of δ's entries, of the first MLP's hidden units, below a share of each token's largest one."""
    taps: list[Tensor] = []
    layer = model.vit.get_submodule("blocks.0.mlp.fc1")
    handle = layer.register_full_backward_hook(lambda _, __, out: taps.append(out[0]))
    model.requires_grad_(True)
    nn.functional.cross_entropy(model(images), torch.arange(len(images))).backward()
    model.zero_grad()
    handle.remove()
    δ = taps[0].abs()
    return float((δ <= least * δ.amax(-1, keepdim=True)).double().mean())


def side_of(name: str, side: int, shared: Callable[[str], Path]) -> VictimModel:
    weights = str(shared("weights/vit_tiny_patch16_224.safetensors")) if name == "vit_ti" else "auto"
    return victim(name, img_size=side, weights=weights).model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
@pytest.mark.parametrize(("name", "side"), [("cifar_vit", 12), ("vit_ti", 48)])
def test_trained_weights_with_relu_in_the_place_of_gelu(
    name: str, side: int, shared: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """N = 9 patches and a class token: the figures of docs/studies/baselines.md, of held-out photographs."""
    caplog.set_level(logging.INFO)
    model = side_of(name, side, shared)
    cut = Preprocessing(size=(side, side), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic")
    folder = open_images(str(shared("data/imagenet_samples")))
    images = torch.stack([cut(image.pixels) for i, image in enumerate(folder) if i % 125 == 22 and image.pixels])
    log = logging.getLogger(__name__)
    for act in (nn.GELU, nn.ReLU):
        with swapped(model, act):
            shares = [zero_share(model, images, least) for least in (0.0, 1e-6, 1e-4, 1e-2)]
            log.info("%s, %s: share of δ at or below 0, 1e-6, 1e-4, 1e-2 of the largest: %s", name, act, shares)
            assert (shares[1] > 0.1) == (act is nn.ReLU)
    model.requires_grad_(False)
    with swapped(model, nn.ReLU):
        seen = seen_of(model, images)
        for attack in (Spear(rounds=60), TokenSeparation()):
            made = attack(seen)
            scores = psnr(made.images, images)
            assert made.tokens is not None
            found = made.tokens.tolist()
            log.info("%s, %s: tokens %s of 10, PSNR %s", name, attack.name, found, scores.tolist())
            assert found == [10] * len(images)
            assert scores.min() > 100

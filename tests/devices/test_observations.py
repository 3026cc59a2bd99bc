"""What clients release on a card is what they release on the CPU: gradients and features under every defense, files."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from privlab.attacks import PatchGradient
from privlab.attacks.weights.weight_matching import WeightMatching, WeightObservation
from privlab.defenses import DEFENSES
from privlab.keys import ModelShape, apply_key, new_key
from privlab.release import (
    GradientFile,
    observation,
    observe,
    observe_features,
    predictions,
    read_gradient_file,
    released_parameters,
    send,
    told_labels,
)
from privlab.release.capture import capture
from privlab.threat import Draws, Stack, acts_on
from privlab.victims import VictimModel

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")

Off = Callable[[Any], Any]
Out = Callable[[], AbstractContextManager[Any]]
OPTIONS: dict[str, dict[str, Any]] = {"gradient-noise": {"multiplier": 0.01}, "gaussian-noise": {"std": 0.1}}


@pytest.fixture
def victims(tiny_model: Callable[..., VictimModel], card: Any) -> tuple[VictimModel, VictimModel]:
    """Return the same victim on the CPU and on the card."""
    return tiny_model(), tiny_model().to("cuda:0")


def draws(n: int) -> list[Generator]:
    """Return fresh generators, always of the CPU: what is drawn does not depend on the device."""
    return [Generator().manual_seed(i) for i in range(n)]


def release(model: VictimModel, crops: Tensor, name: str) -> dict[str, Tensor]:
    """Return everything that three clients release under a defense, and what the client itself gets."""
    images, labels = crops[:3].to(model.mean), torch.tensor([1, 4, 2], device=model.mean.device)
    part = DEFENSES[name](**OPTIONS.get(name, {}))
    stack = Stack((part,))
    feed = stack.feed(images, model.patch, draws(3), 3, draws(2)[1])
    released: dict[str, Tensor] = {"fed": feed.images, "order": feed.order, "moved": feed.moved}
    if acts_on(type(part)) != "features":
        seen = observe(model, feed, labels, sorted(released_parameters(model)), (part,), draws(3))
        together = observe(model, feed, labels, ["pos_embed"], (part,), draws(1), images_per_release=3)
        released |= {**seen.gradients, "together": together.gradients["pos_embed"]}
    if acts_on(type(part)) != "gradients":
        sent = send(model, feed, stack, Draws(images=draws(3), batch=draws(1)[0], model=draws(2)[1]))
        seen = observe_features(model, sent, stack, crops[5:8].to(model.mean))
        released |= {"features": seen.features, "source": sent.source, "logits": predictions(model, sent)}
    return released


COPIES = {
    "svt-privacy": {"defenses/gradients/svt_privacy.py:_of_one"},  # the loop ends by the count of accepted entries
    "adaptive-clipping": {"defenses/gradients/adaptive_clipping.py:release"},  # all norms at once, which bits tell
}
"""Where a defense may copy a tensor to the CPU."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFENSES)
def test_the_card_releases_the_same(
    victims: tuple[VictimModel, VictimModel], crops: Tensor, card: Any, off: Off, no_card: Out, name: str
) -> None:
    cpu, gpu = victims
    with sdpa_kernel(SDPBackend.MATH):
        with no_card():
            wanted = release(cpu, crops, name)
        found = release(gpu, crops, name)
    assert found.keys() == wanted.keys()
    assert [name for name, released in found.items() if not released.is_cuda] == []
    assert [name for name, released in off(found).items() if not torch.equal(released, wanted[name])] == []
    waits = {place for kind, place in card.waits if kind == "download" and place != "test"}
    assert waits == COPIES.get(name, set())


def test_labels_are_read_on_the_card(victims: tuple[VictimModel, VictimModel], crops: Tensor, off: Off) -> None:
    _, gpu = victims
    images = crops[:3].to(gpu.mean)
    for labels, B in (([1, 4, 2], 1), ([1, 4, 4], 3)):
        names = ["head.weight", "head.bias"]
        seen = observe(gpu, images, torch.tensor(labels, device=images.device), names, images_per_release=B)
        released = {name: g[0] for name, g in seen.gradients.items()}
        told = told_labels(gpu.vit.head, released, B)
        assert told is not None
        assert sorted(told.labels) == labels[:B]
        by_bias = told_labels(gpu.vit.head, {"head.bias": released["head.bias"]}, B)
        assert by_bias is not None
        assert len(by_bias.labels) == B


def test_a_gradient_captured_on_the_card_is_attacked_there(
    victims: tuple[VictimModel, VictimModel], crops: Tensor, off: Off, no_card: Out, tmp_path: Path
) -> None:
    cpu, gpu = victims

    def captured(model: VictimModel, path: Path) -> GradientFile:
        image, label = crops[:1].to(model.mean), torch.tensor([3], device=model.mean.device)
        vit = model.vit.requires_grad_(True)
        F.cross_entropy(vit(model.normalise(image)), label).backward()
        capture(vit, path, batch_size=1)
        vit.requires_grad_(False).zero_grad()
        return read_gradient_file(path)

    with sdpa_kernel(SDPBackend.MATH):
        with no_card():
            wanted = captured(cpu, tmp_path / "cpu.safetensors")
        found = captured(gpu, tmp_path / "gpu.safetensors")
    assert found.gradients.keys() == wanted.gradients.keys()
    assert all(torch.equal(g, wanted.gradients[name]) for name, g in found.gradients.items())
    seen = observation(found, gpu)
    assert all(g.is_cuda for g in seen.gradients.values())
    with no_card():
        expected = PatchGradient()(observation(wanted, cpu))
    assert torch.equal(off(PatchGradient()(seen)), expected)


def test_a_key_is_recovered_from_weights_on_the_card(victims: tuple[VictimModel, VictimModel], off: Off) -> None:
    _, gpu = victims
    state, shape = gpu.vit.state_dict(), ModelShape.of(gpu.vit)
    key = new_key(shape)
    locked = apply_key(state, key, shape)
    assert all(tensor.is_cuda for tensor in locked.values())
    found = WeightMatching()(WeightObservation(locked, state, shape))
    assert torch.equal(off(found.residual), key.residual)

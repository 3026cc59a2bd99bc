"""What a file holds instead of a gradient, told from its entries: optimisers' steps are, and true gradients never."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from privlab.release import decay_of, labels_of_signs, partial_training, sgd_rate, signs_of, update_in
from privlab.victims import VictimModel, victim

Gradients = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(scope="module")
def model() -> VictimModel:
    """Return the zoo's trained ViT for CIFAR-10."""
    return victim("cifar_vit").model


@pytest.fixture(scope="module")
def images(photographs: Callable[[int, int], Tensor]) -> Tensor:
    return photographs(3, 32)


def gradients(model: VictimModel, x: Tensor, y: Tensor, loss: Loss = F.cross_entropy) -> Gradients:
    vit = copy.deepcopy(model.vit).requires_grad_(True)
    loss(vit(model.normalise(x)), y).backward()
    return {name: p.grad for name, p in vit.named_parameters() if p.grad is not None}


def difference(model: VictimModel, x: Tensor, y: Tensor, make: Callable[..., torch.optim.Optimizer]) -> Gradients:
    """Return θ_after − θ_before of one step of an optimiser."""
    vit = copy.deepcopy(model.vit).requires_grad_(True)
    F.cross_entropy(vit(model.normalise(x)), y).backward()
    make(vit.parameters()).step()
    before = dict(model.vit.named_parameters())
    return {name: p.detach() - before[name] for name, p in vit.named_parameters()}


def binary(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[1]).float())


LOSSES: dict[str, Loss] = {
    "cross-entropy": F.cross_entropy,
    "smoothed": partial(F.cross_entropy, label_smoothing=0.1),
    "binary": binary,
}


def clipped(g: Gradients, norm: float) -> Gradients:
    whole = torch.stack([t.norm() for t in g.values()]).norm()
    return {name: t * (norm / whole).clamp(max=1) for name, t in g.items()}


def noisy(g: Gradients) -> Gradients:
    draw = torch.Generator().manual_seed(0)
    return {name: t + 1e-3 * torch.randn(t.shape, generator=draw) for name, t in clipped(g, 1.0).items()}


def quantised(g: Gradients, levels: int) -> Gradients:
    return {name: (t / t.abs().max() * levels).round() for name, t in g.items()}


def pruned(g: Gradients, kept: float) -> Gradients:
    least = {name: t.abs().flatten().quantile(1 - kept) for name, t in g.items()}
    return {name: t.where(t.abs() >= least[name], 0) for name, t in g.items()}


CHANGES: dict[str, Callable[[Gradients], Gradients]] = {
    "as it is": lambda g: g,
    "clipped": lambda g: clipped(g, 0.1),
    "float16": lambda g: {name: t.half() for name, t in g.items()},
    "bfloat16": lambda g: {name: t.bfloat16() for name, t in g.items()},
    "noisy": noisy,
    "pruned": lambda g: pruned(g, 0.1),
    "eight bits": lambda g: quantised(g, 127),
    "four bits": lambda g: quantised(g, 7),
    "summed": lambda g: {name: 64 * t for name, t in g.items()},
    "zero": lambda g: {name: torch.zeros_like(t) for name, t in g.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_true_gradient_is_nothing_else(model: VictimModel, images: Tensor, loss: str, change: str) -> None:
    """Of one image or of three, labelled as the model has it or otherwise, and whatever was done to it."""
    own = model(images).argmax(1)
    for size, labels in ((1, own), (1, (own + 3) % 10), (3, own), (3, torch.tensor([1, 1, 4]))):
        g = CHANGES[change](gradients(model, images[:size], labels[:size], LOSSES[loss]))
        assert update_in(g, model, size, "f") is None


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("optimiser", [torch.optim.Adam, torch.optim.AdamW])
def test_the_first_step_of_adam(
    model: VictimModel, images: Tensor, optimiser: Callable[..., Any], rate: float, decay: float
) -> None:
    y = torch.tensor([2, 5, 5])
    for size in (1, 3):
        d = difference(model, images[:size], y[:size], partial(optimiser, lr=rate, weight_decay=decay))
        signs = signs_of(d)
        assert signs is not None
        assert signs.magnitude == pytest.approx(rate, rel=0.02)
        assert f"Adam or AdamW (learning rate about {rate:.2g})" in str(update_in(d, None, size, "f"))
        assert labels_of_signs(d["head.bias"], size) == sorted({*y[:size].tolist()})
        halves = {name: t.half() * 64 for name, t in d.items()}
        assert signs_of(halves) is not None


def test_layers_may_have_rates_of_their_own(model: VictimModel, images: Tensor) -> None:
    d = difference(model, images[:1], torch.tensor([2]), partial(torch.optim.Adam, lr=1e-3))
    decayed = {name: t * 0.75 ** (i % 5) for i, (name, t) in enumerate(d.items())}
    assert signs_of(decayed) is not None


def test_signs_alone_are_no_step_of_adam(model: VictimModel, images: Tensor) -> None:
    g = gradients(model, images[:1], torch.tensor([2]))
    told = update_in({name: t.sign() for name, t in g.items()}, model, 1, "f")
    assert told is not None
    assert told.startswith(
        "f looks like a gradient quantised to signs, not like a whole one: in each parameter 100.0 %"
    )
    ternary = {name: (t / t.abs().max() + 0.5).floor() for name, t in g.items()}
    assert signs_of(ternary) is not None


@pytest.mark.parametrize(("rate", "decay"), [(0.1, 0.0), (0.1, 1e-2), (1e-2, 5e-2), (1e-3, 0.0)])
def test_a_step_of_sgd(model: VictimModel, images: Tensor, rate: float, decay: float) -> None:
    """Its rate and its decay are read from the head alone."""
    head = model.vit.head
    assert isinstance(head, nn.Linear)
    d = difference(model, images[:1], torch.tensor([2]), partial(torch.optim.SGD, lr=rate, weight_decay=decay))
    found = decay_of(d, head)
    assert found == (pytest.approx(-rate * decay, rel=0.01) if decay else None)
    assert sgd_rate(d, head, found or 0.0) == pytest.approx(rate, rel=0.01)
    told = update_in(d, model, 1, "f")
    assert told is not None
    assert f"one step of SGD (learning rate about {rate:.2g})" in told
    assert ("Or divide the file by" in told) == (decay == 0)
    assert update_in(d, None, 1, "f") is None  # without the weights it cannot be told


def test_decay_of_several_images(model: VictimModel, images: Tensor) -> None:
    d = difference(model, images, torch.tensor([2, 5, 5]), partial(torch.optim.SGD, lr=0.1, weight_decay=0.01))
    told = update_in(d, model, 3, "f")
    assert told is not None
    assert told.startswith("f holds weights beside a gradient: the sums of the head's rows are -0.001 times those of")


@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(-10, 10), λ=st.floats(1e-3, 1) | st.floats(-1, -1e-3))
def test_the_decay_is_exact(seed: int, scale: float, λ: float) -> None:
    """Of aG + λθ, for any G whose rows add up to zero."""
    torch.manual_seed(seed)
    head = nn.Linear(16, 5).double()
    G = torch.randn(5, 16, dtype=torch.float64)
    G -= G.mean(0)
    assert decay_of({"head.weight": scale * G + λ * head.weight.detach()}, head) == pytest.approx(λ, rel=1e-9)
    assert decay_of({"head.weight": scale * G}, head) is None
    assert decay_of({}, head) is None


def test_labels_of_signs() -> None:
    """Up to B entries of one sign are labels where more than 2 B have the other; otherwise nothing is told."""
    h = torch.tensor([0.1, 0.2, -0.5, 0.1, 0.1])
    assert labels_of_signs(h, 1) == labels_of_signs(-h, 1) == [2]
    assert labels_of_signs(h, 2) is None
    assert labels_of_signs(h[1:3], 1) is None
    assert labels_of_signs(h.abs(), 1) is None
    assert labels_of_signs(torch.tensor([-1.0, -1, 1, 1, 1, 1, 1]), 2) == [0, 1]
    assert labels_of_signs(torch.tensor([-1.0, -1, 1, 1, 1, 1, 1]), 1) is None


def test_names_of_adapters() -> None:
    wanted = ["blocks.0.attn.qkv.weight", "head.weight", "head.bias", "pos_embed"]
    for name in (
        "base_model.model.blocks.0.attn.qkv.lora_A.weight",
        "blocks.0.attn.qkv.lora_B.default.weight",
        "blocks.0.attn.qkv.lora_A",
        "blocks.0.attn.qkv.lora_up.weight",
    ):
        told = partial_training([name, *wanted[:1]], wanted)
        assert told is not None
        assert told.startswith(
            f"holds LoRA's 1 adapters ({name}) beside blocks.0.attn.qkv.weight, and no gradient of 3 "
        )
    assert "alone (head.bias, head.weight), and no gradient of 2 of" in str(partial_training(wanted[1:3], wanted))
    assert "alone (head.bias), and" in str(partial_training(["base_model.model.head.bias"], wanted))
    for whole in (wanted, wanted[1:], ["explora_A.weight"], ["pos_embed"], []):
        assert partial_training(whole, wanted) is None
        assert partial_training(whole) is None

"""The losses of clients: their formulas, their private targets, and what attacks still know."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import PatchUpdate
from privlab.base import PrivlabError
from privlab.metrics import psnr
from privlab.release import gradient_capabilities, observe_updates, run_client, update_capabilities
from privlab.release.labels import label_of_update
from privlab.threat import Capability, Client, ClientData, client_loss, linear_loss, private_targets
from privlab.victims import VictimModel, victim

Model = Callable[..., VictimModel]
LOSSES = ("cross-entropy", "focal", "binary", "binary-focal", "regression", "l1", "smooth-l1", "contrastive", "dino")


def test_each_loss_is_its_formula() -> None:
    o, t = torch.tensor([[1.0, -2.0], [0.5, 3.0]]).double(), torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()

    def log_sigmoid(x: Tensor) -> Tensor:
        return -torch.log1p(torch.exp(-x))

    binary = -(t * log_sigmoid(o) + (1 - t) * log_sigmoid(-o)).mean()
    assert_close(client_loss(Client(loss="binary"), o, t), binary)
    assert_close(client_loss(Client(loss="regression"), o, t), (o - t).square().sum() / 4)
    unit = o / o.square().sum(1, keepdim=True).sqrt()
    pairs = [
        log_sigmoid((1 if i == j else -1) * (10 * unit[i] @ t[j] - 10)) for i in range(2) for j in range(2)
    ]  # t has unit rows
    assert_close(client_loss(Client(loss="contrastive"), o, t), -torch.stack(pairs).sum() / 2)
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).double()
    dino = -(p * (o / 0.1 - (o / 0.1).exp().sum(1, keepdim=True).log())).sum(1).mean()
    assert_close(client_loss(Client(loss="dino"), o, p), dino)
    e = (o - t).abs()
    assert_close(client_loss(Client(loss="l1"), o, t), e.sum() / 4)
    assert_close(client_loss(Client(loss="smooth-l1"), o, t), (e.square() / 2).where(e < 1, e - 0.5).sum() / 4)
    smooth = Client(label_smoothing=0.2)
    y = torch.tensor([0, 1])
    soft = 0.8 * t + 0.1
    logs = o - o.exp().sum(1, keepdim=True).log()
    assert_close(client_loss(smooth, o, y), -(soft * logs).sum(1).mean())


def test_weights_and_focal_losses_are_their_formulas() -> None:
    o, y = torch.tensor([[1.0, -2.0, 0.3], [0.5, 3.0, -1.0]]).double(), torch.tensor([2, 0])
    w, p = torch.tensor([0.5, 2.0, 3.0]).double(), o.softmax(1)
    of_labels, of_true = w[y], p[torch.arange(2), y]
    weighted = Client(class_weights=(0.5, 2.0, 3.0))
    assert_close(client_loss(weighted, o, y), -(of_labels * of_true.log()).sum() / of_labels.sum())
    assert_close(client_loss(weighted, o[:1], y[:1]), client_loss(Client(), o[:1], y[:1]))  # they cancel for one image
    focal = Client(loss="focal", gamma=1.5, class_weights=(0.5, 2.0, 3.0))
    assert_close(client_loss(focal, o, y), -(of_labels * (1 - of_true) ** 1.5 * of_true.log()).mean())
    assert_close(client_loss(Client(loss="focal", gamma=0.0), o, y), client_loss(Client(), o, y))
    t, q = F.one_hot(y, 3).double(), o.sigmoid()
    assert_close(client_loss(Client(loss="binary", pos_weight=(0.5, 2.0, 3.0)), o, t), binary_of(q, t, w).mean())
    one = Client(loss="binary", pos_weight=(4.0,))
    assert_close(client_loss(one, o, t), binary_of(q, t, torch.tensor(4.0)).mean())
    of_each = (1 - q.where(t == 1, 1 - q)) ** 2 * binary_of(q, t, torch.tensor(1.0))
    assert_close(client_loss(Client(loss="binary-focal"), o, t), of_each.mean())
    shares = torch.tensor(0.3).where(t == 1, torch.tensor(0.7))
    assert_close(client_loss(Client(loss="binary-focal", alpha=0.3), o, t), (shares * of_each).mean())


def binary_of(q: Tensor, t: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted binary loss of each entry, with probabilities q and targets t."""
    return -(weight * t * q.log() + (1 - t) * (1 - q).log())


def test_every_loss_is_linear_in_a_step(tiny_model: Model, crops: Tensor) -> None:
    """∂ℓ/∂θ = Σ (∂o_i/∂θ)ᵀ ∂ℓ/∂o_i, also of losses that compare images with each other."""
    model, x = tiny_model(), crops[:2].double()
    for loss in LOSSES:
        client = Client(loss=loss, lr=0.1, images=2, batch_size=2, shuffle=False)
        o = model(x).detach().requires_grad_()
        targets = private_targets(model, client, x, torch.tensor([3, 1]), Generator().manual_seed(0))
        (h,) = torch.autograd.grad(client_loss(client, o, targets), o)
        linear = replace(client, loss=linear_loss)
        moved = [
            run_client(model, each, ClientData(x, given, Generator().manual_seed(0)))
            for each, given in ((client, torch.tensor([3, 1])), (linear, 2 * h))
        ]
        for name, update in moved[0].items():
            assert_close(moved[1][name], update, rtol=1e-6, atol=1e-12)


def test_numeric_targets_are_taken_as_they_are(tiny_model: Model, crops: Tensor) -> None:
    for count in (1, 3):
        model = tiny_model(num_classes=count)
        y = torch.arange(2 * count).view(2, count) / 3
        for loss in ("regression", "l1", "smooth-l1"):
            assert_close(private_targets(model, Client(loss=loss), crops[:2], y, Generator()), y.double())
    with pytest.raises(PrivlabError, match=r"client\.loss=l1 must be a row of 3 numbers.*Found 1"):
        private_targets(model, Client(loss="l1"), crops[:2], torch.ones(2, 1), Generator())


def test_a_function_is_a_loss(tiny_model: Model, crops: Tensor) -> None:
    """It gets the logits and the labels or targets that are given."""
    model, data = tiny_model(), ClientData(crops[:1].double(), torch.tensor([3]), Generator())

    def own(logits: Tensor, targets: Tensor) -> Tensor:
        assert targets.tolist() == [3]
        return F.cross_entropy(logits, targets)

    assert Client(loss=own).loss_name == "own"
    ours, theirs = (run_client(model, Client(loss=loss), data) for loss in (own, "cross-entropy"))
    assert all(torch.equal(ours[name], u) for name, u in theirs.items())


WRONG: dict[str, tuple[Callable[..., object], str]] = {
    "nan": (lambda o, y: o.sum() * torch.nan, "Found nan"),
    "vector": (lambda o, y: F.cross_entropy(o, y, reduction="none"), r"shape \(1,\)"),
    "argument": (lambda o, y, weight: o.sum(), "failed.*weight"),
    "number": (lambda o, y: 0.5, "Found float"),
    "constant": (lambda o, y: o.detach().sum(), "does not depend"),
    "error": (lambda o, y: {}[1], "failed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_is_no_loss_is_one_line(tiny_model: Model, crops: Tensor, name: str) -> None:
    function, right = WRONG[name]
    data = ClientData(crops[:1].double(), torch.tensor([3]), Generator())
    with pytest.raises(PrivlabError, match=right) as found:
        run_client(tiny_model(), Client(loss=function), data)
    assert "\n" not in str(found.value)


def test_weights_of_another_number_of_classes_are_one_line(tiny_model: Model, crops: Tensor) -> None:
    weights: Any = (1.0, 2.0)
    for loss, name in (("focal", "class_weights"), ("binary", "pos_weight")):
        with pytest.raises(PrivlabError, match=rf"client\.{name} must be one number for each.* 7 classes\. Found 2"):
            private_targets(
                tiny_model(), Client(loss=loss, **{name: weights}), crops[:1], torch.tensor([0]), Generator()
            )


def test_targets_are_the_loss_s_own(tiny_model: Model, crops: Tensor) -> None:
    model, x, y = tiny_model(), crops[:3].double(), torch.tensor([1, 5, 0])

    def draw() -> Generator:
        return Generator().manual_seed(4)

    assert private_targets(model, Client(), x, y, draw()) is y
    assert_close(private_targets(model, Client(loss="binary"), x, y, draw()).argmax(1), y)
    drawn = private_targets(model, Client(loss="regression"), x, y, draw())
    assert drawn.shape == (3, 7)
    assert torch.equal(drawn, private_targets(model, Client(loss="contrastive"), x, y, draw()))
    teacher = private_targets(model, Client(loss="dino"), x, y, draw())
    assert_close(teacher, (model(x.flip(3)) / 0.04).softmax(1))


@pytest.mark.parametrize("loss", LOSSES)
def test_closed_forms_need_no_labels(loss: str, tiny_model: Model, crops: Tensor) -> None:
    model, x = tiny_model(), crops[5:6].double()
    client = Client(loss=loss, lr=0.1)
    data = ClientData(x, torch.tensor([3]), Generator().manual_seed(0))
    seen = observe_updates(model, client, [data])
    assert (Capability.CLASS_LABELS in seen.grants) == (loss == "cross-entropy")
    assert label_of_update(seen) == (3 if client.has_labels else None)
    assert psnr(PatchUpdate()(seen), x).min() > 100


def test_class_labels_are_granted_by_gradients_and_by_cross_entropy(tiny_model: Model) -> None:
    model = tiny_model()
    assert Capability.CLASS_LABELS in gradient_capabilities(model)
    assert Capability.CLASS_LABELS in update_capabilities(model, Client())
    assert Capability.CLASS_LABELS not in update_capabilities(model, Client(loss="dino"))


OF_OTHER_LOSSES: list[tuple[str, Any, str]] = [
    ("class_weights", (1.0, 2.0), "binary"),
    ("pos_weight", (2.0,), "cross-entropy"),
    ("gamma", 1.0, "cross-entropy"),
    ("alpha", 0.5, "focal"),
]
OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("class_weights", (1.0, -2.0), "focal"),
    ("class_weights", (0.0, 0.0), "focal"),
    ("pos_weight", (math.nan,), "binary"),
    ("gamma", -1.0, "focal"),
    ("alpha", 1.5, "binary-focal"),
]


def test_mistakes_are_one_line(tiny_vit: Callable[..., VisionTransformer], crops: Tensor) -> None:
    with pytest.raises(PrivlabError, match="Unknown loss 'mse'"):
        Client(loss="mse")
    for name, value, loss in OF_OTHER_LOSSES:
        with pytest.raises(PrivlabError, match=rf"client\.{name}=.*client\.loss={loss}\."):
            Client(loss=loss, **{name: value})
    for name, value, loss in OUT_OF_RANGE:
        with pytest.raises(PrivlabError, match=rf"client\.{name} must be"):
            Client(loss=loss, **{name: value})
    with pytest.raises(PrivlabError, match=r"label_smoothing=0\.1.*cross-entropy.*client\.loss=dino"):
        Client(loss="dino", label_smoothing=0.1)
    bare = victim(tiny_vit(num_classes=0)).model
    for loss in ("cross-entropy", "focal", "binary", "binary-focal"):
        with pytest.raises(PrivlabError, match=r"without classifier \(num_classes = 0\)"):
            private_targets(bare, Client(loss=loss), crops[:1], torch.tensor([0]), Generator())
    assert private_targets(bare, Client(loss="contrastive"), crops[:1], torch.tensor([0]), Generator()).shape == (1, 64)

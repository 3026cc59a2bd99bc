"""The losses of clients: their formulas, their private targets, and what attacks still know."""

from collections.abc import Callable

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.attacks import PatchUpdate
from privlab.base import PrivlabError
from privlab.metrics import psnr
from privlab.release import gradient_capabilities, observe_updates, update_capabilities
from privlab.release.labels import label_of_update
from privlab.threat import Capability, Client, ClientData, client_loss, private_targets
from privlab.victims import VictimModel, victim

Model = Callable[..., VictimModel]
LOSSES = ("cross-entropy", "binary", "contrastive", "dino", "regression")


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
    smooth = Client(label_smoothing=0.2)
    y = torch.tensor([0, 1])
    soft = 0.8 * t + 0.1
    logs = o - o.exp().sum(1, keepdim=True).log()
    assert_close(client_loss(smooth, o, y), -(soft * logs).sum(1).mean())


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
    assert label_of_update(seen) == (3 if loss in ("cross-entropy", "binary") else None)
    assert psnr(PatchUpdate()(seen), x).min() > 100


def test_class_labels_are_granted_by_gradients_and_by_cross_entropy(tiny_model: Model) -> None:
    model = tiny_model()
    assert Capability.CLASS_LABELS in gradient_capabilities(model)
    assert Capability.CLASS_LABELS in update_capabilities(model, Client())
    assert Capability.CLASS_LABELS not in update_capabilities(model, Client(loss="dino"))


def test_mistakes_are_one_line(tiny_vit: Callable[..., VisionTransformer], crops: Tensor) -> None:
    with pytest.raises(PrivlabError, match="Unknown loss 'mse'"):
        Client(loss="mse")
    with pytest.raises(PrivlabError, match=r"label_smoothing=0\.1.*cross-entropy.*client\.loss=dino"):
        Client(loss="dino", label_smoothing=0.1)
    bare = victim(tiny_vit(num_classes=0)).model
    for loss in ("cross-entropy", "binary"):
        with pytest.raises(PrivlabError, match=r"without classifier \(num_classes = 0\)"):
            private_targets(bare, Client(loss=loss), crops[:1], torch.tensor([0]), Generator())
    assert private_targets(bare, Client(loss="contrastive"), crops[:1], torch.tensor([0]), Generator()).shape == (1, 64)

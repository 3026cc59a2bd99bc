"""Audits of updates of any loss: the image is proven, and what its target was is stated where it can be known."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import privlab
from privlab.report.run import Run
from privlab.threat import Client

Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHTS = torch.tensor([4.0, 1.0, 0.5])


@pytest.fixture(scope="module")
def photograph() -> Tensor:
    from skimage.data import astronaut

    return torch.from_numpy(astronaut()[100:132, 200:232]).permute(2, 0, 1)[None] / 255


def audited(photograph: Tensor, outputs: int, loss: Loss, target: Any, stated: Client) -> Run:
    """Return the audit of one step of SGD by plain PyTorch."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=outputs)
    before = copy.deepcopy(model.state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    loss(model((photograph - 0.5) / 0.5), torch.tensor(target)).backward()
    optimiser.step()
    weights = (before, model.state_dict())
    return privlab.audit_update(*weights, model=model, client=replace(stated, lr=0.05), attacks="patch-update")


def smooth(logits: Tensor, targets: Tensor) -> Tensor:
    return F.smooth_l1_loss(logits, targets)


def hinge(logits: Tensor, targets: Tensor) -> Tensor:
    return F.multi_margin_loss(logits, targets)


def weighted(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=WEIGHTS)


def of_class(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, weight=WEIGHTS)


AUDITS: dict[str, tuple[int, Loss, Any, Client, str]] = {
    "one number": (1, F.mse_loss, [[2.5]], Client(loss="regression"), r"target of client\.loss=regression: 2\.5$"),
    "numbers": (3, F.mse_loss, [[2.5, -1.0, 0.0]], Client(loss="regression"), "target.*: 2.5, -1,"),
    "a side": (1, F.l1_loss, [[2.5]], Client(loss="l1"), "target.*: above"),
    "smooth": (1, smooth, [[0.3]], Client(loss="smooth-l1"), "target.*: 0.3$"),
    "class weights": (3, of_class, [1], Client(), "labels given away.*: 1$"),
    "positive weights": (3, weighted, [[1.0, 0.0, 1.0]], Client(loss="binary"), "labels given away.*: 0, 2$"),
    "several labels": (
        3,
        F.binary_cross_entropy_with_logits,
        [[1.0, 0.0, 1.0]],
        Client(),
        "label: 1.00 of class 0, 1.00.* 2",
    ),
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", [name if name == "one number" else pytest.param(name, marks=SLOW) for name in AUDITS])
def test_an_image_is_proven_and_its_target_stated(photograph: Tensor, name: str) -> None:
    outputs, loss, target, stated, right = AUDITS[name]
    run = audited(photograph, outputs, loss, target, stated)
    assert run.leaks
    flags = run.results.facts["flags"]
    assert any(re.search(right, flag) for flag in flags), flags


WRONG: dict[str, tuple[int, Loss, Any, Client]] = {
    "numbers": (3, F.mse_loss, [[2.5, -1.0, 4.0]], Client()),
    "one number": (1, F.mse_loss, [[2.5]], Client()),
    "one number below": (1, F.mse_loss, [[-2.5]], Client()),
    "hinge": (3, hinge, [1], Client(loss="binary")),
    "label": (3, F.cross_entropy, [1], Client(loss="regression")),
}


@pytest.mark.parametrize("name", [name if name == "label" else pytest.param(name, marks=SLOW) for name in WRONG])
def test_a_loss_that_is_stated_wrongly_hides_nothing_and_names_no_label(photograph: Tensor, name: str) -> None:
    outputs, loss, target, stated = WRONG[name]
    run = audited(photograph, outputs, loss, target, stated)
    assert run.leaks
    assert not any("given away" in flag for flag in run.results.facts["flags"])
    assert not any("no image explains" in line for line in run.warnings)


def test_no_certificate_holds_after_several_steps_of_a_function(photograph: Tensor) -> None:
    """After one step of the same loss one does."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5)
    for steps, proven in ((1, True), (3, False)):
        after = copy.deepcopy(model)
        optimiser = torch.optim.SGD(after.parameters(), lr=0.05)
        for _ in range(steps):
            optimiser.zero_grad()
            hinge(after((photograph - 0.5) / 0.5), torch.tensor([3])).backward()
            optimiser.step()
        stated = Client(loss=hinge, lr=0.05, steps=steps)
        run = privlab.audit_update(model, after, model=model, client=stated, attacks="patch-update")
        (row,) = run.results.facts["attacks"]
        assert (row["proof"] == "update") is proven
        assert any("no certificate" in message for message in run.results.facts["warnings"]) is not proven


@pytest.mark.slow
@pytest.mark.parametrize("attacks", [None, "patch-update"])
def test_a_batch_that_is_not_stated_is_counted_by_its_labels(attacks: str | None) -> None:
    """An attack for one image that is named runs on one image."""
    from skimage.data import astronaut, chelsea

    torch.manual_seed(0)
    crops = [picture()[100:132, 200:232] for picture in (astronaut, chelsea)]
    photographs = torch.stack([torch.from_numpy(crop).permute(2, 0, 1) for crop in crops]) / 255
    before = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5)
    after = copy.deepcopy(before)
    F.cross_entropy(after((photographs - 0.5) / 0.5), torch.tensor([1, 3])).backward()
    torch.optim.SGD(after.parameters(), lr=0.05).step()
    weights = (before.state_dict(), after.state_dict())
    run = privlab.audit_update(*weights, model=before, client=Client(lr=0.05), attacks=attacks)
    taken = [line for line in run.warnings if "client.batch_size=2 are taken" in line]
    assert (bool(run.leaks), len(taken)) == ((True, 1) if attacks is None else (False, 0))

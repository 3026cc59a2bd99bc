"""Losses that are functions, and numeric targets, in whole runs and in single observations."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import privlab
from privlab.base import PrivlabError
from privlab.report.tables import origins
from privlab.threat import Client, Observation, Update

Vit = Callable[..., VisionTransformer]


def margin(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.multi_margin_loss(logits, targets)


def cubic(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits - targets).abs().pow(3).mean()


def test_a_run_with_a_function_states_its_source(tiny_vit: Vit, crops: Tensor, tmp_path: Path) -> None:
    release = Update(Client(loss=margin, lr=0.1))
    run = privlab.attack(
        tiny_vit().float(),
        crops[60:61],
        [3],
        release=release,
        metrics="psnr",
        attacks="patch-update",
        out=tmp_path / "a",
    )
    row = run.records[run.records.attack == "patch-update"].iloc[0]
    assert row.explained > 0.9975
    facts = json.loads((tmp_path / "a" / "run.json").read_text())
    stated = facts["specification"]["own_loss"]
    assert stated["name"] == "margin"
    assert len(stated["source_sha256"]) == 64
    assert stated["source_sha256"] in row.conditions
    loaded = privlab.load(tmp_path / "a")
    assert loaded.spec.words.own_loss is None  # the function is not in the run, which says its name
    (line,) = origins(loaded.results.facts, loaded.spec)
    assert line.endswith("loss margin")
    other = Update(Client(loss=cubic, lr=0.1))
    with pytest.raises(PrivlabError, match="another run"):
        privlab.attack(
            tiny_vit().float(),
            crops[60:61],
            [3],
            release=other,
            metrics="psnr",
            attacks="patch-update",
            out=tmp_path / "a",
        )


@pytest.mark.parametrize("loss", ["regression", "l1", "smooth-l1", cubic])
@pytest.mark.parametrize("outputs", [1, 3])
def test_numbers_are_observed_as_they_are_given(
    tiny_vit: Vit, crops: Tensor, loss: str | Callable[..., Tensor], outputs: int
) -> None:
    """The gradient of the squared error at the logits is 2 (z − y) / K."""
    model, image = privlab.victim(tiny_vit(num_classes=outputs)), crops[60:61].double()
    y = torch.tensor([[0.5, -3.0, 9.0]])[:, :outputs]
    seen = privlab.observe(model, image, y, release=Update(Client(loss=loss, lr=1.0)))
    assert isinstance(seen, Observation)
    z = model.model(image).detach()
    powers = {"regression": 2 * (z - y), "l1": (z - y).sign(), "smooth-l1": (z - y).clamp(-1, 1)}
    right = powers.get(str(loss), 3 * (z - y) * (z - y).abs()) / outputs
    torch.testing.assert_close(seen.gradients["head.bias"], right, atol=1e-6, rtol=1e-6)
    run = privlab.attack(
        tiny_vit(num_classes=outputs),
        image,
        y.tolist(),
        release=Update(Client(loss=loss)),
        metrics="psnr",
        attacks="patch-update",
    )
    found = run.records[run.records.attack == "patch-update"].explained.min()
    assert found > 0.9975


def test_bad_numbers_are_one_line(tiny_vit: Vit, crops: Tensor) -> None:
    model, release = privlab.victim(tiny_vit(num_classes=3)), Update(Client(loss="regression"))
    for labels, right in (
        ([[0.5, float("nan"), 1.0]], "finite number"),
        ([[0.5, 1.0]], "2 numbers.* 3 classes"),
        (["high"], "finite number"),
        ([0.5], "1 numbers.* 3 classes"),
    ):
        with pytest.raises(PrivlabError, match=right) as found:
            privlab.observe(model, crops[:1], labels, release=release)
        assert "\n" not in str(found.value)


def test_gradients_of_images_are_of_the_client_s_loss(tiny_vit: Vit, crops: Tensor) -> None:
    """For each release its own mean, also where weights of classes divide it."""
    model, images, labels = privlab.victim(tiny_vit()), crops[:2].double(), torch.tensor([3, 0])
    weighted = Client(lr=0.1, class_weights=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), images=2, batch_size=2)
    for client in (Client(loss=margin, lr=0.1), Client(loss="focal", lr=0.1), weighted):
        seen = privlab.observe(model, images, labels, release=Update(client))
        assert isinstance(seen, Observation)
        made = seen.gradients_of(images, labels)
        for name, gradient in seen.gradients.items():
            torch.testing.assert_close(made[name].detach(), gradient, atol=1e-9, rtol=1e-6)

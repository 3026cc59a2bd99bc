"""What is captured of a model, of whatever library and in whatever wrapper, is what the audit reads."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.release import check_fit, check_head, read_gradient_file
from privlab.release.capture import capture, capture_update
from privlab.release.update_files import update_between
from privlab.victims import Victim, read_state, victim

NAME = "timm:vit_tiny_patch16_224"


def of_timm() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5)


def of_torchvision() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=5)


def of_transformers() -> Any:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": 32}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**size, num_hidden_layers=12, num_labels=5))


def in_lightning(model: nn.Module) -> nn.Module:
    """Return a LightningModule that holds the model, and the weights of its loss."""
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.loss = model, nn.CrossEntropyLoss(weight=torch.ones(5))

        def forward(self, images: Tensor) -> Any:
            return self.backbone(images)

    return Module()


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda model: model,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "both": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    "Lightning": in_lightning,
}


def logits(made: Any) -> Tensor:
    return made if isinstance(made, Tensor) else made.logits


def step(model: nn.Module, trains: str) -> None:
    """Leave the gradients of one image in the parameters whose names have a pattern."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(trains, name) is not None)
    F.cross_entropy(logits(model(torch.rand(1, 3, 32, 32))), torch.tensor([3])).backward()


def read(path: Path) -> Victim:
    return victim(NAME, weights=path, img_size=32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
@pytest.mark.parametrize("trains", ["", "query|q_proj", "bias"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("make", [of_timm, of_torchvision, of_transformers])
def test_a_captured_gradient_and_update_fit_the_model(
    make: Callable[[], nn.Module], wrapper: str, trains: str, tmp_path: Path
) -> None:
    bare = make()
    if not any(re.search(trains, name) for name, _ in bare.named_parameters()):
        pytest.skip("this library has no such parameters")
    model = WRAPPERS[wrapper](bare)
    before = copy.deepcopy(model.state_dict())
    step(model, trains)
    file = tmp_path / "gradient.safetensors"
    if "query" in trains:  # timm joins queries, keys and values
        with pytest.raises(PrivlabError, match="some of the queries, keys and values"):
            capture(model, file, batch_size=1)
    else:
        capture(model, file, batch_size=1)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    files = capture_update(before, model, tmp_path / "round")
    base = read(files[0])
    if file.is_file():
        released = read_gradient_file(file)
        check_fit(released, base.model)
        check_head(released)
        assert released.weights_sha256 == base.weights.sha256
    names = [*base.model.vit.state_dict()]
    update = update_between(read_state(files[0]), read_state(files[1]), 1, ("a", "b"), names).gradients
    assert update.keys() == {*names}
    assert any(bool(moved.any()) for moved in update.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("make", [of_timm, of_transformers])
def test_adapters_are_merged_into_an_update_and_a_gradient_of_them_is_refused(
    make: Callable[[], nn.Module], wrapper: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    bare: Any = make()
    target = r".*\.(qkv|query|value|q_proj|v_proj)"
    tuned = peft.get_peft_model(bare, peft.LoraConfig(r=2, lora_alpha=6, target_modules=target))
    model, x = WRAPPERS[wrapper](tuned), torch.rand(2, 3, 32, 32)
    before = copy.deepcopy(model.state_dict())
    F.cross_entropy(logits(model(x)), torch.tensor([3, 1])).backward()
    with pytest.raises(PrivlabError, match="LoRA"):
        capture(model, tmp_path / "gradient.safetensors", batch_size=2)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    files = capture_update(before, model, tmp_path / "round")
    base = read(files[1]).model
    with torch.no_grad():
        wanted = logits(tuned.eval()(base.normalise(x)))
    assert_close(base(x), wanted, rtol=1e-5, atol=1e-5)
    assert_close(read(files[0]).model.vit.pos_embed, base.vit.pos_embed)
    with pytest.raises(PrivlabError, match="no PeftModel"):
        capture_update(before, {name: tensor + 1 for name, tensor in before.items()}, tmp_path / "other")


def test_what_the_audit_refuses_is_not_written(tmp_path: Path) -> None:
    model = of_timm()
    before = copy.deepcopy(model.state_dict())
    (1000 * F.cross_entropy(model(torch.rand(1, 3, 32, 32)), torch.tensor([3]))).backward()
    with pytest.raises(PrivlabError, match="unscale"):
        capture(model, tmp_path / "a.safetensors", batch_size=1)
    model.get_parameter("head.weight").data[0, 0] = torch.nan
    with pytest.raises(PrivlabError, match="finite"):
        capture_update(before, model, tmp_path / "round")
    model(torch.rand(1, 3, 32, 32)).sum().backward()
    with pytest.raises(PrivlabError, match="finite"):
        capture(model, tmp_path / "a.safetensors", batch_size=1)
    assert [*tmp_path.iterdir()] == []

"""Audits in Python: of updates and gradients that are given as objects or files."""

import copy
from pathlib import Path

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import privlab
from privlab.base import PrivlabError
from privlab.images import to_pil

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


def trained(photos: Tensor, images: int = 1) -> tuple[dict[str, Tensor], torch.nn.Module]:
    """Return the weights before and the model after one step of SGD on photographs."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    before = copy.deepcopy(model.state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    x = (photos[:images] - torch.tensor([0.5]).view(1, 1, 1, 1)) / 0.5
    torch.nn.functional.cross_entropy(model(x), torch.arange(images)).backward()
    optimiser.step()
    return before, model


@pytest.mark.slow
def test_an_update_is_audited_from_state_dicts_and_models(photos: Tensor, tmp_path: Path) -> None:
    before, model = trained(photos)
    client = privlab.Client(lr=0.01, steps=1)
    run = privlab.audit_update(
        before,
        model,
        model=model,
        client=client,
        normalisation="inception",
        attacks="patch-update",
    )
    assert run.leaks is True
    assert run.verdict
    to_pil(photos[0]).save(tmp_path / "x.png")
    scored = privlab.audit_update(
        before, model, model=model, client="sgd", normalisation="inception", reference=tmp_path / "x.png",
        attacks="patch-update", metrics="psnr", out=tmp_path / "audit",
    )  # fmt: skip
    assert scored.records.query("attack == 'patch-update'").psnr.max() > 50
    assert privlab.load(tmp_path / "audit").leaks is True
    with pytest.raises(PrivlabError, match="both"):
        privlab.audit_update("before.pth", model, model=model)
    with pytest.raises(PrivlabError, match="timm"):
        privlab.audit_update(before, model, model=torch.nn.Linear(1, 1))


def test_an_update_of_any_model_that_is_attacked_is_audited(photos: Tensor) -> None:
    """Of a model that no name makes, and of another library's; the weights of the victim are replaced by BEFORE."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 192}
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=5, **sizes)
    small = VisionTransformer(img_size=32, patch_size=8, embed_dim=96, depth=2, num_heads=3, num_classes=5)
    for model in (small, transformers.ViTForImageClassification(config)):
        before = copy.deepcopy(model.state_dict())
        logits = model.eval()((photos[:1] - 0.5) / 0.5)
        torch.nn.functional.cross_entropy(getattr(logits, "logits", logits), torch.tensor([3])).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        for given in (model, privlab.victim(model)):
            run = privlab.audit_update(
                before, model, model=given, client=privlab.Client(lr=0.01, steps=1), normalisation="inception",
                attacks="patch-update",
            )  # fmt: skip
            assert run.leaks is True


def test_a_gradient_is_audited_with_the_model_of_its_step(photos: Tensor, tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    torch.nn.functional.cross_entropy(model((photos[:1] - 0.5) / 0.5), torch.tensor([3])).backward()
    privlab.capture(model, tmp_path / "step.safetensors", batch_size=1)
    run = privlab.audit_gradients(
        tmp_path / "step.safetensors", model=model, normalisation="inception", attacks="patch-gradient"
    )
    assert run.leaks is True


def test_an_audit_says_whether_it_leaks_and_takes_checkpoints(photos: Tensor) -> None:
    vit = privlab.victim("cifar_vit").model.vit.requires_grad_(True)
    before = {"epoch": 1, "model_state_dict": {f"module.model.{n}": t.clone() for n, t in vit.state_dict().items()}}
    torch.nn.functional.cross_entropy(vit(photos[:1]), torch.tensor([3])).backward()
    torch.optim.SGD(vit.parameters(), lr=0.01).step()
    audit = privlab.audit_update(
        before, vit, model="cifar_vit", client=privlab.Client(lr=0.01, steps=1), normalisation="none"
    )
    assert (audit.leaks, audit.verdict) == (True, "leaks: yes, a private image was reconstructed")

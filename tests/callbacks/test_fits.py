"""Real fits of two steps by Lightning and by Hugging Face's Trainer, whose updates are recorded."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.data import Dataset

import privlab
from privlab.base import PrivlabError
from privlab.callbacks.rounds import RoundRecorder
from privlab.threat import Client


class One(Dataset[dict[str, Tensor]]):
    """One image, twice: two steps."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.linspace(-1, 1, 3 * 64 * 64).reshape(3, 64, 64), "labels": torch.tensor(3)}


class Classifier(nn.Module):
    """A ViT whose forward pass returns what Hugging Face's Trainer reads."""

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and logits."""
        logits = self.vit(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def assert_recorded(folder: Path, before: dict[str, Tensor], vit: VisionTransformer) -> None:
    """Check that both files hold what the ViT was and is: that is, after two steps of SGD at a rate of 0.01."""
    old, new = (load_file(folder / f"{name}.safetensors") for name in ("before", "after"))
    assert old.keys() == before.keys() == new.keys()
    assert all(torch.equal(old[name], value) for name, value in before.items())
    assert all(torch.equal(new[name], value.cpu()) for name, value in vit.state_dict().items())
    own = timm.create_model("vit_tiny_patch16_224", img_size=64, embed_dim=64, depth=2, num_heads=2, num_classes=10)
    own.load_state_dict(before)
    optimiser = torch.optim.SGD(own.parameters(), lr=0.01)
    for _ in range(2):
        optimiser.zero_grad()
        F.cross_entropy(own(One()[0]["pixel_values"][None]), torch.tensor([3])).backward()
        optimiser.step()
    torch.testing.assert_close(new["pos_embed"], own.state_dict()["pos_embed"])
    assert not torch.equal(new["pos_embed"], old["pos_embed"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning:lightning")
def test_a_fit_of_lightning_is_recorded(vit: VisionTransformer, tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from privlab.callbacks.lightning import RecordUpdate

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.vit = vit

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return F.cross_entropy(self.vit(batch["pixel_values"]), batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    before = copy.deepcopy(vit.state_dict())
    record = RecordUpdate(vit, tmp_path / "updates")
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for round_ in (1, 2):
        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[record], enable_model_summary=False, **quiet)
        trainer.fit(Module(), torch.utils.data.DataLoader(One()))
        assert_recorded(tmp_path / "updates" / f"round-{round_}", before, vit)
        before = copy.deepcopy(vit.state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of the Trainer, of memory that it would pin for a GPU
def test_a_training_of_transformers_is_recorded(vit: VisionTransformer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from privlab.callbacks.transformers import RecordUpdate

    before = copy.deepcopy(vit.state_dict())
    given: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(
        *(str(tmp_path / "trainer"),),
        **given | {"per_device_train_batch_size": 1, "num_train_epochs": 1, "max_grad_norm": 0.0},
        **{"optim": "sgd", "learning_rate": 0.01, "lr_scheduler_type": "constant"},
    )
    record = RecordUpdate(vit, tmp_path / "updates")
    transformers.Trainer(Classifier(vit), arguments, train_dataset=One(), callbacks=[record]).train()
    assert_recorded(tmp_path / "updates" / "round-1", before, vit)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of the Trainer, of memory that it would pin for a GPU
def test_a_training_of_a_vit_of_transformers_is_recorded_and_audited(tmp_path: Path) -> None:
    """The image of one step of the Trainer comes back from the two files, and is proven."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from privlab.callbacks.transformers import RecordUpdate

    size = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.ViTConfig(**size, num_hidden_layers=12, num_labels=10)
        model = transformers.ViTForImageClassification(config)
    given: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(
        *(str(tmp_path / "trainer"),),
        **given | {"per_device_train_batch_size": 1, "max_steps": 1, "max_grad_norm": 0.0},
        **{"optim": "sgd", "learning_rate": 0.01, "lr_scheduler_type": "constant"},
    )
    record = RecordUpdate(model, tmp_path / "updates")
    transformers.Trainer(model, arguments, train_dataset=One(), callbacks=[record]).train()
    files = [tmp_path / "updates" / "round-1" / f"{name}.safetensors" for name in ("before", "after")]
    run = privlab.audit_update(
        *files, model="timm:vit_tiny_patch16_224", img_size=64, client=Client(lr=0.01), attacks="patch-update"
    )
    assert any("names of transformers" in warning for warning in run.warnings)
    assert run.records["explained"].item() > 0.999


def test_a_second_recorder_goes_on_where_the_first_one_ended(vit: VisionTransformer, tmp_path: Path) -> None:
    """Another process that records into the same folder replaces nothing either."""
    (tmp_path / "round-notes").mkdir()
    weights = []
    for recorder in (RoundRecorder(vit, tmp_path), RoundRecorder(vit, tmp_path), RoundRecorder(vit, tmp_path)):
        before = copy.deepcopy(vit.state_dict())
        recorder.begin()
        with torch.no_grad():
            vit.head.weight += 1
        recorder.end()
        weights.append((before, copy.deepcopy(vit.state_dict())))
    for round_, (before, after) in enumerate(weights, start=1):
        for name, wanted in (("before", before), ("after", after)):
            found = load_file(tmp_path / f"round-{round_}" / f"{name}.safetensors")
            assert torch.equal(found["head.weight"], wanted["head.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-1", "round-2", "round-3", "round-notes"]


def test_what_cannot_be_recorded_is_one_line(vit: VisionTransformer, tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"names of a ViT.*weight"):
        RoundRecorder(nn.Linear(2, 2), tmp_path)
    recorder = RoundRecorder(vit, tmp_path)
    with pytest.raises(PrivlabError, match="There is no update yet"):
        recorder.end()
    recorder.begin()
    with pytest.raises(PrivlabError, match="Nothing was trained"):
        recorder.end()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize(("module", "package"), [("lightning", "lightning.pytorch"), ("transformers", "transformers")])
def test_without_a_trainer_the_extra_is_named(module: str, package: str) -> None:
    code = f"import sys; sys.modules['{package}'] = None\nimport privlab.callbacks.{module}"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert "pip install 'privlab[callbacks]'." in done.stderr.splitlines()[-1]

"""The table of containers in docs/how-to/victims.md: each row is written here, read as an update, and compared."""

import argparse
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.release.update_files import update_between
from privlab.victims import from_any_layout, read_state

State = dict[str, Tensor]
MOVED = 0.01
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "victims.md"


def of_timm() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=2, num_heads=2, num_classes=5)


def of_torchvision() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=48, num_classes=5)


def of_transformers() -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 32}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**size, num_hidden_layers=2, num_labels=5))


def of_monai() -> nn.Module:
    pytest.importorskip("einops")
    nets: Any = pytest.importorskip("monai.networks.nets")
    sizes = {"img_size": (32, 32), "patch_size": (16, 16), "hidden_size": 16, "mlp_dim": 48, "num_heads": 2}
    kind = {"in_channels": 1, "spatial_dims": 2, "classification": True, "num_classes": 5, "post_activation": None}
    return nets.ViT(**sizes, **kind, num_layers=2)


MODELS = {"timm": of_timm, "torchvision": of_torchvision, "transformers": of_transformers, "MONAI": of_monai}

Write = Callable[[State, State, Path], Path]
"""It writes the weights after, given those before, into a folder, and returns what is read."""


def prefixed(state: State, prefix: str) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def other(state: State) -> State:
    return {name: tensor + 1 for name, tensor in state.items()}


def pth(content: Callable[[State], object], entry: str = "") -> Write:
    """Return what saves a checkpoint by torch."""

    def write(_: State, after: State, folder: Path) -> Path:
        torch.save(content(after), folder / "a.pth")
        return folder / f"a.pth{entry}"

    return write


def safetensors(_: State, after: State, folder: Path) -> Path:
    save_file(after, folder / "a.safetensors")
    return folder / "a.safetensors"


def arrays(*, named: bool) -> Write:
    def write(_: State, after: State, folder: Path) -> Path:
        values: dict[str, Any] = {name: tensor.numpy() for name, tensor in after.items()}
        np.savez(
            folder / "a.npz", **(values if named else {f"arr_{i}": each for i, each in enumerate(values.values())})
        )
        return folder / "a.npz"

    return write


def file_in(name: str, content: Callable[[State], object] = lambda state: state) -> Write:
    """Return what saves a file of a name into a folder, which is read as a whole."""

    def write(_: State, after: State, folder: Path) -> Path:
        (folder / name).parent.mkdir(exist_ok=True)
        if name.endswith(".safetensors"):
            save_file(after, folder / name)
        else:
            torch.save(content(after), folder / name)
        return folder

    return write


def sharded(_: State, after: State, folder: Path) -> Path:
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(after)}
    for file in set(files.values()):
        save_file({name: after[name] for name in files if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def deepspeed(before: State, after: State, folder: Path) -> Path:
    (folder / "latest").write_text("global_step1")
    return file_in("global_step1/mp_rank_00_model_states.pt", lambda state: {"module": state})(before, after, folder)


def fsdp(_: State, after: State, folder: Path) -> Path:
    (folder / "pytorch_model_fsdp_0").mkdir()
    (folder / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(b"")
    return folder


def adapters(before: State, after: State, folder: Path) -> Path:
    """Save adapters of rank 2 for queries, which add one number to all entries, and all other tensors as trained."""
    save_file(before, folder / "model.safetensors")
    saved = {}
    for name, tensor in after.items():
        layer = re.fullmatch(r"(.*(?:qkv|query|q_proj))\.weight", name)
        if layer is None:
            saved[f"base_model.model.{name}"] = tensor
            continue
        saved[f"base_model.model.{layer[1]}.lora_A.weight"] = torch.ones(2, tensor.shape[1])
        saved[f"base_model.model.{layer[1]}.lora_B.weight"] = torch.full((len(tensor), 2), MOVED / 4)
    save_file(saved, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 4, "r": 2, "peft_type": "LORA"}))
    return folder


def difference(number: torch.dtype) -> Write:
    def write(before: State, after: State, folder: Path) -> Path:
        torch.save({name: (after[name] - before[name]).to(number) for name in after}, folder / "a.pth")
        return folder / "a.pth"

    return write


def lightning(state: State) -> object:
    callback = {"best_model_score": torch.tensor(0.5), "best_model_path": "", "kth_value": torch.tensor(1.0)}
    return {
        "state_dict": prefixed(state, "model.") | {"loss.weight": torch.ones(5)},
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": callback},
        "hyper_parameters": {"lr": 0.1, "root": PurePosixPath("/data")},
        "optimizer_states": [{"state": {0: {"momentum_buffer": torch.ones(3)}}}],
    }


def timms_script(state: State) -> object:
    arguments = argparse.Namespace(lr=0.1, output=PurePosixPath("/out"), device=torch.device("cpu"))
    beside = {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "metric": np.float64(3.0), "args": arguments}
    return {"arch": "vit", "state_dict": state, "state_dict_ema": other(state), **beside}


@dataclass(frozen=True)
class Row:
    """A row of the table: `said` is a pattern of the message, which is an error where `refused`."""

    container: str
    libraries: str
    outcome: str
    write: Write
    said: str = ""
    refused: bool = False
    tolerance: float = 1e-6

    @property
    def line(self) -> str:
        """Return the row as the page has it."""
        return f"| {self.container} | {self.libraries} | {self.outcome} |"


BOTH, EVERY = "timm, transformers", "timm, torchvision, transformers, MONAI"

ROWS = [
    Row("a state dict by `torch.save`", EVERY, "read", pth(lambda state: state)),
    Row("safetensors", EVERY, "read", safetensors),
    Row(
        *("`nn.Parameter` values", EVERY, "read"),
        pth(lambda state: {name: nn.Parameter(tensor) for name, tensor in state.items()}),
    ),
    Row(
        *("names with `_orig_mod.module.` (`torch.compile`, DDP)", EVERY, "read"),
        pth(lambda state: prefixed(state, "_orig_mod.module.")),
    ),
    Row(
        *("names with any prefix, nested (`module.model.backbone.`)", EVERY, "read; the prefix is stated"),
        pth(lambda state: prefixed(state, "module.model.backbone.")),
        "module.model.backbone.",
    ),
    Row(
        *("a state dict in half precision", BOTH, "read; its rounding is stated, and counts"),
        *(pth(lambda state: {name: tensor.half() for name, tensor in state.items()}), "sent_as=fp16"),
        tolerance=1e-3,
    ),
    Row(
        *("an entry of any name (`model_state_dict`)", EVERY, "read; the entry is stated"),
        pth(lambda s: {"epoch": 2, "model_state_dict": s, "optimizer_state_dict": {"state": other(s)}}),
        "the entry 'model_state_dict'",
    ),
    Row(
        *("Lightning's checkpoint", BOTH, "its `state_dict`, below the module's prefix; both are stated"),
        *(pth(lightning), "the entry 'state_dict' and .* 'model\\."),
    ),
    Row(
        *("Lightning's checkpoint with averaged weights", BOTH, "`current_model_state`, or `#state_dict`, the average"),
        pth(lambda state: {"state_dict": other(state), "current_model_state": state}),
        "#state_dict",
    ),
    Row(
        *("the checkpoint of timm's `train.py`", "timm", "`state_dict`, or `#state_dict_ema`"),
        pth(timms_script),
        "#state_dict_ema",
    ),
    Row(
        *("weights and their average", BOTH, "`model`, or `#model_ema`, as asked for"),
        pth(lambda state: {"model": other(state), "model_ema": state}, "#model_ema"),
        "#model",
    ),
    Row(
        *("a student and a teacher (DINO)", BOTH, "`student`, or `#teacher`, as asked for"),
        pth(
            lambda s: {"student": prefixed(other(s), "module.backbone."), "teacher": prefixed(s, "backbone.")},
            "#teacher",
        ),
        "#student",
    ),
    Row("a folder with `model.safetensors`", BOTH, "read", file_in("model.safetensors")),
    Row("a folder with `pytorch_model.bin`", BOTH, "read", file_in("pytorch_model.bin")),
    Row("a folder with shards and `model.safetensors.index.json`", BOTH, "read", sharded),
    Row("a folder of DeepSpeed (`latest`, `mp_rank_00_model_states.pt`)", BOTH, "its `module`", deepspeed, "module"),
    Row("a folder of accelerate's FSDP, `FULL_STATE_DICT`", BOTH, "read", file_in("pytorch_model_fsdp.bin")),
    Row(
        *("a folder of accelerate's FSDP, `SHARDED_STATE_DICT`", BOTH, "refused: its list of shards is a pickle"),
        *(fsdp, "accelerate merge-weights", True),
    ),
    Row(
        *("a folder of peft with its base next to the adapters", BOTH, "the adapters are merged"),
        *(adapters, "LoRA's adapters"),
    ),
    Row("`.npz` by name", BOTH, "read", arrays(named=True)),
    Row("`.npz` without names, as Flower sends it", "timm", "in the model's order", arrays(named=False)),
    Row(
        *("a difference in the place of AFTER", BOTH, "added to the weights before, which is stated"),
        *(difference(torch.float32), "read as the difference"),
    ),
    Row(
        *("a difference in half precision (NVFlare's DIFF)", BOTH, "added to the weights before; both are stated"),
        *(difference(torch.float16), "sent_as=fp16"),
        tolerance=1e-4,
    ),
    Row(
        *("a whole model by `torch.save(model)`", "timm", "refused: it is a pickle of code"),
        *(pth(lambda _: nn.Linear(2, 2)), "holds torch.nn.modules.linear.Linear", True),
    ),
]


@pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning")  # of MONAI
@pytest.mark.parametrize(
    ("row", "library"),
    [pytest.param(row, name, id=f"{row.container}-{name}") for row in ROWS for name in row.libraries.split(", ")],
)
def test_a_row_of_the_table_holds(row: Row, library: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        before = {name: tensor.clone() + 0.5 for name, tensor in MODELS[library]().state_dict().items()}
    after = {name: tensor + MOVED for name, tensor in before.items()}
    path = row.write(before, after, tmp_path)
    if row.refused:
        with pytest.raises(PrivlabError, match=row.said):
            read_state(path)
        return
    names = [*from_any_layout(before)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = update_between(before, read_state(path, before), 1, ("before", "after"), names).gradients
    assert re.search(row.said, " ".join(str(each.message) for each in caught))
    assert found.keys() == {*names}
    for moved in found.values():
        assert_close(moved, torch.full_like(moved, -MOVED), atol=row.tolerance, rtol=0)


def test_the_page_has_these_rows_and_no_others() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("| container | library | outcome |\n|---|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [row.line for row in ROWS]

"""`privlab train finetune` and `probe`: what is printed, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import save_file

from privlab.victims import victim

CLI = Callable[..., "Result"]  # noqa: F821  # of conftest, which test modules cannot import
FEW = ("--preset", "small", "--batch-size", "4", "--epochs", "1", "--precision", "32-true")
TUNED = ("finetune", "--model", "cifar_vit", "--weights", "START")
PROBE = ("probe", "--model", "cifar_vit_nope")
pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 4 + 4 pictures of two classes."""
    root = tmp_path_factory.mktemp("data")
    for split in ("train", "test"):
        for name, grey in (("dark", 40), ("light", 200)):
            (root / split / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (32, 32), (grey + i,) * 3).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return weights of a victim without position embeddings."""
    path = tmp_path_factory.mktemp("weights") / "start.safetensors"
    save_file(victim("cifar_vit_nope", weights="random").model.vit.state_dict(), path)
    return path


def test_fine_tuning_says_what_starts_anew(cli: CLI, data: Path, weights: Path, tmp_path: Path) -> None:
    options = ("--weights", str(weights), "--data", str(data), "--layer-decay", "0.7", "--out", str(tmp_path))
    done = cli("train", "finetune", "--model", "cifar_vit", *FEW, *options)
    assert done.status == 0
    said = " ".join(done.err.split())
    assert "Warning: cifar_vit: the weights hold no position embeddings; they begin as timm draws them" in said
    assert "the weights' head is for 10 classes, the data have 2: a new one begins" in said
    card = json.loads((tmp_path / "card.json").read_text("utf-8"))
    assert card["plan"]["layer_decay"] == 0.7
    assert card["course"]["weights"] == "start.safetensors"
    assert all(note in said for note in card["start"]["notes"])


def test_a_probe_reads_the_trained_weights_of_the_zoo(cli: CLI, data: Path, tmp_path: Path) -> None:
    options = ("--data", str(data), "--set", "target=position", "--out", str(tmp_path))
    assert cli("train", "probe", "--model", "cifar_vit", *FEW, *options).status == 0
    assert json.loads((tmp_path / "card.json").read_text("utf-8"))["start"]["weights"] == "pretrained:cifar_vit"


def test_a_probe_of_places(cli: CLI, data: Path, weights: Path, tmp_path: Path) -> None:
    options = ("--weights", str(weights), "--data", str(data), "--set", "target=position", "--out", str(tmp_path))
    done = cli("train", "probe", "--model", "cifar_vit_nope", *FEW, *options)
    assert done.status == 0
    assert "probe.safetensors" in done.out
    assert "model.safetensors" not in done.out
    assert "test accuracy" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("finetune", "--model", "cifar_vit_nope", "--weights", "random"), "finetune starts from trained weights"),
        (("finetune", "--model", "cifar_vit", "--weights", "missing.safetensors"), "No weights file at"),
        (("finetune", "--model", "vit_ti", "--weights", "START"), "this model is a ViT-Ti (D = 192, 12 blocks)"),
        ((*TUNED, "--layer-decay", "1.2"), "layer_decay of a training"),
        ((*TUNED, "--set", "drop_path=1"), "drop_path must be in [0, 1)"),
        (("mp3", "--model", "cifar_vit_nope", "--layer-decay", "0.5"), "layer_decay needs a model that knows"),
        (("probe", "--model", "cifar_vit", "--weights", "START"), "missing: pos_embed"),
        ((*PROBE, "--set", "target=places"), "Unknown target of a probe 'places'"),
        ((*PROBE, "--set", "layer=9"), "layer of this probe must be 1 to 4. Found 9"),
        ((*PROBE, "--set", "layer=last"), "the value must be of type int. Found 'last'"),
        ((*PROBE, "--set", "gamma_pos=2"), "gamma_pos (γ_pos) must be in [0, 1]"),
        ((*PROBE, "--batch-size", "1"), "batch_norm needs two images at a time"),
        (("probe", "--model", "resnet50"), "This needs a plain ViT"),
    ],
)  # fmt: skip
def test_bad_input(
    cli: CLI, data: Path, weights: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    arguments = tuple(str(weights) if word == "START" else word for word in arguments)
    done = cli("train", *arguments[:1], *FEW, "--data", str(data), *arguments[1:], "--out", str(tmp_path / "out"))
    assert message in done.error
    assert "\n" not in done.error


def test_labels_are_needed_for_classes_alone(cli: CLI, weights: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (32, 32), (90 * i,) * 3).save(tmp_path / "data" / split / f"{i}.png")
    options = (*FEW, "--weights", str(weights), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"))
    assert "have no label" in cli("train", "probe", "--model", "cifar_vit_nope", *options).error
    done = cli("train", "probe", "--model", "cifar_vit_nope", *options, "--set", "target=position")
    assert done.status == 0

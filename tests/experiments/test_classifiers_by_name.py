"""Swin with absolute PEs and ResNet by name: evaluated from their files, weights in every layout, refusals."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor

from privlab.base import PrivlabError, PrivlabWarning
from privlab.cli import _status
from privlab.experiments.methods.consistency import measure_consistency
from privlab.experiments.methods.evaluate import EvaluationConfig, evaluate_models
from privlab.experiments.training.classifiers import IndexedViT, NamedClassifier, SwinModel, classifier
from privlab.experiments.training.examples import Examples
from privlab.experiments.training.train_victim import TrainingConfig, train_victim
from privlab.victims import own_layout, save, victim


def pictures(n: int = 6) -> Examples:
    images = torch.randint(256, (n, 3, 32, 32), generator=Generator().manual_seed(0), dtype=torch.uint8)
    return Examples(images, torch.arange(n) % 3, 3, "toy")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder of ten classes, with an image for training and one for the test in each."""
    draw = Generator().manual_seed(0)
    for split in ("train", "test"):
        for label in range(10):
            (folder := tmp_path / "data" / split / f"{label}").mkdir(parents=True)
            pixels = torch.randint(256, (32, 32, 3), generator=draw, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / "0.png")
    return tmp_path / "data"


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
@pytest.mark.parametrize(
    ("model", "options", "unknown"),
    [
        ("cifar_swin_mjp", (), "trained"),
        ("cifar_resnet", ("unknown=false", "dal=none"), None),
        ("cifar_vit_idx", ("unknown=false", "dal=none"), None),
    ],
)
def test_a_trained_one_is_evaluated_from_its_file(
    model: str, options: tuple[str, ...], unknown: str | None, data: Path, tmp_path: Path
) -> None:
    """The card's hash and scores are those of what is read back, in half precision; BatchNorm's counts stay whole."""
    config = TrainingConfig(
        recipe="mjp",
        model=model,
        data=str(data),
        preset="small",
        epochs=1.0,
        batch_size=5,
        precision="32-true",
        options=("gamma=0.3", *options),
        half=True,
    )
    card = train_victim(config, tmp_path / "out")
    assert card is not None
    file = tmp_path / "out" / "model.safetensors"
    read = classifier(model, weights=file)
    assert (read.weights.sha256, read.weights.unknown) == (card["sha256"], unknown)
    assert {v.dtype for k, v in load_file(file).items() if not k.endswith("tracked")} == {torch.float16}
    (row,) = evaluate_models(
        EvaluationConfig(models=(model,), weights=(str(file),), data=str(data), gammas=(0.15,), batch=250)
    )
    test = {name: card["test"][name] for name in asdict(measure_consistency(read.model, pictures(), gamma=0.15))}
    found = row["by_gamma"][0] | {"images": row["images"], "accuracy": row["accuracy"]}
    assert found == pytest.approx(test, rel=1e-4)
    kept = classifier(model, weights=next((tmp_path / "out" / "checkpoints").rglob("*.safetensors")))
    assert kept.weights.unknown == unknown


def test_random_weights_are_those_of_the_seed() -> None:
    with pytest.warns(PrivlabWarning, match=r"RANDOM weights \(seed 1\)"):
        first = classifier("cifar_swin_mjp", weights="random", seed=1)
    with pytest.warns(PrivlabWarning, match="RANDOM"):
        again = classifier("cifar_swin_mjp", weights="random", seed=1)
    with pytest.warns(PrivlabWarning, match="RANDOM"):
        other = classifier("cifar_swin_mjp", weights="random")
    assert first.weights == again.weights
    assert other.weights.sha256 != first.weights.sha256
    assert first.weights.unknown == "random"
    assert first.preprocessing.size == (32, 32)


def read(state: Mapping[str, Tensor], path: Path, model: str = "cifar_swin_mjp", **options: Any) -> NamedClassifier:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    made = classifier(model, weights=path, **options)
    assert isinstance(made, NamedClassifier)
    return made


@pytest.fixture
def cifar_swin() -> SwinModel:
    with pytest.warns(PrivlabWarning, match="RANDOM"):
        made = classifier("cifar_swin_mjp", weights="random").model
    assert isinstance(made, SwinModel)
    return made


@pytest.mark.parametrize("layout", ["swin", "mjp", "wrapped"])
def test_weights_of_the_authors(cifar_swin: SwinModel, layout: str, tmp_path: Path) -> None:
    """Swin's authors merge patches at the end of a stage; MJP's put E_unk behind the PEs, in one table."""
    net, pe, unknown = cifar_swin.net.state_dict(), cifar_swin.pos_embed, cifar_swin.unk_embed
    assert pe is not None
    assert unknown is not None
    for number in (1, 2):
        moved = [name for name in net if name.startswith(f"layers.{number}.downsample.")]
        for name in moved:
            net[name.replace(f"layers.{number}.", f"layers.{number - 1}.")] = net.pop(name)
    theirs = {name.replace("head.fc.", "head."): tensor for name, tensor in net.items()}
    images = torch.rand(2, 3, 32, 32, generator=Generator().manual_seed(0))
    masked = torch.arange(64).expand(2, -1) < 20
    if layout == "swin":
        with pytest.warns(PrivlabWarning, match="E_unk"):
            made = read(theirs | {"absolute_pos_embed": pe}, tmp_path / "w.safetensors")
        assert made.weights.unknown == "mean-pe"
        torch.testing.assert_close(made.model.unk_embed, pe.mean(1, keepdim=True), check_stride=False)
        assert torch.equal(made.model(images), cifar_swin(images))
        return
    if layout == "mjp":
        theirs |= {"absolute_pos_embed.weight": torch.cat([pe, unknown], 1)[0], "dlocr.layers.0.weight": pe[0]}
    else:  # a checkpoint of `privlab train`
        theirs = {f"victim.{name}": tensor for name, tensor in cifar_swin.state_dict().items()}
    made = read(theirs, tmp_path / "w.safetensors")
    assert made.weights.unknown == "trained"
    assert torch.equal(made.model(images, masked), cifar_swin(images, masked))


def test_a_plain_swin_gets_position_embeddings_that_are_untrained(cifar_swin: SwinModel, tmp_path: Path) -> None:
    with pytest.warns(PrivlabWarning, match="embeddings"):
        made = read(cifar_swin.net.state_dict(), tmp_path / "w.safetensors")
    assert made.weights.unknown == "random"
    assert read(cifar_swin.net.state_dict(), tmp_path / "w.safetensors", "cifar_swin").model.unk_embed is None


def test_another_size_is_asked_for(cifar_swin: SwinModel, tmp_path: Path) -> None:
    state = cifar_swin.state_dict()
    assert read(state, tmp_path / "w.safetensors", img_size=64).model.grid == (32, 32)
    state["pos_embed"] = state["pos_embed"][:, :64]
    with pytest.raises(PrivlabError, match=r"pos_embed.*\(1.*64.*48\).*\(1.*256.*48\).*\(--img-size"):
        read(state, tmp_path / "w.safetensors")


def test_position_embeddings_are_not_dropped(cifar_swin: SwinModel, tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"cifar_swin.*cifar_swin_mjp"):
        read(cifar_swin.state_dict(), tmp_path / "w.safetensors", "cifar_swin")


def test_weights_of_something_else(cifar_swin: SwinModel, tmp_path: Path) -> None:
    with pytest.raises(
        PrivlabError,
        match=r"model.s.*conv1\.weight",
    ):
        read(cifar_swin.net.state_dict(), tmp_path / "w.safetensors", "cifar_resnet")
    with pytest.raises(PrivlabError, match=r"--weights.*cifar_swin"):
        classifier("cifar_swin", weights="pretrained")


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_timms_names_are_taken_too() -> None:
    made = classifier("timm:resnet10t", weights="random", img_size=32)
    assert isinstance(made, NamedClassifier)
    assert (made.model.image_shape, made.architecture) == ((3, 32, 32), "resnet10t")
    plain = classifier("cifar_vit", weights="random")
    assert plain.weights == victim("cifar_vit", weights="random").weights


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_index_embeddings_begin_at_zero_on_plain_weights(tmp_path: Path) -> None:
    """Then the model is the plain one; and the plain one refuses what has learnt them."""
    plain = victim("cifar_vit", weights="random")
    save(plain.model.vit.state_dict(), tmp_path / "plain.safetensors")
    with pytest.warns(PrivlabWarning, match="UNTRAINED"):
        made = classifier("cifar_vit_idx", weights=tmp_path / "plain.safetensors")
    assert isinstance(made, NamedClassifier)
    assert isinstance(made.model, IndexedViT)
    x, order = torch.rand(2, 3, 32, 32), torch.randperm(64).expand(2, -1)
    torch.testing.assert_close(made.model(x), plain.model(x))
    torch.testing.assert_close(made.model(x, order), plain.model(x))
    save(own_layout(made.model), tmp_path / "idx.safetensors")
    with pytest.raises(PrivlabError, match="idx_embed"):
        victim("cifar_vit", weights=tmp_path / "idx.safetensors")


@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_who_is_told_every_patchs_index_and_no_slots_is_consistent() -> None:
    """Without PEs of the slots, x̃ with its order is x; evaluated without the order it would not be."""
    model = classifier("cifar_vit_idx", weights="random", seed=1).model
    assert isinstance(model, IndexedViT)
    model.net.pos_embed.data.zero_()
    model.net.idx_embed.data.mul_(50)
    found = measure_consistency(model, pictures(20), gamma=0.9)
    assert (found.consistency, found.diff_norm < 1e-6) == (1.0, True)
    model.net.pos_embed.data[0, 1:] = model.net.idx_embed.data[0]
    assert measure_consistency(model, pictures(20), gamma=0.9).diff_norm > 1e-3


# Refusals


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("cifar_resnet", (), "MJP trains E_unk, and this model has none. Use a `_mjp` victim, or --set unknown=false"),
        ("cifar_resnet", ("unknown=false",), "this model has none: --set dal=none"),
        ("cifar_swin", (), "MJP trains E_unk, and this model has none"),
        ("resnet50_mjp", (), "resnet50 has no position embeddings, and so no E_unk. Found resnet50_mjp"),
        ("resnet5", (), "Unknown model 'resnet5'. Did you mean resnet50"),
        ("cifar_vit_idx", (), "MJP trains E_unk, and this model has none"),
        ("cifar_vit_idx_mjp", (), "cifar_vit_idx has no E_unk. Found cifar_vit_idx_mjp: train cifar_vit_idx, with"),
    ],
)
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_mjp_says_what_it_lacks(model: str, options: tuple[str, ...], message: str, data: Path, tmp_path: Path) -> None:
    config = TrainingConfig(recipe="mjp", model=model, data=str(data), preset="small", options=options)
    with pytest.raises(PrivlabError, match=message):
        train_victim(config, tmp_path / "out")


@pytest.mark.parametrize("command", [("attack",), ("train", "mp3"), ("train", "droppos")])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "swin_t_mjp",
            "needs a plain ViT, timm's VisionTransformer. Found swin_t_mjp: `privlab evaluate`",
        ),
        (
            "resnet50",
            "needs a plain ViT, timm's VisionTransformer. Found resnet50: `privlab evaluate`",
        ),
        ("timm:resnet10t", "Found ResNet of timm.models.resnet, which has no patch embedding"),
        ("cifar_vit_idx", "needs a plain ViT, timm's VisionTransformer. Found cifar_vit_idx: `privlab evaluate`"),
    ],
)
def test_what_needs_a_plain_vit_says_so_in_one_line(
    command: tuple[str, ...], model: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = () if command == ("attack",) else ("--data", "samples", "--split", "none")
    out = ("--out", str(tmp_path / "out"), "--weights", "random")
    assert _status([*command, "--model", model, *rest, *out]) == 2
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in told.err
    assert told.out == ""

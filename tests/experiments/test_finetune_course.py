"""Fine-tuning and probes as trainings: what starts anew, relative position embeddings, and heads that stand alone."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Generator

from privlab.base import PrivlabError, PrivlabWarning
from privlab.experiments.training.classifiers import RelativeViT, classifier
from privlab.experiments.training.train_victim import TrainingConfig, _set_up, train_victim
from privlab.victims import hash_of, own_layout, save, victim

quiet = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")


# Relative position embeddings


def relative(weights: str | Path = "random") -> RelativeViT:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivlabWarning)
        made = classifier("cifar_vit_relpos", weights=weights).model
    assert isinstance(made, RelativeViT)
    return made


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False])
def test_biases_are_added_by_how_far_slots_are_apart(fused: bool) -> None:
    """Against a loop over pairs: 15 × 15 offsets of the 8 × 8 slots, then the class token's row, column and corner."""
    block = relative().net.blocks[0]
    block.attn.fused_attn = fused
    table = torch.nn.init.normal_(block.rel_pos.relative_position_bias_table)
    x = torch.randn(1, 65, 128, generator=Generator().manual_seed(0))
    bias = torch.zeros(4, 65, 65)
    for i in range(65):
        for j in range(65):
            row = (i - 1) // 8 - (j - 1) // 8 + 7, (i - 1) % 8 - (j - 1) % 8 + 7
            place = 15 * row[0] + row[1] if i and j else 227 if i == j == 0 else 225 if i == 0 else 226
            bias[:, i, j] = table[place]
    q, k, v = block.attn.qkv(block.norm1(x)).reshape(1, 65, 3, 4, 32).permute(2, 0, 3, 1, 4)
    y = x + block.attn.proj(((q @ k.mT / 32**0.5 + bias).softmax(3) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(block(x), y + block.mlp(block.norm2(y)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@quiet
def test_at_the_start_they_change_nothing(tmp_path: Path) -> None:
    path, images = start("cifar_vit_nope", tmp_path), torch.rand(2, 3, 32, 32, generator=Generator().manual_seed(0))
    with pytest.warns(PrivlabWarning, match="relative"):
        model = classifier("cifar_vit_relpos", weights=path).model
    bare = victim("cifar_vit_nope", weights=path).model
    torch.testing.assert_close(model(images), bare(images), rtol=1e-4, atol=1e-5)
    before = model(images)
    torch.nn.init.normal_(model.net.blocks[0].rel_pos.relative_position_bias_table)
    assert not torch.allclose(model(images), before)


@quiet
def test_fine_tuning_with_relative_embeddings(data: Path, tmp_path: Path) -> None:
    """From weights with absolute ones, which are left out; the biases learn, and come back from the file."""
    path, out = start("cifar_vit", tmp_path), tmp_path / "out"
    card = card_of(data, out, "finetune", model="cifar_vit_relpos", weights=str(path), options=("drop_path=0.1",))
    said = " ".join(card["start"]["notes"])
    assert "absolute position embeddings, which are left out here" in said
    assert "they begin at zero" in said
    assert "the weights' head is for 10 classes, the data have 3" in said
    assert card["plan"]["layer_decay"] == 0.8
    state = load_file(out / "model.safetensors")
    assert len([name for name in state if name.endswith("rel_pos.relative_position_bias_table")]) == 4
    assert all(bool(each.abs().sum() > 0) for name, each in state.items() if "rel_pos" in name)
    again = relative(out / "model.safetensors")
    assert hash_of(own_layout(again)) == card["sha256"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: victim("cifar_vit_relpos", weights="random"),
        lambda: train_victim(TrainingConfig(recipe="mp3", model="cifar_vit_relpos", data="samples"), Path("out")),
    ],
)
def test_attacks_and_predictors_refuse_them(call: Callable[[], object]) -> None:
    with pytest.raises(PrivlabError, match=r"ViT.*VisionTransformer.*cifar_vit_relpos"):
        call()


# Trainings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 9 + 6 images of three classes, by their colour."""
    root = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    for split, count in (("train", 3), ("test", 2)):
        for name, colour in (("black", 20), ("grey", 110), ("white", 200)):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = colour + draw.integers(0, 40, (32, 32, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(root / split / name / f"{i}.png")
    return root


def start(model: str, folder: Path, name: str = "start") -> Path:
    """Write random weights as those of a training."""
    save(victim(model, weights="random").model.vit.state_dict(), folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


def card_of(data: Path, out: Path, recipe: str, **options: Any) -> dict[str, Any]:
    few = {"preset": "small", "batch_size": 6, "epochs": 1.0, "warmup": 0.0, "precision": "32-true"}
    card = train_victim(TrainingConfig(recipe=recipe, data=str(data), **(few | options)), out)
    assert card is not None
    return card


@quiet
def test_fine_tuning_without_embeddings_and_with_new_ones(data: Path, tmp_path: Path) -> None:
    """From weights without PEs: new PEs; from weights with PEs: none; always a head for the classes of the data."""
    bare, full = start("cifar_vit_nope", tmp_path, "bare"), start("cifar_vit", tmp_path, "full")
    still: dict[str, Any] = {"learning_rate": 0.0, "test": None}
    card = card_of(data, tmp_path / "a", "finetune", model="cifar_vit", weights=str(bare), **still)
    head, pe = "the weights' head is for 10 classes, the data have 3", "the weights hold no position embeddings"
    assert [any(note in each for each in card["start"]["notes"]) for note in (head, pe)] == [True, True]
    made, before = load_file(tmp_path / "a" / "model.safetensors"), load_file(bare)
    assert all(torch.equal(made[name], each) for name, each in before.items() if not name.startswith("head"))
    assert 0.015 < float(made["pos_embed"].std()) < 0.025
    assert made["head.weight"].shape == (3, 128)
    assert victim("cifar_vit", weights=tmp_path / "a" / "model.safetensors").model.vit.num_classes == 3
    card = card_of(data, tmp_path / "b", "finetune", model="cifar_vit_nope", weights=str(full), **still)
    assert "trained with position embeddings, which are left out here" in card["start"]["notes"][0]
    assert "pos_embed" not in load_file(tmp_path / "b" / "model.safetensors")


@quiet
def test_embeddings_that_are_lacking_are_an_error_elsewhere(data: Path, tmp_path: Path) -> None:
    bare = start("cifar_vit_nope", tmp_path)
    for recipe in ("classify", "probe"):
        with pytest.raises(PrivlabError, match="pos_embed"):
            card_of(data, tmp_path / "out", recipe, model="cifar_vit", weights=str(bare))


@pytest.mark.slow
@quiet
def test_a_probe_of_classes_makes_weights_of_a_victim(data: Path, tmp_path: Path) -> None:
    weights = start("cifar_vit", tmp_path)
    card = card_of(data, tmp_path / "a", "probe", model="cifar_vit", weights=str(weights), epochs=40.0)
    made, before = load_file(tmp_path / "a" / "model.safetensors"), load_file(weights)
    assert all(torch.equal(made[name], each) for name, each in before.items() if not name.startswith("head"))
    again = victim("cifar_vit", weights=tmp_path / "a" / "model.safetensors")
    assert again.weights.sha256 == card["sha256"]
    layer = load_file(tmp_path / "a" / "probe.safetensors")
    assert card["probe_sha256"] == hash_of(layer)
    assert torch.equal(layer["weight"], made["head.weight"])
    right = []
    for label, name in enumerate(("black", "grey", "white")):
        for path in sorted((data / "test" / name).iterdir()):
            pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None] / 255
            right.append(int(again.model(pixels).argmax()) == label)
    assert card["test"]["accuracy"] == sum(right) / 6 > 0.5


@quiet
@pytest.mark.parametrize("option", ["target=position", "mean=true", "layer=2"])
def test_heads_that_no_victim_has_stand_alone(data: Path, tmp_path: Path, option: str) -> None:
    weights = start("cifar_vit", tmp_path)
    out = tmp_path / "out"
    card = card_of(data, out, "probe", model="cifar_vit", weights=str(weights), options=(option,), half=True)
    assert card["sha256"] is None
    assert not (out / "model.safetensors").exists()
    layer = load_file(out / "probe.safetensors")
    assert {each.dtype for each in layer.values()} == {torch.float16}
    assert len(layer["bias"]) == (64 if option == "target=position" else 3)
    assert card["probe_sha256"] == hash_of({name: each.float() for name, each in layer.items()})
    assert 0 <= card["test"]["accuracy"] <= 1


@pytest.mark.slow
@quiet
def test_places_need_no_labels(data: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        for i, path in enumerate((data / split).rglob("*.png")):
            (tmp_path / "data" / split / f"{i}.png").write_bytes(path.read_bytes())
    told: dict[str, Any] = {"options": ("target=position", "gamma_pos=0"), "epochs": 30.0, "learning_rate": 0.03}
    card = card_of(tmp_path / "data", tmp_path / "out", "probe", model="cifar_vit", **told)
    assert card["test"]["accuracy"] > 0.3  # chance is 1/64
    with pytest.raises(PrivlabError, match="have no label"):
        card_of(tmp_path / "data", tmp_path / "other", "probe", model="cifar_vit")


@quiet
@pytest.mark.parametrize("weights", ["random", "auto"])
def test_random_weights_are_not_fine_tuned(
    data: Path, tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privlab.victims.named.shipped_file", lambda _: None)  # a package without trained weights
    model = "cifar_vit_nope"
    with pytest.raises(PrivlabError, match="cifar_vit_nope"):
        card_of(data, tmp_path / "out", "finetune", model=model, weights=weights)


def test_the_published_fine_tuning_is_supplement_a() -> None:
    config = TrainingConfig(recipe="finetune", model="vit_b", weights="x", data="x")
    objective, augmentation, plan = _set_up(config, 1_281_167)
    assert (plan.optimiser, plan.batch_size, plan.weight_decay, plan.schedule) == ("adamw", 1024, 0.05, "cosine")
    assert plan.learning_rate == pytest.approx(1e-3 * 1024 / 256)
    assert plan.layer_decay == 0.8
    assert abs(plan.steps - 100 * 1_281_167 / 1024) < 1
    assert abs(plan.warmup - 5 * 1_281_167 / 1024) < 1
    assert (objective.smoothing, objective.mixup, objective.cutmix, objective.drop_path) == (0.1, 0.8, 1.0, 0.1)
    assert augmentation.randaugment == 9

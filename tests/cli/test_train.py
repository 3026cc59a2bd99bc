"""`privlab train`: a model with its card, what goes on and what is refused."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from privlab.experiments.methods.consistency import measure_consistency
from privlab.experiments.training.checkpoint import Checkpoints
from privlab.experiments.training.objectives import OBJECTIVES
from privlab.experiments.training.reading import read_examples
from privlab.experiments.training.train_victim import PRESETS, TrainingConfig, _set_up
from privlab.images import open_images
from privlab.victims import hash_of, victim

CLI = Callable[..., "Result"]  # noqa: F821  # of conftest, which test modules cannot import
FEW = ("--model", "cifar_vit_mjp", "--preset", "small", "--batch-size", "4", "--precision", "32-true")
PLAIN = ("--model", "cifar_vit", *FEW[2:])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 8 + 4 pictures whose class is their colour."""
    root = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 2)):
        for name, colour in (("dark", 40), ("light", 180)):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = colour + draw.integers(0, 40, (32, 32, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(root / split / name / f"{i}.png")
    return root


def test_a_model_with_its_card(cli: CLI, data: Path, tmp_path: Path) -> None:
    """The weights are those of the card, load as a victim's, and a second run does nothing."""
    command = (
        "train",
        "mjp",
        *FEW,
        "--data",
        str(data),
        "--epochs",
        "2",
        "--set",
        "gamma=0.27",
        "--out",
        str(tmp_path),
    )
    done = cli(*command, "--json")
    assert done.status == 0
    card = json.loads(done.out)
    assert card == json.loads((tmp_path / "card.json").read_text())
    state = load_file(tmp_path / "model.safetensors")
    assert card["sha256"] == hash_of(state)
    assert card["plan"]["steps"] == 4
    assert card["objective"]["gamma"] == 0.27
    assert card["data"]["pictures"] == 8
    assert card["test"]["images"] == 4
    assert "unk_embed" in state
    assert not any(name.startswith("dal") for name in state)
    trained = victim("cifar_vit_mjp", weights=tmp_path / "model.safetensors")
    assert trained.weights.unknown == "trained"
    again = cli(*command, "--json")
    assert json.loads(again.out) == card
    assert "training" not in again.err


def test_pictures_in_a_file_give_the_same_weights(cli: CLI, data: Path, tmp_path: Path) -> None:
    """With --cache, of which the card says nothing, since it changes nothing."""
    command = ("train", "classify", *PLAIN, "--data", str(data), "--epochs", "1", "--json")
    held = cli(*command, "--out", str(tmp_path / "held"))
    kept = cli(*command, "--out", str(tmp_path / "kept"), "--cache", str(tmp_path / "cache"))
    assert (held.status, kept.status) == (0, 0)
    assert json.loads(kept.out)["sha256"] == json.loads(held.out)["sha256"]
    assert json.loads(kept.out)["course"] == json.loads(held.out)["course"]
    assert len(list((tmp_path / "cache").glob("*.pixels"))) == 2  # what is learnt, and what is evaluated on


@pytest.mark.slow
def test_colours_are_learnt(cli: CLI, data: Path, tmp_path: Path) -> None:
    options = ("--epochs", "30", "--learning-rate", "1e-3", "--set", "shift=0")
    done = cli(
        "train", "classify", "--model", "cifar_vit", *FEW[2:], "--data", str(data), *options, "--out", str(tmp_path)
    )
    assert done.status == 0
    assert json.loads((tmp_path / "card.json").read_text())["test"]["accuracy"] == 1.0
    assert "test accuracy" in done.out
    assert "cifar_vit has RANDOM weights" in done.err


def test_weights_of_a_step_stay(cli: CLI, data: Path, tmp_path: Path) -> None:
    options = ("--epochs", "2", "--keep", "1", "--keep", "3", "--ema", "0.5", "--test", "none")
    done = cli(
        "train", "classify", "--model", "cifar_vit", *FEW[2:], "--data", str(data), *options, "--out", str(tmp_path)
    )
    assert done.status == 0
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == ["step-00000001.safetensors", "step-00000003.safetensors"]
    assert victim("cifar_vit", weights=tmp_path / "kept" / kept[0]).weights.origin == f"file:{kept[0]}"


def test_half_precision_is_evaluated_as_it_is_stored(cli: CLI, data: Path, tmp_path: Path) -> None:
    options = ("--data", str(data), "--epochs", "1", "--half", "--json", "--out", str(tmp_path))
    card = json.loads(cli("train", "mjp", *FEW, *options).out)
    state = load_file(tmp_path / "model.safetensors")
    assert {each.dtype for each in state.values()} == {torch.float16}
    trained = victim("cifar_vit_mjp", weights=tmp_path / "model.safetensors")
    assert trained.weights.sha256 == card["sha256"]
    source = open_images(data, split="test")
    again = measure_consistency(trained.model, read_examples(source, (32, 32)))
    assert {key: card["test"][key] for key in asdict(again)} == pytest.approx(asdict(again), rel=1e-4)


KILLED = """
import os, signal, sys
from privlab.cli import _status
from privlab.base import files
from privlab.experiments.training import checkpoint
real = files.sync
def flush(path, n=[0]):
    n[0] += 1
    if n[0] == {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(path)
checkpoint.sync = files.sync = flush
_status(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 12])
def test_a_killed_training_ends_bit_equal(cli: CLI, data: Path, tmp_path: Path, at: int) -> None:
    """SIGKILL while a checkpoint is written, the first or the third; then the same command again."""
    options = ("--data", str(data), "--epochs", "2", "--save-every", "1", "--ema", "0.9", "--test", "none")
    command = ["train", "mjp", *FEW, *options, "--set", "gamma=0.27"]
    code = KILLED.format(at=at)
    command_line = [sys.executable, "-c", code, *command, "--out", str(tmp_path / "a")]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # as in this process: sums differ with the number of threads
    ended = subprocess.run(command_line, cwd=tmp_path, env=alone, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    for out in "ab":
        assert cli(*command, "--out", str(tmp_path / out)).status == 0
    a, b = (load_file(tmp_path / out / "model.safetensors") for out in "ab")
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_broken_picture_is_named(cli: CLI, data: Path, tmp_path: Path) -> None:
    (data / "train" / "dark" / "broken.png").write_bytes(b"\x89PNG and no more")
    try:
        done = cli(
            "train", "mjp", *FEW, "--data", str(data), "--epochs", "0.5", "--test", "none", "--out", str(tmp_path)
        )
    finally:
        (data / "train" / "dark" / "broken.png").unlink()
    assert done.status == 0
    assert "Skipped dark/broken.png: " in done.err.replace("train/", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("clasify", "--model", "cifar_vit"), "Unknown recipe 'clasify'"),
        (("classify", "--model", "cifar_vitt"), "Unknown model 'cifar_vitt'"),
        (("classify", "--model", "cifar_vit", "--preset", "tiny"), "Unknown preset 'tiny'"),
        (("classify", "--model", "cifar_vit", "--set", "gama=1"), "Unknown option 'gama'"),
        (("classify", "--model", "cifar_vit", "--optimiser", "adamww"), "The training cannot be set up: .*adamww"),
        (("classify", "--model", "cifar_vit", "--precision", "8"), "The training cannot be set up: "),
        (("classify", "--model", "cifar_vit", "--ema", "1"), r"ema of a training must be in \[0, 1\)"),
        (("mjp", "--model", "cifar_vit"), "MJP trains E_unk, and this model has none"),
        (("classify", "--model", "cifar_vit", "--split", "trian"), "trian"),
        (("classify", "--model", "cifar_vit", "--img-size", "30"), "--img-size 30|30"),
        (("classify", "--model", "cifar_vit", "--learning-rate", "1e30"), "The training stopped: .*(nan|not finite)"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_bad_input(cli: CLI, data: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    options = ("--data", str(data), "--preset", "small", "--batch-size", "4", "--epochs", "3")
    recipe, *rest = arguments
    left = [] if "--preset" in rest else options[2:4]
    done = cli("train", recipe, *options[:2], *left, *options[4:], *rest, "--out", str(tmp_path / "out"))
    errors = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert done.status == 2
    assert len(errors) == 1

    assert re.search(message, errors[0])
    assert "Traceback" not in done.err


def test_labels_out_of_range(cli: CLI, tmp_path: Path) -> None:
    for i in range(11):
        (tmp_path / "train" / f"class{i:02}").mkdir(parents=True)
        Image.new("RGB", (32, 32), (20 * i,) * 3).save(tmp_path / "train" / f"class{i:02}" / "a.png")
    done = cli("train", "mjp", *FEW, "--data", str(tmp_path), "--out", str(tmp_path / "out"))
    assert "has the label 10; cifar_vit_mjp tells 10 classes apart" in done.err
    assert done.status == 2


def test_another_training_does_not_go_on_here(cli: CLI, data: Path, tmp_path: Path) -> None:
    """Neither after its end, nor from its checkpoint."""
    command = ("train", "mjp", *FEW, "--data", str(data), "--epochs", "1", "--test", "none", "--out", str(tmp_path))
    assert cli(*command).status == 0
    assert "holds a finished training whose seed is 0" in cli(*command, "--seed", "1").err
    (tmp_path / "card.json").unlink()
    assert "is a checkpoint of another training: its recipe is" in cli(*command, "--set", "gamma=0.5").err


def test_the_published_recipe_is_table_7() -> None:
    config = TrainingConfig(recipe="mjp", model="deit_s_mjp", data="x")
    objective, augmentation, plan = _set_up(config, 1_281_167)
    assert (objective.gamma, objective.weight, objective.smoothing) == (0.03, 0.01, 0.1)
    assert (objective.mixup, objective.cutmix, augmentation.randaugment, augmentation.erasing) == (0.8, 1.0, 9, 0.25)
    assert (plan.optimiser, plan.batch_size, plan.learning_rate, plan.weight_decay) == ("adamw", 1024, 1e-3, 0.05)
    assert plan.schedule == "cosine"
    assert abs(plan.steps - 300 * 1_281_167 / 1024) < 1
    assert abs(plan.warmup - 20 * 1_281_167 / 1024) < 1


def test_every_recipe_has_both_presets() -> None:
    assert {name: set(presets) for name, presets in PRESETS.items()} == {
        name: {"published", "small"} for name in OBJECTIVES
    }


@pytest.mark.slow
def test_an_interrupt_says_what_was_kept_and_how_to_go_on(
    cli: CLI, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", "classify", *PLAIN, "--data", str(data), "--epochs", "2", "--out", str(tmp_path / "out"))
    save, last = Checkpoints.save, 0

    def stopped(checkpoints: Checkpoints, step: int, *state: Any) -> None:
        if step > last:
            raise KeyboardInterrupt
        save(checkpoints, step, *state)

    monkeypatch.setattr(Checkpoints, "save", stopped)
    done = cli(*command, "--save-every", "1")
    assert (done.status, done.out) == (130, "")
    nothing = "No checkpoint had been written, and nothing is kept; --save-every says after how many steps one is."
    assert done.err.endswith(f"Interrupted. {nothing}\n")
    last = 2
    done = cli(*command, "--save-every", "1")
    assert done.status == 130
    kept = f"'{tmp_path / 'out'}' keeps the checkpoint of step 2: the same command goes on from there."
    assert done.err.endswith(f"Interrupted. {kept}\n")
    last = 100
    seen = []
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, *state: seen.append(step) or save(self, step, *state))
    assert cli(*command, "--save-every", "1").status == 0
    assert seen == [3, 4]

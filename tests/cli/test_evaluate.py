"""`privlab evaluate` on small folders: what it prints is what the functions say, and mistakes are one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from privlab.experiments.methods.evaluate import EvaluationConfig, evaluate_models
from privlab.experiments.methods.robustness import natural, outlier_aupr, outputs
from privlab.images import open_images
from privlab.victims import victim

SMALL = ("evaluate", "--weights", "random", "--device", "cpu")
CIFAR = (*SMALL, "--model", "cifar_vit", "--split", "none")


@pytest.fixture
def data(picture: Callable[..., Path], tmp_path: Path) -> Path:
    """Return a folder of ten classes, with two pictures in each."""
    for label in range(10):
        for i in range(2):
            picture(f"data/class{label}/{label}_{i}.png", size=(32, 32))
    return tmp_path / "data"


@pytest.fixture
def corrupted(picture: Callable[..., Path], tmp_path: Path) -> Path:
    """Return a folder as ImageNet-C: one corruption, five severities, ten classes."""
    for severity in range(1, 6):
        for label in range(10):
            picture(f"c/fog/{severity}/class{label}/{severity}{label}.png", size=(32, 32))
    return tmp_path / "c"


@pytest.mark.slow
def test_two_models_are_evaluated_against_gamma(cli: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    (data / "class3" / "broken.png").write_bytes(b"no picture")
    figure = tmp_path / "new" / "gamma.svg"
    asked = (*SMALL, "--model", "cifar_vit,cifar_vit_mjp", "--split", "none", "--data", data, "--gamma", "0,0.5")
    told = cli(*asked, "--figure", figure, "--json")
    assert told.status == 0
    assert "class3/broken.png" in told.err
    assert "RANDOM weights" in told.err
    rows = json.loads(told.out)
    assert [row["model"] for row in rows] == ["cifar_vit", "cifar_vit_mjp"]
    for row in rows:
        assert (row["images"], row["weights"], row["image"]) == (20, "random", [3, 32, 32])
        still, moved = row["by_gamma"]
        assert still == {"gamma": 0, "diff_norm": 0, "consistency": 1, "shuffled_accuracy": row["accuracy"]}
        assert moved["diff_norm"] > 0
    assert "</svg>" in figure.read_text(encoding="utf-8")
    table = cli(*asked).out
    assert "Consistency %" in table
    assert f"{rows[1]['by_gamma'][1]['diff_norm']:.3f}" in table


@pytest.mark.slow
def test_a_shuffle_for_each_batch_where_asked(cli: Callable[..., Any], data: Path) -> None:
    """Consistency is that of a shuffle for each picture; of batches of one picture both are the same."""
    rest = (*CIFAR, "--data", data, "--gamma", "0.5", "--json")
    own, batch, ones, alone = (
        json.loads(cli(*rest, *more).out)
        for more in ((), ("--per", "batch"), ("--batch-size", "1"), ("--per", "batch", "--batch-size", "1"))
    )
    assert own[0]["by_gamma"][0]["diff_norm"] != pytest.approx(batch[0]["by_gamma"][0]["diff_norm"], rel=1e-3)
    assert ones == alone
    told = cli(*rest, "--per", "images")
    assert told.status == 2
    assert told.err.splitlines()[-1] == "Error: Unknown per 'images'. Did you mean image?"


@pytest.mark.slow
def test_corruptions_naturals_and_outliers_are_scored(
    cli: Callable[..., Any], data: Path, corrupted: Path, photos: Path, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "base.json").write_bytes(b'\xef\xbb\xbf{\r\n"fog": 0.5}')  # as Windows writes it
    asked = (
        *CIFAR,
        "--data",
        data,
        "--gamma",
        "0",
        "--natural",
        data,
        "--outliers",
        photos,
        "--corruptions",
        corrupted,
    )
    (row,) = json.loads(cli(*asked, "--baseline", tmp_path / "base.json", "--json").out)
    errors = [each["error"] for each in row["corruptions"]["errors"]]
    assert [each["severity"] for each in row["corruptions"]["errors"]] == [1, 2, 3, 4, 5]
    assert row["corruptions"]["mean_error"] == pytest.approx(sum(errors) / 5)
    assert row["corruptions"]["mce"] == pytest.approx(sum(errors) / 5 / 0.5)
    with pytest.warns(match="RANDOM weights"):
        subject = victim("cifar_vit", weights="random")
    want = natural(outputs(subject, open_images(data)))
    assert row["natural"] == {"images": 20, "classes": 10, "accuracy": want.accuracy, "aurra": want.aurra}
    assert row["natural"]["accuracy"] == row["accuracy"]
    assert row["outliers"]["images"] == 3
    high, low = outputs(subject, open_images(photos), labelled=False), outputs(subject, open_images(data))
    assert row["outliers"]["aupr"] == outlier_aupr(high, low)
    against_alexnet = cli(*asked).out
    assert "n/a" in against_alexnet  # AlexNet's errors are those on ImageNet's 1,000 classes
    assert f"{100 * row['outliers']['aupr']:.2f}" in against_alexnet


def test_labels_come_from_a_file(cli: Callable[..., Any], photos: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("file,label\na.png,1\nb.png,9\nc.png,0\n")
    asked = (*CIFAR, "--data", photos, "--labels", tmp_path / "labels.csv", "--gamma", "0", "--json")
    (row,) = json.loads(cli(*asked).out)
    assert row["images"] == 3
    with pytest.warns(match="RANDOM weights"):
        seen = outputs(victim("cifar_vit", weights="random"), open_images(photos, labels=tmp_path / "labels.csv"))
    assert row["accuracy"] == pytest.approx(float((seen.logits.argmax(1) == torch.tensor([1, 9, 0])).double().mean()))
    (tmp_path / "labels.csv").write_text("file,label\na.png,1\nb.png,9\nc.png,10\n")
    assert "c.png has the label 10; cifar_vit tells 10 classes apart (labels 0 to 9)." in cli(*asked).error


def test_in_python_nothing_is_shown(data: Path) -> None:
    with pytest.warns(match="RANDOM weights"):
        (row,) = evaluate_models(
            EvaluationConfig(
                models=("cifar_vit",), weights=("random",), data=str(data), split=None, gammas=(0.9,), limit=10
            )
        )
    assert row["images"] == 10
    assert "corruptions" not in row


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--data", "{data}", "--gamma", "0,much"),
            "--gamma takes numbers with commas, such as 0,0.27. Found '0,much'.",
        ),
        (("--data", "{data}", "--gamma", "1.5"), "--gamma must be in [0, 1]. Found 1.5."),
        (
            ("--data", "{data}", "--weights", "random,random"),
            "--weights takes one for all of the 1 models, or one for each.",
        ),
        (("--data", "{data}", "--figure", "f.gif"), "A figure is a file .pdf, .svg or .png. Found 'f.gif'."),
        (("--data", "{data}", "--baseline", "gone.json"), "--baseline must be alexnet or a JSON file."),
        (
            (
                "--data",
                "{data}/class1",
            ),
            "has the label None",
        ),
        (("--data", "{data}", "--split", "test"), "No folder"),
        ((), "There is nothing to evaluate on: give --data, --corruptions or --natural."),
        (("--outliers", "{data}"), "--outliers are told from the images of --data: give both."),
        (("--natural", "{photos}"), "has the label None"),
        (("--corruptions", "{photos}"), "holds no CORRUPTION/SEVERITY folders"),
    ],
)
def test_mistakes_are_one_line(
    cli: Callable[..., Any], data: Path, photos: Path, options: tuple[str, ...], message: str
) -> None:
    given = [option.format(data=data, photos=photos) for option in options]
    assert message in cli(*CIFAR, *given).error


def test_too_few_class_folders_are_one_line(cli: Callable[..., Any], data: Path) -> None:
    for path in (data / "class4").iterdir():
        path.unlink()
    (data / "class4").rmdir()
    assert "cifar_vit tells 10 classes apart. Give a folder for each of them." in cli(*CIFAR, "--data", data).error


def test_a_baseline_is_positive_errors(cli: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text('{"fog": 0}')
    assert (
        "must hold an object of positive errors"
        in cli(*CIFAR, "--data", data, "--baseline", tmp_path / "base.json").error
    )

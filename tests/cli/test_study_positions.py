"""`privlab study positions` on tiny predictors: records, figures, no probe without labels, mistakes as one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from privlab.base import PrivlabError
from privlab.experiments.figures.predictors import draw_predictors
from privlab.experiments.studies.position_predictors import ETAS
from privlab.reassembly import DropPosNetwork, Mp3Network, save_predictor
from privlab.victims import VictimModel, hash_of


def model() -> VictimModel:
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3)
    return VictimModel(vit, (0.5,) * 3, (0.25,) * 3)


@pytest.fixture
def predictors(tmp_path: Path) -> tuple[Path, Path]:
    """Return the files of an untrained MP3, with a card, and of an untrained DropPos."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mp3, droppos = Mp3Network(model()), DropPosNetwork(model(), 8, 1, 2)
    first, second = tmp_path / "mine" / "predictor.safetensors", tmp_path / "other.safetensors"
    first.parent.mkdir()
    save_predictor(mp3, first)
    save_predictor(droppos, second)
    card = {"predictor_sha256": hash_of(mp3.tensors()), "objective": {"eta": 0.75, "temperature": "inf"}}
    (first.parent / "card.json").write_text(json.dumps(card), encoding="utf-8")
    (tmp_path / "other.json").write_text(json.dumps(card), encoding="utf-8")  # of another predictor
    return first, second


@pytest.fixture
def labelled(picture: Callable[..., Path], tmp_path: Path) -> Path:
    for split, each in (("train", 3), ("test", 2)):
        for name in ("cat", "dog"):
            for number in range(each):
                picture(f"labelled/{split}/{name}/{split}{name}{number}.png")
    return tmp_path / "labelled"


@pytest.mark.slow
def test_records_and_figures(
    cli: Callable[..., Any], predictors: tuple[Path, Path], labelled: Path, tmp_path: Path
) -> None:
    out, (first, second) = tmp_path / "study", predictors
    given = ("--predictor", first, "--predictor", second, "--images", labelled, "--split", "test")
    told = cli("study", "positions", *given, "--train-split", "train", "--pictures", 2, "--out", out, "--json")
    assert told.status == 0
    made = json.loads(told.out)
    mp3, droppos = made["predictors"]
    assert [about["name"] for about in (mp3, droppos)] == ["mine", "other"]
    assert mp3["objective"] == {"eta": 0.75, "temperature": "inf"}
    assert droppos["objective"] is None
    assert mp3["data"]["pictures"] == 4
    assert [about["placed"]["known"] for about in (mp3, droppos)] == [0, 1]
    names = {Path(path).name for path in made["figures"]}
    own = {f"{kind}_{name}.svg" for kind in ("reconstructions", "attention") for name in ("1_mine", "2_other")}
    assert names == {"accuracy.svg", "knn.svg"} | own
    for path in made["figures"]:
        assert "</svg>" in Path(path).read_text(encoding="utf-8")

    accuracy = pd.read_parquet(out / "accuracy.parquet")
    assert tuple(accuracy[accuracy.predictor == 0].eta) == ETAS
    assert accuracy[accuracy.predictor == 1].groupby("gamma").gamma_pos.count().tolist() == [4] * 4
    assert accuracy.accuracy.between(0, 1).all()
    assert accuracy[accuracy.eta == 0].accuracy.item() == mp3["accuracy"]
    assert accuracy[accuracy.predictor == 1].accuracy.mean() == pytest.approx(droppos["accuracy"])

    placements = pd.read_parquet(out / "placements.parquet")
    groups = placements.groupby(["predictor", "image"])
    assert len(groups) == 4
    for _, rows in groups:
        assert sorted(rows.patch) == sorted(rows.assigned) == sorted(rows.slot) == list(range(16))
        assert (rows[rows.known].likeliest == rows[rows.known].slot).all()
        assert (rows[rows.known].patch == rows[rows.known].slot).all()
    assert {(out / name).is_file() for name in placements.picture} == {True}

    probe = pd.read_parquet(out / "knn.parquet")
    assert probe.layer.tolist() == [0, 1, 2] * 2
    assert set(probe.neighbours) == {6}
    assert mp3["knn"]["accuracy"] == probe[probe.predictor == 0].accuracy.max()

    attention, heads = pd.read_parquet(out / "attention.parquet"), pd.read_parquet(out / "heads.parquet")
    keys = ["predictor", "layer", "head"]
    given = (attention.weight * attention.pairs).groupby([attention[key] for key in keys]).sum() / 16
    assert given.to_numpy() == pytest.approx(1 - heads.sort_values(keys).class_share.to_numpy())


@pytest.mark.slow
def test_the_same_study_is_the_same_bytes(
    cli: Callable[..., Any], predictors: tuple[Path, Path], photos: Path, tmp_path: Path
) -> None:
    given = ("study", "positions", "--predictor", predictors[0], "--images", photos, "--figures", "png")
    for name in ("one", "two"):
        told = cli(*given, "--out", tmp_path / name)
        assert told.status == 0
        assert "mine (mp3)" in told.out
        assert "no k-NN probe: give --train-split" in told.err
    for path in sorted((tmp_path / "one").rglob("*.*")):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes(), path
    assert not (tmp_path / "one" / "knn.png").exists()
    assert (tmp_path / "one" / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_without_labels_have_no_probe(
    cli: Callable[..., Any], predictors: tuple[Path, Path], picture: Callable[..., Path], tmp_path: Path
) -> None:
    for split in ("train", "test"):
        picture(f"bare/{split}/{split}.png")
    (tmp_path / "bare" / "test" / "broken.png").write_bytes(b"no picture")
    given = ("--images", tmp_path / "bare", "--split", "test", "--train-split", "train", "--out", tmp_path / "out")
    told = cli("study", "positions", "--predictor", predictors[1], *given)
    assert told.status == 0
    assert "other: no k-NN probe: not all images have labels." in told.err
    assert "Skipped: test/broken.png" in told.err
    (about,) = json.loads((tmp_path / "out" / "predictors.json").read_text(encoding="utf-8"))
    assert about["knn"] is None
    assert len(about["skipped"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--predictor", "nowhere"), "No position predictor at 'nowhere'."),
        (("--predictor", "cifar_vit"), "is not a position predictor"),
        (("--images", "nowhere"), "No file or folder 'nowhere'."),
        (("--train-split", "there"), "for split 'there'"),
    ],
)
def test_mistakes_are_one_line(
    cli: Callable[..., Any],
    predictors: tuple[Path, Path],
    photos: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
) -> None:
    given = ("--predictor", predictors[0], "--images", photos, "--out", tmp_path / "out")
    assert message in cli("study", "positions", *given, *options).error


def test_a_folder_without_a_study_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match="holds no study of predictors"):
        draw_predictors(tmp_path)
    with pytest.raises(PrivlabError, match=r"Found 'figure\.gif'"):
        draw_predictors(tmp_path, "gif")

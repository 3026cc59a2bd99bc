"""`privlab study pe` on tiny victims: records, figures, the paper's figures beside, and mistakes as one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from privlab.base import PrivlabError
from privlab.experiments.figures.positions import draw_positions
from privlab.experiments.studies.position_embeddings import cosines
from privlab.victims import victim

TINY = ("study", "pe", "--model", "vit_ti,cifar_vit", "--weights", "random", "--img-size", "32", "--no-umap")


@pytest.mark.slow
def test_records_and_figures_of_two_models(cli: Callable[..., Any], photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "pe"
    told = cli(*TINY, "--images", photos, "--limit", 2, "--out", out, "--json")
    assert told.status == 0
    assert "vit_ti: no UMAP" in told.err
    made = json.loads(told.out)
    assert [(about["model"], about["grid"], about["umap"]) for about in made["models"]] == [
        ("vit_ti", [2, 2], False),
        ("cifar_vit", [8, 8], False),
    ]
    assert list(made["models"][0]["explained_variance"]) == ["3", "4"]
    names = {Path(path).name for path in made["figures"]}
    assert {
        "spectrum.svg",
        "projections_1_vit_ti.svg",
        "similarity_2_cifar_vit.svg",
        "attention_2_cifar_vit.svg",
    } <= names
    for path in made["figures"]:
        assert "</svg>" in Path(path).read_text(encoding="utf-8")
    spectrum = pd.read_parquet(out / "spectrum.parquet")
    last = spectrum[spectrum.model == 1].iloc[-1]
    assert (last.accumulated, last.explained) == pytest.approx((1, 1))
    points = pd.read_parquet(out / "points.parquet")
    assert points.groupby("model").slot.count().tolist() == [4, 64]
    assert points[points.model == 1].row.tolist() == [slot // 8 for slot in range(64)]
    with pytest.warns(match="RANDOM weights"):
        table = victim("cifar_vit", weights="random", img_size=32).model.vit.pos_embed
    assert table is not None
    similarity = pd.read_parquet(out / "similarity.parquet")
    matrix = similarity[similarity.model == 1].cosine.to_numpy().reshape(64, 64)
    np.testing.assert_allclose(matrix, cosines(table.detach()[0, 1:].double().numpy()), atol=1e-6)
    attention = pd.read_parquet(out / "attention.parquet")
    sums = attention.groupby(["model", "image", "head"]).weight.sum()
    assert ((sums > 0) & (sums < 1)).all()
    assert {(out / name).is_file() for name in attention.picture} == {True}


@pytest.mark.slow
def test_the_table_has_the_paper_beside_it(cli: Callable[..., Any], tmp_path: Path) -> None:
    table = cli(*TINY, "--out", tmp_path / "pe", "--figures", "png").out
    for printed in ("54.61", "84.55", "0.945", "1.301"):
        assert printed in table
    assert (tmp_path / "pe" / "spectrum.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "vit_ti_nope"), "vit_ti_nope has no position embeddings to look at."),
        (("--model", "vit_ti", "--weights", "random,random"), "--weights takes one for all of the 1 models"),
        (("--images", "nowhere"), "No file or folder 'nowhere'."),
    ],
)
def test_mistakes_are_one_line(cli: Callable[..., Any], tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    assert message in cli(*TINY, "--out", tmp_path / "pe", *options).error


def test_pictures_that_cannot_be_read_are_one_line(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"no picture")
    assert "can be read" in cli(*TINY, "--images", tmp_path / "bad", "--out", tmp_path / "pe").error


def test_a_folder_without_a_study_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match="embeddings"):
        draw_positions(tmp_path)
    with pytest.raises(PrivlabError, match=r"Found 'figure\.gif'"):
        draw_positions(tmp_path, "gif")

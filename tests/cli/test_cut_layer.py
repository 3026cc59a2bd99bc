"""`--cut-layer`: features after ℓ blocks are attacked and recorded as what they are, or refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from privlab.base import PrivlabError
from privlab.grids import specify
from privlab.release import Recorder
from privlab.runs import audit_features
from privlab.victims import victim

DECODER = ("--attack", "inversion-mae", "--set", "steps=2", "--set", "width=32", "--metrics", "psnr")


@pytest.fixture(autouse=True)
def own_cache(cache: Path) -> Path:
    """Keep no decoder of another test."""
    return cache


@pytest.mark.slow
def test_records_state_the_cut_and_have_keys_of_their_own(attack: Callable[..., Any], tmp_path: Path) -> None:
    cells, scores = dict[int | None, set[str]](), dict[int | None, list[float]]()
    for cut in (None, 0, 1, 12):
        out = tmp_path / f"cut-{cut}"
        options = () if cut is None else ("--cut-layer", cut)
        done = attack(*DECODER, "--release", "features", *options, "--out", out, "--details")
        assert done.status == 0
        assert ("features after block" in " ".join(done.out.split())) == bool(cut)
        made = pd.read_parquet(out / "records")
        assert set(made.cut_layer) == {cut or 0}
        assert set(made.release) == {"features"}
        assert {json.loads(text).get("cut_layer") for text in made.conditions} == {cut or None}
        own = made.query("attack == 'inversion-mae' and geometry == 'in_place'")
        cells[cut], scores[cut] = set(own.cell), own.psnr.tolist()
    assert cells[None] == cells[0]
    assert len(cells[0] | cells[1] | cells[12]) == 3
    assert scores[0] == scores[None] != scores[1]


@pytest.mark.slow
def test_a_cut_alone_releases_features_and_gradients_have_none(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame]
) -> None:
    assert attack(*DECODER, "--cut-layer", 2).status == 0
    assert set(records().release) == {"features"}
    assert attack("--attack", "patch-gradient", "--metrics", "psnr", "--overwrite").status == 0
    assert records().cut_layer.isna().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cut-layer", 13), "The cut layer must be in 0 … 12, the number of blocks. Found 13."),
        (("--cut-layer", -1), "-1 is not in the range x>=0"),
        (
            ("--cut-layer", 2, "--release", "gradients"),
            "A cut layer is of released features. Found cut_layer 2, and gradients released: leave one of them out.",
        ),
        (
            ("--cut-layer", 2, "--client", "sgd"),
            "A cut layer is of released features. Found cut_layer 2, and update released: leave one of them out.",
        ),
        (
            ("--cut-layer", 2, "--attack", "patch-gradient"),
            "Attack 'patch-gradient' reads gradients, and this run releases features.",
        ),
        *(
            (
                ("--cut-layer", 1, "--attack", name),
                "needs what this observation does not grant: embedded_rows (each row is one patch's embedding, as with "
                "--cut-layer 0).",
            )
            for name in (
                *("pe-assignment", "border-jigsaw", "row-alignment", "column-statistics", "class-token-key"),
                *("least-squares", "feature-optimisation"),
            )
        ),
    ],
)
def test_a_cut_that_cannot_be_is_one_line(attack: Callable[..., Any], options: tuple[str, ...], message: str) -> None:
    assert message in attack(*options).error


@pytest.mark.slow
def test_a_table_may_vary_the_cut(cli: Callable[..., Any], photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "depth.toml"
    path.write_text(
        f"""[run]
model = "vit_ti"
weights = "random"
img_size = 32
images = ["{photos}"]
attack = ["inversion-mae"]
set = ["steps=2", "width=32"]
metrics = ["psnr"]
[grid]
cut_layer = [0, 3]
[table]
columns = ["psnr"]
"""
    )
    assert cli("table", path, "--out", tmp_path / "out", "--quiet").status == 0
    made = pd.read_parquet(tmp_path / "out" / "records").query("attack == 'inversion-mae' and geometry == 'in_place'")
    assert sorted(made.cut_layer) == [0, 0, 0, 3, 3, 3]
    assert made.cell.nunique() == 2


@pytest.mark.slow
def test_an_audit_takes_the_cut_from_the_recording(cli: Callable[..., Any], photos: Path, tmp_path: Path) -> None:
    model = victim("cifar_vit").model
    tokens = model.client_blocks(model.embed(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))), 2)
    session = Recorder(tmp_path / "seen", {}, on_stop=pytest.fail).session("alice", {"contract": {"cut_layer": 2}})
    session.inference(tokens.detach())
    base = ("features", tmp_path / "seen", "--model", "cifar_vit", "--defense", "none", "--public", photos)
    few = ("--set", "depth-optimisation.steps=2")
    done = cli("audit", *base, *few, "--attack", "depth-optimisation", "--out", tmp_path / "a")
    assert done.status == 0
    assert set(pd.read_parquet(tmp_path / "a" / "records").cut_layer) == {2}
    wrong = specify("cifar_vit", "c", attack="depth-optimisation", release="features", cut_layer=1)
    with pytest.raises(PrivlabError, match=r"has cut layer 2\. Found 1\."):
        audit_features(tmp_path / "seen", wrong, out=tmp_path / "b")
    lacking = cli("audit", *base, "--attack", "pe-assignment", "--out", tmp_path / "c")
    assert "embedded_rows" in lacking.error

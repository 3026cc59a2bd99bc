"""`privlab study placement`: what is exact, what chance gives, and mistakes as one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from privlab.reassembly import Mp3Network, save_predictor
from privlab.victims import VictimModel

SMALL = ("study", "placement", "--img-size", "16", "--patch", "4")


@pytest.fixture
def predictor(tmp_path: Path) -> Path:
    """Return a predictor that gives each slot the same probability, whatever it sees."""
    vit = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=2, num_classes=3)
    made = Mp3Network(VictimModel(vit, (0.5,) * 3, (0.5,) * 3))
    nn.init.zeros_(made.head.weight)
    save_predictor(made, tmp_path / "predictor.safetensors")
    return tmp_path / "predictor.safetensors"


def saved(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.mark.slow
def test_a_ramp_is_put_together_and_ignorance_is_chance(
    cli: Callable[..., Any], predictor: Path, tmp_path: Path
) -> None:
    """Borders of a smooth picture say all; a predictor that knows nothing leaves the shuffled patches to chance."""
    across = np.linspace(20, 230, 16)
    ramp = np.stack([np.tile(across, (16, 1)), np.tile(across, (16, 1)).T, np.full((16, 16), 99)], 2).astype(np.uint8)
    for i in range(3):
        saved(ramp + i, tmp_path / "ramps" / f"{i}.png")
    options = ("--gamma", "0.5,1", "--reassembly", "border,mp3", "--set", f"mp3.weights={predictor}")
    told = cli(*SMALL, *options, "--images", tmp_path / "ramps", "--out", tmp_path / "out", "--json")
    assert told.status == 0
    facts = json.loads(told.out)
    placed = {(cell["gamma"], cell["solver"]): cell["placed"] for cell in facts["placed"]}
    assert placed[0.5, "border"] == placed[0.5, "mp3 with borders"] == 1
    assert placed[0.5, "mp3 alone"] < 0.6
    assert placed[1.0, "mp3 alone"] < 0.4
    assert facts["images"] == 3
    records = pd.read_parquet(tmp_path / "out" / "placement.parquet")
    assert len(records) == 3 * 2 * 3
    assert set(records[records.gamma == 0.5].moved) == {8}
    assert set(records[records.gamma == 1].moved) == {16}
    assert records.groupby(["gamma", "solver"]).placed.mean().to_dict() == pytest.approx(placed)
    shown = cli(*SMALL, *options, "--images", tmp_path / "ramps", "--out", tmp_path / "out").out
    assert "rows (γ = 1)" in shown
    assert "[100.0, 100.0]" in shown
    assert "over 3 images; [95 % interval" in shown


def test_an_option_without_a_name_is_for_all_that_know_it(
    cli: Callable[..., Any], predictor: Path, photos: Path, tmp_path: Path
) -> None:
    """Whatever stands in its value, such as the dot of a file's name."""
    options = ("--gamma", "1", "--reassembly", "border,mp3", "--images", photos, "--out", tmp_path / "out", "--json")
    told = cli(*SMALL, *options, "--set", f"weights={predictor}", "--set", "border.rounds=0", "--set", "mp3.rounds=2")
    assert told.status == 0
    solvers = json.loads(told.out)["solvers"]
    assert solvers["border"] == "Borders(rounds=0)"
    assert solvers["mp3 alone"] == f"ByMp3(weights='{predictor}', borders=False, rounds=2)"
    assert solvers["mp3 with borders"] == f"ByMp3(weights='{predictor}', borders=True, rounds=2)"


@pytest.mark.slow
def test_the_draw_is_that_of_the_image_not_of_the_run(cli: Callable[..., Any], tmp_path: Path) -> None:
    noise = torch.randint(256, (4, 16, 16, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8).numpy()
    for i, pixels in enumerate(noise):
        saved(pixels, tmp_path / "noise" / f"{i}.png")
    options = ("--gamma", "1", "--reassembly", "border", "--images", tmp_path / "noise")
    tables = []
    for limit in (2, 4):
        assert cli(*SMALL, *options, "--limit", limit, "--out", tmp_path / f"{limit}").status == 0
        tables.append(pd.read_parquet(tmp_path / f"{limit}" / "placement.parquet").drop(columns="seconds"))
    pd.testing.assert_frame_equal(tables[0], tables[1].head(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gamma", "half"), "--gamma takes numbers in (0, 1] with commas between them. Found 'half'."),
        (("--gamma", "0"), "Found 0.0."),
        (("--gamma", "0.05"), "shuffle one of 16 patches or more. Found 0.05."),
        (("--patch", "5"), "Found patches of 5 and images of 16."),
        (("--patch", "2"), "side of 3 pixels or more"),
        (("--reassembly", "boarder"), "Unknown re-assembly 'boarder'. Did you mean border"),
        (("--reassembly", "mp3", "--set", "mp3.weights=nowhere"), "Found no file 'nowhere'."),
        (("--reassembly", "border", "--set", "border.runds=1"), "Unknown option 'runds'"),
        (("--images", "nowhere"), "No file or folder 'nowhere'."),
    ],
)
def test_mistakes_are_one_line(
    cli: Callable[..., Any], photos: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    given = ("--images", photos, "--gamma", "0.5", "--reassembly", "border", "--out", tmp_path / "out")
    assert message in cli(*SMALL, *given, *options).error


def test_pictures_that_cannot_be_read_are_one_line(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"no picture")
    told = cli(*SMALL, "--images", tmp_path / "bad", "--reassembly", "border", "--gamma", "1", "--out", tmp_path / "o")
    assert told.status == 2
    assert "can be read" in told.err

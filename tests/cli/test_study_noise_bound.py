"""`privlab study noise-bound` on a tiny victim: its figures against the records, and mistakes as one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from privlab.base import PrivlabError
from privlab.evaluation import batches
from privlab.experiments.figures.studies import draw_bound
from privlab.experiments.methods.reconstruction_bound import fixed_guess, success_bound
from privlab.images import open_images
from privlab.release import released_gradients, released_parameters
from privlab.report.intervals import clopper_pearson
from privlab.threat import Feed
from privlab.victims import victim

VICTIM = ("--model", "vit_ti", "--weights", "random", "--img-size", "32")
NOISE = ("--defense", "gradient-noise", "--attack", "patch-gradient", "--labels", "predicted", "--metrics", "psnr")


@pytest.fixture
def run(cli: Callable[..., Any], photos: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of runs on the photographs."""

    def make(*options: str) -> Path:
        out = tmp_path / "-".join(("run", *options))
        told = cli("attack", *VICTIM, *NOISE, "--no-strips", "--images", photos, *options, "--out", out)
        assert told.status == 0
        return out

    return make


@pytest.mark.slow
def test_shares_norms_and_bounds(
    cli: Callable[..., Any], photos: Path, run: Callable[..., Path], tmp_path: Path
) -> None:
    folder = run("--set", "multiplier=1e-7", "--set", "releases=2", "--draws", "2")
    study = ("study", "noise-bound", folder, "--images", photos, *VICTIM, "--labels", "predicted")
    out, fine = tmp_path / "study", ("--psnr", "15", "--draws", "300")
    facts = json.loads(cli(*study, *fine, "--out", out, "--json").out)
    with pytest.warns(match="RANDOM weights"):
        base = victim("vit_ti", weights="random", img_size=32)
    (chunk,) = batches(open_images(photos), base.preprocessing, 100)
    n = len(chunk.images)
    with torch.no_grad():
        labels = base.model(chunk.images).argmax(1)
    feed = Feed.undefended(chunk.images, base.model.patch)
    whole = released_gradients(base.model, feed, labels, released_parameters(base.model))
    norm = torch.cat([g.flatten(1).double() for g in whole.values()], 1).norm(dim=1)
    assert facts["photographs"] == n
    assert facts["prior"] == fixed_guess(chunk.images, 15.0)
    assert facts["norm"] == pytest.approx(
        {"mean": norm.mean().item(), "least": norm.min().item(), "greatest": norm.max().item()}, rel=1e-4
    )
    (share,) = facts["attacks"]
    rows = pd.read_parquet(folder / "records").query("attack == 'patch-gradient' and geometry == 'in_place'")
    hits = int((rows.psnr >= 15).sum())
    assert (share["hits"], share["trials"], share["releases"]) == (hits, 2 * n, 2)
    assert (share["low"], share["high"]) == clopper_pearson(hits, 2 * n)
    assert share["bound"] == success_bound(facts["prior"], 1e-7, 2)
    games = {(game["multiplier"], game["releases"]): game for game in facts["games"]}
    assert games[1e-7, 2]["share"] == 1
    for (multiplier, releases), game in games.items():
        assert game["bound"] == success_bound(1 / n, multiplier, releases)
        assert clopper_pearson(game["hits"], game["trials"], 0.9999)[0] <= game["bound"]
    assert games[10.0, 1]["share"] < games[0.1, 1]["share"]
    assert "</svg>" in Path(facts["figure"]).read_text(encoding="utf-8")
    table = cli(*study, *fine, "--out", out).out
    assert "share with PSNR ≥ 15 dB" in table
    assert "| 1e-07 | 2 | patch-gradient |" in table


@pytest.mark.slow
def test_mistakes(cli: Callable[..., Any], photos: Path, run: Callable[..., Path], tmp_path: Path) -> None:
    noisy, out = run(), ("--out", tmp_path / "study")
    study = ("study", "noise-bound", noisy, *VICTIM, "--labels", "predicted", *out)
    assert "is not of these photographs and weights" in cli(*study, "--images", photos, "--limit", 1).error
    sign = run("--defense", "gradient-sign")
    elsewhere = cli("study", "noise-bound", sign, "--images", photos, *VICTIM, *out)
    assert "has no scores (psnr) of attacks on gradient-noise alone" in elsewhere.error
    assert "nowhere" in cli("study", "noise-bound", tmp_path / "nowhere", "--images", photos, *VICTIM, *out).error
    with pytest.raises(PrivlabError, match="holds no study of noise"):
        draw_bound(tmp_path)
    with pytest.raises(PrivlabError, match=r"gif"):
        draw_bound(tmp_path, "gif")

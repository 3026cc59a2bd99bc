"""`privlab audit`: what it prints and its exit status."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from privlab.attacks import PatchGradient

Cli = Callable[..., Any]
SEARCHED = ("--attack", "patch-gradient,mjp-subspace")


def first_words(text: str) -> list[str]:
    """Return the first word of each line that is neither in a table nor the rest of a paragraph."""
    return re.findall(r"^(\w+):", text, re.MULTILINE)


@pytest.mark.slow
def test_a_leak_fails_a_pipeline_that_asks_for_it(audit: Cli, step: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--attack", "patch-gradient", "--fail-on-leak", "--overwrite")
    told = audit(step(), *asked)
    assert told.status == 3
    assert told.out.startswith("leaks: yes, a private image was reconstructed\n")
    told = audit(step(), *asked, "--json")
    assert told.status == 3
    assert '"leaks": true' in told.out
    assert audit(step(), *asked[:2], "--overwrite").status == 0
    monkeypatch.setattr(PatchGradient, "__call__", lambda self, seen: torch.rand(1, 3, 32, 32))
    assert audit(step(), *asked).status == 0
    monkeypatch.setattr(PatchGradient, "__call__", lambda self, seen: torch.full((1, 3, 32, 32), torch.nan))
    assert audit(step(), *asked).status == 2


@pytest.mark.slow
def test_the_verdict_comes_first_and_all_fits_into_80_columns(
    audit: Cli, step: Cli, photos: Path, tmp_path: Path
) -> None:
    told = audit(step(), *SEARCHED, "--reference", photos / "a.png", "--public", photos)
    assert told.status == 0
    lines = told.out.splitlines()
    assert max(len(line) for line in lines if not line.startswith(("run: ", "images: "))) <= 80
    assert first_words(told.out) == ["leaks", "residual", "flag", "run", "images"]
    assert lines[0].startswith("leaks: yes")
    assert lines[1].startswith("┏")
    assert lines[-2:] == [f"run: {tmp_path / 'audit'}", f"images: {tmp_path / 'audit' / 'pictures'}"]
    scores = re.findall(r"patch-gradient +│ +(\d+\.\d+) │ +(\d+\.\d+) │", told.out)
    assert len(scores) == 1
    for metric in ("mse ↓", "psnr ↑", "ssim ↑", "lpips squeeze ↓"):
        assert metric in told.out


def test_a_recording_is_not_scored(cli: Cli, recording: Path, photos: Path, tmp_path: Path) -> None:
    victim = ("--model", "vit_ti", "--weights", "random", "--img-size", "64", "--defense", "row-permutation")
    options = ("--attack", "pe-assignment", "--public", photos, "--limit", 1, "--out", tmp_path / "audit")
    told = cli("audit", "features", recording, *victim, *options)
    assert told.status == 0
    lines = told.out.splitlines()
    assert told.out.startswith("leaks: not known: ")
    assert "Features prove no image: look at the pictures." in told.out
    assert max(len(line) for line in lines if not line.startswith(("run: ", "images: "))) <= 80
    assert lines[-2:] == [f"run: {tmp_path / 'audit'}", f"images: {tmp_path / 'audit' / 'strips'}"]


def test_only_the_option_that_moved_is_named_without_a_model(cli: Cli) -> None:
    for name in ("--update", "--gradients", "--features", "--reference"):
        error = cli("attack", name, "file").error
        assert error.startswith(f"{name} is no longer an option of `privlab attack`. Use `privlab audit ")
        assert name not in cli("attack", "--help").out

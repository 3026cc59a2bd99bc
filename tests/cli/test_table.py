"""`privlab table` prints published numbers; `report` and `figures` need a directory alone (more in tests/grid)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOML = """
title = "Noise"
[run]
model = "vit_ti"
weights = "random"
img_size = 32
attack = ["april", "patch-gradient"]
images = ["{photos}"]
[grid]
gamma = [0.3, 0.9]
[[case]]
label = "jigsaw"
setting = "c"
published = {{ psnr = 8.07 }}
[table]
columns = ["mse", "psnr"]
paper_attack = "april"
[[figure]]
kind = "curve"
name = "psnr"
x = "gamma"
"""


@pytest.fixture
def experiment(photos: Path, tmp_path: Path) -> Path:
    path = tmp_path / "noise.toml"
    path.write_text(TOML.format(photos=photos), encoding="utf-8")
    return path


@pytest.fixture
def table(cli: Callable[..., Any], experiment: Path, tmp_path: Path) -> Callable[..., Any]:
    return lambda *arguments: cli("table", experiment, "--out", tmp_path / "run", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "start"),
    [("latex", "% It needs "), ("csv", "group,case,"), ("markdown", "**Noise**"), ("json", "{")],
)
def test_writers(table: Callable[..., Any], form: str, start: str) -> None:
    done = table("--format", form)
    assert done.status == 0
    assert done.out.startswith(start)
    assert "8.07" in done.out


@pytest.mark.slow
def test_report_and_figures_from_the_directory_alone(
    table: Callable[..., Any], cli: Callable[..., Any], experiment: Path, tmp_path: Path
) -> None:
    table()
    experiment.unlink()
    page = cli("report", tmp_path / "run")
    assert page.out == f"{tmp_path / 'run' / 'report.html'}\n"
    assert "jigsaw, gamma 0.9" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    drawn = json.loads(cli("figures", tmp_path / "run", "--format", "svg", "--json").out)
    assert drawn == [str(tmp_path / "run" / "figures" / "psnr.svg")]
    assert (tmp_path / "run" / "figures" / "psnr.svg").stat().st_size > 1000


@pytest.mark.slow
def test_report_of_a_single_attack_run(attack: Callable[..., Any], cli: Callable[..., Any], tmp_path: Path) -> None:
    attack()
    assert cli("report", tmp_path / "run", "--out", tmp_path / "page.html").out == f"{tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert "The run asks for no figures" in cli("figures", tmp_path / "run").err

"""The README's set-up commands are found, and what the docs list is what there is."""

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pandas as pd
import pytest

from privlab.base import plugins as registry
from privlab.cli import _status
from privlab.evaluation import COLUMNS
from privlab.metrics import METRICS

ROOT = Path(__file__).parents[2]
PLUGINS, RECORDS, HOUSE = (
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("how-to/plugins.md", "reference/records.md", "reference/house.md")
)


@pytest.mark.parametrize("word", ["privlab attack", "pytest"])
def test_ci_finds_both_commands_of_the_readme(word: str) -> None:
    command = (sys.executable, ".ci/readme_command.py", word)
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.startswith("python3 -m venv .venv && . .venv/bin/activate && pip install ")
    assert word in found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_a_defense_of_ones_own_is_an_entry_point_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", PLUGINS, re.DOTALL) if "class PixelNoise" in code]
    (tmp_path / "my_package.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("pixel-noise", "my_package:PixelNoise", "privlab.defenses")
    monkeypatch.setattr(registry, "installed_plugins", lambda group: [point] if group == point.group else [])
    run = tmp_path / "run"
    arguments = "attack --model vit_ti --img-size 32 --weights random --limit 2 --metrics psnr --defense pixel-noise"
    assert _status([*arguments.split(), "--details", "--out", str(run)]) == 0
    assert "PixelNoise(std=0.1)" in capsys.readouterr().out
    records = pd.read_parquet(run / "records")
    assert set(records.defense) == {"pixel-noise"}
    assert set(records.setting) == {"c"}
    assert _status(["list", "defenses"]) == 0
    assert "pixel-noise" in capsys.readouterr().out


def test_every_column_is_documented() -> None:
    documented = set(re.findall(r"`(\w+)`", RECORDS)) | set(METRICS)
    assert set(COLUMNS.names) <= documented


def test_every_room_of_the_house_exists() -> None:
    rooms = [line.split("|")[1] for line in HOUSE.splitlines() if line.startswith("| `")]
    named = {name.strip("/").removeprefix("privlab/") for line in rooms for name in re.findall(r"`([\w/]+)`", line)}
    folders = {path.parent.name for path in (ROOT / "privlab").glob("*/__init__.py")}
    assert named == folders | {"attacks", "benchmarks", "defenses", "experiments"}
    assert len(rooms) <= 21

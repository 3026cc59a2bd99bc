"""The README's code runs as printed, and what it lists is what there is."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pandas as pd
import pytest

from privlab.attacks import ATTACKS
from privlab.base import plugins as registry
from privlab.cli import _status, cli
from privlab.defenses import DEFENSES
from privlab.evaluation import COLUMNS
from privlab.metrics import METRICS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```(?:\n```\n(.*?)```)?", README, re.DOTALL)


def block(word: str) -> tuple[str, str]:
    """Return the one Python block that holds a word, and its printed output."""
    (found,) = [(code, printed) for code, printed in PYTHON if word in code]
    return found


def test_the_pieces_work_alone_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = block("privlab.observe(")
    exec(code, {})  # the README's own code
    assert capsys.readouterr().out == printed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_a_defense_of_ones_own_is_an_entry_point_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = block("class PixelNoise")
    (tmp_path / "my_package.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("pixel-noise", "my_package:PixelNoise", "privlab.defenses")
    monkeypatch.setattr(registry, "installed_plugins", lambda group: [point] if group == point.group else [])
    run = tmp_path / "run"
    arguments = "attack --model vit_ti --img-size 32 --weights random --limit 2 --metrics psnr --defense pixel-noise"
    assert _status([*arguments.split(), "--out", str(run)]) == 0
    assert "PixelNoise(std=0.1)" in capsys.readouterr().out
    records = pd.read_parquet(run / "records")
    assert set(records.defense) == {"pixel-noise"}
    assert set(records.setting) == {"c"}
    assert _status(["list", "defenses"]) == 0
    assert "pixel-noise" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*ATTACKS, *DEFENSES, *METRICS, *COLUMNS.names[:3], *cli.commands])
def test_what_there_is_is_in_the_readme(name: str) -> None:
    assert re.search(rf"\b{re.escape(name)}\b", README)


def test_every_column_is_documented() -> None:
    table = README.split("## The columns of a record")[1].split("##")[0]
    documented = set(re.findall(r"`(\w+)`", table)) | set(METRICS)
    assert set(COLUMNS.names) <= documented


def test_every_room_of_the_house_exists() -> None:
    house = README.split("## The house")[1].split("\n## ")[0]
    rooms = [line.split("|")[1] for line in house.splitlines() if line.startswith("| `")]
    named = {name.strip("/").removeprefix("privlab/") for line in rooms for name in re.findall(r"`([\w/]+)`", line)}
    folders = {path.parent.name for path in (ROOT / "privlab").glob("*/__init__.py")}
    assert named == folders | {"attacks", "defenses", "experiments"}
    assert len(rooms) <= 20


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target

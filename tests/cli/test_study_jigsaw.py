"""`privlab study jigsaw`: its table, its figure, and mistakes as one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privlab.base import PrivlabError
from privlab.experiments.figures.studies import draw_jigsaw

SMALL = ("study", "jigsaw", "--protocol", "3x3@48-4", "--missing", "0,2")


@pytest.mark.slow
def test_a_table_a_figure_and_json(cli: Callable[..., Any], photos: Path, tmp_path: Path) -> None:
    asked = (
        *SMALL,
        "--images",
        photos,
        "--limit",
        "2",
        "--public",
        "samples",
        "--public-limit",
        "2",
        "--out",
        tmp_path / "out",
    )
    told = cli(*asked, "--json")
    assert told.status == 0
    facts = json.loads(told.out)
    assert {(cell["protocol"], cell["missing"], cell["solver"]) for cell in facts["cells"]} == {
        ("3x3@48-4", gone, solver) for gone in (0, 2) for solver in ("border", "odds", "odds+slots")
    }
    assert Path(facts["figure"]) == tmp_path / "out" / "jigsaw.svg"
    drawn = (tmp_path / "out" / "jigsaw.svg").read_bytes()
    assert draw_jigsaw(tmp_path / "out").read_bytes() == drawn
    shown = cli(*asked, "--figures", "png")
    assert "placed %" in shown.out
    assert (tmp_path / "out" / "jigsaw.png").stat().st_size > 1000


def test_published_figures_are_called_theirs(cli: Callable[..., Any], photos: Path, tmp_path: Path) -> None:
    asked = ("--images", photos, "--limit", "1", "--protocol", "3x3", "--solvers", "odds", "--out", tmp_path)
    told = cli("study", "jigsaw", *asked)
    assert "PuzLM, theirs" in told.out
    assert "arXiv 2511.06315" in told.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--missing", "some"), "--missing takes whole numbers with commas between them. Found 'some'."),
        (("--missing", "9"), "Found 9 missing and 0 known."),
        (("--protocol", "3x3@50"), "multiple of the pieces a side. Found 3x3@50."),
        (("--protocol", "3x3@48-13"), "4 pixels or more. Found 3"),
        (("--solvers", "odds+slots"), "give --public, or --solvers border,odds."),
        (("--images", "nowhere"), "No file or folder 'nowhere'."),
    ],
)
def test_mistakes_are_one_line(
    cli: Callable[..., Any], photos: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    asked = (*SMALL, "--images", photos, "--solvers", "odds", "--out", tmp_path / "out", *options)
    assert message in cli(*asked).error


def test_a_folder_without_a_study_has_no_figure(tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match="holds no study of jigsaws"):
        draw_jigsaw(tmp_path)

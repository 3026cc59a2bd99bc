"""The table on updates: what it says of records, and that README and site hold what the script makes of them."""

import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from privlab.cli import cli
from privlab.defenses import GradientNoise
from privlab.experiments.figures import updates

DOCS = updates.ROOT / "docs"


def records(psnr: list[float], control: float = 12.0, exact: int = 0) -> pd.DataFrame:
    """Return the records of a row, of which the first ones are exact."""
    wrong = [0] * exact + [9] * (len(psnr) - exact)
    return pd.DataFrame({"psnr": psnr, "levels_wrong": wrong, "control": control})


def test_readme_holds_the_table_of_the_records() -> None:
    readme = (updates.ROOT / "README.md").read_text("utf-8")
    assert updates.HEAD in readme
    assert updates.with_table(readme) == readme


@pytest.mark.parametrize("name", ["how-to/updates.md", "tutorials/update.md"])
def test_pages_include_the_table_that_the_site_generates(name: str) -> None:
    assert "```{include} ../generated/updates.inc\n```" in (DOCS / name).read_text("utf-8")
    assert 'yield "updates.inc", updates.page()' in (DOCS / "_ext" / "generated_pages.py").read_text("utf-8")
    assert (DOCS / Path(name).parent / updates.SHEET_ON_SITE).resolve() == updates.SHEET


def test_each_row_has_records_and_a_line() -> None:
    stored, lines = updates.read_records(), updates.long_table().splitlines()
    assert list(dict.fromkeys(stored.row)) == [row.name for row in updates.ROWS if row.is_measured]
    assert {row.name for row in updates.ROWS if not row.is_measured} <= set(updates.studied().index)
    assert all((stored[stored.row == row.name].attack == updates.attack_of(row)).all() for row in updates.ROWS)
    assert (stored.groupby("row").size() >= 10).all()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == [row.trains for row in updates.ROWS]
    assert updates.RECORDS.stat().st_size < 200_000
    assert updates.SHEET.stat().st_size < 150_000


def test_figures_of_studies_are_those_of_their_pages() -> None:
    studies = updates.studied()
    assert set(studies.index) <= {row.name for row in updates.ROWS}
    for name, study in studies.iterrows():
        text = (DOCS / "studies" / f"{study.page}.md").read_text("utf-8").replace("*", "")
        figures = re.findall(r"\d+\.\d|\d+ of \d+", study.found)
        assert figures, name
        assert all(figure in text for figure in figures), (name, study.found)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (records([157.0] * 4, exact=4), "4 of 4 exact"),
        (records([157.0, 30.0, 30.0], exact=1), "1 of 3 exact; 53.3 dB [-47.1, 153.7]"),  # 53.3 ± 4.303 · 40.41 / √3
        (records([20.0, 22.0, 24.0, 26.0]), "23.0 dB [18.9, 27.1]"),  # 23 ± 3.182 · 2.582 / 2
        (records([10.0, 12.0, 13.0]), "no evidence (11.7 dB)"),
        (records([5.0, 12.0, 40.0]), "no evidence (19.0 dB)"),  # the interval of the gain holds 0
    ],
)
def test_words_of_a_result(part: pd.DataFrame, words: str) -> None:
    assert str(updates.result_of(part)) == words


def test_an_exact_image_counts_as_100_db() -> None:
    assert updates.result_of(records([157.0, 80.0], exact=1)).mean == 90.0


def test_commands_are_read_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates.write_mixed(torch.rand(2, 3, 32, 32), tmp_path)
    monkeypatch.chdir(tmp_path)
    for row in updates.ROWS:
        words = shlex.split(f"{updates.COMMAND} {row.options}")[2:]
        context = cli.commands["attack"].make_context("attack", words)
        assert context.params["attack"], row.name


def test_the_epsilon_of_the_text_is_that_of_the_noise() -> None:
    pytest.importorskip("opacus")
    assert f"ε ≤ {GradientNoise(multiplier=1.0).epsilon():.2f}" in updates.page()


def test_mixed_images_and_labels(tmp_path: Path) -> None:
    images = torch.rand(3, 3, 32, 32)
    updates.write_mixed(images, tmp_path)
    mixup, cutmix, labels = (np.load(tmp_path / f"{name}.npz") for name in ("mixup", "cutmix", "labels"))
    np.testing.assert_allclose(mixup["images"][2], (0.7 * images[2] + 0.3 * images[0]).permute(1, 2, 0), atol=1e-6)
    stored = updates.to_bytes(images).permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(labels["images"], stored)
    assert (cutmix["images"] == stored)[0, 0].all()
    np.testing.assert_array_equal(cutmix["images"][0, 8:24, 8:24], stored[1, 8:24, 8:24])
    np.testing.assert_allclose(mixup["labels"].sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(cutmix["labels"].sum(1), 1, atol=1e-6)
    assert set(np.unique(labels["labels"])) <= {0, 1}


def test_stored_levels_do_not_change_in_bytes() -> None:
    levels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256)
    assert torch.equal(updates.to_bytes(levels / 255), levels)


def test_the_sheet_can_be_opened() -> None:
    with Image.open(updates.SHEET) as picture:
        assert picture.width >= 700

"""The table on updates: what it says of records, and the commands that make them."""

import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from privlab.cli import cli
from privlab.experiments.figures import updates

DOCS = updates.ROOT / "docs"


def records(psnr: list[float], control: float = 12.0, exact: int = 0) -> pd.DataFrame:
    """Return the records of a row, of which the first ones are exact."""
    wrong = [0] * exact + [9] * (len(psnr) - exact)
    return pd.DataFrame({"attack": "mine", "psnr": psnr, "levels_wrong": wrong, "control": control})


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
        (records([157.0, 30.0, 30.0], exact=1), "1 of 3 exact"),
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

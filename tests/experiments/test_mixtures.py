"""The study of mixtures measures each pair in each way once."""

import csv
from pathlib import Path

import pytest
import torch
from PIL import Image

from privlab.experiments.methods import mixtures


def test_rows_are_not_measured_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "images", tmp_path / "out.csv"
    folder.mkdir()
    for i in range(203):
        Image.new("RGB", (40, 36), (i, i, i)).save(folder / f"{i:03}.png")
    calls = list[tuple[int, float | None, float]]()

    def measure(images: torch.Tensor, pair: int, share: float | None, rate: float) -> tuple[float, ...] | None:
        assert (images * 255).round().unique().tolist() == [pair + 1, pair + 201]  # the first photograph is left out
        calls.append((pair, share, rate))
        return None if pair == 1 else (0.6, rate, 100.0, 1.0, 99.0, 99.0)

    monkeypatch.setattr(mixtures, "measure", measure)
    mixtures.study(str(folder), out, 2, 1)
    assert [call[0] for call in calls] == [0] * len(mixtures.WAYS) + [1]
    mixtures.study(str(folder), out, 2, 1)
    assert len(calls) == len(mixtures.WAYS) + 2  # a pair of one class has no row
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["way"] for row in rows] == [str(way) for way in range(len(mixtures.WAYS))]


def test_a_pair_of_one_class_is_left_out() -> None:
    assert mixtures.measure(torch.full((2, 3, 32, 32), 0.5), 0, 0.7, 0.1) is None

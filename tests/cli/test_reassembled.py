"""`privlab attack --geometry reassembled` as users type it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OPTIONS = ("--images", "samples", "--limit", "2", "--img-size", "64", "--attack", "patch-gradient", "--gamma", "0.4")


@pytest.mark.slow
def test_the_table_shows_what_the_adversary_puts_together(attack: Callable[..., Any]) -> None:
    told = json.loads(attack("--setting", "c", *OPTIONS, "--geometry", "reassembled", "--json").out)
    row = next(row for row in told["rows"] if row["attack"] == "patch-gradient")
    assert told["geometry"] == "reassembled"
    means = {name: score["mean"] for name, score in row["scores"].items()}
    assert means["psnr"] > 60
    assert means["placement_accuracy"] == means["neighbour_accuracy"] == 1


@pytest.mark.slow
def test_what_re_assembly_changes_stands_below_every_table(attack: Callable[..., Any], tmp_path: Path) -> None:
    """The jigsaw alone: exact patches, out of their places."""

    def said(name: str, *more: object) -> str:
        return attack("--setting", "c", *OPTIONS, "--out", tmp_path / name, *more).out

    there = json.loads(said("two", "--geometry", "reassembled", "--json"))["rows"]
    here = json.loads(said("five", "--json"))["rows"]
    for kind, name in (("worst", "worst case"), ("single", "best single attack")):
        ours, theirs = (next(row for row in rows if row["kind"] == kind) for rows in (here, there))
        scores = [row["scores"]["psnr"]["mean"] for row in (ours, theirs)]
        assert scores[0] == scores[1] > 60  # what an adversary can make, whichever rows are shown
        behind = [list(row["leakiest"]["psnr"]) for row in (ours, theirs)]
        assert behind == [["patch-gradient (reassembled)"]] * 2
        assert ours["attack"] == name
    assert next(row for row in here if row["kind"] == "attack")["scores"]["psnr"]["mean"] < 40
    text = " ".join(said("one", "--details").split())
    assert "reassembled" in text
    assert "both: as it is, or reassembled (the adversary put patches in order), whichever leaks more" in text
    assert "worst case: the best attack of each image, chosen by the evaluator: an upper bound" in text
    unmoved = attack("--setting", "a", *OPTIONS[:-2], "--out", tmp_path / "four", "--details")
    assert unmoved.status == 0
    assert "(--geometry " not in unmoved.out
    oracle = " ".join(said("six", "--geometry", "oracle", "--details").split())
    assert "control:shuffled would be the image itself, and is left out" in oracle
    assert "oracle)" in oracle


def test_it_is_refused_before_the_run_where_there_is_nothing_to_put_together(attack: Callable[..., Any]) -> None:
    done = attack("--setting", "a", *OPTIONS[:-2], "--geometry", "reassembled")
    assert done.status == 2
    assert done.err.splitlines() == [
        "Error: Geometry 'reassembled' is for setting c, released gradients and a defense that shuffles patches. "
        "Found setting a, gradients and defense auto."
    ]

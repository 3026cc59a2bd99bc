"""`privlab attack --geometry reassembled` as users type it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPTIONS = ("--images", "samples", "--limit", "2", "--img-size", "64", "--attack", "patch-gradient", "--gamma", "0.4")


def test_the_table_shows_what_the_adversary_puts_together(attack: Callable[..., Any]) -> None:
    told = json.loads(attack("--setting", "c", *OPTIONS, "--geometry", "reassembled", "--json").out)
    row = next(row for row in told["rows"] if row["attack"] == "patch-gradient")
    assert told["geometry"] == "reassembled"
    assert row["psnr"] > 60
    assert row["placement_accuracy"] == row["neighbour_accuracy"] == 1


def test_what_re_assembly_changes_stands_below_every_table(attack: Callable[..., Any], tmp_path: Path) -> None:
    """The jigsaw alone: exact patches, out of their places."""

    def said(name: str, setting: str, *more: object) -> str:
        return attack("--setting", setting, *OPTIONS, "--out", tmp_path / name, *more).out

    (line,) = [line for line in said("one", "c").splitlines() if line.startswith("geometry reassembled")]
    there = json.loads(said("two", "c", "--geometry", "reassembled", "--json"))["rows"]
    worst = next(row for row in there if row["kind"] == "worst")
    assert line.startswith(f"geometry reassembled (--geometry reassembled), PSNR: worst case {worst['psnr']:.2f} ± ")
    assert "geometry in_place (--geometry in_place), PSNR: " in said("three", "c", "--geometry", "reassembled")
    assert "(--geometry " not in said("four", "a")  # nothing is moved


def test_it_is_refused_before_the_run_where_there_is_nothing_to_put_together(attack: Callable[..., Any]) -> None:
    done = attack("--setting", "a", *OPTIONS, "--geometry", "reassembled")
    assert done.status == 2
    assert done.err.splitlines() == [
        "Error: Geometry 'reassembled' is for setting c, released gradients and a defense that shuffles patches. "
        "Found setting a, gradients and defense auto."
    ]

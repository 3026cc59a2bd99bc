"""`privlab attack --geometry reassembled` as users type it."""

import json
from collections.abc import Callable
from typing import Any

OPTIONS = ("--images", "samples", "--limit", "2", "--img-size", "64", "--attack", "patch-gradient", "--gamma", "0.4")


def test_the_table_shows_what_the_adversary_puts_together(attack: Callable[..., Any]) -> None:
    told = json.loads(attack("--setting", "c", *OPTIONS, "--geometry", "reassembled", "--json").out)
    row = next(row for row in told["rows"] if row["attack"] == "patch-gradient")
    assert told["geometry"] == "reassembled"
    assert row["psnr"] > 60
    assert row["placement_accuracy"] == row["neighbour_accuracy"] == 1


def test_it_is_refused_before_the_run_where_there_is_nothing_to_put_together(attack: Callable[..., Any]) -> None:
    done = attack("--setting", "a", *OPTIONS, "--geometry", "reassembled")
    assert done.status == 2
    assert done.err.splitlines() == [
        "Error: Geometry 'reassembled' is for setting c, released gradients and a defense that shuffles patches. "
        "Found setting a, gradients and defense auto."
    ]

"""`privlab bench attack`: what it prints; how fast anything is, no test says."""

import json
from collections.abc import Callable
from typing import Any

import pytest

RATIOS = [
    "observe_patch_gradient_over_step",
    "breaching_over_privlab_april",
    "breaching_solve_over_privlab_solve",
    "breaching_linear_solves_over_privlab_solve",
    "score_over_observe",
]
SMALL = ("--model", "vit_ti", "--images", "2", "--repeats", "1", "--device", "cpu")


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that attack 400 images take longer than this suite has."""
    monkeypatch.setattr("privlab.bench._peak_rss", lambda model, n: 500.0 + n / 40)


def test_json_holds_ratios_medians_and_setup(cli: Callable[..., Any], peaks: None) -> None:
    told = cli("bench", "attack", *SMALL, "--json")
    assert told.status == 0
    result = json.loads(told.out)
    assert list(result)[:6] == [*RATIOS, "peak_rss_400_over_40"]
    assert all(result[name] > 0 for name in RATIOS)
    assert result["peak_rss_400_over_40"] == pytest.approx(510 / 501)
    assert set(result["targets"]) == {*RATIOS, "peak_rss_400_over_40"}
    assert {"training step", "solve (april)", "breaching: APRIL"} <= set(result["seconds_per_image"])
    seconds, speed = result["seconds_per_image"], result["images_per_second"]
    assert all(speed[name] == pytest.approx(1 / seconds[name]) for name in seconds)
    assert result["setup"]["model"] == "vit_ti"


def test_table_shows_the_same(cli: Callable[..., Any]) -> None:
    told = cli("bench", "attack", *SMALL, "--no-memory")
    assert told.status == 0
    for word in (*RATIOS, "training step", "images per second", "≤ 0.75"):
        assert word in told.out
    assert "peak_rss" not in told.out
    assert "bench attack" in told.err


def test_victim_that_the_attacks_cannot_take(cli: Callable[..., Any]) -> None:
    error = cli("bench", "attack", *SMALL, "--model", "vit_ti_nope", "--no-memory").error
    assert "pos_embed" in error or "position embedding" in error

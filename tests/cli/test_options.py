"""Stacked defenses, `--set` and `--release`: what they take, what the records say, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_defenses_stack_and_take_options(attack: Callable[..., Any], records: Callable[..., Any]) -> None:
    result = attack("--defense", "low-pass+jigsaw", "--set", "radius=0.2", "--set", "jigsaw.gamma=1", "--setting", "c")
    assert result.status == 0
    made = records()
    assert set(made.defense) == {"low-pass+jigsaw"}
    assert set(made.release) == {"gradients"}
    assert json.loads(made.defense_params[0]) == {"low-pass": {"radius": 0.2}, "jigsaw": {"gamma": 1.0}}


@pytest.mark.slow
def test_options_reach_the_attack(attack: Callable[..., Any], records: Callable[..., Any]) -> None:
    assert attack("--attack", "patch-gradient", "--set", "patch-gradient.rtol=1e-5").status == 0
    attacked = records().query("attack == 'patch-gradient'")
    assert {json.loads(params)["rtol"] for params in attacked.attack_params} == {1e-5}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "rtol"], "--set takes KEY=VALUE or NAME.KEY=VALUE. Found 'rtol'."),
        (["--set", "rtl=1"], "Unknown option 'rtl'. Did you mean rtol"),
        (["--set", "aprill.rtol=1"], "Unknown attack or defense of this run 'aprill'. Did you mean april"),
        (["--set", "rtol=much"], "--set rtol=much: the value must be of type float. Found 'much'."),
        (["--defense", "low-pass+jigsw"], "Unknown defense 'jigsw'. Did you mean jigsaw?"),
        (["--defense", "low-pass", "--set", "radius=0"], "radius of low-pass must be in (0, 1]"),
        (["--defense", "auto+blur"], "Unknown defense 'auto'."),
        (["--release", "feature"], "Unknown release 'feature'. Did you mean features"),
        (["--release", "gradients", "--defense", "row-permutation"], "'row-permutation' acts on features."),
        (["--defense", "row-permutation", "--block", "april"], "Found --block april: leave it out."),
        (
            ["--defense", "row-permutation", "--attack", "april"],
            "Attack 'april' reads gradients, and this run releases features",
        ),
        (["--embedding", "resnet18", "--metrics", "f_sim"], "--embedding must be timm:NAME@FILE"),
    ],
)
def test_what_does_not_fit_is_one_line(attack: Callable[..., Any], arguments: list[str], message: str) -> None:
    assert message in attack(*arguments).error


def test_metrics_of_which_none_can_be_computed_are_refused_at_once(attack: Callable[..., Any], tmp_path: Path) -> None:
    error = attack("--metrics", "f_sim").error
    assert error.startswith("None of the metrics that are asked for can be computed here. f_sim: no embedding is named")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_f_sim_without_an_embedding_is_not_available(attack: Callable[..., Any], records: Callable[..., Any]) -> None:
    result = attack("--metrics", "psnr,f_sim")
    assert result.status == 0
    assert "f_sim is n/a: no embedding is named" in result.err
    assert records().f_sim.isna().all()

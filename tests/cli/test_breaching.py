"""breaching's attacks from the command line: run where they are named, told by --set, their failures recorded."""

import json
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from privlab.attacks import ATTACKS
from privlab.attacks.breaching.wrapper import _shipped_config
from privlab.threat import attack_declarations

SHORT = ("--limit", "2", "--metrics", "psnr", "--set", "optim.max_iterations=2")


@pytest.mark.slow
def test_one_is_scored_beside_ours(attack: Callable[..., Any], records: Callable[..., pd.DataFrame]) -> None:
    """Every attack of the run reads the same release: all of it."""
    names = "breaching:invertinggradients,patch-gradient,april,breaching:april_analytic"
    result = attack("--attack", names, *SHORT, "--set", "optim.step_size=0.2")
    assert result.status == 0
    attacked = records().query("geometry == 'in_place' and not attack.str.startswith('control')")
    assert set(attacked.attack) == set(names.split(","))
    assert set(attacked.status) == {"ok"}
    assert attacked.psnr.notna().all()
    searched = attacked[attacked.attack == "breaching:invertinggradients"]
    (params,) = {*searched.attack_params}
    assert json.loads(params) == {"config": [["optim.max_iterations", 2], ["optim.step_size", 0.2]], "seed": 0}
    assert set(searched.block) == {"stock"}
    assert set(attacked[attacked.attack == "breaching:april_analytic"].block) == {"april"}


@pytest.mark.slow
def test_a_crash_is_a_failure_with_its_reason(attack: Callable[..., Any], records: Callable[..., pd.DataFrame]) -> None:
    result = attack("--attack", "breaching:rgap,patch-gradient", "--limit", "2", "--metrics", "psnr")
    assert result.status == 2
    assert "undoes a chain of convolutions" in result.err
    made = records()
    failed = made[made.attack == "breaching:rgap"]
    assert set(failed.status) == {"failed"}
    assert failed.reason.str.startswith("breaching:rgap: breaching fails with ").all()
    assert set(made[made.attack == "patch-gradient"].status) == {"ok"}


@pytest.mark.slow
def test_none_runs_that_is_not_named(attack: Callable[..., Any], records: Callable[..., pd.DataFrame]) -> None:
    result = attack("--limit", "1", "--metrics", "psnr")
    assert result.status == 0
    assert not records().attack.str.startswith("breaching").any()
    assert "breaching" not in result.out + result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attack", "breaching:invertinggradient"], "Unknown attack 'breaching:invertinggradient'. Did you mean"),
        (["--set", "optim.max_iterations=3"], "Unknown option 'optim.max_iterations'. Did you mean"),
        (
            ["--attack", "breaching:wei", "--set", "optim.max_iteration=3"],
            "Unknown option 'optim.max_iteration'. Did you mean optim.max_iterations",
        ),
        (
            ["--attack", "breaching:wei", "--set", "optim.max_iterations=3.5"],
            "--set optim.max_iterations=3.5: the value must be of type int. Found '3.5'.",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(attack: Callable[..., Any], arguments: list[str], message: str) -> None:
    assert attack(*arguments).error.startswith(message)


def test_the_list_says_which_run_on_vits(cli: Callable[..., Any]) -> None:
    rows = {row["name"]: row for row in json.loads(cli("list", "attacks", "--json").out)}
    for name in (name for name in ATTACKS if name.startswith("breaching:")):
        kind = attack_declarations(ATTACKS[name])
        assert ("not on ViTs: " in rows[name]["paper"]) == bool(kind.obstacle)
        assert ("; runs on ViTs" in rows[name]["paper"]) != bool(kind.obstacle)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--set", "optim.max_iterations=2")])
def test_without_breaching_it_is_said_before_the_run(
    options: tuple[str, ...], attack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an extra; everything else runs without it."""
    monkeypatch.setattr("privlab.attacks.breaching.wrapper.find_spec", lambda name: None)
    _shipped_config.cache_clear()
    extra = "breaching's attacks need the extra: pip install 'privlab[breaching]'."
    assert attack("--attack", "breaching:tag", *options).error == extra
    assert attack("--limit", "1", "--metrics", "psnr").status == 0

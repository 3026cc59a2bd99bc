"""`privlab attack --defense gradient-…`: records, the stated ε, stacks, and mistakes in one line."""

import json
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from privlab.defenses import DEFENSES

LARGE = ("--img-size", "64", "--metrics", "psnr")
NAMES = [name for name in DEFENSES if name.startswith("gradient-")]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_plain_and_adaptive_attack_stand_side_by_side(
    name: str, attack: Callable[..., Any], records: Callable[..., pd.DataFrame]
) -> None:
    result = attack(*LARGE, "--defense", name, "--details")
    assert result.status == 0
    made = records()
    assert {"patch-gradient", "patch-gradient-adaptive"} <= set(made.attack)
    assert set(made.defense) == {name}
    assert set(made.setting) == {"c"}
    assert set(made.release) == {"gradients"}
    assert (made.status == "ok").all()
    assert ("ε " in result.out) == (name == "gradient-noise")


@pytest.mark.slow
def test_options_stand_in_the_record_and_change_the_cell(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame]
) -> None:
    quiet = ("--defense", "gradient-noise", "--attack", "patch-gradient", *LARGE)
    assert attack(*quiet, "--set", "multiplier=1e-7", "--set", "gradient-noise.clip=2").status == 0
    weak = records().query("attack == 'patch-gradient'")
    assert json.loads(weak.defense_params.iloc[0]) == {"clip": 2.0, "multiplier": 1e-7, "releases": 1}
    assert attack(*quiet, "--set", "multiplier=0.1", "--overwrite").status == 0
    strong = records().query("attack == 'patch-gradient'")
    assert set(weak.cell).isdisjoint(strong.cell)
    assert weak.psnr.min() > strong.psnr.max()


@pytest.mark.slow
def test_stacked_with_mjp(attack: Callable[..., Any], records: Callable[..., pd.DataFrame]) -> None:
    arguments = ("--model", "vit_ti_mjp", "--defense", "mjp+gradient-pruning", "--setting", "a,c", "--set", "keep=0.5")
    assert attack(*LARGE, *arguments, "--attack", "patch-gradient,patch-gradient-adaptive,mjp-subspace").status == 0
    made = records()
    assert dict(made.groupby("setting").defense.first()) == {"a": "none", "c": "mjp+gradient-pruning"}
    plain = made[(made.setting == "a") & (made.geometry == "in_place")].pivot(
        index="image", columns="attack", values="psnr"
    )
    assert (plain["patch-gradient-adaptive"] - plain["patch-gradient"]).abs().max() < 1e-6
    assert set(made[made.setting == "c"].attack) >= {"patch-gradient-adaptive", "mjp-subspace"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--defense", "gradient-nois"), "Unknown defense 'gradient-nois'. Did you mean gradient-noise"),
        (("--defense", "gradient-noise", "--set", "multiplyer=1"), "Did you mean multiplier"),
        (("--defense", "gradient-noise", "--set", "multiplier=loud"), "must be of type float. Found 'loud'"),
        (("--defense", "gradient-noise", "--set", "multiplier=-1"), "must be at least 0 and finite. Found -1.0"),
        (("--defense", "gradient-noise", "--set", "releases=0"), "must be at least 1. Found 0."),
        (("--defense", "gradient-pruning", "--set", "keep=0"), "must be in (0, 1]. Found 0.0"),
        (("--defense", "gradient-quantisation", "--set", "dtype=int4"), "'int4'. Did you mean int8"),
        (("--defense", "gradient-noise", "--release", "features"), "acts on gradients. Found features released"),
        (("--defense", "row-permutation+gradient-sign"), "'gradient-sign' acts on gradients"),
        (("--attack", "patch-gradient-adaptive"), "gradient_defense (a defense acts on the released gradient"),
        (
            ("--attack", "patch-gradient-adaptive", "--defense", "gradient-noise", "--setting", "a"),
            "gradient_defense (a defense acts on the released gradient",
        ),
    ],
)
def test_mistakes(attack: Callable[..., Any], arguments: tuple[str, ...], said: str) -> None:
    assert said in attack(*LARGE, *arguments).error


@pytest.mark.slow
def test_nothing_is_left_out_where_no_gradient_defense_is_at_work(attack: Callable[..., Any]) -> None:
    assert "patch-gradient-adaptive" not in attack(*LARGE).err

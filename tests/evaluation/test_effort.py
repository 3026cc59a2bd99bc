"""Effort: which attacks run unnamed, with which budgets, and what records and flags say of it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pandas as pd
import pytest

import privlab.evaluation.case
from privlab.attacks import ATTACKS, attacks
from privlab.base import PrivlabError
from privlab.evaluation import applicable
from privlab.evaluation.case import Adversary, default_attacks
from privlab.evaluation.names import EFFORTS
from privlab.grids import read_experiment, specify
from privlab.threat import AttackDeclarations, attack_declarations
from privlab.victims import victim

GRADIENTS = {
    "quick": {"april", "patch-gradient", "patch-gradient-prior", "mjp-subspace"},
    "standard": {"mjp-full"},
    "full": {"gradient-matching"},
}
FEATURES = {
    "quick": {*("class-token-key", "pe-assignment", "border-jigsaw", "row-alignment", "column-statistics")}
    | {"least-squares", "map-inversion"},
    "standard": {"feature-optimisation"},
    "full": {"inversion-conv", "inversion-mae", "inversion-set", "inversion-token"},
}


def test_the_usual_effort_is_the_standard_one() -> None:
    assert specify(model=("vit_ti",)).adversary.effort == AttackDeclarations().effort == "standard"


@pytest.mark.parametrize(("release", "by_effort"), [("gradients", GRADIENTS), ("features", FEATURES)])
@pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
def test_each_effort_adds_its_own_attacks_to_those_of_the_lower_ones(
    release: str, by_effort: dict[str, set[str]]
) -> None:
    base, expected, efforts = victim("vit_ti_mjp", weights="random", img_size=64), set[str](), set[str]()
    for effort in EFFORTS:
        efforts.add(effort)
        spec = specify(
            model=("vit_ti_mjp",), setting=("c",), weights="random", img_size=64, release=release, effort=effort
        )
        groups, refused = applicable(spec, base)
        expected |= by_effort[effort]
        running = {attack.name for group in groups for attack in group.attacks}
        assert running >= expected
        assert {attack_declarations(ATTACKS[name]).effort for name in running} <= efforts
        assert not refused


def test_no_effort_runs_what_must_be_named() -> None:
    named = {name for name, kind in attacks().items() if attack_declarations(kind).named_only}
    assert named >= {"head-inversion", "spear", "breaching:wei"}
    assert {*default_attacks("full")} == {*attacks()} - named
    assert {*default_attacks("quick")} < {*default_attacks()} < {*default_attacks("full")}


@pytest.mark.parametrize("name", [name for name in ATTACKS if attack_declarations(ATTACKS[name]).at_full])
def test_full_effort_has_larger_budgets_that_options_overrule(name: str) -> None:
    larger = attack_declarations(ATTACKS[name]).at_full
    usual, most = (Adversary(effort=effort).made(ATTACKS[name]) for effort in ("standard", "full"))
    changed = {f.name for f in fields(usual) if getattr(usual, f.name) != getattr(most, f.name)}  # pyright: ignore[reportArgumentType]
    assert changed == {*larger}
    assert all(getattr(most, option) == n > getattr(usual, option) for option, n in larger.items())
    option = next(iter(larger))
    spec = specify(model=("vit_ti",), attack=(name,), effort="full", options=(f"{name}.{option}=1",))
    assert [getattr(attack, option) for attack in spec.adversary.attacks or ()] == [1]


def test_an_option_of_an_attack_that_this_effort_leaves_out_is_refused() -> None:
    given: dict[str, Any] = {"model": ("vit_ti",), "options": ("inner=3",)}
    specify(**given)
    with pytest.raises(PrivlabError, match="inner"):
        specify(**given, effort="quick")


@dataclass(frozen=True)
class Hasty:
    """An attack of another package that declares an effort that there is not."""

    name: ClassVar[str] = "hasty"
    effort: ClassVar[str] = "fast"


def test_an_effort_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(PrivlabError, match=r"'ful'.*full\?"):
        specify(model=("vit_ti",), effort="ful")
    (file := tmp_path / "own.toml").write_text('[run]\neffort = "most"\n[[case]]\nmodel = "vit_ti"\n')
    with pytest.raises(PrivlabError, match=r"own\.toml.*2.*'most'"):
        read_experiment(file)
    monkeypatch.setattr(privlab.evaluation.case, "installed_attacks", lambda: {**attacks(), "hasty": Hasty})
    with pytest.raises(PrivlabError, match="'fast'"):
        default_attacks()


@pytest.mark.slow
@pytest.mark.parametrize(("effort", "flagged"), [("quick", True), ("standard", False)])
def test_records_state_the_effort_and_less_than_the_standard_one_is_a_red_flag(
    cli: Callable[..., Any], tmp_path: Any, effort: str, flagged: bool
) -> None:
    done = cli(
        *("attack", "--model", "cifar_vit", "--weights", "random", "--limit", 1, "--metrics", "psnr", "--no-strips"),
        *("--attack", "patch-gradient", "--effort", effort, "--json", "--out", tmp_path / "run"),
    )
    assert done.status == 0
    told = json.loads(done.out)
    assert ("Low effort" in [flag["head"] for flag in told["flags"]]) is flagged
    assert {*pd.read_parquet(tmp_path / "run" / "records").effort} == {effort}

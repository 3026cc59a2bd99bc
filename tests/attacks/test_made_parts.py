"""Attacks and defenses that are made in Python are the same runs as their names and options."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import pytest

import privlab
from privlab.attacks import PatchGradient, attacks
from privlab.base import PrivlabError, configure, options_of
from privlab.defenses import GradientNoise, Jigsaw, Mjp, defenses

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
SMALL = {"weights": "random", "img_size": 32, "limit": 2, "metrics": "psnr"}


def run(**options: Any) -> pd.DataFrame:
    records = privlab.attack("vit_ti_mjp", **(SMALL | options)).records
    return records.drop(columns=[name for name in records if name.startswith("seconds")])


@pytest.mark.slow
def test_a_made_attack_is_its_name_with_its_options() -> None:
    made = run(settings="a", attacks=[PatchGradient(rtol=0.25), "april"])
    named = run(settings="a", attacks="patch-gradient,april", options=["patch-gradient.rtol=0.25"])
    pd.testing.assert_frame_equal(made, named)
    assert {*made.attack_params.dropna()} >= {'{"rtol": 0.25}'}
    pd.testing.assert_frame_equal(
        run(settings="a", attacks=PatchGradient()), run(settings="a", attacks="patch-gradient")
    )


@pytest.mark.slow
def test_a_made_defense_is_its_name_with_its_options_and_several_are_stacked() -> None:
    made = run(attacks="patch-gradient", defense=[Mjp(gamma=0.5), GradientNoise(multiplier=1e-5)])
    options = ["gradient-noise.multiplier=1e-5"]
    named = run(attacks="patch-gradient", defense="mjp+gradient-noise", gamma=0.5, options=options)
    pd.testing.assert_frame_equal(made, named)
    assert {*made.setting} == {"c"}  # a defense is at work
    assert run(attacks="patch-gradient", defense=Jigsaw(gamma=0.75)).defense.unique().tolist() == ["jigsaw"]


@pytest.mark.parametrize("kinds", [attacks, defenses], ids=["attacks", "defenses"])
def test_what_is_stated_makes_the_same_instance(kinds: Callable[[], dict[str, type[Any]]]) -> None:
    for name, kind in kinds().items():
        if not name.startswith("breaching:"):
            assert configure(kind, options_of(kind())) == kind()
    assert options_of(Jigsaw(gamma=0.5, per="image")) == ["jigsaw.gamma=0.5", "jigsaw.per=image"]


@dataclass(frozen=True)
class Odd:  # noqa: D101
    name: ClassVar[str] = "odd"
    levels: tuple[float, ...] = (1.0, 2.0)


def test_values_that_no_option_can_give_are_refused() -> None:
    with pytest.raises(PrivlabError, match=r"levels=\(1\.0.*2\.0\)"):
        options_of(Odd())

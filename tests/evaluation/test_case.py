"""Which defense a specification names, and with which options."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import privlab.evaluation.case
import privlab.evaluation.names
from privlab.defenses import Jigsaw, Mjp, defenses
from privlab.evaluation import Case
from privlab.evaluation.case import part_of


@dataclass(frozen=True)
class OwnJigsaw(Jigsaw):
    """A defense from another package, with a γ of its own."""

    name: ClassVar[str] = "own-jigsaw"
    gamma: float = 0.9


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"defense": "own-jigsaw"}, OwnJigsaw(gamma=0.9)),
        ({"defense": "own-jigsaw", "gamma": 0.5}, OwnJigsaw(gamma=0.5)),
        ({"defense": "own-jigsaw", "options": ("gamma=0.4",)}, OwnJigsaw(gamma=0.4)),
        ({"defense": "jigsaw", "masked_pe": "slot"}, Jigsaw(gamma=0.27)),
        ({"defense": "mjp"}, Mjp(gamma=0.27, masked_pe="unknown")),
        ({"defense": "mjp", "gamma": 0.0, "masked_pe": "none"}, Mjp(gamma=0.0, masked_pe="none")),
        ({"defense": "mjp", "gamma": 0.5, "options": ("mjp.gamma=0.4",)}, Mjp(gamma=0.4)),
    ],
)
def test_a_defense_keeps_its_own_defaults_where_the_run_states_none(
    given: dict[str, Any], made: Jigsaw, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {**defenses(), OwnJigsaw.name: OwnJigsaw}
    for module in (privlab.evaluation.names, privlab.evaluation.case):
        monkeypatch.setattr(module, "defenses", lambda: known)
    spec = Case(models=("vit_ti_mjp",), settings=("c",), **given)
    assert part_of(spec.defense, spec) == made

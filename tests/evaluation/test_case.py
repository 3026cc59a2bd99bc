"""Which defense a case has by its name, and with which options."""

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from privlab.defenses import Jigsaw, Mjp, defenses
from privlab.grids import specify


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
    for module in ("privlab.evaluation.names", "privlab.grids.specify"):
        monkeypatch.setattr(sys.modules[module], "defenses", lambda: known)
    spec = specify(model=("vit_ti_mjp",), setting=("c",), **given)
    assert spec.defense == (made,)

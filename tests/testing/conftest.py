"""Fixtures of the tests of admission."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from privlab.testing import Check, check_defense
from privlab.victims import VictimModel


@pytest.fixture(scope="module")
def tried(
    tiny_model: Callable[..., VictimModel], photographs: Callable[[int, int], Tensor]
) -> Callable[..., dict[str, Check]]:
    """Admit a defense on a tiny victim with three photographs; return the checks by name."""
    victim, images = tiny_model(depth=1), photographs(3, 16)

    def run(defense: Any, model: VictimModel = victim) -> dict[str, Check]:
        return {check.name: check for check in check_defense(defense, model, images)}

    return run

"""Photographs that the tests of the Python interface share."""

from typing import Any

import pytest
from torch import Tensor


@pytest.fixture(scope="module")
def photos(photographs: Any) -> Tensor:
    return photographs(3, 32)

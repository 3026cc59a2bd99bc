"""How a long computation tells its caller what is done."""

from collections.abc import Callable

__all__ = ["Progress"]

Progress = Callable[[int, int | None], None]
"""A function that is called with the number of items that are done, and with the number of all, None if unknown."""

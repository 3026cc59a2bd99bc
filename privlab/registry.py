"""What is installed: the literal table of a package, and what other distributions add by entry point."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TypeVar

__all__ = ["with_plugins"]

T = TypeVar("T")


def with_plugins(builtin: Mapping[str, T], group: str) -> dict[str, T]:
    """Return `builtin` and everything that entry points of `group` name; ours win where names collide."""
    return {point.name: point.load() for point in entry_points(group=group)} | dict(builtin)

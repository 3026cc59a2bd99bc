"""What is installed: the literal table of a package, and what other distributions add by entry point."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

__all__ = ["installed_plugins", "with_plugins"]

T = TypeVar("T")


def with_plugins(builtin: Mapping[str, T], group: str) -> dict[str, T]:
    """Return `builtin` and everything that entry points of `group` name; ours win where names collide."""
    return {point.name: point.load() for point in installed_plugins(group)} | dict(builtin)


@cache
def installed_plugins(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of `group`, looked up once, for that opens a file of every distribution."""
    return tuple(entry_points(group=group))

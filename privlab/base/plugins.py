"""What is installed: the table of a package, and what other distributions add by entry point; names import nothing."""

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

__all__ = ["Registry", "installed_plugins", "with_plugins"]

T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """A table by name whose entry points are loaded when they are looked up, so that its names import nothing.

    The object that an entry point names may be a table itself, which then holds the value under the same name.
    """

    def __init__(self, entries: "Mapping[str, T | EntryPoint]") -> None:
        self._entries = dict(entries._entries if isinstance(entries, Registry) else entries)

    @classmethod
    def of_places(cls, places: Mapping[str, str]) -> "Registry[T]":
        """Return the table of a package's own parts from the place of each, "module:NAME"."""
        return cls({name: EntryPoint(name, place, "") for name, place in places.items()})

    def __getitem__(self, name: str) -> T:
        entry = self._entries[name]
        if not isinstance(entry, EntryPoint):
            return entry
        found = entry.load()
        return found[name] if isinstance(found, dict) else found

    def __setitem__(self, name: str, value: T) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def with_plugins(builtin: Mapping[str, T], group: str) -> Registry[T]:
    """Return `builtin` and everything that entry points of `group` name; ours win where names collide."""
    ours = Registry(builtin)
    return Registry({point.name: point for point in installed_plugins(group)} | ours._entries)


@cache
def installed_plugins(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of `group`, looked up once, for that opens a file of every distribution."""
    return tuple(entry_points(group=group))

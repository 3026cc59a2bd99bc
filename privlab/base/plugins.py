"""What is installed: the table of a package, and what other distributions add by entry point; names import nothing."""

from collections import UserDict
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar

from privlab.base.errors import PrivlabError
from privlab.base.sources import parts_of

T = TypeVar("T")


class Registry(UserDict[str, T]):
    """A table by name whose entry points are loaded when they are looked up, so that its names import nothing.

    Args:
        entries: the table, or a function that makes it when it is first used.
    """

    def __init__(self, entries: "Mapping[str, T | EntryPoint] | Callable[[], Mapping[str, T | EntryPoint]]") -> None:
        self._given = entries

    @cached_property
    def data(self) -> "dict[str, T | EntryPoint]":  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the entries, which UserDict reads."""
        given = self._given() if callable(self._given) else self._given
        return dict(given.data if isinstance(given, Registry) else given)

    @classmethod
    def of_parts(cls, package: str, folder: Path, without: str = "") -> "Registry[T]":
        """Return the table of the parts that the files of a package define, which are read on first use.

        Args:
            package: its dotted name.
            folder: where it is.
            without: the room whose parts are left out.
        """

        def entries() -> dict[str, T | EntryPoint]:
            found = [each for each in parts_of(package, folder) if not each.place.startswith(f"{package}.{without}.")]
            named = [(each.constants["name"], each.place) for each in found]
            return {name: EntryPoint(name, place, "") for name, place in named}

        return cls(entries)

    def place(self, name: str) -> str:
        """Return the place of an entry that is loaded when it is looked up, "module:NAME"; "" for any other."""
        entry = self.data.get(name)
        return entry.value if isinstance(entry, EntryPoint) else ""

    def __getitem__(self, name: str) -> T:
        entry = self.data[name]
        if not isinstance(entry, EntryPoint):
            return entry
        try:
            return entry.load()
        except (ImportError, AttributeError) as error:
            if not entry.group:  # a part of privlab, whose own error says more
                raise
            raise PrivlabError(
                f"'{name}' of {entry.group} cannot be loaded from '{entry.value}': {error}. "
                "Repair or uninstall its package."
            ) from error


def with_plugins(builtin: Mapping[str, T], group: str) -> Registry[T]:
    """Return `builtin` and everything that entry points of `group` name; ours win where names collide."""
    return Registry({point.name: point for point in installed_plugins(group)} | Registry(builtin).data)


@cache
def installed_plugins(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of `group`, looked up once, for that opens a file of every distribution."""
    return tuple(entry_points(group=group))

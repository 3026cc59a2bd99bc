"""TOML files whose mistakes are refused by file, line, value and what would be right."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privlab.base import PrivlabError, check_name, check_range, parse_toml
from privlab.evaluation import GEOMETRIES


def list_of(kind: type, value: object) -> bool:
    """Return whether a value is a list of one type."""
    return isinstance(value, list) and all(type(each) is kind for each in value)


def is_finite(value: object) -> bool:
    """Return whether a value is a number that a float holds; whole numbers in TOML may have more digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < sys.float_info.max


ANYTHING = "anything"

RIGHT: Mapping[str, Callable[[Any], object]] = {
    ANYTHING: lambda value: True,
    "a text": lambda value: isinstance(value, str),
    "a table of METRIC = NUMBER": lambda value: isinstance(value, dict) and value,
    "a list of names": lambda value: list_of(str, value),
    "a list of texts": lambda value: isinstance(value, str) or list_of(str, value),
    "a table": lambda value: isinstance(value, dict),
    "true or false": lambda value: isinstance(value, bool),
    "a whole number": lambda value: type(value) is int,
    "a positive whole number": lambda value: type(value) is int and value > 0,
    "a list of whole numbers": lambda value: value and list_of(int, value),
    "a number": lambda value: type(value) in (int, float),
    "a finite number": is_finite,
    'a finite number or "none"': lambda value: value == "none" or is_finite(value),
    "a number in (0, 1)": lambda value: type(value) is float and 0 < value < 1,
    "the name of one victim": lambda value: isinstance(value, str) and value and "," not in value,
    "a, b or c": lambda value: isinstance(value, str) and value and "," not in value,
    "an attack": lambda value: isinstance(value, str),
    "a list of metrics": lambda value: value and list_of(str, value),
    "a table of METRIC = 0 … 12": lambda value: (
        isinstance(value, dict) and list_of(int, [*value.values()]) and all(0 <= n <= 12 for n in value.values())
    ),
    "in_place, oracle or reassembled": lambda value: value in GEOMETRIES,
    "a table of texts": lambda value: isinstance(value, dict) and list_of(str, [*value.values()]),
    "the name of a CSV file": lambda value: isinstance(value, str),
}
"""What a value must be, in words, and whether it is."""


@dataclass(frozen=True)
class TomlFile:
    """The data of a TOML file, with the place of each key by its table, the number of that table, and the key.

    The place is the line, or the option --set that put the key there. A table itself has the key "". `right` says what
    the values of each table must be, by key; "" is the table of what is in no other.
    """

    path: Path
    data: dict[str, Any]
    right: Mapping[str, Mapping[str, str]]
    places: dict[tuple[str, int, str], str]

    @classmethod
    def parse(
        cls, path: Path, text: str, right: Mapping[str, Mapping[str, str]], overrides: Sequence[str] = ()
    ) -> "TomlFile":
        """Check what is in no table of a text in TOML, and return its data.

        Args:
            path: the file that holds the text.
            text: the text.
            right: what the values must be.
            overrides: TABLE.KEY=VALUE, with the value in TOML; they replace what the file states.
        """
        file = cls(path, parse_toml(text, str(path)), right, {})
        table, number, count, nested = "", 0, Counter[str](), False
        for line, words in enumerate(text.splitlines(), 1):
            here = f"{path}, line {line}"
            if header := re.match(r"\s*\[+\s*([\w-]+)\s*(?:\.\s*[\"']?([\w.-]+)[\"']?\s*)?\]+\s*(#.*)?$", words):
                table, nested = header[1], header[2] is not None
                count[table] += not nested
                number = max(0, count[table] - 1)
                file.places.setdefault(("", 0, table), here)
                file.places.setdefault((table, number, header[2] or ""), here)
            elif not nested and (key := re.match(r"\s*[\"']?([\w.-]+)[\"']?\s*=", words)):
                for name in (key[1], key[1].partition(".")[0]):
                    file.places.setdefault((table, number, name), here)
        for override in overrides:
            file._override(override)
        file.check(file.data, "")
        return file

    def _override(self, override: str) -> None:
        """Put TABLE.KEY=VALUE into the data."""
        where, equals, text = override.partition("=")
        table, dot, key = where.strip().partition(".")
        if not (equals and dot and key):
            raise PrivlabError(f"--set must be TABLE.KEY=VALUE, such as run.limit=4. Found '{override}'.")
        try:
            value = parse_toml(f"value = {text}", override)["value"]
        except PrivlabError:
            value = text.strip()  # a bare word is a text
        check_name("table of --set", table, ("run", "grid", "table"))
        self.check({table: self.data.setdefault(table, {})}, "")
        self.data[table][key] = value
        self.places[table, 0, key] = f"--set {table}.{key}"

    def refuse(self, message: str, table: str, number: int = 0, key: str = "") -> PrivlabError:
        """Return an error that names the place of a key, or of what holds the key.

        Args:
            message: what is wrong.
            table: the table of the key; "" for what is in no table.
            number: which of the tables of that name, from 0.
            key: the key; "" for the table itself.
        """
        at = ((table, number, key), (table, number, ""), ("", 0, table))
        place = next((self.places[each] for each in at if each in self.places), f"{self.path}, line 1")
        return PrivlabError(f"{place}: {message}")

    @contextmanager
    def at(self, table: str, number: int, key: str) -> Iterator[None]:
        """Add the place of a key to an error.

        Args:
            table: as in `refuse`.
            number: as in `refuse`.
            key: as in `refuse`.
        """
        try:
            yield
        except PrivlabError as error:
            raise self.refuse(str(error), table, number, key) from None

    def check(self, given: Mapping[str, Any], table: str, number: int = 0) -> None:
        """Refuse an unknown key of a table, or a value of another type.

        Args:
            given: the keys and values.
            table: as in `refuse`.
            number: as in `refuse`.
        """
        for name, value in given.items():
            with self.at(table, number, name):
                check_name(f"key of [{table}]" if table else "table or key", name, self.right[table])
                words = self.right[table][name]
                check_range(bool(RIGHT[words](value)), name, words, repr(value))

    def tables(self, name: str, default: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the checked tables that are written as [[name]]."""
        found = self.data.get(name, default)
        if not list_of(dict, found) or len(found) < len(default):
            raise self.refuse(f"{name}s are written as [[{name}]].", name)
        for number, table in enumerate(found):
            self.check(table, name, number)
        return found

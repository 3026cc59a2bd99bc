"""`--set`: options of attacks and defenses from the command line, checked against their fields and their types.

A class with a field `config` takes more keys than its fields: `config_types()` returns their types. Such a key may hold
dots, and its value goes into `config` as a (key, value) pair.

The range of an option stands with its type: `steps: AtLeast1 = 200` in a class that is `Checked`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_origin, get_type_hints

from privlab.base.errors import PrivlabError, check_name, check_range, unknown_name

T = TypeVar("T")


@dataclass(frozen=True)
class _Range:
    """What a value must be, in words, and whether it is; a comparison with NaN is false."""

    words: str
    holds: Callable[[float], bool]


AtLeast0 = Annotated[int, _Range("at least 0", lambda x: x >= 0)]
"""A whole number of at least 0."""
AtLeast1 = Annotated[int, _Range("at least 1", lambda x: x >= 1)]
"""A whole number of at least 1."""
NotNegative = Annotated[float, _Range("at least 0 and finite", lambda x: 0 <= x < math.inf)]
"""A finite number of at least 0."""
Positive = Annotated[float, _Range("above 0 and finite", lambda x: 0 < x < math.inf)]
"""A finite number above 0."""
Share = Annotated[float, _Range("in [0, 1]", lambda x: 0 <= x <= 1)]
"""A number in [0, 1]."""
PositiveShare = Annotated[float, _Range("in (0, 1]", lambda x: 0 < x <= 1)]
"""A number in (0, 1]."""
Fraction = Annotated[float, _Range("in (0, 1)", lambda x: 0 < x < 1)]
"""A number in (0, 1)."""


def read_options(options: Sequence[str], kinds: Iterable[type[Any]]) -> None:
    """Check that each option, KEY=VALUE or NAME.KEY=VALUE, is a field of a class in `kinds`, and its value of its type.

    Raises:
        PrivlabError: for another form, a name or key that none has (with the nearest), or a value of another type.
    """
    if not options:
        return  # looking up the options of attacks may cost an import
    types = {kind: _types(kind) for kind in kinds}
    for option in options:
        name, key, value = _split(option, [kind.name for kind in types])
        owners = [kind for kind in types if not name or kind.name == name]
        having = [kind for kind in owners if key in types[kind]]
        if not having:
            raise _nobodys(name, key, {kind.name: types[kind] for kind in owners})
        for kind in having:
            _convert(option, value, types[kind][key])


def _nobodys(name: str, key: str, owners: Mapping[str, Mapping[str, Any]]) -> PrivlabError:
    """Return the error for a key that none of the owners has; the part before its first dot may be a wrong name."""
    known = {known for types in owners.values() for known in types}
    first, dot, _ = key.partition(".")
    if not name and dot and (get_close_matches(first, owners) or not get_close_matches(key, known)):
        return unknown_name("attack or defense of this run", first, owners)
    return unknown_name("option", key, known)


def configure(kind: type[T], options: Sequence[str], given: Mapping[str, Any] = {}) -> T:
    """Return an instance of a class with the options that are meant for it.

    Args:
        kind: a dataclass with a `name`: an attack, a defense, a reassembly or a training objective.
        options: KEY=VALUE or NAME.KEY=VALUE; one whose key `kind` lacks, or with another NAME, is passed over. Of two
            with the same key the later holds.
        given: values by field, which hold where no option sets the field.

    Raises:
        PrivlabError: for an option of another form, or a value that is not of the field's type.
    """
    values, config, types = dict(given), {}, _types(kind) if options else {}
    own = {f.name for f in fields(kind)}  # pyright: ignore[reportArgumentType]
    for option in options:
        _, key, value = _split(option, [kind.name])  # pyright: ignore[reportAttributeAccessIssue]
        if key in types:
            into = values if key in own else config
            into[key] = _convert(option, value, types[key])
    return kind(**values, **({"config": tuple(config.items())} if config else {}))


def options_of(part: Any) -> list[str]:  # noqa: ANN401
    """Return the options that make this instance of an attack or defense: NAME.KEY=VALUE for each of its fields.

    Raises:
        PrivlabError: if no option can give one of the values.
    """
    kinds, found = _types(type(part)), []
    values = {f.name: getattr(part, f.name) for f in fields(part)}
    values |= dict(values.pop("config") or ()) if hasattr(part, "config_types") else {}
    for key, value in values.items():
        text = option_text(value)
        option = f"{part.name}.{key}={text}"
        try:
            same = _convert(option, text, kinds[key]) == value
        except PrivlabError:
            same = False
        if not same:
            raise PrivlabError(
                f"{part.name}: {key}={value!r} is not an option that a record can state: a number or a text."
            )
        found.append(option)
    return found


def option_text(value: object) -> str:
    """Return the text of an option's value: "none" for None, and numbers with commas for several."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def _split(option: str, names: Iterable[str]) -> tuple[str, str, str]:
    """Return which of the names an option is for (empty: for all), its key, and its value."""
    left, equals, value = (part.strip() for part in option.partition("="))
    name = next((name for name in names if left.startswith(f"{name}.")), "")
    key = left.removeprefix(f"{name}.") if name else left
    if not equals or not key or key.endswith("."):
        raise PrivlabError(f"--set takes KEY=VALUE or NAME.KEY=VALUE. Found '{option}'.")
    return name, key, value


def _types(kind: type[Any]) -> dict[str, Any]:
    """Return the type of each option of a class, those of a configuration of another library included."""
    hints = get_type_hints(kind)
    types = {f.name: hints[f.name] for f in fields(kind)}
    if hasattr(kind, "config_types"):
        del types["config"]
        types |= kind.config_types()
    return types


def _convert(option: str, value: str, wanted: Any) -> Any:  # noqa: ANN401
    """Return a value of the wanted type: bool, int, float, str or numbers with commas; "none" where None is allowed.

    Where several types are allowed, the first that can read the value is taken.
    """
    kinds = getattr(wanted, "__args__", (wanted,))
    if type(None) in kinds and value == "none":
        return None
    kinds = [kind for kind in kinds if kind is not type(None)]
    for kind in kinds:
        try:
            if get_origin(kind) is tuple:
                return tuple(float(part) for part in value.split(","))
            return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
        except (KeyError, ValueError, TypeError):
            continue
    names = {bool: "true or false", tuple[float, ...]: "numbers with commas"}
    wanted = " or ".join(names.get(k, f"of type {getattr(k, '__name__', k)}") for k in kinds)
    raise PrivlabError(f"--set {option}: the value must be {wanted}. Found '{value}'.")


def read_numbers(option: str, text: str) -> tuple[float, ...]:
    """Return the numbers of a list with commas.

    Raises:
        PrivlabError: if a part of the list is not a number.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise PrivlabError(f"{option} takes numbers with commas, such as 0,0.27. Found '{text}'.") from None


class Checked:
    """An attack or a defense whose options are checked: a number by a range above, `Annotated[str, NAMES]` by names."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        """Raise a PrivlabError for the first option that is out of its range."""
        for name, limit in _limits(type(self)):
            value, what = getattr(self, name), f"{name} of {self.name}"
            if isinstance(limit, _Range):
                check_range(limit.holds(value), what, limit.words, value)
            else:
                check_name(what, value, limit)


@cache
def _limits(kind: type[Any]) -> tuple[tuple[str, _Range | Collection[str]], ...]:
    """Return the limit of each option that has one."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple((f.name, limit) for f in fields(kind) for limit in getattr(hints[f.name], "__metadata__", ()))

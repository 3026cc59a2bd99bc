"""`--set`: options of attacks and defenses from the command line, checked against their fields and their types."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from privlab.errors import PrivlabError, unknown_name

__all__ = ["configured", "read_options"]

T = TypeVar("T")


def read_options(options: Sequence[str], kinds: Iterable[type[Any]]) -> None:
    """Check that each option, KEY=VALUE or NAME.KEY=VALUE, is a field of a class in `kinds`, and its value of its type.

    Raises:
        PrivlabError: for another form, a name or key that none has (with the nearest), or a value of another type.
    """
    kinds = list(kinds)
    for option in options:
        name, key, value = _split(option)
        owners = [kind for kind in kinds if not name or kind.name == name]
        if not owners:
            raise unknown_name("attack or defense of this run", name, {kind.name for kind in kinds})
        having = [kind for kind in owners if key in _types(kind)]
        if not having:
            raise unknown_name("option", key, {known for kind in owners for known in _types(kind)})
        for kind in having:
            _convert(option, value, _types(kind)[key])


def configured(kind: type[T], options: Sequence[str], given: Mapping[str, Any] = {}) -> T:
    """Return an instance of the class with the options that are meant for it, and `given` where they say nothing."""
    values, types = dict(given), _types(kind)
    for option in options:
        name, key, value = _split(option)
        if key in types and name in ("", kind.name):  # pyright: ignore[reportAttributeAccessIssue]
            values[key] = _convert(option, value, types[key])
    return kind(**values)


def _split(option: str) -> tuple[str, str, str]:
    left, equals, value = option.partition("=")
    name, _, key = left.rpartition(".")
    if not equals or not key:
        raise PrivlabError(f"--set takes KEY=VALUE or NAME.KEY=VALUE. Found '{option}'.")
    return name.strip(), key.strip(), value.strip()


def _types(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _convert(option: str, value: str, wanted: Any) -> Any:  # noqa: ANN401
    """Return a value of the wanted type: bool, int, float or str; "none" where the type allows None."""
    kinds = getattr(wanted, "__args__", (wanted,))
    if type(None) in kinds and value == "none":
        return None
    wanted = next(kind for kind in kinds if kind is not type(None))
    try:
        if wanted is bool:
            return {"true": True, "false": False}[value.lower()]
        return wanted(value)
    except (KeyError, ValueError, TypeError):
        expected = "true or false" if wanted is bool else f"of type {getattr(wanted, '__name__', wanted)}"
        raise PrivlabError(f"--set {option}: the value must be {expected}. Found '{value}'.") from None

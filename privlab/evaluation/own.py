"""Your own attacks and defenses: plain dataclasses, with defaults for what they do not declare."""

import hashlib
import inspect
import marshal
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Generator, Tensor

from privlab.attacks import attacks
from privlab.base import PrivlabError, check_name, draw_for
from privlab.defenses import defenses

_DRAWS = 16
"""Releases from which the variance of a defense that does not state it is measured."""


def completed(part: Any, kind: str) -> Any:  # noqa: ANN401
    """Return an attack or a defense with all that its protocol asks for; the class that was given is left as it is.

    A name is that of an installed one, which gets its default options.

    What its class does not declare has a default: `name` is the class's name in kebab-case, `paper` is empty, an attack
    requires nothing and reads all gradients, and the variance of a defense on gradients is measured from releases.

    Args:
        part: a name, or an instance of a dataclass.
        kind: "attack" or "defense".

    Raises:
        PrivlabError: for an unknown name, a class instead of an instance, or an object that is not a dataclass or lacks
            the method.
    """
    if isinstance(part, str):
        installed = attacks() if kind == "attack" else defenses()
        check_name(kind, part, installed)
        part = installed[part]()
    if isinstance(part, type):
        raise PrivlabError(f"{kind} must be an instance. Found the class {part.__name__}: make it, {part.__name__}().")
    methods = ("__call__",) if kind == "attack" else ("__call__", "send", "release")
    if not is_dataclass(part) or not any(hasattr(type(part), method) for method in methods):
        wanted = " or ".join(methods)
        raise PrivlabError(
            f"{kind} must be a name, or an instance of a dataclass with the method {wanted}. Found {part!r}."
        )
    made = object.__new__(complete_class(type(part), kind))
    held = vars(part) if hasattr(part, "__dict__") else {f.name: getattr(part, f.name) for f in fields(part)}
    for name, value in held.items():
        object.__setattr__(made, name, value)
    return made


@cache
def complete_class(kind_of_part: type, kind: str) -> type:
    """Return a class with the declarations that it has, and the defaults of the others; the same for the same class."""
    defaults: dict[str, Any] = {"name": _kebab(kind_of_part.__name__), "paper": ""}
    if kind == "attack":
        defaults |= {"requires": frozenset(), "parameters": ("*",)}
    elif hasattr(kind_of_part, "release"):
        defaults["variance"] = _measured_variance
    missing = {name: value for name, value in defaults.items() if not hasattr(kind_of_part, name)}
    if kind_of_part.__module__ == "__main__" or "<locals>" in kind_of_part.__qualname__:
        missing["_source_sha256"] = source_sha256(kind_of_part)  # worker processes get the class without its source
    if kind_of_part.__hash__ is None:  # a dataclass that is not frozen
        missing["__hash__"] = object.__hash__
    if not missing:
        return kind_of_part
    about = {"__module__": kind_of_part.__module__, "__doc__": kind_of_part.__doc__}
    return type(kind_of_part.__name__, (kind_of_part,), missing | about)


def _kebab(name: str) -> str:
    """Return a class's name in kebab-case: "MyAttack" is my-attack."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


def _measured_variance(self: Any, released: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the variance of what a defense adds, from releases of what it released, with draws of the adversary's."""
    count = len(next(iter(released.values())))
    releases = [self.release(released, _draws(count, number)) for number in range(_DRAWS)]
    return {name: torch.stack([each[name] for each in releases]).var(0) for name in released}


def _draws(count: int, number: int) -> Sequence[Generator]:
    return [draw_for(0, str(i), "variance", number) for i in range(count)]


@cache
def source_sha256(kind: type | Callable[..., Any]) -> str:
    """Return the SHA-256 of the source text of a function, or of a class and of the classes that it inherits from.

    The compiled code is used where there is no source, as in an interactive interpreter.

    Args:
        kind: the class or the function.
    """
    if (known := getattr(kind, "_source_sha256", None)) is not None:
        return known
    digest = hashlib.sha256()
    for each in (each for each in getattr(kind, "__mro__", (kind,)) if each is not object):
        try:
            digest.update(inspect.getsource(each).encode())
        except (OSError, TypeError):
            for name, value in sorted((vars(each) if isinstance(each, type) else {"": each}).items()):
                if (code := getattr(value, "__code__", None)) is not None:
                    digest.update(name.encode() + marshal.dumps(code))
    return digest.hexdigest()

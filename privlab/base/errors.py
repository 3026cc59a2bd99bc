"""Errors that a user can act on: one line with what is wrong, the value found, and what would be right."""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb

_MOST_CHOICES = 24
"""The most names that a message lists."""


class PrivlabError(ValueError):
    """A mistake in what the user asked for or handed over; its message is the one line that a user reads.

    Example:
        >>> import privlab
        >>> privlab.victim("cifar_vitt")
        Traceback (most recent call last):
            ...
        privlab.base.errors.PrivlabError: ...
    """


_OTHER_NAMES = {"learning_rate": "lr", "max_grad_norm": "clip", "local_epochs": "epochs", "num_images": "images"}
_OTHER_NAMES |= {
    "optimizer": "optimiser",
    "criterion": "loss",
    "scheduler": "schedule",
    "grad_accumulation": "accumulation",
}
"""Names that other libraries give to what has another one here, which no likeness of letters finds."""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> PrivlabError:
    """Return the error for a `name` that is none of the `choices`, with the nearest valid names.

    Args:
        kind: what is named, such as "metric"; it stands before the name in the message.
        name: the unknown name, as the user gave it.
        choices: the valid names, in any order; the message lists the first of them where none is near.
    """
    choices = sorted({*choices})
    near = get_close_matches(name, choices, n=3, cutoff=0.4)
    if (same := _OTHER_NAMES.get(name)) in choices:
        near = [same]
    more = f" and {len(choices) - _MOST_CHOICES} more" if len(choices) > _MOST_CHOICES else ""
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Choose from: {', '.join(choices[:_MOST_CHOICES])}{more}."
    return PrivlabError(f"Unknown {kind} '{name}'. {hint}")


def check_name(kind: str, name: str, choices: Collection[str]) -> None:
    """Raise `unknown_name` of these arguments, unless the name is one of the choices; an object is no name.

    Args:
        kind: what is named, as in `unknown_name`.
        name: the name that the user gave.
        choices: the valid names.
    """
    if not isinstance(name, str):
        raise PrivlabError(f"A {kind} is given by its name, such as '{min(choices)}'. Found {type(name).__name__}.")
    if name not in choices:
        raise unknown_name(kind, name, choices)


def check_range(holds: bool, name: str, right: str, found: object) -> None:
    """Raise a PrivlabError that says what a value must be, unless that holds.

    Args:
        holds: whether the value is in its range; a comparison with NaN is false.
        name: the value's name, such as "gamma (γ)".
        right: what it must be, such as "in [0, 1]".
        found: the value.
    """
    if not holds:
        raise PrivlabError(f"{name} must be {right}. Found {found}.")


def memory_ended(error: Exception) -> str | None:
    """Return one line for the user if a GPU had too little memory; None for any other error. It does not import torch.

    Args:
        error: any exception, such as `torch.OutOfMemoryError`.
    """
    if type(error).__name__ != "OutOfMemoryError":
        return None
    wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    more = f" {wanted[1]} more were needed." if wanted else ""
    return f"The GPU has too little memory.{more} Use a smaller batch, fewer --workers, or --device cpu."


def first(names: Iterable[str], most: int = 6) -> str:
    """Return the first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def one_line(error: BaseException, *, kind: bool = False) -> str:
    """Return what an error says in one line of at most 300 characters, without a full stop; with its type if asked."""
    text = f"{type(error).__name__}: {error}" if kind else str(error)
    return " ".join(text.split())[:300].rstrip(".:") or type(error).__name__


def foreign_error(error: Exception, module: str) -> str:
    """Return an error of somebody else's class in one line: its kind, what it says, and the line that raised it.

    Args:
        error: the error, with its traceback.
        module: the module of the class or function that was called.
    """
    text = one_line(error, kind=True)
    places = [
        f"{Path(frame.f_code.co_filename).name}, line {line}"
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == module
    ]
    return f"{text} ({places[-1]})" if places else text

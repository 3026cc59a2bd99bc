"""Errors that a user can act on: one line with what is wrong, the value found, and what would be right."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["PrivlabError", "first", "unknown_name"]

_MOST_CHOICES = 24
"""The most names that a message lists."""


class PrivlabError(ValueError):
    """A mistake in what the user asked for or handed over; its message is the one line that a user reads."""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> PrivlabError:
    """Return the error for a `name` that is none of the `choices`, with the nearest valid names.

    Args:
        kind: what is named, such as "metric"; it stands before the name in the message.
        name: the unknown name, as the user gave it.
        choices: the valid names, in any order; the message lists the first of them where none is near.
    """
    choices = sorted(choices)
    near = get_close_matches(name, choices, n=3, cutoff=0.4)
    more = f" and {len(choices) - _MOST_CHOICES} more" if len(choices) > _MOST_CHOICES else ""
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Choose from: {', '.join(choices[:_MOST_CHOICES])}{more}."
    return PrivlabError(f"Unknown {kind} '{name}'. {hint}")


def first(names: Iterable[str], most: int = 6) -> str:
    """Return the first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

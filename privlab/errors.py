"""Errors that a user can act on: one line with what is wrong, the value found, and what would be right."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["PrivlabError", "unknown_name"]


class PrivlabError(ValueError):
    """A mistake in what the user asked for or handed over; its message is the one line that a user reads."""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> PrivlabError:
    """Return the error for a `name` that is none of the `choices`, with the nearest valid names first."""
    choices = sorted(choices)
    near = get_close_matches(name, choices, n=3, cutoff=0.4)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Choose from: {', '.join(choices)}."
    return PrivlabError(f"Unknown {kind} '{name}'. {hint}")

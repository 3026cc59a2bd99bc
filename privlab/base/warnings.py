"""Warnings that weaken a verdict, and how a run collects them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class PrivlabWarning(UserWarning):
    """Something that weakens a verdict: the run goes on, and the reader must know."""


def warn(message: str, level: int = 2) -> None:
    """Warn of something that weakens a verdict, as of the caller `level` calls above."""
    warnings.warn(message, PrivlabWarning, stacklevel=level + 1)


@contextmanager
def collect_warnings(messages: list[str]) -> Iterator[None]:
    """Add privlab's warnings to `messages`, each once; hand all others on."""
    foreign = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", PrivlabWarning)
        try:
            yield
        finally:
            for entry in caught:
                if not issubclass(entry.category, PrivlabWarning):
                    foreign.append(entry)
                elif str(entry.message) not in messages:
                    messages.append(str(entry.message))
    for entry in foreign:
        warnings.warn_explicit(entry.message, entry.category, entry.filename, entry.lineno)

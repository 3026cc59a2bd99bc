"""Warnings that weaken a verdict, and how a run collects them."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


class PrivlabWarning(UserWarning):
    """Something that weakens a verdict: the run goes on, and the reader must know."""


def warn(message: str) -> None:
    """Warn of something that weakens a verdict, at the line outside the package that called privlab."""
    frame, level, outermost = sys._getframe(1), 2, 1
    while frame is not None:  # an attack of the user's own may be called in between: the outermost call counts
        if frame.f_code.co_filename.startswith(_PACKAGE):
            outermost = level
        frame, level = frame.f_back, level + 1
    warnings.warn(message, PrivlabWarning, stacklevel=outermost + 1)


@contextmanager
def collect_warnings(messages: list[str]) -> Iterator[None]:
    """Add privlab's warnings to `messages`, each once; hand all others on, except torch's about its own code."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", PrivlabWarning)
        warnings.filterwarnings("ignore", r"`torch\.jit", FutureWarning)  # torch's own, of its first forward derivative
        try:
            yield
        finally:
            own = [str(entry.message) for entry in caught if issubclass(entry.category, PrivlabWarning)]
            messages.extend([each for each in dict.fromkeys(own) if each not in messages])
    for entry in caught:
        if not issubclass(entry.category, PrivlabWarning):
            warnings.warn_explicit(entry.message, entry.category, entry.filename, entry.lineno)

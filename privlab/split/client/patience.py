"""How long a client tries again if the server does not answer."""

import time
from collections.abc import Callable

from privlab.base import PrivlabError
from privlab.split.client.client import Lost, Rebuffed

__all__ = ["Patience"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Seconds before the second attempt, and the most between any two."""


class Patience:
    """Pauses between attempts that double in length, for up to `seconds` in a row without success.

    Args:
        seconds: the time without success after which `wait` raises.
        tell: called with the reason at the first of several waits in a row.
    """

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self._seconds, self._tell = seconds, tell
        self._met = False
        self._since: float | None = None
        self._pause = _FIRST_PAUSE

    def reset(self) -> None:
        """Reset the time and the pauses: the server has answered."""
        self._met, self._since, self._pause = True, None, _FIRST_PAUSE

    def wait(self, lost: Lost) -> None:
        """Wait before the next attempt.

        Raises:
            PrivlabError: if the time is over, or the server needs another kind of connection.
        """
        if isinstance(lost, Rebuffed) and not self._met:
            raise lost
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._tell(f"{lost} Trying again for {self._seconds:g} seconds.")
        left = self._since + self._seconds - now
        if left <= 0:
            raise PrivlabError(f"{lost} Tried for {self._seconds:g} seconds (--retry-for).") from None
        time.sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

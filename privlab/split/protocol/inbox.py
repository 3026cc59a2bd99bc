"""A stream of messages that can be awaited with a time limit."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Inbox:
    """Reads one message at a time in a thread of its own, since gRPC's iterators offer no time limit."""

    def __init__(self, stream: Iterator[bytes]) -> None:
        self._stream = stream
        self._reader = ThreadPoolExecutor(1, "inbox")
        self._coming: Future[Any] | None = None

    def get(self, seconds: float) -> bytes | None:
        """Return the next message, or None at the end of the stream.

        Raises:
            TimeoutError: (of concurrent.futures) if no message came; the next call waits for the same message.
        """
        if self._coming is None:
            self._coming = self._reader.submit(next, self._stream, None)
        message = self._coming.result(seconds)
        self._coming = None
        return message

    def close(self) -> None:
        """Stop reading; the thread ends with the stream."""
        self._reader.shutdown(wait=False)

"""Standard output and error as they are found: their reader gone, their disk full, or without characters to write.

A run never ends because nobody watches it: what standard error does not take is dropped, and standard output is written
when everything is on disk.
"""

import codecs
import io
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from privlab.base.errors import PrivlabError

CONTROLS_BEYOND_ASCII = r"\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
"""DEL, and control characters that are not ASCII, as a regular expression has them between brackets."""

_CONTROLS = re.compile(rf"[\x00-\x08\x0b-\x1f{CONTROLS_BEYOND_ASCII}]")
"""Characters that move the cursor, or change colours, the title or the direction of writing; no line end or tab."""
_LONGEST = 2000

CLOSED = 141
"""Exit status where nobody reads standard output any more: what a shell says of a program that SIGPIPE ended."""


def printable(text: str, longest: int | None = _LONGEST) -> str:
    """Return a text for a terminal, whoever wrote it: control characters are escaped, and each line is cut.

    Args:
        text: any text; its lines keep their ends.
        longest: the most characters of a line; None for any number.
    """
    if longest is not None and len(text) > longest:
        lines = (line if len(line) <= longest else f"{line[:longest]}…" for line in text.split("\n"))
        text = "\n".join(lines)
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class OutputClosed(Exception):
    """Nobody reads standard output any more."""


class Stream(io.TextIOWrapper):
    """A standard stream that writes every text in its encoding, and outlives its reader and a full disk."""

    def __init__(self, number: int, encoding: str, *, kept: bool) -> None:
        binary = open(number, "wb", closefd=False)  # noqa: SIM115
        # click takes a stream that says ASCII for a mistake and writes UTF-8; Latin-1 holds ASCII
        super().__init__(binary, "latin-1" if codecs.lookup(encoding).name == "ascii" else encoding)
        self.reconfigure(line_buffering=not kept or self.isatty())
        self._number, self._written, self._kept = number, encoding, kept

    def fitted(self, text: str) -> str:
        """Return text as it is written: characters that the encoding lacks are escaped as in Python."""
        return text if text.isascii() else text.encode(self._written, "backslashreplace").decode(self._written)

    def write(self, text: str, /) -> int:
        """Write text; what the stream cannot take is dropped.

        Raises:
            OutputClosed: if this is standard output and nobody reads it.
            PrivlabError: if standard output cannot be written.
        """
        try:
            super().write(self.fitted(text))
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Write what is held back; raises as `write` does."""
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Let nothing that is written, or held back, go anywhere from now on."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._number)
        os.close(nowhere)
        if not self._kept:
            return
        if isinstance(error, BrokenPipeError):
            raise OutputClosed from None
        reason = error.strerror or error
        raise PrivlabError(f"Standard output cannot be written: {reason}. What a run has finished is kept.") from None


def prepare_streams() -> None:
    """Let this process's standard output and error outlive their readers, and escape what their encodings lack.

    A descriptor that is closed is opened on nothing, so that no file of a run is taken for it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdout, sys.stderr = _prepared(sys.stdout, kept=True), _prepared(sys.stderr, kept=False)


def _prepared(stream: TextIO | None, *, kept: bool) -> TextIO:
    if stream is None:  # it was closed when Python started
        return Path(os.devnull).open("w", encoding="utf-8", errors="replace")
    stream.flush()
    return Stream(stream.fileno(), stream.encoding, kept=kept)


def end_streams(status: int) -> int:
    """Write what the streams hold back, and return the exit status: `status`, or what became of standard output."""
    try:
        sys.stdout.flush()
    except OutputClosed:
        status = CLOSED
    except PrivlabError as error:
        sys.stderr.write(f"Error: {error}\n")
        status = 2
    sys.stderr.flush()
    return status

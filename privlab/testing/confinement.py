"""A plug-in that is measured: what it may not reach while it runs, seen by an audit hook of Python.

The hook (PEP 578) is added to the process with the first plug-in, looks at what happens inside one alone, and replaces
nothing. It is no sandbox: it sees what Python's own functions announce, and neither what compiled code does by itself
nor what another thread does.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType, FunctionType
from typing import Any

from privlab.base import PrivlabError

REFUSED = "; an entry may not."
"""How the message of what a plug-in may not do ends."""

_PROCESSES = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile", "pty.")
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_inside: ContextVar[tuple[str, str, list[str]] | None] = ContextVar("inside", default=None)
"""The module of the plug-in at work, its method, and what it did that it may not."""


@contextmanager
def confined(module: str, method: str) -> Iterator[None]:
    """Refuse the network, files and processes to a method of a plug-in's module in this thread.

    What is read while another module is imported is let pass.

    Raises:
        PrivlabError: for the first of them that was tried, whatever was made of its error.
    """
    if _inside.get() is not None:
        yield
        return
    _add_hook()
    found: list[str] = []
    token = _inside.set((module, method, found))
    try:
        yield
    except Exception:
        if not found:
            raise
    finally:
        _inside.reset(token)
    if found:
        raise PrivlabError(found[0]) from None


def confine(module: str) -> None:
    """Confine the methods of all classes of a module, which was imported under this name."""
    for kind in [*vars(sys.modules[module]).values()]:
        if isinstance(kind, type) and kind.__module__ == module:
            for name, value in [*vars(kind).items()]:
                if name.startswith("__") and name not in ("__init__", "__post_init__", "__call__"):
                    continue
                if isinstance(value, FunctionType):
                    setattr(kind, name, _confined(value, module))
                elif isinstance(value, property) and value.fget is not None:
                    setattr(kind, name, property(_confined(value.fget, module)))


def _confined(function: Callable[..., Any], module: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*given: Any, **named: Any) -> Any:  # noqa: ANN401
        with confined(module, function.__name__):
            return function(*given, **named)

    return run


@functools.cache
def _add_hook() -> None:
    sys.addaudithook(_see)


def _see(event: str, given: tuple[Any, ...]) -> None:
    """Refuse an event inside a plug-in; Python raises what this raises where the event happens."""
    if (inside := _inside.get()) is None:
        return
    module, method, found = inside
    if (what := _what(event, given)) is None or _by(sys._getframe(1), module, reads=what.startswith("reads the file")):
        return
    found.append(f"The plug-in {what} in {method}{REFUSED}")
    raise PrivlabError(found[-1])


def _what(event: str, given: tuple[Any, ...]) -> str | None:
    """Return what an event is, as a clause; None for one that anybody may cause."""
    if event.startswith("socket.") or event == "urllib.Request":
        return f"reads the network: {event}{_address(event, given)}"
    if event.startswith(_PROCESSES):
        return f"starts a process: {event}"
    if event.startswith(_CHANGES):
        return None if "__pycache__" in str(given[0]) else f"changes files: {event} of {_short(given[0])}"
    if event == "open" and isinstance(given[0], str | bytes | os.PathLike):
        path = os.path.realpath(os.fsdecode(given[0]))
        writes = any(c in (given[1] or "") for c in "wax+") or bool((given[2] or 0) & _WRITES)
        if writes:
            return None if "__pycache__" in path else f"writes the file {_short(path)}"
        return None if path.startswith(_installed()) else f"reads the file {_short(path)}"
    return None


def _installed() -> tuple[str, ...]:
    """Return the folders of Python and of what is installed, which hold no photograph of anybody."""
    return tuple(os.path.realpath(path) + os.sep for path in (sys.prefix, sys.base_prefix, *sys.path) if path)


def _address(event: str, given: tuple[Any, ...]) -> str:
    if event == "urllib.Request":
        return f" to {_short(given[0])}"
    if event in ("socket.connect", "socket.sendto", "socket.bind"):
        parts = given[1] if isinstance(given[1], tuple) else (given[1],)
        return f" to {_short(':'.join(map(str, parts[:2])))}"
    return f" to {_short(given[0])}:{given[1]}" if event == "socket.getaddrinfo" else ""


def _short(value: object) -> str:
    text = " ".join(os.fsdecode(value).split()) if isinstance(value, bytes) else " ".join(str(value).split())
    return text if len(text) <= 100 else f"{text[:99]}…"


def _by(frame: FrameType | None, module: str, *, reads: bool) -> bool:
    """Return whether an import, or, of a file that is read, code of privlab, stands between an event and a plug-in."""
    while frame is not None and (name := frame.f_globals.get("__name__", "")) != module:
        if name.startswith("importlib.") or (reads and name.startswith("privlab.") and name != __name__):
            return True
        frame = frame.f_back
    return False

"""What the tests of hostile files share: a separate process, whose memory and time are measured."""

import os
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from privlab.base import PrivlabError

_CEILING = 12 * 2**30
"""The address space of the separate process, so that a file that does harm ends the process and not the machine."""
_SECONDS = 120
_NEW_PROCESS = 512  # MiB of Python, privlab and the libraries

Measured = tuple[str, float, int]


def _separately(work: Callable[[], object]) -> Measured:
    """Do something in a copy of this process; return what it returns, as text, its seconds of a core, and its MiB.

    The memory is that of a new process in which the copy's peak is reached: the copy begins with what this process
    holds, which is more after other tests. An error is a text too.
    """
    resource = pytest.importorskip("resource")
    receiver, sender = os.pipe()
    began, held = time.monotonic(), _resident()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        said = ""
        try:
            resource.setrlimit(resource.RLIMIT_AS, (_CEILING, _CEILING))
            resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                said = str(work())
        except PrivlabError as error:
            said = f"refused: {error}"[:3000] if "\n" not in str(error) else f"several lines: {error}"
        except BaseException:
            said = traceback.format_exc()[-3000:]
        finally:
            os.write(sender, said.encode(errors="replace")[:12_000])
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status, usage = os.wait4(child, 0)
    ended = said or f"ended with status {status} after {time.monotonic() - began:.0f} seconds"
    return ended, usage.ru_utime + usage.ru_stime, _NEW_PROCESS + max(0, usage.ru_maxrss // 1024 - held)


def _resident() -> int:
    """Return the memory of this process in MiB; where Linux does not state it, that of a new one."""
    path = Path("/proc/self/statm")
    if not path.exists():
        return _NEW_PROCESS
    return int(path.read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


@pytest.fixture
def separately() -> Callable[[Callable[[], object]], Measured]:
    """Return what does something in a separate process."""
    return _separately

"""What the tests of hostile files share: a separate process, whose memory and time are measured."""

import os
import time
import traceback
import warnings
from collections.abc import Callable

import pytest

from privlab.base import PrivlabError

_CEILING = 12 * 2**30
"""The address space of the separate process, so that a file that does harm ends the process and not the machine."""
_SECONDS = 120

Measured = tuple[str, float, int]


def _separately(work: Callable[[], object]) -> Measured:
    """Do something in a copy of this process; return what it returns, as text, its seconds of a core, and its MiB.

    The memory is the peak of the copy, which begins with what this process holds; an error is a text too.
    """
    resource = pytest.importorskip("resource")
    receiver, sender = os.pipe()
    began = time.monotonic()
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
    return ended, usage.ru_utime + usage.ru_stime, usage.ru_maxrss // 1024


@pytest.fixture
def separately() -> Callable[[Callable[[], object]], Measured]:
    """Return what does something in a separate process."""
    return _separately

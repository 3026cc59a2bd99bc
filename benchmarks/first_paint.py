"""The time to the first paint of a page, in a headless Chromium that is controlled over a pair of pipes."""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from privlab.base import PrivlabError

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_TIMEOUT = 120
"""Seconds after which a browser is ended that has not painted."""
_PAINT_TIME = (
    "new Promise((done) => new PerformanceObserver((list) => list.getEntriesByName('first-paint').forEach((one) => "
    "done(one.startTime))).observe({type: 'paint', buffered: true}))"
)
"""The JavaScript that gives the time of the first paint, in milliseconds since the navigation."""
_Send = Callable[..., dict[str, Any]]


def find_chromium() -> str | None:
    """Return the path of a Chromium or Chrome, first the one in PRIVLAB_CHROMIUM; None if there is none."""
    named = os.environ.get("PRIVLAB_CHROMIUM")
    if os.name != "posix":  # it is driven through a shell and two pipes
        return None
    return named or next((path for name in _NAMES if (path := shutil.which(name))), None)


def first_paint(chromium: str, page: Path, times: int = 3) -> float:
    """Return the median of the seconds from the navigation to the first paint, each in a new tab.

    Args:
        chromium: path of the browser, as `find_chromium` returns it.
        page: an HTML file.
        times: number of tabs over which the median is taken, ≥ 1.

    Raises:
        PrivlabError: if the browser dies, refuses a command, or does not answer within two minutes.
    """
    with _launch(chromium) as send:
        return statistics.median(_paint_seconds(send, page) for _ in range(times))


def _paint_seconds(send: _Send, page: Path) -> float:
    target = send("Target.createTarget", url="about:blank")["targetId"]
    session = send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    send("Page.enable", session)
    send("Page.navigate", session, url=page.absolute().as_uri())
    answer = send("Runtime.evaluate", session, expression=_PAINT_TIME, awaitPromise=True, returnByValue=True)
    send("Target.closeTarget", targetId=target)
    return answer["result"]["value"] / 1000


@contextmanager
def _launch(chromium: str) -> Iterator[_Send]:
    """Start a Chromium with an empty profile, and yield a function that sends a command and returns its result."""
    theirs, ours = os.pipe(), os.pipe()
    ends = theirs[0], ours[1]  # the shell puts them at 3 and 4, in this order: the first may be 3, the second cannot
    options = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-extensions"]
    options += ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        shell = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        command = ["bash", "-c", shell, "bash", chromium, *options, f"--user-data-dir={profile}", "about:blank"]
        null = subprocess.DEVNULL
        process = subprocess.Popen(command, pass_fds=ends, stdin=null, stdout=null, stderr=null)
        for end in ends:
            os.close(end)
        patience = threading.Timer(_TIMEOUT, process.kill)
        patience.start()
        try:
            with os.fdopen(theirs[1], "wb", buffering=0) as writes, os.fdopen(ours[0], "rb") as reads:
                yield _sender(writes, reads)
        finally:
            patience.cancel()
            try:
                process.wait(10)  # Chromium ends when its pipe is closed
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _sender(writes: Any, reads: Any) -> _Send:  # noqa: ANN401
    count = 0

    def send(method: str, session: str | None = None, **params: object) -> dict[str, Any]:
        nonlocal count
        count += 1
        message = {"id": count, "method": method, "params": params} | ({"sessionId": session} if session else {})
        with suppress(BrokenPipeError):  # the read below reports that the browser died
            writes.write(json.dumps(message).encode() + b"\0")
        while (answer := _message(reads)).get("id") != count:
            pass
        if "error" in answer:
            raise PrivlabError(f"Chromium refuses {method}: {answer['error']['message']}.")
        return answer["result"]

    return send


def _message(reads: Any) -> dict[str, Any]:  # noqa: ANN401
    parts = bytearray()
    while (byte := reads.read(1)) != b"\0":
        if not byte:
            raise PrivlabError("Chromium died.")
        parts += byte
    return json.loads(parts)

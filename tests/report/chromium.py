"""A headless Chromium driven through its DevTools protocol, over a pair of pipes: no port, and no package."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Browser", "Page", "find_chromium", "launched"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_OPTIONS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--hide-scrollbars", "--force-color-profile=srgb"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-pings"),
)
_AT_3_AND_4 = (  # where Chromium expects its pipes; the numbers that we got may be these, in the wrong order
    "import os, sys; from fcntl import F_DUPFD_CLOEXEC, fcntl; "
    "r, w = (fcntl(int(n), F_DUPFD_CLOEXEC, 10) for n in sys.argv[1:3]); "
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_PATIENCE = 60.0
_KEYS = {"Enter": 13, " ": 32, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38}
_KEYS |= {"Tab": 9, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40}
_TEXTS = {"Enter": "\r", " ": " "}

Event = dict[str, Any]


def find_chromium() -> str | None:
    """Return the path of a Chromium or Chrome, the one that PRIVLAB_CHROMIUM names first; None where there is none."""
    named = os.environ.get("PRIVLAB_CHROMIUM")
    return named or next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def launched() -> Iterator["Browser"]:
    """Start a Chromium with an empty profile, and end it.

    Raises:
        RuntimeError: if there is no Chromium, or it does not start.
    """
    if (chromium := find_chromium()) is None:
        raise RuntimeError("There is no Chromium on the path.")
    theirs, ours = os.pipe(), os.pipe()
    root = ("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _AT_3_AND_4, str(theirs[0]), str(ours[1])),
                *(chromium, *_OPTIONS, *root, f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=(theirs[0], ours[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs[0])
        os.close(ours[1])
        browser = Browser(reads=ours[0], writes=theirs[1])
        try:
            browser.send("Browser.getVersion")
            yield browser
        finally:
            os.close(browser.writes)  # Chromium ends when its pipe does
            os.close(browser.reads)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(eq=False)
class Browser:
    """A running Chromium: two pipes, and the events that came while something else was waited for."""

    reads: int
    writes: int
    events: list[Event] = field(default_factory=list)
    _buffer: bytes = b""
    _number: int = 0

    def send(self, method: str, session: str | None = None, **params: object) -> dict[str, Any]:
        """Send one command and return its result.

        Raises:
            RuntimeError: if the browser refuses it, dies, or does not answer.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self.writes, json.dumps(message).encode() + b"\0")
        while (answer := self._receive(method)).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def wait(self, method: str, session: str) -> Event:
        """Return the first event of that name in a session, among those that came and those that will come."""
        while True:
            for event in self.events:
                if event["method"] == method and event.get("sessionId") == session:
                    return event
            self.events.append(self._receive(method))

    def _receive(self, waiting_for: str) -> Event:
        until = time.monotonic() + _PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self.reads], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self.reads, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError(f"{waiting_for}: Chromium {'died' if ready else 'does not answer'}.")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> "Page":
        """Load a file in a tab of its own and wait until it is there."""
        target = self.send("Target.createTarget", url="about:blank", newWindow=True)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        page.send("Emulation.setFocusEmulationEnabled", enabled=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        page.send("Emulation.setEmulatedMedia", features=[scheme, motion])
        page.send("Page.navigate", url=path.absolute().as_uri())
        self.wait("Page.loadEventFired", session)
        return page


@dataclass(frozen=True, eq=False)
class Page:
    """A tab with a loaded file."""

    browser: Browser
    session: str

    def send(self, method: str, **params: object) -> dict[str, Any]:
        """Send one command to this tab."""
        return self.browser.send(method, self.session, **params)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, a promise's when it is kept.

        Raises:
            RuntimeError: if it throws.
        """
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until two frames were painted, so that observers have been called."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def resize(self, width: int, height: int) -> None:
        """Give the page another viewport, in CSS pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def first_paint(self) -> float:
        """Return the seconds from the start of loading until something was to be seen."""
        found = "(list) => list.getEntriesByName('first-contentful-paint').forEach((one) => done(one.startTime))"
        seen = "observe({ type: 'paint', buffered: true })"
        return self.run(f"new Promise((done) => new PerformanceObserver({found}).{seen})") / 1000

    def press(self, *keys: str) -> None:
        """Press and release each key, by its name in DOM events, where the focus is."""
        for key in keys:
            named = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": _KEYS[key]}
            text = {"text": _TEXTS[key]} if key in _TEXTS else {}
            self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **named, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **named)
        self.settle()

    def write(self, text: str) -> None:
        """Type a text where the focus is."""
        self.send("Input.insertText", text=text)
        self.settle()

    def drag(self, selector: str, start: float, end: float) -> None:
        """Drag the mouse over an element from one share of its width to another."""
        left, top, width, height = self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); "
            "one.scrollIntoView({block: 'center'}); const {left, top, width, height} = one.getBoundingClientRect(); "
            "return [left, top, width, height]; })()"
        )
        moves = [("mouseMoved", start + (end - start) * i / 8) for i in range(1, 9)]
        for kind, share in [("mousePressed", start), *moves, ("mouseReleased", end)]:
            where = {"x": left + share * width, "y": top + height / 2}
            self.send("Input.dispatchMouseEvent", type=kind, **where, button="left", buttons=1, clickCount=1)
        self.settle()

    def click(self, selector: str) -> None:
        """Click into the middle of an element."""
        self.drag(selector, 0.5, 0.5)

    def screenshot(self, *, whole: bool = False) -> bytes:
        """Return a PNG of what is in sight, or of the whole page."""
        return base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def complaints(self) -> list[str]:
        """Return what was written to the console, thrown, or logged by the browser."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self._events() if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for, other than data held in the page."""
        asked = [event["params"]["request"]["url"] for event in self._events() if event["method"] == _REQUEST]
        return [url for url in asked if not url.startswith("data:")]

    def _events(self) -> list[Event]:
        self.send("Runtime.evaluate", expression="0")  # whatever was under way has been reported
        return [event for event in self.browser.events if event.get("sessionId") == self.session]


_REQUEST = "Network.requestWillBeSent"

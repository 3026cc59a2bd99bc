"""The check of the built site's links: each fault is found, and nothing else."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

EXTENSIONS = str(Path(__file__).parents[2] / "docs/_ext")


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the extension."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(EXTENSIONS)
    yield import_module("checked_links")
    sys.modules.pop("checked_links")


START = '<a href="guide/one.html#ways">one</a><a href="#">up</a><script src="_static/a.js?v=1"></script>'
ONE = '<h2 id="ways"></h2><a href="../index.html">home</a><a href="https://example.org/a_(b)?c=d#e">out</a>'


def faults(links: ModuleType, start: str, one: str = ONE) -> list[tuple[str, str]]:
    """Return the faults of a site of two pages and one script."""
    pages = {"index.html": links.Page(start), "guide/one.html": links.Page(one)}
    return [*links.faults(pages, {"_static/a.js"})]


def test_good_links_are_good(links: ModuleType) -> None:
    assert faults(links, START) == []
    assert (
        faults(links, START, ONE + '<a href="mailto:a@example.org">m</a><img src="data:image/png;base64,AA=="/>') == []
    )


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ('<a href="two.html">', "no such file: two.html"),
        ('<a href="../guide">', "no such file: ../guide"),
        ('<img src="strip.png">', "no such file: strip.png"),
        ('<link href="print.css">', "no such file: print.css"),
        ('<a href="#means">', "no such anchor: #means"),
        ('<a href="one.html#means">', "no such anchor: one.html#means"),
        ('<a href="https://example">', "not a well-formed address: https://example"),
        ('<a href="https://example.org/a.">', "not a well-formed address: https://example.org/a."),
        ('<a href="https://exam ple.org/">', "not a well-formed address: https://exam ple.org/"),
        ('<a href="http:///a">', "not a well-formed address: http:///a"),
        ('<a href="javascript:a()">', "an address of a kind that no reader can open: javascript:a()"),
        ('<a href="//example.org">', "an address of a kind that no reader can open: //example.org"),
    ],
)
def test_each_fault_is_found(links: ModuleType, more: str, fault: str) -> None:
    assert faults(links, START, ONE + more) == [("guide/one.html", fault)]


def test_a_page_that_no_link_reaches_is_found(links: ModuleType) -> None:
    """A link of the page to itself or away does not reach it."""
    lost = [("guide/one.html", "no chain of links leads here from index.html")]
    assert faults(links, "", ONE + '<a href="one.html">self</a>') == lost
    assert faults(links, '<script src="guide/one.html"></script>') == lost

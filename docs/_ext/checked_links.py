"""Checks the links of the built pages: targets and anchors exist, addresses are well formed, every page is reached.

Only the plain HTML is read, as a browser without JavaScript reads it, and nothing is asked of the network. What the
network answers is what `sphinx-build -b linkcheck` says.
"""

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from posixpath import dirname, join, normpath
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

START = "index.html"


@dataclass
class Page(HTMLParser):
    """The anchors of a page, its links, and what else it loads."""

    text: str
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read the page."""
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the anchor and the address of a tag."""
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        self.links += [found["href"]] if tag == "a" and "href" in found else []
        self.loads += [found[name] for name in ("src", "href") if tag in ("img", "script", "link") and name in found]


def faults(pages: Mapping[str, Page], others: Set[str]) -> Iterator[tuple[str, str]]:
    """Yield the page and the text of each fault.

    Args:
        pages: the pages by their path from the top of the site; `START` is one of them.
        others: the paths of all other files.
    """
    files = pages.keys() | others
    reached, ahead = {START}, [START]
    for name, page in pages.items():
        for address in (*page.links, *page.loads):
            if fault := of_address(name, address, pages, files):
                yield name, fault
    while ahead:
        for address in pages[name := ahead.pop()].links:
            if (target := path_of(name, address)) in pages and target not in reached:
                reached.add(target)
                ahead.append(target)
    yield from ((name, f"no chain of links leads here from {START}") for name in pages if name not in reached)


def path_of(page: str, address: str) -> str:
    """Return the path from the top of the site that a relative address on a page names."""
    path = unquote(urlsplit(address).path)
    return normpath(join(dirname(page), path)) if path else page


def of_address(page: str, address: str, pages: Mapping[str, Page], files: Set[str]) -> str | None:
    """Return what is wrong with an address on a page; None if nothing is."""
    parts = urlsplit(address)
    if parts.scheme in ("http", "https"):
        plain = re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.hostname or "") and not re.search(r"[\s<>\"]|[.,;]$", address)
        return None if plain else f"not a well-formed address: {address}"
    if parts.scheme in ("data", "mailto"):
        return None
    if parts.scheme or parts.netloc:
        return f"an address of a kind that no reader can open: {address}"
    if (target := path_of(page, address)) not in files:
        return f"no such file: {address}"
    wanted = unquote(parts.fragment)
    return f"no such anchor: {address}" if wanted and target in pages and wanted not in pages[target].anchors else None


def check(app: Sphinx, failed: Exception | None) -> None:
    """Warn of each fault of the pages that were built."""
    if failed is not None or app.builder.name != "html":
        return
    top = Path(app.outdir)
    names = [*map(app.builder.get_target_uri, sorted(app.env.found_docs)), "genindex.html"]
    pages = {name: Page((top / name).read_text("utf-8")) for name in names}
    rest = {path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()}
    for name, fault in faults(pages, rest):
        logging.getLogger(__name__).warning("%s: %s", name, fault, type="links")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

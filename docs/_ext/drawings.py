"""Draws the way from the image to the adversary as SVG within a page, whose colour its text has, light or dark."""

from collections.abc import Sequence
from html import escape
from textwrap import wrap

from privlab.inventory.explain import Box

WIDTH, HEIGHT, GAP, LABEL = 360, 44, 22, 84
COLOURS = {"client": "#0072b2", "released": "#e69f00", "adversary": "#d55e00"}
"""Of Okabe and Ito; the words beside the boxes say the same."""


def drawing(name: str, flow: Sequence[Box]) -> str:
    """Return a drawing as a raw block of Markdown, or "" for a page without one.

    Args:
        name: of the page, for those who do not see the drawing.
        flow: its boxes, from the top.
    """
    if not flow:
        return ""
    height = len(flow) * (HEIGHT + GAP) - GAP + 4
    told = escape(f"{name}: " + ", then ".join(f"{box.party}: {box.text}" for box in flow))
    parts = [part for i, box in enumerate(flow) for part in _box(i, box, flow)]
    head = f'<svg class="flow" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{told}" fill="currentColor">'
    return "\n".join(("```{raw} html", head, *parts, "</svg>", "```"))


def _box(i: int, box: Box, flow: Sequence[Box]) -> list[str]:
    """Return a box with its text, the party beside the first of its boxes, and the arrow that leads to it."""
    top, colour, middle = 2 + i * (HEIGHT + GAP), COLOURS[box.party], (LABEL + WIDTH) / 2
    dash = ' stroke-dasharray="6 4"' if box.party == "released" else ""
    parts = [
        f'<rect x="{LABEL}" y="{top}" width="{WIDTH - LABEL - 2}" height="{HEIGHT}" rx="6" fill="{colour}" '
        f'fill-opacity="0.12" stroke="{colour}" stroke-width="2"{dash}/>'
    ]
    lines = wrap(box.text, 38)
    for j, line in enumerate(lines):
        y = top + HEIGHT / 2 + 5 + 16 * (j - (len(lines) - 1) / 2)
        parts.append(f'<text x="{middle}" y="{y:g}" text-anchor="middle">{escape(line)}</text>')
    if i == 0 or flow[i - 1].party != box.party:
        parts.append(f'<text x="0" y="{top + HEIGHT / 2 + 5:g}" class="party">{box.party}</text>')
    if i:
        parts.append(f'<path d="M{middle} {top - GAP + 2}v{GAP - 8}" stroke="currentColor" stroke-width="2"/>')
        parts.append(f'<path d="M{middle - 5} {top - 9}h10l-5 7z"/>')
    return parts

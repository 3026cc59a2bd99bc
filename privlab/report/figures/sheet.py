"""Contact sheets: reconstructions at the best, the median and the worst score, next to the private image."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.figure
import numpy as np
from matplotlib.axes import Axes
from PIL import Image

from privlab.base import PrivlabError
from privlab.grids import KNOWN, Figure
from privlab.report.figures import style
from privlab.report.figures.data import names_of, notes
from privlab.report.tables import WORST, Results, Scored, attack_label, figure_text
from privlab.report.tables.cells import decimals
from privlab.stores import Place

_RANKS = ("leakiest", "median", "least leaky")

_DOTS_PER_INCH = 240
"""Most pixels per inch of an image, so that the file of a sheet stays small."""

_NARROW_CASES = 2
"""Up to this many cases are a column wide, a line for each rank; more are a page wide, a line for each case."""

_EDGE, _GAP, _BETWEEN, _LINE = 0.04, 0.04, 0.12, 0.088
"""Inches around the sheet, between images, between ranks, and for a line of text."""


@dataclass(frozen=True)
class _Panel:
    """An image and the lines under it; without a place there is no image."""

    place: Place | None
    score: str = ""
    attack: str = ""


def draw_sheet(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw three images of each case: each private, fed, and as the paper's attack and the worst case reconstruct it.

    They are the images with the leakiest, the median and the least leaky worst case, among those whose image files were
    kept. Scores stand beneath, with the attack behind the worst case.
    """
    ranked = {case: panels for case in range(len(results.cases)) if (panels := _rank(results, case, figure.y))}
    if not ranked:
        raise PrivlabError(f"The sheet '{figure.name}' needs images. Found none in '{results.path}'.")
    said = f"Numbers: {style.with_unit(figure.y)}. Images are ranked by their worst case."
    names = names_of(results)
    titles = [names[case] for case in ranked] if len(results.cases) > 1 else [""]
    heads = filter(None, ("private", "fed", results.layout.paper_attack, "worst case"))
    return _draw(list(ranked.values()), titles, list(heads), notes(results, list(ranked), said))


def _rank(results: Results, case: int, metric: str) -> list[list[_Panel]]:
    """Return the panels of the images at each rank, or nothing where no images were kept."""
    paper = results.layout.paper_attack
    scored = Scored(results.records.loc[results.records.case == case], [metric], results.layout.geometry)
    images = scored.images.set_index("image")
    worst = images.loc[(images.attack == WORST) & images[metric].notna(), metric]
    worst = worst.loc[[results.picture(case, sha, "private") is not None for sha in worst.index]]
    if worst.empty:
        return []
    leaks_less = KNOWN[metric].direction == "lower leaks"
    worst = worst.sort_index().sort_values(ascending=leaks_less, kind="stable")
    of_paper = images.loc[images.attack == paper, metric].groupby(level=0).mean()
    reached = scored.reached.drop_duplicates("image").set_index("image")
    ranks = []
    for sha in worst.index[[0, (len(worst) - 1) // 2, -1]]:
        panels = [_Panel(results.picture(case, sha, what)) for what in ("private", "fed")]
        by = reached.loc[sha]
        shown = [(by.attack, worst[sha], attack_label(by.attack, by.geometry))]
        if paper:
            shown.insert(0, (paper, of_paper.get(sha, math.nan), ""))
        for attack, score, below in shown:
            text = figure_text(score, decimals(results.layout, metric))
            panels.append(_Panel(results.picture(case, sha, attack), text, below))
        ranks.append(panels)
    return ranks


def _draw(
    cases: Sequence[list[list[_Panel]]], titles: Sequence[str], heads: Sequence[str], said: Sequence[str]
) -> matplotlib.figure.Figure:
    """Draw the panels, placed in inches from the top left corner."""
    narrow = len(cases) <= _NARROW_CASES
    width, blocks, left = (style.COLUMN, 1, _EDGE + 1.4 * _LINE) if narrow else (style.PAGE, len(_RANKS), _EDGE)
    block = (width - left - _EDGE + _BETWEEN) / blocks
    step = (block - _BETWEEN + _GAP) / len(heads)
    side = step - _GAP
    columns = [left + i * block + j * step for i in range(blocks) for j in range(len(heads))]
    picture = matplotlib.figure.Figure()
    ax = picture.add_axes((0, 0, 1, 1), frameon=False)
    y = _EDGE
    if not narrow:
        for i, rank in enumerate(_RANKS):
            _write(ax, left + i * block + (block - _BETWEEN) / 2, y, rank, weight="bold")
        y += 1.3 * _LINE
    for x, head in zip(columns, itertools.cycle(heads), strict=False):
        _write(ax, x + side / 2, y, head)
    y += 1.3 * _LINE
    for title, ranks in zip(titles, cases, strict=True):
        if title:
            head = style.wrap([title], 0.75 * width)  # it is bold
            _write(ax, left, y, head, ha="left", weight="bold")
            y += _LINE * (1.3 + 1.1 * head.count("\n"))
        for i, panels in enumerate(ranks if narrow else [list(itertools.chain(*ranks))]):
            if narrow:
                _write(ax, _EDGE + _LINE / 2, y + side / 2, _RANKS[i], rotation=90, va="center")
            for x, panel in zip(columns, panels, strict=True):
                _show(ax, panel, x, y, side)
            y += step + 2.1 * _LINE
    text = style.wrap(said, width)
    _write(ax, left, y, text, ha="left", color=style.GREY, linespacing=1.25)
    y += _LINE * (1.1 * text.count("\n") + 1.2) + _EDGE
    picture.set_size_inches(width, y)
    ax.set(xlim=(0, width), ylim=(y, 0), xticks=[], yticks=[], aspect="auto")
    return picture


def _write(ax: Axes, x: float, y: float, text: str, ha: str = "center", va: str = "top", **look: Any) -> None:  # noqa: ANN401
    ax.text(x, y, text, ha=ha, va=va, fontsize=style.SMALL, **look)


def _show(ax: Axes, panel: _Panel, x: float, y: float, side: float) -> None:
    """Draw an image within a square of that side, and the lines under it."""
    if panel.place is None:
        _write(ax, x + side / 2, y + side / 2, "no image", va="center", color=style.GREY)
    else:
        image = panel.place.open().convert("RGB")
        most = round(side * _DOTS_PER_INCH)
        image.thumbnail((most, most), Image.Resampling.BOX)
        wide, high = (side * n / max(image.size) for n in image.size)
        x0, y0 = x + (side - wide) / 2, y + (side - high) / 2
        ax.imshow(np.asarray(image), extent=(x0, x0 + wide, y0 + high, y0), interpolation="none")
    _write(ax, x + side / 2, y + side + 0.2 * _LINE, panel.score)
    if len(panel.attack) * style.SMALL / 110 < side:  # about its width in inches
        _write(ax, x + side / 2, y + side + 1.2 * _LINE, panel.attack)
    else:
        _write(ax, x + side, y + side + 1.2 * _LINE, panel.attack, ha="right")

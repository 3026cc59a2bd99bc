"""Contact sheets: reconstructions at the best, the median and the worst score, beside the private image."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.figure
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from PIL import Image

from privlab.base import PrivlabError
from privlab.grids import KNOWN, Figure
from privlab.report.figures.data import check_leaks, names_of, notes, with_columns
from privlab.report.figures.style import COLUMN, GREY, PAGE, SMALL, with_unit, wrap
from privlab.report.tables import WORST, Results, Scored, attack_label, figure_text
from privlab.report.tables.table import decimals
from privlab.stores import Place, pngs

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
    check_leaks(figure)
    results = with_columns(results, figure, figure.y)
    ranked = {case: panels for case in range(len(results.cases)) if (panels := _rank(results, case, figure.y))}
    if not ranked:
        raise PrivlabError(f"The sheet '{figure.name}' needs images. Found none in '{results.path}'.")
    said = f"Numbers: {with_unit(figure.y)}. Images are ranked by their worst case."
    names = names_of(results)
    titles = [names[case] for case in ranked] if len(results.cases) > 1 else [""]
    heads = filter(None, ("private", "fed", results.layout.paper_attack, "worst case"))
    return _draw(list(ranked.values()), titles, list(heads), notes(results, list(ranked), said))


def _rank(results: Results, case: int, metric: str) -> list[list[_Panel]]:
    """Return the panels of the images at each rank, or nothing where no images were kept."""
    records = results.records.loc[results.records.case == case]
    scored = Scored(records, [metric], results.layout.geometry)
    images = scored.images
    worst = images.loc[(images.attack == WORST) & images[metric].notna()]
    worst = worst.loc[[results.picture(case, sha, "private") is not None for sha in worst.image]]
    if worst.empty:
        return []
    order = worst.sort_values([metric, "image"], ascending=[KNOWN[metric].direction == "lower leaks", True])
    scores = list(zip(order.image.tolist(), order[metric].tolist(), strict=True))
    reached = scored.reached.drop_duplicates("image")
    by = dict(zip(reached.image, zip(reached.attack, reached.geometry, strict=True), strict=True))
    of_paper = images.loc[images.attack == results.layout.paper_attack].groupby("image")[metric].mean().to_dict()
    chosen = [scores[place] for place in (0, (len(scores) - 1) // 2, -1)]
    n, paper = decimals(results.layout, metric), results.layout.paper_attack
    ranks = []
    for sha, score in chosen:
        panels = [_Panel(results.picture(case, sha, what)) for what in ("private", "fed")]
        if paper:
            panels.append(_Panel(results.picture(case, sha, paper), figure_text(of_paper.get(sha, math.nan), n)))
        attack, geometry = by[sha]
        worst = results.picture(case, sha, attack)
        ranks.append([*panels, _Panel(worst, figure_text(score, n), attack_label(attack, geometry))])
    return ranks


def _draw(
    cases: Sequence[Sequence[Sequence[_Panel]]], titles: Sequence[str], heads: Sequence[str], said: Sequence[str]
) -> matplotlib.figure.Figure:
    """Draw the panels, placed in inches from the top left corner."""
    narrow = len(cases) <= _NARROW_CASES
    width, blocks, left = (COLUMN, 1, _EDGE + 1.4 * _LINE) if narrow else (PAGE, len(_RANKS), _EDGE)
    block = (width - left - _EDGE + _BETWEEN) / blocks
    step = (block - _BETWEEN + _GAP) / len(heads)
    picture = matplotlib.figure.Figure()
    ax = picture.add_axes((0, 0, 1, 1), frameon=False)
    y = _EDGE
    for i in range(blocks):
        if not narrow:
            _write(ax, left + i * block + (block - _BETWEEN) / 2, y, _RANKS[i], weight="bold")
        for j, head in enumerate(heads):
            _write(ax, left + i * block + j * step + (step - _GAP) / 2, y + (0 if narrow else 1.3 * _LINE), head)
    y += 1.3 * _LINE * (1 if narrow else 2)
    for title, ranks in zip(titles, cases, strict=True):
        if title:
            head = wrap([title], 0.75 * width)  # it is bold
            _write(ax, left, y, head, ha="left", weight="bold")
            y += _LINE * (1.3 + 1.1 * head.count("\n"))
        for i, panels in enumerate(ranks):
            if narrow:
                _write(ax, _EDGE + _LINE / 2, y + (step - _GAP) / 2, _RANKS[i], rotation=90, va="center")
            for j, panel in enumerate(panels):
                _show(ax, panel, left + (0 if narrow else i * block) + j * step, y, step - _GAP)
            y += step + 2.1 * _LINE if narrow or i == len(_RANKS) - 1 else 0
    text = wrap(said, width)
    _write(ax, left, y, text, ha="left", color=GREY, linespacing=1.25)
    y += _LINE * (1.1 * text.count("\n") + 1.2) + _EDGE
    picture.set_size_inches(width, y)
    ax.set(xlim=(0, width), ylim=(y, 0), xticks=[], yticks=[], aspect="auto")
    return picture


def _write(ax: Axes, x: float, y: float, text: str, ha: str = "center", va: str = "top", **style: Any) -> None:  # noqa: ANN401
    ax.text(x, y, text, ha=ha, va=va, fontsize=SMALL, **style)


def _show(ax: Axes, panel: _Panel, x: float, y: float, side: float) -> None:
    """Draw an image within a square of that side, and the lines under it."""
    if panel.place is None:
        _write(ax, x + side / 2, y + side / 2, "no image", va="center", color=GREY)
    else:
        pixels = _read(panel.place, side)
        high, wide = (side * n / max(pixels.shape[:2]) for n in pixels.shape[:2])
        x0, y0 = x + (side - wide) / 2, y + (side - high) / 2
        ax.imshow(pixels, extent=(x0, x0 + wide, y0 + high, y0), interpolation="none")
    _write(ax, x + side / 2, y + side + 0.2 * _LINE, panel.score)
    if len(panel.attack) * SMALL / 110 < side:  # about its width in inches
        _write(ax, x + side / 2, y + side + 1.2 * _LINE, panel.attack)
    else:
        _write(ax, x + side, y + side + 1.2 * _LINE, panel.attack, ha="right")


def _read(place: Place, side: float) -> NDArray[np.uint8]:
    """Return the pixels of an image, made smaller where it has more than `_DOTS_PER_INCH` per inch."""
    try:
        with Image.open(io.BytesIO(pngs([place])[0])) as image:
            image.thumbnail((round(side * _DOTS_PER_INCH), round(side * _DOTS_PER_INCH)), Image.Resampling.BOX)
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # as Pillow says that a file is torn
        reason = getattr(error, "strerror", None) or "it is no image"
        raise PrivlabError(f"Cannot read the image '{place.file}': {reason}.") from None

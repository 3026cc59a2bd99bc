"""The figures of an experiment, drawn from its records and written as vector files that a paper can use directly."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib.figure

from privlab.base import PrivlabError, check_name
from privlab.grids import FIGURES, KNOWN, Figure
from privlab.report.figures.claim import draw_claim
from privlab.report.figures.curve import draw_curve
from privlab.report.figures.distribution import draw_distribution
from privlab.report.figures.files import KINDS, write_figure
from privlab.report.figures.sheet import draw_sheet
from privlab.report.figures.style import figure_style
from privlab.report.figures.trade_off import draw_trade_off
from privlab.report.tables import Results
from privlab.report.tables.table import some

_DRAW: Mapping[str, Callable[[Results, Figure], matplotlib.figure.Figure]] = {
    "curve": draw_curve,
    "trade-off": draw_trade_off,
    "distribution": draw_distribution,
    "sheet": draw_sheet,
    "claim": draw_claim,
}


def draw(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw a figure of the results.

    Raises:
        PrivlabError: if the kind or the metric is unknown, or the results lack what the figure shows: a numeric option
            on x, values of the metric, a paper's figures, or images.
    """
    check_name("figure", figure.kind, FIGURES)
    check_name("metric", figure.y, KNOWN)
    with figure_style():
        return _DRAW[figure.kind](results, figure)


def write_figures(results: Results, out: Path, formats: Sequence[str] = ("pdf", "svg")) -> list[Path]:
    """Draw every figure of the results, write it to `out` as NAME.FORMAT, and return the files.

    The same records give the same bytes. A figure that cannot be drawn keeps no other one from being written.

    Args:
        results: the records, and the figures that the experiment asks for.
        out: the folder, which is made if it does not exist.
        formats: "pdf", "svg" or "png"; each figure is written in all of them.

    Raises:
        PrivlabError: if a figure cannot be written, or a format or name cannot be used; and after all others were
            written, if figures cannot be drawn.
    """
    _check(results.figures, formats)
    written, failed = [], []
    for figure in results.figures:
        try:
            picture = draw(results, figure)
        except PrivlabError as error:
            failed.append(str(error))
            continue
        for kind in formats:
            written.append(out / f"{figure.name}.{kind}")
            write_figure(picture, written[-1])
    if failed:
        others = f" The others are in {out}." if written else ""
        raise PrivlabError(
            f"{len(failed)} of {some(len(results.figures), 'figure')} not drawn: {' '.join(failed)}{others}"
        )
    return written


def _check(figures: Sequence[Figure], formats: Sequence[str]) -> None:
    for kind in formats:
        check_name("format of figures", kind, KINDS)
    names = [figure.name for figure in figures]
    for name in names:
        if names.count(name) > 1:
            raise PrivlabError(f"Two figures are named '{name}': give each its own name.")
        if name != Path(name).name or name in ("", ".", ".."):
            raise PrivlabError(f"A figure's name must be that of a file, without a folder. Found '{name}'.")

"""The figures of an experiment, drawn from its records and written as vector files that a paper can use directly."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib.figure

from privlab.base import PrivlabError, check_name, write_whole
from privlab.grids import FIGURES, KNOWN, Figure
from privlab.report.figures.bars import draw_claim, draw_distribution
from privlab.report.figures.data import scores_of
from privlab.report.figures.points import draw_curve, draw_trade_off
from privlab.report.figures.sheet import draw_sheet
from privlab.report.figures.style import figure_style
from privlab.report.tables import Results
from privlab.report.tables.cells import some

_DRAW: Mapping[str, Callable[[Results, Figure], matplotlib.figure.Figure]] = {
    "curve": draw_curve,
    "trade-off": draw_trade_off,
    "distribution": draw_distribution,
    "sheet": draw_sheet,
    "claim": draw_claim,
}


_KINDS: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
"""The formats, each with metadata that keep the time out of the file, so that the same records give the same bytes."""


def draw(results: Results, figure: Figure) -> matplotlib.figure.Figure:
    """Draw a figure of the results.

    Raises:
        PrivlabError: if the kind or the metric is unknown, or the results lack what the figure shows: a numeric option
            on x, values of the metric, a paper's figures, or images.
    """
    kind, metrics = figure.kind, [figure.y]
    check_name("figure", kind, FIGURES)
    check_name("metric", figure.y, KNOWN)
    if kind == "trade-off":
        metrics.append(figure.x or "correct")
        check_name("metric of a trade-off", metrics[1], KNOWN)
    if kind in ("distribution", "sheet") and not KNOWN[figure.y].arrow:  # utility has no worst case
        leaky = ", ".join(name for name, metric in KNOWN.items() if metric.arrow)
        raise PrivlabError(f"A {kind} shows what leaks. Found y = {figure.y}. Choose from: {leaky}.")
    results = results.laid_out(columns=tuple(metrics))
    if scores_of(results, figure.y)["mean"].isna().all():
        raise PrivlabError(f"The figure '{figure.name}' needs values of {figure.y}. Found none in '{results.name}'.")
    with figure_style():
        return _DRAW[kind](results, figure)


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
        check_name("format of figures", kind, _KINDS)
    names = [figure.name for figure in figures]
    for name in names:
        if names.count(name) > 1:
            raise PrivlabError(f"Two figures are named '{name}': give each its own name.")
        if name != Path(name).name or name in ("", ".", ".."):
            raise PrivlabError(f"A figure's name must be that of a file, without a folder. Found '{name}'.")


def check_ending(path: Path) -> None:
    """Check that a figure can be written under this name.

    Raises:
        PrivlabError: unless it ends in .pdf, .svg or .png.
    """
    if path.suffix[1:] not in _KINDS:
        raise PrivlabError(f"A figure is a file .pdf, .svg or .png. Found '{path}'.")


def write_figure(figure: matplotlib.figure.Figure, path: Path) -> None:
    """Write a figure as PDF, SVG or PNG, by the ending of its name; the same figure gives the same bytes.

    Raises:
        PrivlabError: for another ending, or if it cannot be written.
    """
    check_ending(path)
    kind = path.suffix[1:]
    with figure_style():
        write_whole(path, lambda made: figure.savefig(made, format=kind, metadata=_KINDS[kind]), durable=False)

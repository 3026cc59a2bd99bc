"""The files of figures: PDF, SVG or PNG, in the same bytes for the same figure."""

from pathlib import Path

from matplotlib.figure import Figure

from privlab.base import PrivlabError, write_whole
from privlab.report.figures.style import figure_style

KINDS: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
"""The formats, each with metadata that keep the time out of the file, so that the same records give the same bytes."""


def check_ending(path: Path) -> None:
    """Check that a figure can be written under this name.

    Raises:
        PrivlabError: unless it ends in .pdf, .svg or .png.
    """
    if path.suffix[1:] not in KINDS:
        raise PrivlabError(f"A figure is a file .pdf, .svg or .png. Found '{path}'.")


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PDF, SVG or PNG, by the ending of its name; the same figure gives the same bytes.

    Raises:
        PrivlabError: for another ending, or if it cannot be written.
    """
    check_ending(path)
    kind = path.suffix[1:]
    with figure_style():
        write_whole(path, lambda made: figure.savefig(made, format=kind, metadata=KINDS[kind]), durable=False)

"""Figure 3 of MJP: the accuracy and the Consistency that are left when a share γ of the patches is shuffled."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from privlab.base import PrivlabError, write_whole
from privlab.report.figures.style import MARKERS, PAGE, PALETTE, figure_style

__all__ = ["KINDS", "check_ending", "draw_by_gamma", "write_figure"]

KINDS: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
"""The formats, each with metadata that keep the time out of the file, so that the same records give the same bytes."""

_AXES = {"shuffled_accuracy": "top-1 accuracy (%)", "consistency": "Consistency (%)"}


def draw_by_gamma(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw accuracy and Consistency against γ, a line for each model that `privlab evaluate` measured on data."""
    with figure_style():
        figure = Figure(figsize=(PAGE, 2.4), layout="constrained")
        for ax, (key, title) in zip(figure.subplots(1, 2), _AXES.items(), strict=True):
            for i, row in enumerate(rows):
                points = sorted((point["gamma"], 100 * point[key]) for point in row["by_gamma"])
                color, marker = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]
                ax.plot(
                    *zip(*points, strict=True), color=color, marker=marker, label=f"{row['model']} ({row['weights']})"
                )
            ax.set(xlabel="γ at inference (share of patches shuffled)", ylabel=title, xlim=(-0.02, 1), ylim=(0, 101))
            ax.grid(visible=True)
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=2)
    return figure


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

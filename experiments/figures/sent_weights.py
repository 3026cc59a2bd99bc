"""The figures of `privlab study sent-weights`: what manipulated weights leak against what the audit sees of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from privlab.experiments.figures.studies import read_facts
from privlab.report.figures import check_ending, write_figure
from privlab.report.figures.style import GREY, MARKERS, PALETTE, canvas, dress, figure_style
from privlab.runs.sent_weights import MOST_READABLE, RANGES, TRAINED_DEPENDS

_LEAST = 1e-3
"""Where a share of 0 is drawn on the logarithmic axes: one patch in a thousand is more than one of the batch."""

_SERIES = {
    "mixed": "mixed with trained weights",
    "neurons": "bins in few neurons",
    "steepness": "bins that are less steep",
    "noise": "pairs of unequal neurons",
}

_DEPENDENCE = "dependence on the image"

_NUMBERS = {
    f"{_DEPENDENCE}, for all weights": (_DEPENDENCE, RANGES[_DEPENDENCE][0]),
    "by slot, for models trained before": ("dependence by slot", TRAINED_DEPENDS),
}
"""What the audit measures of hidden versions: the name, the column, and the limit below which they are suspicious."""


def draw_sent_weights(out: Path, kind: str = "svg") -> list[Path]:
    """Draw what a server reads against what the audit counts: of manipulated weights, and of versions that hide.

    Args:
        out: folder of the study.
        kind: svg, png or pdf.

    Returns:
        The files in the folder: `sent_weights.KIND` where the study has manipulated and honest weights, and
        `hidden_weights.KIND` where it has versions that hide.

    Raises:
        PrivlabError: if there is no study, or a file cannot be written.
    """
    check_ending(out / f"sent_weights.{kind}")
    rows = read_facts(out, "sent weights", "sent-weights")
    hidden = [row for row in rows if row["kind"] == "hidden"]
    honest = [row["readable"] for row in rows if row["kind"] in ("trained", "random", "round")]
    manipulated = {label: [row for row in rows if row["kind"] == series] for series, label in _SERIES.items()}
    paths = []
    if honest and any(manipulated.values()):
        paths.append(out / f"sent_weights.{kind}")
        _draw_manipulated(paths[-1], manipulated, max(honest))
    if hidden:
        paths.append(out / f"hidden_weights.{kind}")
        _draw_hidden(paths[-1], hidden)
    return paths


def _draw_manipulated(path: Path, manipulated: Mapping[str, Sequence[Mapping[str, Any]]], honest: float) -> None:
    """Draw a mark for each manipulation: the share of patches that a server reads, and the share that is counted."""
    with figure_style():
        figure, ax = canvas()
        handles = []
        for i, (label, own) in enumerate(manipulated.items()):
            leaked = [max(row["recognisable"], _LEAST) for row in own]
            counted = [max(row["readable"], _LEAST) for row in own]
            handles += ax.plot(leaked, counted, label=label, **_dots(i))
        ax.axhline(MOST_READABLE, color="black", linewidth=0.8)
        handles.append(ax.axhline(honest, color=GREY, linestyle=":", linewidth=0.8, label="most of honest weights"))
        ax.set(xscale="log", yscale="log", xlim=(0.8 * _LEAST, 1.2), ylim=(0.8 * _LEAST, 1.2))
        ax.grid(visible=True)
        ax.set_xlabel("share of patches that the server recognises")
        ax.set_ylabel("share that the audit counts")
        said = (
            "One mark for each manipulation of cifar_vit, seven photographs in a batch. Line: above it weights are "
            f"suspicious. Marks at {_LEAST:g} are shares below it."
        )
        dress(figure, 2.2, handles, [said])
    write_figure(figure, path)


def _draw_hidden(path: Path, hidden: Sequence[Mapping[str, Any]]) -> None:
    """Draw two marks for each hidden version: the share of patches that it reads, and how it depends on the image."""
    with figure_style():
        figure, ax = canvas()
        handles = []
        for i, (label, (column, limit)) in enumerate(_NUMBERS.items()):
            read = [max(row["read"], _LEAST) for row in hidden]
            handles += ax.plot(read, [row[column] for row in hidden], label=label, **_dots(i))
            ax.axhline(limit, color=PALETTE[i], linewidth=0.8)
        ax.set(xscale="log", xlim=(0.8 * _LEAST, 1.2), ylim=(-0.03, 1.03))
        ax.grid(visible=True)
        ax.set_xlabel("share of patches that the server reads")
        ax.set_ylabel(_DEPENDENCE)
        said = (
            "Two marks for each version that hides, one photograph in each update. Lines: below the line of its "
            f"colour a mark makes weights suspicious. Marks at {_LEAST:g} are shares below it."
        )
        dress(figure, 2.2, handles, [said], 1)
    write_figure(figure, path)


def _dots(i: int) -> dict[str, Any]:
    """Return how the dots of a series look."""
    return {"color": PALETTE[i], "marker": MARKERS[i], "linestyle": "none", "markersize": 4, "fillstyle": "full"}

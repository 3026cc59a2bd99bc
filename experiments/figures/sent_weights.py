"""The figure of `privlab study sent-weights`: what manipulated weights leak against what the audit sees of them."""

from pathlib import Path

from privlab.experiments.figures.studies import read_facts
from privlab.report.figures import check_ending, write_figure
from privlab.report.figures.style import GREY, MARKERS, PALETTE, canvas, dress, figure_style
from privlab.runs.sent_weights import MOST_READABLE

_LEAST = 1e-3
"""Where a share of 0 is drawn on the logarithmic axes: one patch in a thousand is more than one of the batch."""

_SERIES = {
    "mixed": "mixed with trained weights",
    "neurons": "bins in few neurons",
    "steepness": "bins that are less steep",
    "noise": "pairs of unequal neurons",
}


def draw_sent_weights(out: Path, kind: str = "svg") -> Path:
    """Draw the share of patches that a server reads against the share that the audit counts, a mark for each attack.

    Args:
        out: folder of the study.
        kind: svg, png or pdf.

    Returns:
        The figure's file, `sent_weights.KIND` in the folder.

    Raises:
        PrivlabError: if there is no study, or the file cannot be written.
    """
    path = out / f"sent_weights.{kind}"
    check_ending(path)
    rows = read_facts(out, "sent weights", "sent-weights")
    honest = max(row["readable"] for row in rows if row["kind"] in ("trained", "random", "round"))
    with figure_style():
        figure, ax = canvas()
        handles = []
        for i, (series, label) in enumerate(_SERIES.items()):
            own = [row for row in rows if row["kind"] == series]
            leaked = [max(row["recognisable"], _LEAST) for row in own]
            counted = [max(row["readable"], _LEAST) for row in own]
            line = {"color": PALETTE[i], "marker": MARKERS[i], "linestyle": "none", "markersize": 4}
            handles += ax.plot(leaked, counted, label=label, fillstyle="full", **line)
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
    return path

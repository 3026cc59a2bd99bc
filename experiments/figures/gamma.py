"""Figure 3 of MJP: the accuracy and the Consistency that are left when a share γ of the patches is shuffled."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from privlab.report.figures.style import MARKERS, PAGE, PALETTE, figure_style

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

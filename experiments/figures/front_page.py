"""The first picture of the README: one photograph, undefended and under MJP, and what two attacks made of each.

`python -m privlab.experiments.figures.front_page` draws it from the strip that the study of MJP kept.
"""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from privlab.report.figures.style import figure_style
from privlab.stores import places_of

STRIP = Path(__file__).parents[1] / "notes" / "strip_vit_ti_mjp.png"
PICTURE = STRIP.with_name("front_page.jpg")

_COLUMNS = (
    "private image",
    "what the client\nfeeds the model",
    "the paper's attack\n(april)",
    "knows the defense\n(mjp-full)",
)
_ROWS: Mapping[str, tuple[str, str]] = {"no defense": ("16.6 dB", "exact"), "MJP": ("9.8 dB", "exact")}
"""The scores are those under the strip's panels: PSNR of `april`; `mjp-full` has every grey level right."""

_SHOWN = (0, 1, 2, 5)
"""The panels that are shown of each row of the strip, which has six."""


def draw() -> Figure:
    """Return the picture, 7 inches wide: at 700 pixels its letters are 11 pixels high or more."""
    panels = [place.open() for place in places_of(STRIP).values()]
    rows = [[panels[6 * row + column] for column in _SHOWN] for row in range(2)]
    with figure_style():
        figure = Figure(figsize=(7, 4.3), layout="constrained")
        for row, (name, scores) in enumerate(_ROWS.items()):
            for column in range(4):
                axes = figure.add_subplot(2, 4, 4 * row + column + 1, xticks=[], yticks=[])
                axes.imshow(rows[row][column].resize((480, 480), Image.Resampling.NEAREST))
                if row == 0:
                    axes.set_title(_COLUMNS[column], fontsize=11)
                if column == 0:
                    axes.set_ylabel(name, fontsize=13, fontweight="bold")
                if column >= 2:
                    axes.set_xlabel(scores[column - 2], fontsize=12)
    return figure


if __name__ == "__main__":
    draw().savefig(PICTURE, dpi=200, pil_kwargs={"quality": 90})

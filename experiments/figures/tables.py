"""A figure of a study, drawn from a table of its page, so that both state the same numbers.

`python -m privlab.experiments.figures.tables` draws them all into experiments/notes.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from privlab.base import PrivlabError
from privlab.report.figures.style import MARKERS, PALETTE, figure_style

NOTES = Path(__file__).parents[1] / "notes"
PAGES = Path(__file__).resolve().parents[2] / "docs" / "studies"

_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?")
_INTERVAL = re.compile(r"[\[(](\d[\d.]*)(?:,| to) (\d[\d.]*)[\])]")
_SCORES = "PSNR in dB"


@dataclass(frozen=True)
class Drawn:
    """A table that is drawn: each row is a line with a mark for each of its columns.

    Args:
        page: the stem of the page in docs/studies.
        head: how the table's first line begins.
        columns: the heads of the columns that are drawn.
        labels: how many columns at the left name the row; an empty cell repeats the one above it.
        axis: the name of the axis.
        ends: heads of two columns with the ends of each row's interval; none for those in brackets in the cell.
        log: whether the axis is logarithmic.
        without: rows whose label has this text are left out.
    """

    page: str
    head: str
    columns: tuple[str, ...]
    labels: int = 1
    axis: str = _SCORES
    ends: tuple[str, str] | None = None
    log: bool = False
    without: str = "\0"


FIGURES = (
    Drawn("aims", "release", ("before", "now", "aim")),
    Drawn("adam", "side | rate", ("PSNR, mean and 95 % interval",), labels=3),
    Drawn("architectures", "model", ("`patch-gradient`", "`token-separation`", "`least-squares`")),
    Drawn("baselines", "client", ("PSNR, mean",), labels=2, ends=("lowest", "highest")),
    Drawn("benchmark", "entry", ("dB",), axis="score, PSNR in dB"),
    Drawn("clients", "rate, steps", ("74 products", "111", "148"), axis="|(I − P) h| / |h|", log=True),
    Drawn("clipping", "kept", ("within the interval", "without the interval", "left at zero")),
    Drawn("filters", "filter", ("`patch-gradient`", "`patch-update`")),
    Drawn("identity", "entry", ("500",), labels=2, axis="recognised among 500, %"),
    Drawn("partial_training", "trained, side", ("PSNR", "one colour, PSNR"), labels=2),
    Drawn(
        "published",
        "deviation of",
        ("`least-squares`", "`depth-optimisation`", "`map-inversion`", "`plug-and-play`"),
    ),
    Drawn("rounds", "images, side", ("PSNR, mean and 95 % interval",)),
    Drawn(
        "speed",
        "images per second, if",
        (
            "ViT-B, 224 pixels",
            "DeiT-S, 224 pixels",
            "ViT-Ti, 160 pixels",
        ),
        axis="images per second",
        log=True,
        without="steps per second",
    ),
    Drawn("tokens", "victim", ("PSNR in dB, of each photograph",), labels=2),
)


def draw(what: Drawn) -> Figure:
    """Return the figure of a table, with a row for each of its rows and marks in the style of all figures."""
    head, *rows = _table(what)
    places = [head.index(name) for name in what.columns]
    names, above = list[str](), [""] * what.labels
    for row in rows:
        above = [cell or before for cell, before in zip(row[: what.labels], above, strict=True)]
        names.append(", ".join(filter(None, above)))
    shown = [i for i, name in enumerate(names) if what.without not in name]
    with figure_style():
        plt.rcParams.update({"font.size": 11, "axes.labelsize": 11, "xtick.labelsize": 11, "legend.fontsize": 10})
        labels = [fill(names[i], 46) for i in shown]
        height = sum(0.16 + 0.19 * (1 + label.count("\n")) for label in labels)
        figure = Figure(figsize=(8, 0.9 + height), layout="constrained")
        axes = figure.add_subplot()
        for series, place in enumerate(places):
            shift = 0.22 * (series - (len(places) - 1) / 2)
            title = head[place].replace("`", "")
            for line, i in enumerate(shown):
                values, ends = _values(rows[i][place])
                if what.ends is not None:
                    ends = [_values(rows[i][head.index(end)])[0][0] for end in what.ends]
                style = {"color": PALETTE[series], "marker": MARKERS[series], "markersize": 6}
                if ends:
                    axes.plot(ends, [line + shift] * 2, color=PALETTE[series], linewidth=1.5)
                axes.plot(values, [line + shift] * len(values), linestyle="none", label=title, **style)
                title = "_"  # a legend names a series once
        axes.set_yticks(range(len(shown)), labels, fontsize=10)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlabel(what.axis)
        axes.set_ylabel(", ".join(filter(None, head[: what.labels])))
        axes.grid(axis="x")
        if what.log:
            axes.set_xscale("log")
        if len(places) > 1:
            figure.legend(loc="outside upper center", ncols=len(places))
    return figure


def _table(what: Drawn) -> list[list[str]]:
    """Return the cells of a table of a page, without marks of Markdown; the first line has the heads."""
    lines = (PAGES / f"{what.page}.md").read_text("utf-8").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(f"| {what.head}")]
    heads = [i for i in starts if all(f"| {column} |" in lines[i] for column in what.columns)]
    if not heads:
        raise PrivlabError(f"docs/studies/{what.page}.md has no table '{what.head}' with the columns {what.columns}.")
    rows = [lines[heads[0]]]
    for line in lines[heads[0] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(re.sub(r"\{doc\}`[^`]*/([^`]*)`", r"\1", line).replace("`", "").replace("**", ""))
    return [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows]


def _values(cell: str) -> tuple[list[float], list[float]]:
    """Return the numbers of a cell, and the ends of the interval behind it in brackets, if it has one."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", cell).partition(";")[0].partition(" on average")[0]
    outside = re.split(r"[\[(]", plain)[0]
    interval = _INTERVAL.search(plain)
    return _numbers(outside), [float(end) for end in interval.groups()] if interval else []


def _numbers(text: str) -> list[float]:
    return [float(number) for number in _NUMBER.findall(text)]


if __name__ == "__main__":
    with figure_style():  # which names the parts of a figure the same way each time
        for each in FIGURES:
            draw(each).savefig(NOTES / f"study_{each.page}.svg", metadata={"Date": None})

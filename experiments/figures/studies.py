"""What two studies measured beside what others say: `privlab study noise-bound` and `privlab study jigsaw`."""

from pathlib import Path
from typing import Any

import numpy as np

from privlab.base import PrivlabError, parse_json, read_bytes
from privlab.experiments.methods.reconstruction_bound import success_bound
from privlab.report.figures import check_ending, write_figure
from privlab.report.figures.style import MARKERS, PALETTE, canvas, dress, figure_style

_HEIGHT = 1.6
"""Height of the axes of the bound, in inches."""

_ROW = 0.19
"""Height of a jigsaw's row, in inches."""


def draw_bound(out: Path, kind: str = "svg") -> Path:
    """Draw the shares of successes in one release against the noise multiplier, with their intervals and the bounds.

    Raises:
        PrivlabError: if there is no study, or the file cannot be written.
    """
    path = out / f"bound.{kind}"
    check_ending(path)
    facts = read_facts(out, "noise", "noise-bound")
    rows = [row | {"attack": row.get("attack", "identification")} for row in (*facts["attacks"], *facts["games"])]
    rows = [row for row in rows if row["releases"] == 1 and row["multiplier"] > 0]
    ends = [row["multiplier"] for row in rows]
    σ = np.geomspace(min(ends), max(ends), 200)
    with figure_style():
        figure, ax = canvas()
        handles = []
        for line, κ, name in (("-", facts["prior"], "bound"), (":", 1 / facts["photographs"], "bound, identification")):
            handles += ax.plot(σ, [success_bound(κ, s) for s in σ], line, color="black", label=name)
        for i, name in enumerate(dict.fromkeys(row["attack"] for row in rows)):
            own = [row for row in rows if row["attack"] == name]
            share = np.array([row["share"] for row in own])
            sides = np.array([[row["share"] - row["low"], row["high"] - row["share"]] for row in own]).T
            at = [row["multiplier"] for row in own]
            color = PALETTE[i]
            ax.errorbar(at, share, yerr=np.abs(sides), fmt="none", ecolor=color, elinewidth=0.6)
            handles += ax.plot(at, share, color=color, marker=MARKERS[i], linestyle="none", label=name)
        ax.set_xscale("log")
        ax.set_ylim(-0.03, 1.03)
        ax.grid(axis="y")
        ax.set_xlabel("noise multiplier")
        ax.set_ylabel("share of successes")
        said = (
            f"Success: PSNR of {facts['psnr']:g} dB or more; identification: which of {facts['photographs']} "
            "photographs it is. Bars: 95 % Clopper-Pearson intervals. Bound: Hayes et al. (2023), one release."
        )
        dress(figure, _HEIGHT, handles, [said])
    write_figure(figure, path)
    return path


def draw_jigsaw(out: Path, kind: str = "svg") -> Path:
    """Draw a row for each protocol and number of missing pieces: the share placed by each solver, and by others.

    Args:
        out: folder of the study.
        kind: svg, png or pdf.

    Returns:
        The figure's file, `jigsaw.KIND` in the folder.

    Raises:
        PrivlabError: if there is no study, or the file cannot be written.
    """
    path = out / f"jigsaw.{kind}"
    check_ending(path)
    facts = read_facts(out, "jigsaws", "jigsaw")
    keys = list(dict.fromkeys((cell["protocol"], cell["missing"]) for cell in facts["cells"]))
    with figure_style():
        figure, ax = canvas()
        handles = []
        for i, name in enumerate(dict.fromkeys(cell["solver"] for cell in facts["cells"])):
            own = [cell for cell in facts["cells"] if cell["solver"] == name]
            y = np.array([keys.index((cell["protocol"], cell["missing"])) for cell in own]) + 0.22 * (i - 1)
            share = [100 * cell["placed"] for cell in own]
            for at, cell in zip(y, own, strict=True):
                if cell["low"] is not None:
                    ax.plot([100 * cell["low"], 100 * cell["high"]], [at, at], color=PALETTE[i], linewidth=0.8)
            handles += ax.plot(share, y, color=PALETTE[i], marker=MARKERS[i], linestyle="none", label=name)
        theirs = {}
        for row in facts["published"]:
            theirs.setdefault(row["method"], []).append((row["placed"], keys.index((row["protocol"], row["missing"]))))
        for i, (name, points) in enumerate(theirs.items()):
            handles += ax.plot(
                *zip(*points, strict=True),
                marker="xv^P"[i % 4],
                color="black",
                fillstyle="none",
                linestyle="none",
                label=f"{name}, theirs",
            )
        ax.set_yticks(range(len(keys)), [name if not gone else f"{name}, {gone} missing" for name, gone in keys])
        ax.invert_yaxis()
        ax.set_xlim(0, 102)
        ax.grid(axis="x")
        ax.set_xlabel("pieces placed (%)")
        said = (
            f"{facts['images']} photographs. Bars: 95 % bootstrap intervals of the mean. Figures of others are on "
            "their images and borders."
        )
        dress(figure, 0.3 + _ROW * len(keys), handles, [said])
    write_figure(figure, path)
    return path


def read_facts(out: Path, what: str, command: str) -> Any:  # noqa: ANN401
    """Return what a study found.

    Args:
        out: folder of the study.
        what: what it is a study of.
        command: its name in `privlab study`.

    Raises:
        PrivlabError: if there is no study, or its file is damaged.
    """
    path = out / "facts.json"
    if not path.is_file():
        raise PrivlabError(f"'{out}' holds no study of {what} (facts.json): run `privlab study {command}`.")
    return parse_json(read_bytes(path, "study"), f"'{path}'")

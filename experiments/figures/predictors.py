"""Figures of position predictors, drawn from the records of `privlab study positions`."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from privlab.base import PrivlabError
from privlab.experiments.figures.positions import bare
from privlab.report.figures import check_ending, write_figure
from privlab.report.figures.style import GREY, MARKERS, PAGE, PALETTE, SMALL, figure_style

Facts = Mapping[str, Any]
Patches = NDArray[np.float64]

EMPTY, WRONG = 0.5, "red"
_COLUMNS = ("picture", "patches as given", "by argmax", "by assignment")


def draw_predictors(out: Path, kind: str = "svg") -> list[Path]:
    """Draw the figures of the study in `out`, write them there as svg, png or pdf, and return the files.

    Raises:
        PrivlabError: if there is no study, or a file cannot be written.
    """
    check_ending(Path(f"figure.{kind}"))
    if not (out / "predictors.json").is_file():
        raise PrivlabError(f"'{out}' holds no study of predictors (predictors.json): run `privlab study positions`.")
    facts: list[Facts] = json.loads((out / "predictors.json").read_text(encoding="utf-8"))
    names = ("accuracy", "placements", "heads", "attention", "knn")
    tables = {name: pd.read_parquet(out / f"{name}.parquet") for name in names}
    figures = {"accuracy": _accuracy(facts, tables["accuracy"])}
    if len(tables["knn"]):
        figures["knn"] = _knn(facts, tables["knn"])
    for number, about in enumerate(facts):
        name = f"{number + 1}_{about['name']}"
        own = {table: rows.query(f"predictor == {number}") for table, rows in tables.items()}
        figures[f"reconstructions_{name}"] = _reconstructions(about, own["placements"], out)
        figures[f"attention_{name}"] = _attention(about, own["attention"], own["heads"])
    paths = [out / f"{name}.{kind}" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        write_figure(figure, path)
    return paths


def _title(about: Facts) -> str:
    """Return a predictor's name, and which shares were hidden from it in training, if its card states them."""
    how = about["objective"] or {}
    signs = (("eta", "η"), ("gamma", "γ"), ("gamma_pos", "γ_pos"))
    said = [f"{sign} = {how[key]:g}" for key, sign in signs if key in how]
    return about["name"] + (f", trained at {', '.join(said)}" if said else f" ({about['kind']})")


def _accuracy(facts: Sequence[Facts], accuracy: pd.DataFrame) -> Figure:
    """Draw accuracy against η in one pair of axes (MP3, Figure 3), and by γ and γ_pos in one for each DropPos."""
    numbers = range(len(facts))
    curves = [i for i in numbers if facts[i]["kind"] == "mp3"]
    grids = [i for i in numbers if facts[i]["kind"] != "mp3"]
    wide = bool(curves) + len(grids)
    with figure_style():
        figure = Figure(figsize=(min(PAGE, 3.3 * wide), 2.6), layout="constrained")
        axes = list(figure.subplots(1, wide, squeeze=False)[0])
        if curves:
            _curves(axes.pop(0), [(i, facts[i], accuracy.query(f"predictor == {i}")) for i in curves])
        for ax, number in zip(axes, grids, strict=True):
            ax.set_title(_title(facts[number]), fontsize=7)
            _grid(ax, accuracy.query(f"predictor == {number}"))
    return figure


def _curves(ax: Axes, predictors: Sequence[tuple[int, Facts, pd.DataFrame]]) -> None:
    for number, about, rows in predictors:
        color, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
        ax.plot(rows.eta, 100 * rows.accuracy, color=color, marker=marker, label=_title(about), clip_on=False)
    for slots in sorted({about["placed"]["patches"] for _, about, _ in predictors}):
        ax.axhline(100 / slots, color=GREY, linestyle=":", linewidth=0.7, label=f"chance, 1/{slots}")
    ax.set(xlabel="η at evaluation (share of patches that are no context)", ylabel="position accuracy (%)")
    ax.set(xlim=(0, 1), ylim=(0, 101))
    ax.grid(visible=True)
    ax.legend()


def _grid(ax: Axes, rows: pd.DataFrame) -> None:
    table = 100 * rows.pivot_table(index="gamma", columns="gamma_pos", values="accuracy")
    ax.imshow(table, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for (row, column), value in np.ndenumerate(table.to_numpy()):
        ax.text(column, row, f"{value:.1f}", ha="center", va="center", color="white" if value > 60 else "black")
    ax.set_xticks(range(table.shape[1]), [f"{lost:g}" for lost in table.columns])
    ax.set_yticks(range(table.shape[0]), [f"{hidden:g}" for hidden in table.index])
    ax.set(xlabel="γ_pos (share of PEs dropped)", ylabel="γ (share of patches masked)")
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)


def _knn(facts: Sequence[Facts], knn: pd.DataFrame) -> Figure:
    """Draw the accuracy of the k-NN probe by layer, dashed for the same networks untrained (MP3, Figure 9)."""
    with figure_style():
        figure = Figure(figsize=(2 * PAGE / 3, 2.6), layout="constrained")
        ax = figure.subplots()
        for number, about in enumerate(facts):
            rows, color = knn.query(f"predictor == {number}"), PALETTE[number % len(PALETTE)]
            look: dict[str, Any] = {"color": color, "marker": MARKERS[number % len(MARKERS)]}
            ax.plot(rows.layer, 100 * rows.accuracy, label=_title(about), **look)
            ax.plot(rows.layer, 100 * rows.untrained, label="untrained", mfc="white", linestyle="--", **look)
        ax.set(xlabel="layer (0: patch embedding)", ylabel="k-NN top-1 (%)")
        ax.set_xticks(range(int(knn.layer.max()) + 1))
        ax.grid(visible=True)
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def lay_out_patches(patches: NDArray[np.float64], slots: NDArray[np.int64]) -> tuple[Patches, NDArray[np.bool_]]:
    """Return what each slot shows if patch i is put into `slots[i]`, and which slots get no patch.

    A slot with several patches shows their mean; a slot without a patch is grey.
    """
    count = np.bincount(slots, minlength=len(patches))
    shown = np.zeros_like(patches)
    np.add.at(shown, slots, patches)
    empty = count == 0
    shown[~empty] /= count[~empty, None, None, None]
    shown[empty] = EMPTY
    return shown, empty


def _reconstructions(about: Facts, placements: pd.DataFrame, out: Path) -> Figure:
    """Draw images, their patches as given, and where a predictor puts them (MP3, Figure 2; DropPos, Figure 3)."""
    pictures = list(dict.fromkeys(placements.image))
    told = about["placed"]
    with figure_style():
        figure = Figure(figsize=(1.3 * len(_COLUMNS) + 0.2, 1.3 * len(pictures) + 0.6), layout="constrained")
        known = f"{told['known']} of {told['patches']} patches known (blue)" if told["known"] else "no patch known"
        said = f"{known}; red: a patch that does not belong there; grey: none"
        figure.suptitle(f"{_title(about)}\n{said}", fontsize=7)
        axes = figure.subplots(len(pictures), len(_COLUMNS), squeeze=False)
        for line, image in zip(axes, pictures, strict=True):
            own = placements.query(f"image == {image}").sort_values("slot")
            _one(list(line), matplotlib.image.imread(out / own.picture.iloc[0]).astype(float), own, about)
        for ax, name in zip(axes[0], _COLUMNS, strict=True):
            ax.set_title(name, fontsize=7, pad=3)
    return figure


def _one(line: Sequence[Axes], picture: NDArray[np.float64], own: pd.DataFrame, about: Facts) -> None:
    """Draw one image's row: the image, its shuffled patches, and these where the predictor puts them."""
    rows, columns = about["grid"]
    side, truth, known = about["patch"], own.patch.to_numpy(), own.known.to_numpy()
    cut = picture.reshape(rows, side, columns, side, -1).swapaxes(1, 2).reshape(rows * columns, side, side, -1)
    given = cut[truth]
    line[0].imshow(picture, interpolation="nearest")
    _show(line[1], given, about)
    _frame(line[1], np.flatnonzero(known), about, PALETTE[0])
    for ax, name in zip(line[2:], ("likeliest", "assigned"), strict=True):
        put = own[name].to_numpy()
        shown, _ = lay_out_patches(given, put)
        _show(ax, shown, about)
        _frame(ax, np.unique(put[put != truth]), about, WRONG)
        right = f"{100 * (put == truth)[~known].mean():.0f} % right"
        ax.set_xlabel(right, fontsize=SMALL, labelpad=2)
    for ax in line:
        bare(ax)


def _show(ax: Axes, patches: Patches, about: Facts) -> None:
    rows, columns = about["grid"]
    side = about["patch"]
    joined = patches.reshape(rows, columns, side, side, -1).swapaxes(1, 2).reshape(rows * side, columns * side, -1)
    ax.imshow(joined, interpolation="nearest", vmin=0, vmax=1)


def _frame(ax: Axes, slots: NDArray[np.int64], about: Facts, color: str) -> None:
    side = about["patch"]
    inset = side / 12  # so that the frames of neighbours stand side by side
    for row, column in zip(*np.divmod(slots, about["grid"][1]), strict=True):
        corner = (column * side - 0.5 + inset, row * side - 0.5 + inset)
        width = side - 2 * inset
        ax.add_patch(Rectangle(corner, width, width, fill=False, edgecolor=color, linewidth=0.6))


def _attention(about: Facts, attention: pd.DataFrame, heads: pd.DataFrame) -> Figure:
    """Draw the mean attention of each head by offset; each map's scale ends at its maximum (MP3, Figures 8 and 11)."""
    deep, wide = about["depth"], about["heads"]
    rows, columns = about["grid"]
    with figure_style():
        figure = Figure(figsize=(min(PAGE, 1.05 * wide + 0.5), 1.2 * deep + 0.7), layout="constrained")
        uniform = f"reach: mean distance in patches ({heads.distance_uniform.iloc[0]:.1f} if all were alike)"
        figure.suptitle(f"{_title(about)}\nmean attention by offset; max: the largest weight\n{uniform}", fontsize=7)
        axes = figure.subplots(deep, wide, squeeze=False)
        shape = (2 * rows - 1, 2 * columns - 1)
        extent = (0.5 - columns, columns - 0.5, rows - 0.5, 0.5 - rows)
        for layer, head in itertools.product(range(1, deep + 1), range(1, wide + 1)):
            here = f"layer == {layer} and head == {head}"
            own, distance = attention.query(here).sort_values(["down", "right"]), heads.query(here).distance.item()
            weights = own.weight.to_numpy().reshape(shape)
            ax: Axes = axes[layer - 1, head - 1]
            ax.imshow(weights, cmap="magma", vmin=0, extent=extent, interpolation="nearest")
            ax.set_title(f"max {weights.max():.2f}, reach {distance:.1f}", fontsize=SMALL, pad=2)
            bare(ax)
            ax.set(xticks=[0], yticks=[0])
            ax.tick_params(labelsize=SMALL, length=2, pad=1)
            if head == 1:
                ax.set_ylabel(f"layer {layer}")
            if layer == deep:
                ax.set_xlabel(f"head {head}")
    return figure

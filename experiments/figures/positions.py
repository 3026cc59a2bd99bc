"""Figures of position embeddings, drawn from the records of `privlab study pe`: one file for each figure and model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from privlab.experiments.figures.studies import read_facts
from privlab.report.figures import check_ending, write_figure
from privlab.report.figures.style import MARKERS, PAGE, PALETTE, SMALL, figure_style

Facts = Mapping[str, Any]


def draw_positions(out: Path, kind: str = "svg") -> list[Path]:
    """Draw the figures of the study in `out`, write them there as svg, png or pdf, and return the files.

    Raises:
        PrivlabError: if there is no study, or a file cannot be written.
    """
    check_ending(Path(f"figure.{kind}"))
    facts: list[Facts] = read_facts(out, "position embeddings", "pe")
    tables = {path.stem: pd.read_parquet(path) for path in out.glob("*.parquet")}
    figures = {"spectrum": _spectrum(facts, tables["spectrum"])}
    for number, about in enumerate(facts):
        name = f"{number + 1}_{about['model'].replace(':', '-')}"
        own = {table: rows.query(f"model == {number}") for table, rows in tables.items()}
        figures[f"projections_{name}"] = _projections(about, own["points"])
        figures[f"similarity_{name}"] = _similarity(about, own["similarity"])
        if "attention" in own:
            figures[f"attention_{name}"] = _attention(about, own["attention"], out)
    paths = [out / f"{name}.{kind}" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        write_figure(figure, path)
    return paths


def _title(about: Facts) -> str:
    return f"{about['model']} ({about['weights']})"


def _spectrum(facts: list[Facts], spectrum: pd.DataFrame) -> Figure:
    """Draw accumulated singular values (Figure 4) and explained variance by dimension (Table 6)."""
    with figure_style():
        figure = Figure(figsize=(PAGE, 2.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        for number, about in enumerate(facts):
            rows = spectrum.query(f"model == {number}")
            color, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
            left.plot(rows["index"], 100 * rows.accumulated, color=color, label=_title(about))
            first = rows.head(20)
            right.plot(first["index"], 100 * first.explained, color=color, marker=marker, clip_on=False)
        left.set(xlabel="largest singular values", ylabel="their share of the sum (%)", ylim=(0, 101))
        right.set(xlabel="dimension of the PCA", ylabel="explained variance (%)", ylim=(0, 101))
        right.set_xticks(range(0, 21, 4))
        for ax in (left, right):
            ax.grid(visible=True)
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _projections(about: Facts, points: pd.DataFrame) -> Figure:
    """Draw the 2-D UMAP, where there is one, and the 3-D PCA: neighbours in a row are joined (Figures 1 and 7)."""
    planar = "umap_1" in points and points.umap_1.notna().all()
    with figure_style():
        figure = Figure(figsize=(PAGE if planar else PAGE / 2, PAGE / 2), layout="constrained")
        figure.suptitle(_title(about), fontsize=7)
        rows, columns = about["grid"]
        shape = {"c": points.row * columns + points.column, "cmap": "viridis", "s": 7, "zorder": 3}
        if planar:
            flat = figure.add_subplot(1, 2, 1, aspect="equal", xlabel="UMAP 1", ylabel="UMAP 2")
            _mesh(flat, [_on_grid(points, name, rows, columns) for name in ("umap_1", "umap_2")])
            flat.scatter(points.umap_1, points.umap_2, **shape)
        solid: Any = figure.add_subplot(1, 2 if planar else 1, 2 if planar else 1, projection="3d")
        axes = ("pca_1", "pca_2", "pca_3")
        _mesh(solid, [_on_grid(points, name, rows, columns) for name in axes])
        drawn = solid.scatter(*(points[name] for name in axes), depthshade=False, **shape)
        solid.set(xlabel="PCA 1", ylabel="PCA 2", zlabel="PCA 3")
        solid.tick_params(labelsize=SMALL - 1, pad=-2)
        bar = figure.colorbar(drawn, ax=figure.axes, shrink=0.6, pad=0.12, aspect=30)
        bar.set_label("slot, row by row")
    return figure


def _on_grid(points: pd.DataFrame, name: str, rows: int, columns: int) -> NDArray[np.float64]:
    return points.sort_values("slot")[name].to_numpy(dtype=float).reshape(rows, columns)


def _mesh(ax: Any, coordinates: list[NDArray[np.float64]]) -> None:  # noqa: ANN401
    """Join slots that are adjacent on the grid of patches."""
    for lines in (coordinates, [each.T for each in coordinates]):
        for line in zip(*lines, strict=True):
            ax.plot(*line, color="0.8", linewidth=0.4, zorder=1)


def _similarity(about: Facts, similarity: pd.DataFrame) -> Figure:
    """Draw the cosine of some slots' embeddings with all others, laid out on the grid; a cross marks the slot."""
    rows, columns = about["grid"]
    matrix = similarity.sort_values(["slot", "other"]).cosine.to_numpy().reshape(rows * columns, rows, columns)
    picked = [np.unique(np.linspace(0, n - 1, min(n, 5)).round().astype(int)) for n in (rows, columns)]
    with figure_style():
        figure = Figure(figsize=(PAGE / 2 + 0.5, PAGE / 2), layout="constrained")
        figure.suptitle(f"{_title(about)}: cosine of position embeddings", fontsize=7)
        axes = figure.subplots(len(picked[0]), len(picked[1]), squeeze=False)
        drawn = None
        for line, row in zip(axes, picked[0], strict=True):
            for ax, column in zip(line, picked[1], strict=True):
                drawn = ax.imshow(matrix[row * columns + column], cmap="viridis", vmin=-1, vmax=1)
                ax.plot(column, row, "x", color="red", markersize=3)
                bare(ax)
        if drawn is not None:
            figure.colorbar(drawn, ax=axes, shrink=0.6, aspect=30)
    return figure


def _attention(about: Facts, attention: pd.DataFrame, out: Path) -> Figure:
    """Draw each image and the class token's attention by head; each map's scale ends at its 97th percentile."""
    rows, columns = about["grid"]
    images, heads = list(dict.fromkeys(attention.image)), int(attention["head"].max()) + 1
    with figure_style():
        figure = Figure(figsize=(min(PAGE, 1.15 * heads + 1.5), 1.15 * len(images) + 0.4), layout="constrained")
        figure.suptitle(f"{_title(about)}: attention in the last block", fontsize=7)
        axes = figure.subplots(len(images), 1 + heads, squeeze=False)
        for line, image in zip(axes, images, strict=True):
            own = attention.query("image == @image").sort_values(["head", "slot"])
            line[0].imshow(matplotlib.image.imread(out / own.picture.iloc[0]))
            line[0].set_title(Path(image).stem, fontsize=SMALL, pad=2)
            maps = own.weight.to_numpy().reshape(heads, rows, columns)
            for head, (ax, one) in enumerate(zip(line[1:], maps, strict=True)):
                ax.imshow(one, cmap="magma", vmin=0, vmax=np.quantile(one, 0.97))
                ax.set_title(f"head {head + 1}", fontsize=SMALL, pad=2)
            for ax in line:
                bare(ax)
    return figure


def bare(ax: Axes) -> None:
    """Take ticks and spines off axes that show an image."""
    ax.set(xticks=[], yticks=[])
    for side in ax.spines.values():
        side.set_visible(False)

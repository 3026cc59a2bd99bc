"""`privlab evaluate`: it measures the utility of trained victims."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from privlab.cli.common import common, err, print_json, print_table, progress_bar, warned
from privlab.cli.names import CLASSIFIERS


@click.command()
@click.option("--model", "models", type=CLASSIFIERS, required=True, help="Victims, with commas.")
@click.option(
    "--weights",
    default="auto",
    show_default=True,
    help="One value for all models, or one per model, separated by commas.",
)
@click.option("--data", help="A labelled folder, Parquet file, torchvision:NAME or hf:NAME.")
@click.option("--split", default="test", show_default=True, help="Of the data; none for a folder without splits.")
@click.option("--labels", type=click.Path(path_type=Path), help="CSV with the columns file and label.")
@click.option("--gamma", "gammas", default="0,0.03,0.15,0.27,0.5,0.9", show_default=True, help="With commas.")
@click.option("--per", default="image", show_default=True, help="What x̃ draws a mask and an order for: image or batch.")
@click.option("--corruptions", type=click.Path(path_type=Path), help="Folder as ImageNet-C: CORRUPTION/SEVERITY/CLASS.")
@click.option("--baseline", default="alexnet", show_default=True, help="Of mCE: alexnet, or JSON, error by corruption.")
@click.option("--natural", type=click.Path(path_type=Path), help="Folder as ImageNet-A.")
@click.option("--outliers", type=click.Path(path_type=Path), help="Folder as ImageNet-O; --data are the inliers.")
@click.option("--img-size", type=click.IntRange(min=8), help="Side of the input.")
@click.option("--limit", type=click.IntRange(min=1), help="Use N images of each folder.")
@click.option("--batch-size", "batch", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the shuffles.")
@click.option("--figure", type=click.Path(path_type=Path), help="Draw accuracy against γ to a .pdf, .svg or .png.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@common
def evaluate(
    models: str,
    weights: str,
    gammas: str,
    split: str,
    figure: Path | None,
    device: str,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> None:
    """Measure the accuracy and the robustness of victims.

    It reports top-1, Consistency and Diff-Norm against γ, corruptions and outliers.
    """
    from privlab.base import pick_device, read_numbers
    from privlab.experiments.figures.gamma import draw_by_gamma
    from privlab.experiments.methods.evaluate import EvaluationConfig, evaluate_models
    from privlab.report.figures import check_ending, write_figure

    if figure is not None:
        check_ending(figure)
    named = {"models": tuple(models.split(",")), "weights": tuple(weights.split(","))}
    config = EvaluationConfig(
        **named, gammas=read_numbers("--gamma", gammas), split=None if split == "none" else split, **options
    )
    with warned(), progress_bar("judging") as progress:
        rows = evaluate_models(config, device=str(pick_device(device)), progress=progress)
    for line in rows[0].get("skipped", ()):
        err.print(f"Skipped {line}", markup=False)
    if figure is not None and config.data is not None:
        write_figure(draw_by_gamma(rows), figure)
    if as_json:
        print_json(rows)
        return
    if config.data is not None:
        print_table(_by_gamma(rows))
    if config.corruptions is not None:
        print_table(_by_corruption(rows))
    if any(key in rows[0] for key in ("natural", "outliers")):
        print_table(_elsewhere(rows))


def _by_gamma(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("model", "weights", "images", "top-1 %", "γ", "top-1 % on x̃", "Consistency %", "Diff. Norm.")
    for row in rows:
        first = (row["model"], row["weights"], str(row["images"]), f"{100 * row['accuracy']:.2f}")
        for at in row["by_gamma"]:
            scores = (
                f"{100 * at['shuffled_accuracy']:.2f}",
                f"{100 * at['consistency']:.2f}",
                f"{at['diff_norm']:.3f}",
            )
            table.add_row(*first, f"{at['gamma']:g}", *scores)
    return table


def _by_corruption(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("error %", *(row["model"] for row in rows))
    sheets = [row["corruptions"] for row in rows]
    for name in dict.fromkeys(each["corruption"] for each in sheets[0]["errors"]):
        errors = [[each["error"] for each in sheet["errors"] if each["corruption"] == name] for sheet in sheets]
        table.add_row(name, *(f"{100 * sum(some) / len(some):.2f}" for some in errors))
    table.add_row("mean", *(f"{100 * sheet['mean_error']:.2f}" for sheet in sheets))
    mce = [f"{100 * s['mce']:.2f} ({s['mce_over']} corruptions)" if s["mce"] is not None else "n/a" for s in sheets]
    table.add_row("mCE", *mce)
    return table


def _elsewhere(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("model", "natural: accuracy %", "AURRA %", "outliers: AUPR %")
    for row in rows:
        scores = [row.get("natural", {}).get("accuracy"), row.get("natural", {}).get("aurra")]
        scores.append(row.get("outliers", {}).get("aupr"))
        table.add_row(row["model"], *("—" if score is None else f"{100 * score:.2f}" for score in scores))
    return table

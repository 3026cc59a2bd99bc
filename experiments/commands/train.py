"""`privlab train`: it trains victims and position predictors."""

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from privlab.cli.common import (
    command_line,
    common,
    err,
    interruptible,
    print_json,
    print_table,
    progress_bar,
    warned,
)
from privlab.cli.names import CLASSIFIER


@click.command()
@click.argument("recipe")
@click.option("--model", type=CLASSIFIER, required=True, help="A victim's name.")
@click.option("--data", required=True, help="A folder, a Parquet file, torchvision:NAME or hf:NAME.")
@click.option(
    "--weights",
    default="",
    show_default=False,
    help="Where it starts: random, auto, pretrained, or a file.  [default: auto for finetune and probe, else random]",
)
@click.option("--preset", default="published", show_default=True, help="Hyper-parameters: published or small.")
@click.option("--split", default="train", show_default=True, help="What is learnt.")
@click.option("--test", default="test", show_default=True, help="Split to judge on; none for no judgement.")
@click.option("--img-size", type=click.IntRange(min=8), help="Side of the input.")
@click.option("--limit", type=click.IntRange(min=1), help="Use N images of each split.")
@click.option("--epochs", type=float)
@click.option("--warmup", type=float, help="Epochs of it.")
@click.option("--batch-size", type=click.IntRange(min=1))
@click.option("--accumulate", type=click.IntRange(min=1), help="Parts of a batch, one after the other.")
@click.option("--optimiser", help="One of timm's.")
@click.option("--learning-rate", type=float)
@click.option("--weight-decay", type=float)
@click.option("--layer-decay", type=float, help="Learning rate of a layer over that of the next one.")
@click.option("--schedule", help="One of timm's: cosine, poly, constant …")
@click.option("--clip", type=float, help="Largest norm of a gradient; 0 for none.")
@click.option("--ema", type=float, help="Decay of the moving average of the weights; 0 for none.")
@click.option("--precision", help="32-true, bf16-mixed, 16-mixed …")
@click.option("--set", "options", multiple=True, metavar="KEY=VALUE", help="Option of the objective or augmentation.")
@click.option("--keep", type=int, multiple=True, metavar="STEP", help="Keep the weights of a step, too.")
@click.option("--half", is_flag=True, help="Round the result to half precision: half the bytes.")
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the resized images there, mapped into memory: for data that do not fit, and for several processes.",
)
@click.option("--save-every", type=click.IntRange(min=1), default=500, show_default=True, help="Steps.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the training; it goes on there.")
@common
@click.pass_context
def train(context: click.Context, device: str, out: Path, as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Train a victim or a position predictor.

    RECIPE is classify, mjp, mp3, droppos, finetune or probe. All results are written to --out.
    """
    from privlab.base import pick_device
    from privlab.experiments.training.train_victim import TrainingConfig, train_victim

    if options["test"] == "none":
        options["test"] = None
    config = TrainingConfig(**options)
    with interruptible(lambda: _kept(out)), warned(), progress_bar(f"training {config.model}"):
        card = train_victim(config, out, device=str(pick_device(device)), command=command_line(context))
    if card is None:
        return
    for line in card["skipped"]:
        err.print(f"Skipped {line}", markup=False)
    if as_json:
        print_json(card)
        return
    table = Table("what", "value", header_style="bold")
    for what, name, key in (("weights", "model", "sha256"), ("probe", "probe", "probe_sha256")):
        if card.get(key):
            table.add_row(what, str(out / f"{name}.safetensors"))
    table.add_row("steps", str(card["plan"]["steps"]))
    for name, value in (card["test"] or {}).items():
        table.add_row(f"test {name.replace('_', ' ')}", f"{value:.4f}" if isinstance(value, float) else str(value))
    print_table(table)


def _kept(out: Path) -> str:
    """Return what an interrupted training has kept, and how to continue it."""
    steps = [int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*")]
    if not steps:
        return "No checkpoint had been written, and nothing is kept; --save-every says after how many steps one is."
    return f"'{out}' keeps the checkpoint of step {max(steps)}: the same command goes on from there."

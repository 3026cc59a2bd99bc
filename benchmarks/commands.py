"""The commands of `privlab bench`, which finds them in a clone."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from privlab.cli.common import common, err, print_json, print_table, progress_bar
from privlab.cli.names import STACK, VICTIM

bench = click.Group()


def _repeats(default: int, what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option("--repeats", type=click.IntRange(min=1), default=default, show_default=True, help=what)


_ROUNDS = "Rounds; medians are shown."
_BATCH = click.option("--batch", type=click.IntRange(min=2), default=32, show_default=True, help="Images in a batch.")
_DEVICE = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")


@bench.command("attack")
@click.option("--model", type=VICTIM, default="deit_s", show_default=True, help="The victim.")
@click.option("--images", "n_images", type=click.IntRange(min=2), default=32, show_default=True, help="Images timed.")
@_repeats(5, _ROUNDS)
@click.option("--img-size", type=click.IntRange(min=16), help="Side of the images.  [default: the victim's own]")
@click.option(
    "--batch", type=click.IntRange(min=1), default=16, show_default=True, help="Images in a batch; a GPU wants more."
)
@click.option(
    "--searches/--no-searches", default=True, show_default=True, help="Measure the searches and a decoder too."
)
@click.option(
    "--memory/--no-memory", default=True, show_default=True, help="Measure peak memory with 40 and 400 images."
)
@click.option("--main-job/--no-main-job", default=True, show_default=True, help="Run the README's main job, twice.")
@_DEVICE
@common
def bench_attack(as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Measure closed-form attacks against a training step, and against breaching's APRIL."""
    _run("attack", as_json, options)


@bench.command("clients")
@click.option("--model", type=VICTIM, default="cifar_vit", show_default=True, help="What the clients train.")
@click.option("--img-size", type=click.IntRange(min=16), help="Side of the images.  [default: the victim's own]")
@click.option("--clients", type=click.IntRange(min=1), default=8, show_default=True, help="Clients of one image each.")
@_repeats(5, _ROUNDS)
@_DEVICE
@common
def bench_clients(as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Measure clients that are trained one after the other against all at a time by torch.func."""
    _run("clients", as_json, options)


@bench.command("permutation")
@click.option("--model", type=VICTIM, default="vit_b", show_default=True, help="Whose features are permuted.")
@_BATCH
@_repeats(9, _ROUNDS)
@_DEVICE
@common
def bench_permutation(as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Measure permutations by index against matrices, plain copies and the model; key encryption; pe-assignment."""
    _run("permutation", as_json, options)


@bench.command("split")
@click.option("--model", type=VICTIM, default="deit_s", show_default=True, help="What is trained.")
@click.option(
    "--defense",
    type=STACK,
    default="row-permutation+column-permutation",
    show_default=True,
    help="The client's, stacked with +.",
)
@_BATCH
@_repeats(9, "Steps; medians are shown.")
@click.option(
    "--memory/--no-memory", default=True, show_default=True, help="Measure the server's memory over 1000 batches."
)
@_DEVICE
@common
def bench_split(as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Measure split training over loopback against training in one process; the server's memory."""
    _run("split", as_json, options)


@bench.command("startup")
@_repeats(5, _ROUNDS)
@common
def bench_startup(as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Measure what help, a mistyped name and the start of an attack cost against importing torch and timm."""
    _run("startup", as_json, options)


@bench.command("table")
@click.option("--model", type=VICTIM, default="deit_s", show_default=True, help="The victim of what is timed.")
@click.option("--images", "n_images", type=click.IntRange(min=2), default=40, show_default=True, help="Images timed.")
@click.option("--images-dir", type=click.Path(path_type=Path), help="Folder of them.  [default: the samples, shifted]")
@_repeats(3, _ROUNDS)
@click.option(
    "--large/--no-large", default=True, show_default=True, help="Measure a million records and a page of 1000 images."
)
@_DEVICE
@common
def bench_table(as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Measure the whole pipeline against bare attacks; workers, Ray, resuming a million records, the page."""
    _run("table", as_json, options)


@bench.command("train")
@click.option("--model", type=VICTIM, default="deit_s", show_default=True, help="The victim that is trained.")
@click.option("--batch", type=click.IntRange(min=2), default=16, show_default=True, help="Images in a batch.")
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True, help="In each stage.")
@_repeats(5, _ROUNDS)
@_DEVICE
@common
def bench_train(as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Measure the recipes against a bare timm loop, MJP's and MP3's cost, and making batches."""
    _run("train", as_json, options)


def _run(name: str, as_json: bool, options: dict[str, Any]) -> None:
    run = getattr(import_module(f"privlab.benchmarks.{name}"), f"bench_{name}")
    with progress_bar(f"bench {name}") as progress:
        result = run(progress=progress, **options)
    if as_json:
        print_json(result.as_dict())
        return
    for table in result.tables():
        print_table(table)
    if isinstance(absent := result.setup.get("absent"), dict):
        for figure, reason in absent.items():
            err.print(f"{figure} is not measured: {reason}.", style="yellow", markup=False)

"""`privlab list`, `doctor` and `bench`: what is installed, what this machine has, and how fast it is."""

from pathlib import Path
from typing import Any

import click

from privlab.cli.common import common, err, print_json, print_rows, print_table, progress_bar
from privlab.errors import unknown_name

__all__ = ["bench", "doctor", "list_"]


@click.command("list")
@click.argument("what", type=click.Choice(["victims", "attacks", "defenses", "metrics"]))
@common
def list_(what: str, as_json: bool) -> None:
    """List what is installed, with papers, equations and the capabilities that attacks need."""
    from privlab.report.catalogue import catalogue

    print_rows(catalogue(what), as_json)


@click.command()
@click.option("--lpips-weights", type=click.Path(path_type=Path), help="File or folder with LPIPS backbones.")
@common
def doctor(lpips_weights: Path | None, as_json: bool) -> None:
    """Say what this machine has, and what is missing for which feature."""
    from privlab.report.doctor import examine

    with err.status("examining"):
        rows = examine(lpips_weights)
    print_rows(rows, as_json)


@click.command()
@click.argument("name")
@click.option("--model", default="deit_s", show_default=True, help="The victim.")
@click.option("--images", "n_images", type=click.IntRange(min=2), default=32, show_default=True, help="Images timed.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds; medians are shown.")
@click.option(
    "--memory/--no-memory", default=True, show_default=True, help="Measure peak memory with 40 and 400 images."
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@common
def bench(name: str, as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Measure speed side by side in one run, as ratios. NAME is: attack."""
    from privlab.bench import BENCHES

    if name not in BENCHES:
        raise unknown_name("bench", name, BENCHES)
    with progress_bar(f"bench {name}") as progress:
        result = BENCHES[name](progress=progress, **options)
    if as_json:
        print_json(result.as_dict())
        return
    for table in result.tables():
        print_table(table)

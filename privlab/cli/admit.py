"""`privlab admit`: whether a defense, an attack or a metric is what it says."""

from dataclasses import asdict
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from privlab.cli.common import common, err, plain, print_json, print_table
from privlab.cli.names import PART, VICTIM, WEIGHTS

__all__ = ["admit"]


@click.command()
@click.argument("name", type=PART)
@click.option("--set", "options", multiple=True, metavar="KEY=VALUE", help="An option of it; repeat it.")
@click.option("--gamma", type=float, help="γ of jigsaw and mjp.")
@click.option("--model", type=VICTIM, default="vit_ti_mjp", show_default=True, help="The victim on which it is tried.")
@click.option(
    "--weights", type=WEIGHTS, default="random", show_default=True, help="auto, pretrained, random, or a file."
)
@click.option("--img-size", type=click.IntRange(min=16), default=64, show_default=True, help="Side of the input.")
@click.option("--depth", type=click.IntRange(min=1), default=2, show_default=True, help="Blocks of it that are kept.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@common
def admit(name: str, as_json: bool, **options: Any) -> int:  # noqa: ANN401
    """Check a defense, an attack or a metric by its NAME, before a run; exit status 1 where a check fails.

    A defense must release what it says and nothing else; an attack or a metric must say what it needs, and return what
    it should.
    """
    from privlab.admission import admit_any

    with err.status(f"admitting {name}"):
        checks = admit_any(name, **options)
    if as_json:
        print_json([{name: plain(value) for name, value in asdict(check).items()} for check in checks])
    else:
        table = Table("check", "", "measured", "limit", "what", header_style="bold")
        for check in checks:
            verdict = "pass" if check.passed else "FAIL"
            table.add_row(
                check.name, verdict, f"{check.value:.3g}", f"{check.bound} {check.limit:g}", escape(check.text)
            )
        print_table(table)
    return 0 if all(check.passed for check in checks) else 1

"""`privlab list`, `explain` and `doctor`: what is installed, what it is, and what the machine has."""

from dataclasses import asdict
from pathlib import Path

import click

from privlab.cli.common import common, err, print_json, print_rows, warned
from privlab.cli.names import EXPLAINED, PATH


@click.command("list")
@click.argument("what", type=click.Choice(["victims", "attacks", "defenses", "metrics", "experiments"]))
@common
def list_(what: str, as_json: bool) -> None:
    """List what is installed, with papers, equations and the capabilities that attacks need."""
    from privlab.inventory.catalogue import catalogue

    with warned():
        rows = catalogue(what)
    print_rows(rows, as_json)


@click.command()
@click.argument("name", type=EXPLAINED)
@common
def explain(name: str, as_json: bool) -> None:
    """Print the page of an attack, a defense, a metric or a red flag, with measured figures and BibTeX."""
    from privlab.inventory.explain import explain as page_of

    page = page_of(name)
    if as_json:
        shown = {"kind": page.kind, "name": page.name, "idea": page.idea, "sections": page.sections}
        print_json({**shown, "studies": page.studies, "flow": [asdict(box) for box in page.flow]})
        return
    click.echo(f"{click.style(page.name, bold=True)} ({page.kind})\n\n{page.idea}")
    if page.flow:
        click.echo("\n" + "\n".join(f"  {box.party:>9} → {box.text}" for box in page.flow))
    for title, text in page.sections.items():
        click.echo(f"\n{click.style(title, bold=True)}\n{text}")


@click.command()
@click.option("--lpips-weights", type=PATH, help="File or folder with LPIPS backbones.")
@common
def doctor(lpips_weights: Path | None, as_json: bool) -> None:
    """Say what this machine has, and what is missing for which feature."""
    from privlab.inventory import examine

    with err.status("examining"):
        rows = examine(lpips_weights)
    print_rows(rows, as_json)

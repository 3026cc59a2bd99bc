"""`privlab list`, `explain` and `doctor`: what is installed, what it is, and what the machine has."""

from dataclasses import asdict
from pathlib import Path

import click

from privlab.cli.common import WIDTH, common, err, print_json, print_rows, print_text, warned
from privlab.cli.names import EXPLAINED, PATH


@click.command("list")
@click.argument("what", type=click.Choice(["victims", "attacks", "defenses", "metrics", "experiments"]))
@common
def list_(what: str, as_json: bool) -> None:
    """List the victims, attacks, defenses, metrics or experiments."""
    from privlab.inventory.catalogue import catalogue

    with warned():
        rows = catalogue(what)
    if what != "attacks" or as_json:
        print_rows(rows, as_json)
        return
    formatter = click.HelpFormatter(width=WIDTH)
    for released, title in _RELEASED.items():
        with formatter.section(title):
            formatter.write_dl([(str(row["name"]), str(row["does"])) for row in rows if row["released"] == released])
    click.echo(formatter.getvalue().lstrip())
    print_text("`privlab explain NAME` prints what an attack needs, when it runs, and its paper; --json has all of it.")


_RELEASED = {
    "gradients": "Attacks on the gradient of a training step",
    "update": "Attacks on the update of a client's round",
    "features": "Attacks on the features of split learning",
}
"""The groups of `privlab list attacks`."""


@click.command()
@click.argument("name", type=EXPLAINED)
@common
def explain(name: str, as_json: bool) -> None:
    """Print the page of an attack, a defense, a metric or a red flag.

    It has the measured figures and the BibTeX of the papers.
    """
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
    """Check whether privlab can run here, and with which options."""
    from privlab.inventory import examine

    with err.status("examining"):
        rows = examine(lpips_weights)
    if not as_json:
        missing = [row["what"] for row in rows if row["state"] == "missing"]
        optional = [row["what"] for row in rows if row["state"] == "optional"]
        verdict = f"privlab cannot run here without {', '.join(missing)}." if missing else "privlab can run here."
        print_text(f"{verdict} Optional, and not here: {', '.join(optional) or 'none'}.")
    print_rows(rows, as_json)

"""`privlab models`: the zoo, timm's hub, and the user's own weights."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from privlab.cli.common import Commands, common, err, print_either, print_json, print_table, warned
from privlab.cli.names import PATH, VICTIM


@click.group(cls=Commands)
def models() -> None:
    """List, check, fetch and import trained models."""


@models.command("list")
@common
def list_(as_json: bool) -> None:
    """List the models of the zoo, of timm and those that were imported, without a network."""
    from privlab.victims import models as found

    rows = found()
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    table = Table("model", "from", "architecture", "MB", "weights", "about", header_style="bold")
    for row in rows:
        size = "—" if row.bytes is None else f"{row.bytes / 1e6:.1f}"
        cells = (row.name, row.origin, row.architecture, size, row.file or "not here", row.about)
        table.add_row(*(escape(str(cell)) for cell in cells))
    print_table(table)


@models.command()
@click.argument("name")
@common
def show(name: str, as_json: bool) -> int:
    """Print the card of NAME, or of a file of weights, and whether the weights are those of the card."""
    from privlab.victims import show as found

    facts = found(name)
    card_last = {name: value for name, value in facts.items() if name != "card"} | {"card": facts["card"]}
    print_either(as_json, facts, *_lines(card_last))
    if facts["matches"] is False:
        message = f"Error: the weights of {name} are not those of the card: their SHA-256 differs."
        err.print(message, style="red", markup=False)
        return 2
    return 0


def _lines(facts: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield `key: value` lines; a mapping, and a list of texts, follow their key on indented lines."""
    for key, value in facts.items():
        if value and isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, f"{indent}  ")
        elif isinstance(value, list) and any(isinstance(each, str) for each in value):
            yield f"{indent}{key}:"
            yield from (f"{indent}  - {each}" for each in value)
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{indent}{key}: {'—' if value in (None, '', [], {}) else text}"


@models.command()
@click.argument("name", type=VICTIM)
@common
def fetch(name: str, as_json: bool) -> None:
    """Fetch the pretrained weights of NAME from timm's hub into its cache."""
    from privlab.victims import fetch as found

    path = found(name)
    print_either(as_json, {"model": name, "file": str(path), "bytes": path.stat().st_size}, path)


@models.command("import")
@click.argument("file", type=PATH)
@click.option("--as", "name", type=VICTIM, required=True, help="The victim whose weights they are, such as deit_s_mjp.")
@click.option("--img-size", type=click.IntRange(min=8), help="Resize the position embeddings to this input.")
@common
def import_(file: Path, name: str, img_size: int | None, as_json: bool) -> None:
    """Check FILE (timm's, the MJP authors' or privlab's layout), keep it as safetensors, and print where."""
    from privlab.victims import import_weights

    with warned():
        path, card = import_weights(file, name, img_size=img_size)
    print_either(as_json, {"file": str(path), "card": card}, path)

"""`privlab attack --features`: an audit of what a server of split learning recorded."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table

from privlab.cli.common import err, print_json, print_table, progress_bar
from privlab.errors import PrivlabError

__all__ = ["audit_features"]

_TAKEN = {"features", "model", "attack", "weights", "img_size", "defense", "options_", "public", "public_limit"}
_TAKEN |= {"gamma", "masked_pe", "seed", "device", "out", "overwrite", "limit", "as_json"}


def audit_features(context: click.Context, folder: Path, path: Path, options: Mapping[str, Any]) -> int:
    """Attack recorded features, of which no private image is known, and print what was made of them."""
    from privlab.audit import audit
    from privlab.run import specify

    for name in context.params:
        if name not in _TAKEN and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise PrivlabError(
                f"--{name.replace('_', '-')} has no meaning with --features: there is no private image. Leave it out."
            )
    science = {name: options[name] for name in ("weights", "img_size", "defense", "gamma", "masked_pe", "seed")}
    science |= {"public": options["public"], "public_limit": options["public_limit"], "options": options["options_"]}
    spec = specify(options["model"], "c", attack=options["attack"], release="features", **science)
    if len(spec.models) > 1:
        raise PrivlabError(f"--features audits one victim. Found {len(spec.models)}: {', '.join(spec.models)}.")
    with progress_bar("auditing") as progress:
        found = audit(
            folder,
            spec,
            device=options["device"],
            out=path,
            overwrite=options["overwrite"],
            limit=options["limit"],
            progress=progress,
        )
    for message in found.warnings:
        err.print(f"Warning: {message}", style="yellow", markup=False)
    failed = [row for row in found.rows if row["status"] != "ok"]
    if options["as_json"]:
        print_json({"run": str(path), "batches": found.rows, "warnings": found.warnings, "failed": len(failed)})
    else:
        print_table(_table(found.rows))
        click.echo("no private image is known, so nothing is scored: look at the contact sheets")
        click.echo(f"run: {path} (sheets in {path / 'strips'})")
    for row in failed[:1]:
        err.print(f"Failed: {row['kind']} {row['number']}: {row['reason']}", style="red", markup=False)
    return 2 if failed else 0


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("attack", "batches", "images", "failed", "ms per image", header_style="bold")
    for attack in dict.fromkeys(row["attack"] for row in rows):
        of = [row for row in rows if row["attack"] == attack]
        images = sum(row.get("images", 0) for row in of)
        ms = f"{1000 * sum(row.get('seconds', 0) for row in of) / images:.1f}" if images else "n/a"
        table.add_row(attack, str(len(of)), str(images), str(Counter(row["status"] for row in of)["failed"]), ms)
    return table

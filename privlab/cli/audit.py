"""`privlab attack --features`, `--gradients`, `--update`: audits of what a server recorded or a client released."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.table import Table

from privlab.base import PrivlabError
from privlab.cli import common as shared
from privlab.cli.names import several
from privlab.release.given import check_gradients, session_folders
from privlab.threat.client import CLIENT_PRESETS, OPTIMISERS

if TYPE_CHECKING:
    from privlab.runs import Audit
    from privlab.runs.audit_given import Files

_TAKEN = {"model", "attack", "effort", "weights", "img_size", "classes", "defense", "gamma", "masked_pe", "options_"}
_TAKEN |= {"normalisation", "seed", "device", "out", "overwrite", "as_json"}
_FEATURES = _TAKEN | {"features", "cut_layer", "limit", "public", "public_limit", "bit_depth"}
_GRADIENTS = _TAKEN | {"gradients", "reference", "block", "force"}
_UPDATE = (_TAKEN - {"weights"}) | {"update", "client", "reference", "block", "force"}
_LEAKS = {
    True: "yes, a private image was reconstructed",
    False: "no, nothing was released",
    None: "not known: no reconstruction is proven to be a private image, and that attacks fail proves nothing",
}
"""What is said of an audit's `leaks`."""

_SCORING = {"metrics", "lpips_weights", "embedding", "public", "public_limit", "bit_depth"}


def audit_features(context: click.Context, folder: Path) -> int:
    """Attack the features of a recording, whose private images are unknown, and print a summary of the attacks."""
    options = context.params
    _refuse(context, _FEATURES, "--features: there is no private image. Leave it out.")
    session_folders(folder)
    _check_one(options["model"], "--features")
    shared.check_together(options)
    from privlab.release import recorded_cut_layer
    from privlab.runs import audit, specify

    given = context.get_parameter_source("cut_layer") is ParameterSource.COMMANDLINE
    own = {"release": "features", "cut_layer": options["cut_layer"] if given else recorded_cut_layer(folder)}
    spec = specify(options["model"], "c", attack=options["attack"], images=folder, **own, **_science(options))
    known = options["out"] or shared.begun_directory(spec, "audit", overwrite=options["overwrite"])
    with (
        shared.reserved(known, [options["model"], "features"]) as path,
        shared.interruptible(lambda: shared.kept(path)),
        shared.progress_bar("auditing") as progress,
    ):
        found = audit(folder, spec, out=path, limit=options["limit"], progress=progress, **_how(context))
    shared.print_warnings(found.warnings)
    failed = [row for row in found.rows if row["status"] != "ok"]
    if options["as_json"]:
        shared.print_json({"run": str(path), "batches": found.rows, "warnings": found.warnings, "failed": len(failed)})
    else:
        shared.print_table(_table(found.rows))
        click.echo("no private image is known, so nothing is scored: look at the contact sheets")
        click.echo(f"run: {path} (sheets in {path / 'strips'})")
    shared.print_failed((f"{row['kind']} {row['number']}", row["reason"]) for row in failed[:1])
    return 2 if failed else 0


def audit_gradient_file(context: click.Context, file: Path) -> int:
    """Attack the gradient of a file, with a reference image for scoring or without, and print the results."""
    _refuse(context, _GRADIENTS | _SCORING, "--gradients: the file is one training step. Leave it out.")
    check_gradients(file)
    return _audit(context, file, {"release": "gradients"}, _GRADIENTS)


def audit_update(context: click.Context, files: tuple[Path, Path]) -> int:
    """Attack the update of a round by the weights before and after it, with a reference image or without."""
    _refuse(context, _UPDATE | _SCORING, "--update: the files hold the weights of one round. Leave it out.")
    if (client := context.params["client"]) is None:
        raise PrivlabError(
            f"--update needs --client, the optimiser that the client trained with: {', '.join(OPTIMISERS)}, or a "
            f"preset ({', '.join(CLIENT_PRESETS)}). Found none. --set client.lr=0.01 and so on say the rest."
        )
    for file, role in zip(files, ("before", "after"), strict=True):
        if not file.is_file():
            raise PrivlabError(f"No file at '{file}'. Give the weights {role} the round, BEFORE AFTER.")
    return _audit(context, files, {"client": client}, _UPDATE)


def _audit(context: click.Context, files: "Files", release: dict[str, Any], taken: set[str]) -> int:
    """Attack what was released, and print the results."""
    options = context.params
    kind = "update" if "client" in release else "gradients"
    if (reference := options["reference"]) is None:
        _refuse(context, taken, f"--{kind} without a --reference to score by. Give one, or leave it out.")
    elif not reference.exists():
        raise PrivlabError(f"No file at '{reference}'. --reference is the private image.")
    _check_one(options["model"], f"--{kind}")
    shared.check_together(options)
    from privlab.runs import specify
    from privlab.runs.audit_gradients import audit_gradients

    science = _science(options) | {name: options[name] for name in ("block", "force", "lpips_weights", "embedding")}
    setting = "a" if kind == "update" else "c"
    spec = specify(options["model"], setting, attack=options["attack"], metrics=options["metrics"], **science | release)
    go_on = "With --overwrite, the same command starts again."
    with (
        shared.reserved(options["out"], [options["model"], kind]) as path,
        shared.interruptible(lambda: shared.kept(path, go_on)),
    ):
        found = audit_gradients(files, spec, out=path, reference=reference, **_how(context))
    shared.print_warnings(found.warnings)
    failed = [row for row in found.rows if row["status"] != "ok"]
    if options["as_json"]:
        told = {
            "run": str(path),
            "leaks": found.leaks,
            "attacks": found.rows,
            "labels": found.labels,
            "flags": found.flags,
            "reference": found.reference,
        }
        shared.print_json(told | {"warnings": found.warnings, "missing_metrics": found.missing, "failed": len(failed)})
    else:
        _print_gradients(found)
    for row in failed:
        shared.err.print(f"Failed: {row['reason']}", style="red", markup=False)
    return 2 if failed else 0


def _refuse(context: click.Context, taken: set[str], why: str) -> None:
    for name in context.params:
        if name not in taken and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise PrivlabError(f"--{name.replace('_', '-')} has no meaning with {why}")


def _how(context: click.Context) -> dict[str, Any]:
    """Return where an audit runs, whether it replaces an earlier one, and the command for its record."""
    return {**{name: context.params[name] for name in ("device", "overwrite")}, "command": shared.command_line(context)}


def _science(options: Mapping[str, Any]) -> dict[str, Any]:
    names = ("effort", "weights", "img_size", "classes", "normalisation", "defense", "gamma", "masked_pe", "seed")
    return {name: options[name] for name in (*names, "public", "public_limit", "bit_depth")} | {
        "options": options["options_"]
    }


def _check_one(model: str, option: str) -> None:
    models = several(model)
    if len(models) > 1:
        raise PrivlabError(f"{option} audits one victim. Found {len(models)}: {', '.join(models)}.")


def _print_gradients(found: "Audit") -> None:
    from pandas import DataFrame

    from privlab.grids import KNOWN
    from privlab.report.tables import shown_metrics

    shown = shown_metrics(found.metrics, DataFrame(found.rows)) if found.metrics else []
    table = Table("attack", "residual", header_style="bold")
    for name in shown:
        table.add_column(f"{name.replace('_', ' ')} {KNOWN[name].arrow}", justify="right")
    for column in ("images", "seconds", "what it says"):
        table.add_column(column)
    for row in found.rows:
        scores = [f"{row[name]:.{KNOWN[name].decimals}f}" if name in row else "n/a" for name in shown]
        left = f"{row['residual']:.1e}" if "residual" in row else "n/a"
        table.add_row(
            row["attack"], left, *scores, str(row.get("images", "")), str(row.get("seconds", "")), _says(row, found)
        )
    if found.rows:  # else a flag says that no attack ran
        shared.print_table(table)
        said = "that the reconstruction itself gives, against the released one; 0 is the same"
        click.echo(f"residual: of the {found.what} {said}")
    if found.reference is not None:
        click.echo(f"reference: {found.reference}")
    click.echo(f"leaks: {_LEAKS[found.leaks]}")
    for flag in found.flags:
        click.echo(f"flag: {flag}")
    pictures = found.path / "pictures"
    click.echo(f"run: {found.path}" + (f" (images in {pictures})" if pictures.exists() else ""))


def _says(row: Mapping[str, Any], found: "Audit") -> str:
    """Return what a row of an audit proves about the private image."""
    if row["status"] != "ok":
        return "failed"
    if "block" not in row:
        return "no attack made it"
    if row.get("blank"):
        return "nothing found: one colour"
    if row["explained"] is None:
        return "not checked: look at the image"
    if not row["explained"]:
        return "not proven: look at the image"
    several = row["images"] > 1
    if row["proof"] == "grey levels":
        return f"{'stored images: they lie' if several else 'a stored image: it lies'} on grey levels"
    if found.reference is not None:
        return f"what was fed: it gives the released {found.what}"
    private = "the private images: together they give" if several else "the private image: it gives"
    return f"{private} the released {found.what}"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("attack", "batches", "images", "failed", "ms per image", header_style="bold")
    for attack in dict.fromkeys(row["attack"] for row in rows):
        of = [row for row in rows if row["attack"] == attack]
        images = sum(row.get("images", 0) for row in of)
        ms = f"{1000 * sum(row.get('seconds', 0) for row in of) / images:.1f}" if images else "n/a"
        table.add_row(attack, str(len(of)), str(images), str(Counter(row["status"] for row in of)["failed"]), ms)
    return table

"""`privlab attack --features`, `--gradients`, `--update`: audits of what a server recorded or a client released."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.table import Table

from privlab.base import PrivlabError
from privlab.cli.common import (
    begun_directory,
    command_line,
    err,
    interruptible,
    kept,
    plain,
    print_json,
    print_table,
    progress_bar,
)
from privlab.release.given import check_gradients, session_folders

if TYPE_CHECKING:
    from privlab.runs import GradientAudit
    from privlab.runs.audit_given import Files

__all__ = ["audit_features", "audit_gradient_file", "audit_update"]

_TAKEN = {"model", "attack", "effort", "weights", "img_size", "classes", "defense", "gamma", "masked_pe", "options_"}
_TAKEN |= {"normalisation", "seed", "device", "out", "overwrite", "as_json"}
_FEATURES = _TAKEN | {"features", "cut_layer", "limit", "public", "public_limit"}
_GRADIENTS = _TAKEN | {"gradients", "reference", "block", "force"}
_UPDATE = (_TAKEN - {"weights"}) | {"update", "client", "reference", "block", "force"}
_SCORING = {"metrics", "lpips_weights", "embedding", "public", "public_limit"}


def audit_features(context: click.Context, folder: Path, path: Path, options: Mapping[str, Any]) -> int:
    """Attack recorded features, whose private images are unknown, and print a summary of the attacks.

    Args:
        context: the command.
        folder: the recording.
        path: a new run directory, which is not used if there is an unfinished audit of the same specification.
        options: all options of the command.
    """
    _refuse(context, _FEATURES, "--features: there is no private image. Leave it out.")
    session_folders(folder)
    from privlab.release import recorded_cut_layer
    from privlab.runs import audit, specify

    given = context.get_parameter_source("cut_layer") is ParameterSource.COMMANDLINE
    own = {"release": "features", "cut_layer": options["cut_layer"] if given else recorded_cut_layer(folder)}
    spec = specify(options["model"], "c", attack=options["attack"], images=folder, **own, **_science(options))
    _check_one(spec.models, "--features")
    path = options["out"] or begun_directory(spec, "audit", overwrite=options["overwrite"]) or path
    with interruptible(lambda: kept(path)), progress_bar("auditing") as progress:
        found = audit(
            folder,
            spec,
            device=options["device"],
            out=path,
            overwrite=options["overwrite"],
            limit=options["limit"],
            command=command_line(context),
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


def audit_gradient_file(context: click.Context, file: Path, path: Path, options: Mapping[str, Any]) -> int:
    """Attack a released gradient, with a reference image for scoring or without, and print the results.

    Args:
        context: the command.
        file: the gradient file.
        path: the run directory.
        options: all options of the command.
    """
    _refuse(context, _GRADIENTS | _SCORING, "--gradients: the file is one training step. Leave it out.")
    check_gradients(file)
    return _audit(context, file, path, options, {"release": "gradients"}, _GRADIENTS)


def audit_update(context: click.Context, files: tuple[Path, Path], path: Path, options: Mapping[str, Any]) -> int:
    """Attack the update of a client's round, with a reference image for scoring or without, and print the results.

    Args:
        context: the command.
        files: the weights before and after the round.
        path: the run directory.
        options: all options of the command.
    """
    _refuse(context, _UPDATE | _SCORING, "--update: the files hold the weights of one round. Leave it out.")
    if options["client"] is None:
        raise PrivlabError("--update needs --client: what the server knows of the training. Found none: give sgd.")
    for file, role in zip(files, ("before", "after"), strict=True):
        if not file.is_file():
            raise PrivlabError(f"No file at '{file}'. Give the weights {role} the round, BEFORE AFTER.")
    return _audit(context, files, path, options, {"client": options["client"]}, _UPDATE)


def _audit(
    context: click.Context,
    files: "Files",
    path: Path,
    options: Mapping[str, Any],
    release: dict[str, Any],
    taken: set[str],
) -> int:
    """Attack what was released, and print the results."""
    from privlab.runs import specify
    from privlab.runs.audit_gradients import audit_gradients

    kind = "update" if "client" in release else "gradients"
    if options["reference"] is None:
        _refuse(context, taken, f"--{kind} without a --reference to score by. Give one, or leave it out.")
    science = _science(options) | {name: options[name] for name in ("block", "force", "lpips_weights", "embedding")}
    setting = "a" if kind == "update" else "c"
    spec = specify(options["model"], setting, attack=options["attack"], metrics=options["metrics"], **science | release)
    _check_one(spec.models, f"--{kind}")
    with interruptible(lambda: kept(path, "With --overwrite, the same command starts again.")):
        found = audit_gradients(
            files,
            spec,
            device=options["device"],
            out=path,
            overwrite=options["overwrite"],
            reference=options["reference"],
            command=command_line(context),
        )
    for message in found.warnings:
        err.print(f"Warning: {message}", style="yellow", markup=False)
    failed = [row for row in found.rows if row["status"] != "ok"]
    if options["as_json"]:
        rows = [{name: plain(value) for name, value in row.items()} for row in found.rows]
        told = {
            "run": str(path),
            "attacks": rows,
            "labels": found.labels,
            "flags": found.flags,
            "reference": found.reference,
        }
        print_json(told | {"warnings": found.warnings, "missing_metrics": found.missing, "failed": len(failed)})
    else:
        _print_gradients(found)
    for row in failed:
        err.print(f"Failed: {row['reason']}", style="red", markup=False)
    return 2 if failed else 0


def _refuse(context: click.Context, taken: set[str], why: str) -> None:
    for name in context.params:
        if name not in taken and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise PrivlabError(f"--{name.replace('_', '-')} has no meaning with {why}")


def _science(options: Mapping[str, Any]) -> dict[str, Any]:
    names = ("effort", "weights", "img_size", "classes", "normalisation", "defense", "gamma", "masked_pe", "seed")
    return {name: options[name] for name in (*names, "public", "public_limit")} | {"options": options["options_"]}


def _check_one(models: Sequence[str], option: str) -> None:
    if len(models) > 1:
        raise PrivlabError(f"{option} audits one victim. Found {len(models)}: {', '.join(models)}.")


def _print_gradients(found: "GradientAudit") -> None:
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
            row["attack"],
            left,
            *scores,
            str(row.get("images", "")),
            str(row.get("seconds", "")),
            _says(row, found),
        )
    if found.rows:  # else a flag says that no attack ran
        print_table(table)
        said = "that the reconstruction itself gives, against the released one; 0 is the same"
        click.echo(f"residual: of the {found.what} {said}")
    if found.reference is not None:
        click.echo(f"reference: {found.reference}")
    for flag in found.flags:
        click.echo(f"flag: {flag}")
    pictures = found.path / "pictures"
    click.echo(f"run: {found.path}" + (f" (images in {pictures})" if pictures.exists() else ""))


def _says(row: Mapping[str, Any], found: "GradientAudit") -> str:
    """Return what a row of an audit proves about the private image."""
    if row["status"] != "ok":
        return "failed"
    if "block" not in row:
        return "no attack made it"
    if row.get("blank"):
        return "nothing found: one colour"
    if "explained" not in row:
        return "not checked: look at the image"
    if not row["explained"]:
        return "not proven: look at the image"
    return f"{'the private image' if found.reference is None else 'what was fed'}: it gives the released {found.what}"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("attack", "batches", "images", "failed", "ms per image", header_style="bold")
    for attack in dict.fromkeys(row["attack"] for row in rows):
        of = [row for row in rows if row["attack"] == attack]
        images = sum(row.get("images", 0) for row in of)
        ms = f"{1000 * sum(row.get('seconds', 0) for row in of) / images:.1f}" if images else "n/a"
        table.add_row(attack, str(len(of)), str(images), str(Counter(row["status"] for row in of)["failed"]), ms)
    return table

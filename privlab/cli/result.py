"""What `privlab attack` prints of a run: the verdict, the table, and what weakens it."""

from collections.abc import Callable
from dataclasses import asdict, replace

import click

from privlab.base import PrivlabError
from privlab.cli import common as shared
from privlab.evaluation import admissions
from privlab.report import tables
from privlab.report.run import Run
from privlab.report.tables.flags import NOTHING_RELEASED


def print_result(
    context: click.Context, run: Run, geometry: str, warn: Callable[[str], None], *, as_json: bool, details: bool
) -> int:
    """Print the result of a run, and return the exit status of the command.

    Args:
        context: the command.
        run: what it ran.
        geometry: the layout of the patches whose scores are printed.
        warn: prints a warning unless it was printed before.
        as_json: whether the result is printed as JSON.
        details: whether every row and every line is printed.

    Raises:
        PrivlabError: if the defense left nothing to attack.
    """
    run, spec, records = replace(run, geometry=geometry), run.spec, run.records
    for message in run.warnings:
        warn(message)
    if as_json:
        shared.print_json(
            {
                "run": str(run.path),
                **run.details().facts,
                "verdict": [*run.lead, *tables.origins(run.results.facts, spec), tables.scope(records)],
                "verdicts": [asdict(cell) for cell in run.verdicts],
                "flags": [asdict(flag) for flag in run.flags],
                "members": [asdict(row) for row in tables.apart(run.results)],
                "explained": tables.certificates(records),
                "warnings": run.warnings,
                "admit": admissions(spec),
                "missing_metrics": run.missing,
                "failed": run.failed,
            }
        )
    elif (nothing := _nothing_left(run)) is not None:
        raise PrivlabError(f"{nothing} run: {run.path}")
    elif not (records.status == "ok").any():
        shared.echo(f"Nothing could be scored. run: {run.path}")
    else:
        shared.print_fitted(run.details() if details else run)
        shared.echo(f"run: {run.path}")
    if not as_json:
        for line in admissions(spec):
            shared.echo(f"This defense comes from another package. To check that it does what it says: {line}")
    untrained = records.victim[records.weights == "random"].unique()
    if len(untrained) and spec.victim.weights == "auto":
        shared.print_on_trained(shared.attack_on_trained(context, untrained), machine=as_json)
    shared.print_failed(run.failed.items())
    return 2 if run.failed else 0


def _nothing_left(run: Run) -> str | None:
    """Return why no attack could run on any image, if filters left nothing to attack; None else."""
    records, spec = run.records[~run.records.attack.str.startswith("control:")], run.spec
    reasons = set(records.reason.dropna())
    filtered = spec.defends_gradients and (records.status == "failed").all()
    if not filtered or len(reasons) != 1 or not (reason := reasons.pop()).startswith(f"{NOTHING_RELEASED}: "):
        return None
    images = records.image.nunique()
    return (
        f"Nothing could be attacked of {images} image{'s' * (images > 1)}: {reason}. Found --defense "
        f"{spec.defense_name}, options {', '.join(spec.adversary.options) or 'none'}: let it leave more. That no "
        "attack can run is no evidence of privacy."
    )

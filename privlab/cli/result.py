"""What `privlab attack` prints of a run: the verdict, the table, and what weakens it."""

from collections.abc import Callable
from dataclasses import asdict, replace

import click

from privlab.base import PrivlabError
from privlab.cli import common as shared
from privlab.evaluation import admissions
from privlab.grids import KNOWN
from privlab.report import tables
from privlab.report.run import Run
from privlab.report.tables.flags import NOTHING_RELEASED


def print_result(
    context: click.Context,
    outcome: Run,
    geometry: str,
    warn: Callable[[str], None],
    *,
    as_json: bool,
    details: bool,
) -> int:
    """Print the result of a run, and return the exit status of the command.

    Args:
        context: the command.
        outcome: the run.
        geometry: the layout of the patches whose scores are printed.
        warn: prints a warning unless it was printed before.
        as_json: whether the result is printed as JSON.
        details: whether every row and every line is printed.

    Raises:
        PrivlabError: if the defense left nothing to attack.
    """
    spec, run = outcome.spec, replace(outcome, geometry=geometry)
    for message in outcome.warnings:
        warn(message)
    if as_json:
        results = run.results.laid_out(columns=spec.metrics)
        shown = [*tables.shown_metrics(spec.metrics), *tables.measured_placement(results)]
        shared.print_json(
            {
                "run": str(run.path),
                "verdict": [*run.lead, *tables.verdicts(outcome)],
                "verdicts": [asdict(cell) for cell in run.verdicts],
                "flags": [asdict(flag) for flag in run.flags],
                "members": [asdict(row) for row in tables.apart(run.results)],
                "geometry": geometry,
                "worst_case": tables.BOUND,
                "leaks": {name: KNOWN[name].direction for name in shown},
                "explained": tables.certificates(outcome.records),
                "rows": tables.summarise(results).to_dict("records"),
                "warnings": outcome.warnings,
                "admit": admissions(spec),
                "missing_metrics": outcome.missing,
                "failed": outcome.failed,
            }
        )
    elif (nothing := _nothing_left(outcome)) is not None:
        raise PrivlabError(f"{nothing} run: {run.path}")
    elif not (outcome.records.status == "ok").any():
        click.echo(f"Nothing could be scored. run: {run.path}")
    elif details:
        _print_details(outcome, run)
    else:
        shared.print_fitted(run)
        click.echo(f"run: {run.path}")
    if not as_json:
        for line in admissions(spec):
            click.echo(f"This defense comes from another package. To check that it does what it says: {line}")
    untrained = [base.name for base in outcome.victims if base.weights.is_random and spec.weights == "auto"]
    if untrained:
        shared.print_on_trained(shared.attack_on_trained(context, untrained), machine=as_json)
    shared.print_failed(outcome.failed.items())
    return 2 if outcome.failed else 0


def _nothing_left(outcome: Run) -> str | None:
    """Return why no attack could run on any image, if filters left nothing to attack; None else."""
    records = outcome.records[~outcome.records.attack.str.startswith("control:")]
    reasons = set(records.reason.dropna())
    filtered = outcome.spec.defends_gradients and (records.status == "failed").all()
    if not filtered or len(reasons) != 1 or not (reason := reasons.pop()).startswith(f"{NOTHING_RELEASED}: "):
        return None
    images = records.image.nunique()
    return (
        f"Nothing could be attacked of {images} image{'s' * (images > 1)}: {reason}. Found --defense "
        f"{outcome.spec.defense}, options {', '.join(outcome.spec.options) or 'none'}: let it leave more. That no "
        "attack can run is no evidence of privacy."
    )


def _print_details(outcome: Run, run: Run) -> None:
    """Print a row for every attack and control by every metric, and all that is known of the run."""
    records, results = outcome.records, run.results
    shown = [*tables.shown_metrics(outcome.spec.metrics), *tables.measured_placement(results)]
    results = results.laid_out(columns=tuple(shown))
    table = tables.leakage_table(results, tables.rows_once(results), blocks=tables.blocks_of(results))
    shared.print_fitted(table.to_rich())
    controls = "" if results.layout.geometry == "oracle" else ", controls as they are"
    lines = [
        f"arrows show the direction that leaks; geometry {results.layout.geometry}{controls}",
        *tables.elsewhere(results),
        tables.settings_text(records),
        *tables.missing_metrics(outcome, shown),
        *tables.certificates(records),
        *run.lead,
        *(f"verdict: {cell.label}: {cell}" for cell in run.verdicts),
        *tables.verdicts(outcome),
        *tables.apart_lines(tables.apart(results)),
        *tables.flag_lines(run.flags),
        f"run: {run.path}",
    ]
    for line in lines:
        click.echo(line)

"""What `privlab attack` prints of a run: the table of scores, the verdict, and what weakens it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from privlab.base import PrivlabError
from privlab.cli import common as shared
from privlab.evaluation import admissions
from privlab.grids import KNOWN
from privlab.report.page import lead_text
from privlab.report.tables import (
    BOUND,
    Facts,
    apart,
    apart_lines,
    certificates,
    explanations,
    flag_lines,
    load_results,
    missing_metrics,
    red_flags,
    shown_metrics,
    summarise,
    verdicts,
)
from privlab.report.tables.case_verdicts import verdicts_of
from privlab.report.tables.flags import NOTHING_RELEASED
from privlab.report.tables.summary import elsewhere, to_rich

if TYPE_CHECKING:
    from pandas import DataFrame

    from privlab.runs import Outcome


def print_result(
    context: click.Context, outcome: "Outcome", geometry: str, warn: Callable[[str], None], *, as_json: bool
) -> int:
    """Print the result of a run, and return the exit status of the command.

    Args:
        context: the command.
        outcome: the run.
        geometry: the layout of the patches whose scores are printed.
        warn: prints a warning unless it was printed before.
        as_json: whether the result is printed as JSON.

    Raises:
        PrivlabError: if the defense left nothing to attack.
    """
    spec = outcome.spec
    table = summarise(outcome.records, spec.metrics, geometry)
    results = load_results(outcome.path).laid_out(geometry=geometry)
    facts = Facts.of(results)
    found, told, cells = red_flags(facts), apart(results), verdicts_of(facts)
    lead = lead_text(results)
    for message in outcome.warnings:
        warn(message)
    if as_json:
        shared.print_json(
            {
                "run": str(outcome.path),
                "verdict": [*lead, *verdicts(outcome)],
                "verdicts": [asdict(cell) for cell in cells],
                "flags": [asdict(flag) for flag in found],
                "members": [asdict(row) for row in told],
                "geometry": geometry,
                "worst_case": BOUND,
                "leaks": {name: KNOWN[name].direction for name in shown_metrics(spec.metrics, table)},
                "explained": certificates(outcome.records),
                "rows": table.to_dict("records"),
                "warnings": outcome.warnings,
                "admit": admissions(spec),
                "missing_metrics": outcome.missing,
                "failed": outcome.failed,
            }
        )
    elif (nothing := _nothing_left(outcome)) is not None:
        raise PrivlabError(f"{nothing} run: {outcome.path}")
    elif (outcome.records.status == "ok").any():
        said = [*certificates(outcome.records), *lead, *(f"verdict: {cell.label}: {cell}" for cell in cells)]
        _print_attack(outcome, table, geometry, said, [*apart_lines(told), *flag_lines(found)])
    else:
        click.echo(f"Nothing could be scored. run: {outcome.path}")
    if not as_json:
        for line in admissions(spec):
            click.echo(f"This defense comes from another package. To check that it does what it says: {line}")
    untrained = [base.name for base in outcome.victims if base.weights.is_random and spec.weights == "auto"]
    if untrained:
        shared.print_on_trained(shared.attack_on_trained(context, untrained), machine=as_json)
    shared.print_failed(outcome.failed.items())
    return 2 if outcome.failed else 0


def _nothing_left(outcome: "Outcome") -> str | None:
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


def _print_attack(
    outcome: "Outcome", table: "DataFrame", geometry: str, said: Sequence[str], below: Sequence[str]
) -> None:
    shown = shown_metrics(outcome.spec.metrics, table)
    wide = to_rich(table, shown)
    shared.print_table(wide if shared.fits(wide) else to_rich(table, shown, stacked=True))
    controls = "" if geometry == "oracle" else ", controls as they are"
    click.echo(f"arrows show the direction that leaks; geometry {geometry}{controls}")
    for line in elsewhere(outcome.records, outcome.spec.metrics, table, geometry):
        click.echo(line)
    about = explanations(table, outcome.spec.metrics, geometry)
    for line in (*about, *missing_metrics(outcome, shown), *said, *verdicts(outcome), *below):
        click.echo(line)
    click.echo(f"run: {outcome.path}")

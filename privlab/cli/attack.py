"""`privlab attack`: it attacks what a simulated client releases and prints a table of scores."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup

from privlab import images as sources
from privlab.base import PrivlabError
from privlab.cli import common as shared
from privlab.cli import names
from privlab.cli import options as option
from privlab.cli.live import engine_of, run_display
from privlab.victims.names import check_img_size

if TYPE_CHECKING:
    from pandas import DataFrame

    from privlab.report.run import Run

_MOVED = {
    "--update": "privlab audit update BEFORE AFTER --model NAME --client OPTIMISER",
    "--gradients": "privlab audit gradients FILE --model NAME",
    "--features": "privlab audit features DIR --model NAME",
    "--reference": "privlab audit update BEFORE AFTER --reference IMAGE --model NAME --client OPTIMISER",
}
"""The options of earlier versions that made `privlab attack` an audit, and the command that has their place."""


def _refuse_moved(_context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        name = parameter.opts[0]
        raise PrivlabError(f"{name} is no longer an option of `privlab attack`. Use `{_MOVED[name]}`.")


_moved = shared.all_of(
    *(
        click.option(
            name, is_flag=False, flag_value="", hidden=True, expose_value=False, is_eager=True, callback=_refuse_moved
        )
        for name in _MOVED
    )
)


@cloup.command()
@cloup.option_group("Victim", option.model(), option.weights(), option.block(), *option.VICTIM)
@cloup.option_group("Data", option.images(), *option.CHOICE, option.split(), option.labels(), option.bit_depth())
@cloup.option_group(
    *("Release and client", option.release(), option.client()),
    *(option.gradient_batch(), option.client_batch(), option.cut_layer()),
)
@cloup.option_group("Defense", option.setting(), *option.DEFENSE, option.draws())
@cloup.option_group(
    *("Adversary", option.attack(), option.effort(), option.set_(), option.force()),
    *(option.public(), option.public_limit(), option.reassembly()),
)
@cloup.option_group("Scores", *option.SCORES, option.eight_bit(), option.geometry())
@cloup.option_group("Output", option.out(), option.overwrite(), option.strips(), option.quiet(), option.json_())
@cloup.option_group("Execution", option.device(), option.batch_size(), *option.ENGINE, option.seed())
@option.debug()
@_moved
@click.pass_context
def attack(
    context: click.Context,
    geometry: str,
    device: str,
    batch_size: str,
    quiet: bool,
    out: Path | None,
    overwrite: bool,
    strips: bool,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> int:
    """Attack a simulated client, and score the reconstructions.

    The client releases gradients, features, or the update of a round of training. Records, images and a page are
    written to a directory; the same command continues a run that was interrupted.
    """
    for name in names.several(options["model"]):
        check_img_size(name, options["img_size"])
    size, where = _batch_size(batch_size), engine_of(options)
    shared.check_together(context.params)
    sources.check_choice(*(options[name] for name in ("limit", "every", "offset", "manifest")))
    from privlab.evaluation import admissions, check_geometry
    from privlab.grids import specify
    from privlab.runs import execute

    spec = specify(**options)
    check_geometry(geometry, spec)
    given = out or shared.begun_directory(spec, "run", overwrite=overwrite)
    search = ", a search of gradient-matching too" if "gradient-matching" in (spec.attacks or ()) else ""
    go_on = f"The same command goes on where it was{search}."
    with (
        shared.reserved(given, [*spec.models, *spec.settings]) as path,
        shared.interruptible(lambda: shared.kept(path, go_on)),
        run_display(quiet=quiet) as shown,
    ):
        outcome = execute(
            spec,
            device=device,
            batch_size=size,
            out=path,
            overwrite=overwrite,
            strips=strips,
            command=shared.command_line(context),
            engine=where,
            warn=shown.warn,
            progress=shown.progress,
        )
    from privlab.grids import KNOWN
    from privlab.report.page import lead_text
    from privlab.report.tables import (  # after the run, whose first image need not wait for it
        BOUND,
        Facts,
        apart,
        apart_lines,
        certificates,
        flag_lines,
        load_results,
        red_flags,
        shown_metrics,
        summarise,
        verdicts,
    )
    from privlab.report.tables.case_verdicts import verdicts_of

    spec = outcome.spec
    table = summarise(outcome.records, spec.metrics, geometry)
    results = load_results(path).laid_out(geometry=geometry)
    facts = Facts.of(results)
    found, told, cells = red_flags(facts), apart(results), verdicts_of(facts)
    lead = lead_text(results)
    for message in outcome.warnings:
        shown.warn(message)
    if as_json:
        shared.print_json(
            {
                "run": str(path),
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
        raise PrivlabError(f"{nothing} run: {path}")
    elif (outcome.records.status == "ok").any():
        said = [*certificates(outcome.records), *lead, *(f"verdict: {cell.label}: {cell}" for cell in cells)]
        _print_attack(outcome, table, geometry, said, [*apart_lines(told), *flag_lines(found)])
    else:
        click.echo(f"Nothing could be scored. run: {path}")
    if not as_json:
        for line in admissions(spec):
            click.echo(f"This defense comes from another package. To check that it does what it says: {line}")
    untrained = [base.name for base in outcome.victims if base.weights.is_random and spec.weights == "auto"]
    if untrained:
        shared.print_on_trained(shared.attack_on_trained(context, untrained), machine=as_json)
    shared.print_failed(outcome.failed.items())
    return 2 if outcome.failed else 0


def _nothing_left(outcome: "Run") -> str | None:
    """Return why no attack could run on any image, if filters left nothing to attack; None else."""
    from privlab.report.tables.flags import NOTHING_RELEASED

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


def _batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise PrivlabError(f"--batch-size must be auto or a positive number. Found '{text}'.")
    return int(text)


def _print_attack(outcome: "Run", table: "DataFrame", geometry: str, said: Sequence[str], below: Sequence[str]) -> None:
    from privlab.report.tables import explanations, missing_metrics, shown_metrics, verdicts
    from privlab.report.tables.summary import elsewhere, to_rich

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

"""`privlab attack`: it attacks what a client releases and prints a table of scores."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from privlab import images as sources
from privlab.base import PrivlabError
from privlab.cli import common as shared
from privlab.cli import names
from privlab.cli.audit import audit_features, audit_gradient_file, audit_update
from privlab.cli.live import engine_of, engine_options, run_display
from privlab.victims.names import check_img_size

if TYPE_CHECKING:
    from pandas import DataFrame

    from privlab.runs import Outcome


@click.command()
@click.option(
    "--model", type=names.VICTIMS, required=True, help="Names of `privlab list victims` or timm:NAME, with commas."
)
@click.option(
    "--setting", type=names.SETTINGS, help="a, b or c (MJP, Section 5.4), commas.  [default: c if defended, else a]"
)
@click.option("--attack", type=names.ATTACKS, help="Attacks, with commas.  [default: worst-case, all that can run]")
@click.option("--effort", type=names.EFFORT, default="standard", help="How much to try: quick, standard, full.")
@click.option("--weights", type=names.WEIGHTS, default="auto", help="auto, pretrained, random, or a file.")
@click.option("--block", type=names.BLOCK, default="auto", help="First block: auto, stock or april.")
@shared.img_size_option
@click.option("--classes", type=names.POSITIVE, help="Of a random head, for a model without classifier.")
@click.option(
    "--normalisation",
    type=names.NORMALISATION,
    metavar="NAME|MEAN/STD",
    help="How the client normalises images: imagenet, inception, clip, none or numbers.  [default: the model's own]",
)
@click.option(
    "--defense", type=names.DEFENSES, default="auto", help="Names of `privlab list defenses`, stacked with +."
)
@click.option(
    "--set",
    "options_",
    multiple=True,
    metavar="[NAME.]KEY=VALUE",
    help="An option of an attack, a defense or the client; repeat it.",
)
@click.option("--release", type=names.RELEASE, default="auto", help="What is released: gradients, features, update.")
@click.option(
    "--client", type=names.CLIENT, help="Release the update of a round of local training: sgd, adam, adamw or a preset."
)
@click.option(
    "--features",
    type=names.PATH,
    metavar="DIR",
    help="Audit what `privlab split serve --record DIR` wrote; --model names the recorded client's public base.",
)
@click.option(
    "--gradients",
    type=names.PATH,
    metavar="FILE",
    help="Audit the update of a real training step, which `privlab.capture` saved; --model names the client's model.",
)
@click.option(
    "--update",
    type=names.PATH,
    nargs=2,
    metavar="BEFORE AFTER",
    help="Audit the weights before and after a client's round; --client and --set say how it trained.",
)
@click.option("--reference", type=names.PATH, metavar="IMAGE", help="With --gradients or --update: score by it.")
@click.option("--client-batch", type=names.POSITIVE, default=16, help="Features: images sent together.")
@click.option("--cut-layer", type=names.FROM_ZERO, default=0, help="Features: after this many blocks.")
@click.option("--gradient-batch", type=names.POSITIVE, default=1, help="Images that make one gradient.")
@click.option("--public", type=names.IMAGES, multiple=True, default=("samples",), help="Images that the adversary has.")
@click.option("--public-limit", type=names.POSITIVE, default=200, help="How many of them.")
@click.option(
    "--embedding", type=names.EMBEDDING, metavar="timm:NAME@FILE", help="Network of the metric f_sim, with its weights."
)
@click.option("--gamma", type=float, help="γ: share of the patches that is shuffled.  [default: the defense's, 0.27]")
@click.option(
    "--masked-pe", type=names.MASKED_PE, help="PE at shuffled slots under MJP: unknown, none, slot.  [default: unknown]"
)
@shared.images_option
@shared.choice_options
@click.option("--split", help="Split of a data set, or sub-folder of a folder.")
@click.option(
    "--labels",
    type=names.LABELS,
    help="predicted, or a CSV file with columns file, label.  [default: the source's own]",
)
@click.option(
    "--bit-depth",
    type=click.IntRange(1, 16),
    metavar="BITS",
    help="Bits that the levels of 16-bit files use, as 12 in much of medicine.  [default: 16]",
)
@click.option("--metrics", type=names.METRICS, help="Names of `privlab list metrics`, with commas.")
@click.option("--lpips-weights", type=names.LPIPS_WEIGHTS, help="File or folder with LPIPS backbones.")
@click.option("--eight-bit", is_flag=True, help="Round reconstructions to 8 bits before they are scored.")
@click.option("--geometry", type=names.GEOMETRY, default="in_place", help="Rows: in_place, oracle, reassembled.")
@click.option("--reassembly", type=names.REASSEMBLY, default="border", help="What re-assembles: border, mp3, droppos.")
@click.option("--draws", type=names.POSITIVE, default=1, help="Of a random defense, each image.")
@click.option("--seed", type=names.FROM_ZERO, default=0)
@shared.device_option
@click.option("--batch-size", default="auto", help="Images at a time: auto or a number.")
@engine_options("Processes: auto or a number; auto is one a core if attacks search.", "auto")
@click.option("--out", type=names.PATH, help="Run directory.  [default: runs/TIME-MODEL-SETTING]")
@click.option("--overwrite", is_flag=True, help="Let an earlier run in --out give way.")
@click.option("--strips/--no-strips", default=True, help="Write one PNG per image.")
@click.option("--force", is_flag=True, help="With --block stock|april: run attacks that do not hold there.")
@shared.common
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
    """Attack what a client releases (gradients, features, an update), score the reconstructions, write a directory."""
    for name in names.several(options["model"]):
        check_img_size(name, options["img_size"])
    for kind, audit in (("features", audit_features), ("gradients", audit_gradient_file), ("update", audit_update)):
        if (released := options.pop(kind)) is not None:
            return audit(context, released)
    if options.pop("reference") is not None:
        raise PrivlabError(
            "--reference is the private image behind --gradients or --update. Give these, or use --images."
        )
    size, where = _batch_size(batch_size), engine_of(options)
    shared.check_together(context.params)
    sources.check_choice(*(options[name] for name in ("limit", "every", "offset", "manifest")))
    from privlab.evaluation import admissions, check_geometry
    from privlab.runs import execute, specify

    spec = specify(options=options.pop("options_"), **options)
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


def _nothing_left(outcome: "Outcome") -> str | None:
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


def _print_attack(
    outcome: "Outcome", table: "DataFrame", geometry: str, said: Sequence[str], below: Sequence[str]
) -> None:
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

"""`privlab attack`: it attacks what a client releases and prints a table of scores."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from privlab.base import PrivlabError
from privlab.cli.audit import audit_features, audit_gradient_file, audit_update
from privlab.cli.common import (
    EVERY,
    MANIFEST,
    OFFSET,
    attack_on_trained,
    begun_directory,
    command_line,
    common,
    err,
    fits,
    interruptible,
    kept,
    plain,
    print_json,
    print_on_trained,
    print_table,
)
from privlab.cli.live import engine_of, engine_options, run_display
from privlab.cli.names import (
    ATTACKS,
    CLIENT,
    DEFENSES,
    EFFORT,
    IMAGES,
    LABELS,
    MANIFEST_FILE,
    METRICS,
    SETTINGS,
    VICTIMS,
    WEIGHTS,
    several,
)
from privlab.victims.names import check_img_size

if TYPE_CHECKING:
    from pandas import DataFrame

    from privlab.report.tables import PowerVerdict
    from privlab.runs import Outcome

__all__ = ["attack"]


@click.command()
@click.option(
    "--model", type=VICTIMS, required=True, help="Victims: names of `privlab list victims` or timm:NAME, with commas."
)
@click.option(
    "--setting", type=SETTINGS, help="a, b or c (MJP, section 5.4), with commas.  [default: c if defended, else a]"
)
@click.option("--attack", type=ATTACKS, help="Attacks, with commas.  [default: worst-case, all that can run]")
@click.option(
    "--effort", type=EFFORT, default="standard", show_default=True, help="How much is tried: quick, standard or full."
)
@click.option("--weights", type=WEIGHTS, default="auto", show_default=True, help="auto, pretrained, random, or a file.")
@click.option("--block", default="auto", show_default=True, help="First block: auto, stock or april.")
@click.option("--img-size", type=click.IntRange(min=16), help="Side of the input; PEs are resized as timm does.")
@click.option("--classes", type=click.IntRange(min=1), help="Of a random head, for a model without classifier.")
@click.option(
    "--normalisation",
    metavar="NAME|MEAN/STD",
    help="How the client normalises images: imagenet, inception, clip, none or numbers.  [default: the model's own]",
)
@click.option(
    "--defense",
    type=DEFENSES,
    default="auto",
    show_default=True,
    help="Names of `privlab list defenses`, stacked with +.",
)
@click.option(
    "--set",
    "options_",
    multiple=True,
    metavar="[NAME.]KEY=VALUE",
    help="An option of an attack, a defense or the client; repeat it.",
)
@click.option(
    "--release", default="auto", show_default=True, help="What the adversary sees: gradients, features or update."
)
@click.option(
    "--client", type=CLIENT, help="Release the update of a round of local training: sgd, adam, adamw or a preset."
)
@click.option(
    "--features",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Audit what `privlab split serve --record DIR` wrote; --model names the recorded client's public base.",
)
@click.option(
    "--gradients",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Audit the update of a real training step, which `privlab.capture` saved; --model names the client's model.",
)
@click.option(
    "--update",
    type=click.Path(path_type=Path),
    nargs=2,
    metavar="BEFORE AFTER",
    help="Audit the weights before and after a client's round; --client and --set say how it trained.",
)
@click.option(
    "--reference", type=click.Path(path_type=Path), metavar="IMAGE", help="With --gradients or --update: score by it."
)
@click.option(
    "--client-batch", type=click.IntRange(min=1), default=16, show_default=True, help="Features: images sent together."
)
@click.option(
    "--cut-layer", type=click.IntRange(min=0), default=0, show_default=True, help="Features: after this many blocks."
)
@click.option(
    "--gradient-batch", type=click.IntRange(min=1), default=1, show_default=True, help="Images that make one gradient."
)
@click.option(
    "--public",
    type=IMAGES,
    multiple=True,
    default=("samples",),
    show_default=True,
    help="Images that the adversary has.",
)
@click.option("--public-limit", type=click.IntRange(min=1), default=200, show_default=True, help="How many of them.")
@click.option("--embedding", metavar="timm:NAME@FILE", help="Network of the metric f_sim, with its weights.")
@click.option("--gamma", type=float, help="γ: share of the patches that is shuffled.  [default: the defense's, 0.27]")
@click.option("--masked-pe", help="PE at shuffled slots under MJP: unknown, none or slot.  [default: unknown]")
@click.option(
    "--images", type=IMAGES, multiple=True, default=("samples",), show_default=True,
    help="samples, a folder, files (repeat the option), torchvision:NAME or hf:NAME.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), help="Use N images: the first, of class folders by turns.")
@click.option("--every", type=click.IntRange(min=1), help=EVERY)
@click.option("--offset", type=click.IntRange(min=0), help=OFFSET)
@click.option("--manifest", type=MANIFEST_FILE, metavar="FILE.csv", help=MANIFEST)
@click.option("--split", help="Split of a data set, or sub-folder of a folder.")
@click.option(
    "--labels", type=LABELS, help="predicted, or a CSV file with columns file and label.  [default: the source's own]"
)
@click.option("--metrics", type=METRICS, help="Names of `privlab list metrics`, with commas.")
@click.option("--lpips-weights", help="File or folder with LPIPS backbones.")
@click.option("--eight-bit", is_flag=True, help="Round reconstructions to 8 bits before they are scored.")
@click.option("--geometry", default="in_place", show_default=True, help="Rows: in_place, oracle or reassembled.")
@click.option("--reassembly", default="border", show_default=True, help="What re-assembles: border, mp3 or droppos.")
@click.option(
    "--draws", type=click.IntRange(min=1), default=1, show_default=True, help="Of a random defense, each image."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--batch-size", default="auto", show_default=True, help="Images at a time: auto or a number.")
@engine_options("Processes: auto or a number; auto is one a core if attacks search.", "auto")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory.  [default: runs/TIME-MODEL-SETTING]")
@click.option("--overwrite", is_flag=True, help="Let an earlier run in --out give way.")
@click.option("--strips/--no-strips", default=True, show_default=True, help="Write one PNG per image.")
@click.option("--force", is_flag=True, help="With --block stock|april: run attacks that do not hold there.")
@common
@click.pass_context
def attack(
    context: click.Context,
    model: str,
    setting: str | None,
    attack: str | None,
    images: tuple[str, ...],
    public: tuple[str, ...],
    options_: tuple[str, ...],
    metrics: str | None,
    geometry: str,
    device: str,
    batch_size: str,
    workers: str,
    engine: str,
    ray_address: str | None,
    task_cpus: float,
    task_gpus: float,
    quiet: bool,
    out: Path | None,
    overwrite: bool,
    strips: bool,
    as_json: bool,
    features: Path | None,
    gradients: Path | None,
    update: tuple[Path, Path] | None,
    reference: Path | None,
    **options: Any,  # noqa: ANN401
) -> int:
    """Attack what a client releases (gradients, features, an update), score the reconstructions, write a directory."""
    for name in several(model):
        check_img_size(name, options["img_size"])
    if features is not None:
        path = out or _new_directory(model.split(","), ["features"])
        return audit_features(context, features, path, context.params)
    if gradients is not None:
        path = out or _new_directory(model.split(","), ["gradients"])
        return audit_gradient_file(context, gradients, path, context.params)
    if update is not None:
        path = out or _new_directory(model.split(","), ["update"])
        return audit_update(context, update, path, context.params)
    if reference is not None:
        raise PrivlabError(
            "--reference is the private image behind --gradients or --update. Give these, or use --images."
        )
    from privlab.evaluation import admissions, check_geometry
    from privlab.runs import execute, specify

    options |= {"public": public, "options": options_}
    spec = specify(model, setting, attack=attack, images=images, metrics=metrics, **options)
    check_geometry(geometry, spec)
    where = engine_of(engine, workers, ray_address, task_cpus, task_gpus)
    path = out or begun_directory(spec, "run", overwrite=overwrite) or _new_directory(spec.models, spec.settings)
    search = ", a search of gradient-matching too" if "gradient-matching" in (spec.attacks or ()) else ""
    go_on = f"The same command goes on where it was{search}."
    with interruptible(lambda: kept(path, go_on)), run_display(quiet=quiet) as shown:
        outcome = execute(
            spec,
            device=device,
            batch_size=_batch_size(batch_size),
            out=path,
            overwrite=overwrite,
            strips=strips,
            command=command_line(context),
            engine=where,
            warn=shown.warn,
            progress=shown.progress,
        )
    from privlab.grids import KNOWN
    from privlab.report.tables import (  # after the run, whose first image need not wait for it
        BOUND,
        apart_lines,
        certificates,
        flag_lines,
        plain_data,
        shown_metrics,
        summarise,
        verdicts,
    )
    from privlab.report.tables.summary import flags, members

    spec = outcome.spec
    table = summarise(outcome.records, spec.metrics, geometry)
    found = flags(outcome.records, spec.metrics, geometry)
    told = members(outcome.records, spec.metrics, geometry)
    lead, cells = _judged(path, geometry)
    for message in outcome.warnings:
        shown.warn(message)
    if as_json:
        print_json(
            {
                "run": str(path),
                "verdict": [*lead, *verdicts(outcome)],
                "verdicts": plain_data([asdict(cell) for cell in cells]),
                "flags": [asdict(flag) for flag in found],
                "members": [{name: plain(value) for name, value in asdict(row).items()} for row in told],
                "geometry": geometry,
                "worst_case": BOUND,
                "leaks": {name: KNOWN[name].direction for name in shown_metrics(spec.metrics, table)},
                "explained": certificates(outcome.records),
                "rows": [{name: plain(value) for name, value in row.items()} for row in table.to_dict("records")],
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
        print_on_trained(attack_on_trained(context, untrained), machine=as_json)
    for image, reason in outcome.failed.items():
        err.print(f"Failed: {image}: {reason}", style="red", markup=False)
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


def _new_directory(models: Sequence[str], settings: Sequence[str]) -> Path:
    """Return the path of a run directory that does not exist yet."""
    what = "-".join([*models, *settings]).replace(":", "_").replace("/", "_")[:80]
    stem = Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}-{what}")
    return next(path for n in count(1) if not (path := stem if n == 1 else stem.with_name(f"{stem.name}-{n}")).exists())


def _batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise PrivlabError(f"--batch-size must be auto or a positive number. Found '{text}'.")
    return int(text)


def _judged(path: Path, geometry: str) -> tuple[list[str], "list[PowerVerdict]"]:
    """Return the sentences of a run's page, and the verdict on each case."""
    from privlab.report.page import lead_text
    from privlab.report.tables import lead_metric, load_results, power_of
    from privlab.report.tables.leakage import leakage

    results = load_results(path)
    results = replace(results, layout=replace(results.layout, geometry=geometry))
    return lead_text(results, leakage(results), lead_metric(results.layout.columns)), power_of(results)


def _print_attack(
    outcome: "Outcome", table: "DataFrame", geometry: str, said: Sequence[str], below: Sequence[str]
) -> None:
    from privlab.report.tables import explanations, missing_metrics, shown_metrics, verdicts
    from privlab.report.tables.summary import elsewhere, to_rich

    shown = shown_metrics(outcome.spec.metrics, table)
    wide = to_rich(table, shown)
    print_table(wide if fits(wide) else to_rich(table, shown, stacked=True))
    controls = "" if geometry == "oracle" else ", controls as they are"
    click.echo(f"arrows show the direction that leaks; geometry {geometry}{controls}")
    for line in elsewhere(outcome.records, outcome.spec.metrics, geometry):
        click.echo(line)
    about = explanations(table, outcome.spec.metrics, geometry)
    for line in (*about, *missing_metrics(outcome, shown), *said, *verdicts(outcome), *below):
        click.echo(line)
    click.echo(f"run: {outcome.path}")

"""`privlab audit`: it attacks what a real client released, or a server recorded, and looks at what a server sent."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup
from click.core import ParameterSource
from rich.table import Column

from privlab.base import PrivlabError
from privlab.cli import common as shared
from privlab.cli import names
from privlab.cli import options as option
from privlab.release.given import check_gradients, session_folders
from privlab.threat.client import CLIENT_PRESETS, OPTIMISERS
from privlab.victims.names import file_and_entry

if TYPE_CHECKING:
    from privlab.report.run import Run
    from privlab.runs.audited import Files

LEAKED = 3
"""The exit status of `--fail-on-leak` where an image is certified, or weights are suspicious."""


_SCORES_IN_A_ROW = 5
"""How many metrics fit next to the name of an attack in 80 columns."""

_SCORES = (*option.SCORES, option.public(), option.public_limit(), option.bit_depth())
_NEED_REFERENCE = ("metrics", "lpips_weights", "embedding", "public", "public_limit", "bit_depth")
"""The names of `_SCORES`, which say how a reference is compared."""

_ONE_RELEASE = shared.all_of(
    cloup.option_group("Defense", *option.DEFENSE),
    cloup.option_group("Adversary", option.attack(), option.effort(), option.set_(), option.force()),
    cloup.option_group("Scores", option.reference(), *_SCORES),
    cloup.option_group("Output", option.out(), option.overwrite(), option.fail_on_leak(), option.json_()),
    cloup.option_group("Execution", option.device(), option.seed()),
    option.debug(),
)
"""The options of an audit of one release, which may be scored by a reference."""


@click.group(cls=shared.Commands)
def audit() -> None:
    """Attack what a client released, or check the weights that it got."""


@audit.command(cls=cloup.Command)
@cloup.argument("before", type=names.PATH, help="The weights that the client began with.")
@cloup.argument("after", type=names.PATH, help="The weights that it returned.")
@cloup.option_group("Victim", option.one_model(), option.block(), *option.VICTIM)
@cloup.option_group("Release and client", option.client())
@_ONE_RELEASE
@click.pass_context
def update(context: click.Context, before: Path, after: Path, **options: Any) -> int:  # noqa: ANN401
    """Attack the update of a client's round, given the weights BEFORE and AFTER it.

    `--client` and `--set client.KEY=VALUE` state how the client trained. What is not stated of a training by SGD on
    one image is fitted to the update.
    """
    if options["client"] is None:
        raise PrivlabError(
            f"An update needs --client, the optimiser that the client trained with: {', '.join(OPTIMISERS)}, or a "
            f"preset ({', '.join(CLIENT_PRESETS)}). Found none. --set client.lr=0.01 and so on say the rest."
        )
    for file, role in ((before, "before"), (after, "after")):
        if not file_and_entry(file)[0].exists():
            raise PrivlabError(f"No file at '{file}'. Give the weights {role} the round, BEFORE AFTER.")
    return _audit_release(context, (before, after), "a", **options)


@audit.command(cls=cloup.Command)
@cloup.argument("file", type=names.PATH, help="What `privlab.capture` wrote.")
@cloup.option_group("Victim", option.one_model(), option.weights(), option.block(), *option.VICTIM)
@_ONE_RELEASE
@click.pass_context
def gradients(context: click.Context, file: Path, **options: Any) -> int:  # noqa: ANN401
    """Attack the gradient of a training step that `privlab.capture` saved in FILE."""
    check_gradients(file)
    return _audit_release(context, file, "c", release="gradients", **options)


@audit.command(cls=cloup.Command)
@cloup.argument("directory", metavar="DIR", type=names.PATH, help="What `privlab split serve --record DIR` wrote.")
@cloup.option_group("Victim", option.one_model(), option.weights(), *option.VICTIM)
@cloup.option_group("Data", option.limit(help="Attack the first N batches of each session and kind."))
@cloup.option_group("Defense", *option.DEFENSE)
@cloup.option_group(
    *("Adversary", option.attack(), option.effort(), option.set_()),
    *(option.public(), option.public_limit(), option.bit_depth()),
)
@cloup.option_group("Output", option.out(), option.overwrite(), option.json_())
@cloup.option_group("Execution", option.device(), option.seed())
@option.debug()
@click.pass_context
def features(
    context: click.Context,
    directory: Path,
    model: str,
    limit: int | None,
    out: Path | None,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> int:
    """Attack the features that a server of split learning recorded in DIR.

    The private images are unknown, and features prove no image: look at the pictures.
    """
    session_folders(directory)
    shared.check_together(options)
    from privlab.grids import specify
    from privlab.release import recorded_cut_layer
    from privlab.runs import audit_features

    how = _how(context, options)
    spec = specify(model, "c", images=directory, release="features", cut_layer=recorded_cut_layer(directory), **options)
    known = out or shared.begun_directory(spec, "audit", overwrite=how["overwrite"])
    with (
        shared.reserved(known, [model, "features"]) as path,
        shared.interruptible(lambda: shared.kept(path)),
        shared.progress_bar("auditing") as progress,
    ):
        run = audit_features(directory, spec, out=path, limit=limit, progress=progress, **how)
    return _report(run, as_json)


@audit.command(cls=cloup.Command)
@cloup.argument("before", type=names.PATH, help="The weights that the server sent.")
@cloup.option_group("Victim", option.one_model(), *option.VICTIM)
@cloup.option_group(
    "Data",
    option.images(help="Images of the client, whose gradient is tested: samples, a folder, or files."),
    option.limit(help="Use the first N images.  [default: two, and eight if these are suspicious]"),
    cloup.option("--reference-weights", type=names.PATH, help="The weights of the last round.", metavar="FILE"),
    cloup.option("--pretrained", is_flag=True, help="The model was trained before, as one behind adapters is."),
)
@cloup.option_group(
    "Output", option.fail_on_leak(help="Exit with status 3 if the weights are suspicious."), option.json_()
)
@cloup.option_group("Execution", option.device())
@option.debug()
def weights(
    before: Path,
    reference_weights: Path | None,
    as_json: bool,
    fail_on_leak: bool,
    **options: Any,  # noqa: ANN401
) -> int:
    """Test the weights BEFORE a round, which a server may have chosen so that it can read images.

    The gradient that they give of --images is computed, and patches that it shows one by one are counted.
    """
    for file in filter(None, (before, reference_weights)):
        if not file_and_entry(file)[0].exists():
            raise PrivlabError(f"No file at '{file}'. Give the weights that the server sent.")
    from privlab.api.audits import audit_weights

    with shared.warned():
        found = audit_weights(before, last=reference_weights, **options)
    rows = found.table().to_dict("records")
    if as_json:
        shared.print_json({"suspicious": found.suspicious, "verdict": found.verdict, "statistics": rows})
    else:
        shared.print_text(found.verdict)
        cells = [
            (row["what"], f"{row['value']:.3g}", f"{row['low']:g} to {row['high']:g}", "yes" if row["usual"] else "NO")
            for row in rows
        ]
        shared.print_columns(("statistic", "value", "trained models", "usual"), cells)
    return LEAKED if fail_on_leak and found.suspicious else 0


def _audit_release(
    context: click.Context,
    files: "Files",
    setting: str,
    *,
    model: str,
    reference: Path | None,
    out: Path | None,
    as_json: bool,
    fail_on_leak: bool,
    **options: Any,  # noqa: ANN401
) -> int:
    """Attack what was released, and print the results."""
    if reference is None:
        for name in _NEED_REFERENCE:
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise PrivlabError(f"--{name.replace('_', '-')} needs a --reference to score by. Found none.")
    elif not reference.exists() and "#" not in reference.name:
        raise PrivlabError(f"No file at '{reference}'. --reference is the private image.")
    shared.check_together(options)
    from privlab.grids import specify
    from privlab.runs import audit_gradients

    how = _how(context, options)
    spec = specify(model, setting, **options)
    go_on = "With --overwrite, the same command starts again."
    with (
        shared.reserved(out, [model, str(context.command.name)]) as path,
        shared.interruptible(lambda: shared.kept(path, go_on)),
    ):
        run = audit_gradients(files, spec, out=path, reference=reference, **how)
    status = _report(run, as_json)
    return LEAKED if fail_on_leak and run.leaks else status


def _how(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Remove from options where an audit runs and whether it replaces an earlier one; add the command."""
    how = {name: options.pop(name) for name in ("device", "overwrite")}
    return {**how, "command": shared.command_line(context)}


def _report(run: "Run", as_json: bool) -> int:
    """Print the verdict, what each attack proves, its scores, the flags, and where the images are, or all as JSON.

    Return the exit status.
    """
    from privlab.report.run import LEAKS

    facts = run.results.facts
    kind = "batches" if "batches" in facts else "attacks"
    rows, reference, flags = facts[kind], facts.get("reference"), facts.get("flags", [])
    shared.print_warnings(run.warnings)
    failed = [row["reason"] for row in rows if row["status"] != "ok"]
    if as_json:
        result = {"run": str(run.path), "leaks": run.leaks, kind: rows, "labels": facts.get("labels"), "flags": flags}
        result |= {"reference": reference, "warnings": run.warnings, "missing_metrics": run.missing}
        shared.print_json(result | {"failed": len(failed)})
    else:
        shared.print_text(f"leaks: {LEAKS[run.leaks]}")
        if rows:  # else a flag says that no attack ran
            _print_attacks(run, rows)
        if reference is not None:
            shared.print_text(f"reference: {reference}")
        for flag in flags:
            shared.print_text(f"flag: {flag}")
        shared.echo(f"run: {run.path}")
        if (pictures := run.path / ("strips" if kind == "batches" else "pictures")).exists():
            shared.echo(f"images: {pictures}")
    for reason in dict.fromkeys(failed):
        shared.err.print(f"Failed: {reason}", style="red", markup=False)
    return 2 if failed else 0


def _print_attacks(run: "Run", rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what each attack proves, and its scores by the reference, with few metrics in a table."""
    from privlab.grids import KNOWN
    from privlab.report.evidence import attacks_section, scores_of
    from privlab.report.tables import shown_metrics

    facts, found = run.results.facts, attacks_section(run.results, rows)
    shared.print_columns(found.head, found.rows)
    for line in found.lines:
        shared.print_text(line)
    shown = [] if "unscored" in facts else shown_metrics(run.spec.metrics)
    for start in range(0, len(shown), _SCORES_IN_A_ROW):
        metrics = [KNOWN[name] for name in shown[start : start + _SCORES_IN_A_ROW]]
        headings = [Column(f"{m.name.replace('_', ' ')} {m.arrow}", justify="right") for m in metrics]
        shared.print_columns(("attack", *headings), [(row["attack"], *scores_of(row, metrics)) for row in rows])

"""`privlab table`: it runs an experiment and prints its table."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import cloup
from rich.markup import escape
from rich.table import Table as RichTable

from privlab.base import PrivlabError
from privlab.cli import common as shared
from privlab.cli import options as option
from privlab.cli.live import ENGINE_OPTIONS, run_display
from privlab.cli.names import EXPERIMENT, FROM_ZERO, PATH

if TYPE_CHECKING:
    from privlab.grids import Grid, Options, Task
    from privlab.report.run import Run
    from privlab.report.tables import Results

_INSTEAD = "as in `privlab attack`.  [default: the experiment's]"
FORMATS = ("latex", "csv", "markdown", "json", "html")


@cloup.command()
@cloup.argument("experiment", type=EXPERIMENT, help="A TOML file, or a name of `privlab list experiments`.")
@cloup.option_group(
    "Experiment",
    option.set_(metavar="TABLE.KEY=VALUE", help="Replace a value of the file; repeat it for more."),
    cloup.option("--plan", is_flag=True, help="Show the cells, and how many images of each are done; run nothing."),
    cloup.option("--measure", is_flag=True, help="With --plan: run one image of each kind, and estimate the time."),
)
@cloup.option_group("Victim", option.weights(default=None, help=f"Weights: {_INSTEAD}"))
@cloup.option_group("Data", option.images(default=(), help=f"Private images: {_INSTEAD}"), *option.CHOICE)
@cloup.option_group("Adversary", option.effort(default=None, help=f"How much the attacks try: {_INSTEAD}"))
@cloup.option_group("Scores", option.lpips_weights())
@cloup.option_group(
    "Output",
    cloup.option(
        "--format", "format_", type=click.Choice(FORMATS), help="Format of the table.  [default: for a terminal]"
    ),
    cloup.option("--standalone", is_flag=True, help="With --format latex: print a whole document."),
    cloup.option("--notes-outside", is_flag=True, help="With --format latex: print the notes after the float."),
    cloup.option("--caption", metavar="TEXT", help="With --format latex: the caption.  [default: the title]"),
    cloup.option("--label", metavar="NAME", help="With --format latex: the label.  [default: from the title]"),
    cloup.option("--all-attacks", is_flag=True, help="Show a row for every attack and control."),
    cloup.option("--compare", type=PATH, help="Also print what differs from another run."),
    option.out(help="Directory of the run.  [default: runs/NAME]"),
    cloup.option("--pictures", type=FROM_ZERO, default=100, help="Number of images whose PNGs are kept."),
    cloup.option("--keep", type=click.Choice(["reconstructions"]), help="Keep what later metrics can be scored from."),
    option.quiet(),
    option.json_(),
)
@cloup.option_group(
    "Execution",
    option.device(),
    option.batch_size(default=None, type=int, help="Images at a time.  [default: 8 on a CPU, 64 on a GPU]"),
    option.workers(default=1, type=int, help="Number of processes."),
    *option.ENGINE[1:],
    cloup.option("--shard", default="1/1", metavar="I/N", help="Run one of N shares of the images."),
    cloup.option("--chunk", type=int, default=16, help="Number of images in each task."),
    cloup.option("--retry-failed", is_flag=True, help="Try images again that failed."),
)
@option.debug()
def table(
    experiment: str,
    plan: bool,
    measure: bool,
    format_: str | None,
    standalone: bool,
    notes_outside: bool,
    caption: str | None,
    label: str | None,
    all_attacks: bool,
    images: tuple[str, ...],
    out: Path | None,
    compare: Path | None,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> int:
    """Run what an experiment still lacks, and print its table."""
    from privlab.experiments.tables.named import find_experiment
    from privlab.grids import CHOICE, prepare, read_experiment
    from privlab.grids.fill import fill

    if measure and not plan:
        raise PrivlabError("--measure says what a --plan costs. Give both, or neither.")
    file = find_experiment(experiment)
    named = {name: options.pop(name) for name in (*CHOICE, "effort", "weights", "lpips_weights")}
    parsed = read_experiment(file, options.pop("options"), images=list(images) or None, **named)
    path, how = out or Path("runs", parsed.name), _options(options)
    if plan:
        with shared.warned():
            _show_plan(*prepare(parsed, path, how), as_json=as_json, measure=measure)
        return 0
    from privlab.report.run import Run  # a plan does not need it, and its imports take seconds
    from privlab.report.tables import load_results

    with shared.warned():
        other = None if compare is None else load_results(compare)
        if other is not None and "unscored" in other.facts:
            raise PrivlabError(f"--compare needs a run with scores. '{compare}' is an audit without a private image.")
    with (
        shared.interruptible(lambda: shared.kept(path)),
        run_display(quiet=options["quiet"]) as shown,
        shared.warned(),
    ):
        fill(
            *(*prepare(parsed, path, how), path, how),
            command=shared.command_line(click.get_current_context()),
            say=lambda line: shared.err.print(line, markup=False),
            warn=shown.warn,
            progress=shown.progress,
        )
        filled = Run(path)
        results = filled.results
    form = "json" if as_json else format_
    floated = {"standalone": standalone, "notes_outside": notes_outside, "caption": caption, "label": label}
    status = _print_results(filled, form, floated, all_attacks, other)
    untrained = results.records.loc[results.records.weights == "random", "victim"].unique()
    specs = [spec for case in parsed.cases for spec in case.runs]
    if len(untrained) and all(spec.victim.weights == "auto" for spec in specs):
        settings = (spec.settings[0] for spec in specs)
        shared.print_on_trained(shared.table_on_trained(experiment, untrained, settings), machine=form is not None)
    return status


def _options(given: dict[str, Any]) -> "Options":
    from privlab.grids import Engine, Options

    number, slash, count = given["shard"].partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise PrivlabError(f"--shard must be I/N, such as 1/4. Found '{given['shard']}'.")
    engine = Engine(*(given[name] for name in ENGINE_OPTIONS))
    as_given = {name: given[name] for name in ("device", "batch_size", "chunk", "pictures", "retry_failed")}
    return Options(engine=engine, keep=given["keep"] is not None, share=(int(number), int(count)), **as_given)


def _show_plan(grid: "Grid", tasks: Sequence["Task"], *, as_json: bool, measure: bool) -> None:
    """Print each case with its cells and the images done; with `measure`, run one image of each kind for the costs."""
    from privlab.grids import costs

    with shared.err.status("measuring one image of each kind" if measure else "planning"):
        rows = costs(grid, tasks, measure=measure)
    seconds = sum(row["seconds"] or 0 for row in rows) if measure else None
    if as_json:
        shared.print_json({"cases": rows, "tasks": len(tasks), "seconds": seconds})
        return
    shown = RichTable(header_style="bold")
    for column in ("case", "attacks", "cannot run", "images", "done", *["cost"] * measure):
        shown.add_column(column, justify="right" if column in ("images", "done", "cost") else "left")
    for row in rows:
        cost = [f"{row['seconds']:.0f} s" if row["seconds"] else "—"] if measure else []
        label = f"{row['group']} {row['label']}" if row["group"] else row["label"]
        shown.add_row(
            *(escape(label), escape(", ".join(row["attacks"])), escape(", ".join(row["refused"]))),
            *(str(row["images"]), str(row["done"]), *cost),
        )
    shared.print_table(shown)
    if seconds is None:
        shared.echo(f"{len(tasks)} tasks; --measure runs one image of each kind, and says what they cost")
        return
    minutes = f"{seconds / 60:.1f} min of one worker's time"
    shared.echo(f"{len(tasks)} tasks, about {minutes}, as measured on one image of each kind")


def _print_results(
    run: "Run", format_: str | None, floated: dict[str, Any], all_attacks: bool, other: "Results | None"
) -> int:
    from privlab.report.tables.compare import compare as against

    results, table = run.results, run.details(all_attacks=all_attacks)
    if format_ is not None:
        shared.echo_data(table.render(format_, **floated))
    elif not (results.records.status == "ok").any():
        shared.echo(f"Nothing could be scored. run: {results.path}")
    else:
        shared.print_fitted(table)
        shared.echo(f"run: {results.path}")
    if other is not None:
        for moved in against(other, results) or ["No cell moved by more than its interval."]:
            click.echo(str(moved), err=True)
    failed = results.records.loc[results.records.status != "ok", ["image", "reason"]].drop_duplicates()
    shared.print_failed(failed.itertuples(index=False, name=None))
    return 2 if len(failed) else 0

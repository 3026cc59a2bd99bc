"""The command line: options in, tables out. Data goes to standard output, messages to standard error."""

import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from privlab import __version__
from privlab.errors import PrivlabError, unknown_name

if TYPE_CHECKING:
    from pandas import DataFrame

    from privlab.run import Outcome

__all__ = ["cli", "main"]

err = Console(stderr=True, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; every mistake ends in one line and exit status 2, an interrupt in 130."""
    sys.exit(_status(sys.argv[1:]))


def _status(arguments: list[str]) -> int:
    """Run the command line and return its exit status."""
    debug = "--debug" in arguments
    try:
        return cli.main(arguments, prog_name="privlab", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        return _complain(error.format_message(), debug)
    except PrivlabError as error:
        return _complain(str(error), debug)
    except (KeyboardInterrupt, click.Abort):
        err.print("Interrupted. What was finished stays readable.")
        return 130
    except BrokenPipeError:
        return 0
    except Exception as error:  # the last resort: no traceback reaches a user who did not ask for it
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return _complain(f"{what} (a fault of privlab, not yours; --debug shows where)", debug)


def _complain(message: str, debug: bool) -> int:
    if debug:
        err.print(traceback.format_exc(), markup=False)
    err.print(f"Error: {' '.join(message.split())}", style="red", markup=False)
    return 2


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every command has."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
    debug = click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails.")
    return as_json(debug(command))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails.")
def cli() -> None:
    """Measure how much of a private image leaks from a Vision Transformer, and what a defense really stops."""


@cli.command()
@click.option("--model", required=True, help="Victims: names of `privlab list victims` or timm:NAME, with commas.")
@click.option("--setting", help="a, b or c (MJP, section 5.4), with commas.  [default: c if defended, else a]")
@click.option("--attack", help="Attacks, with commas.  [default: all that can run]")
@click.option("--weights", default="auto", show_default=True, help="auto, pretrained, random, or a file.")
@click.option("--block", default="auto", show_default=True, help="First block: auto, stock or april.")
@click.option("--img-size", type=click.IntRange(min=16), help="Side of the input; PEs are resized as timm does.")
@click.option("--defense", default="auto", show_default=True, help="A name of `privlab list defenses`.")
@click.option("--gamma", type=float, default=0.27, show_default=True, help="γ: share of the patches that is shuffled.")
@click.option(
    "--masked-pe", default="unknown", show_default=True, help="PE at shuffled slots under MJP: unknown, none or slot."
)
@click.option(
    "--images", multiple=True, default=("samples",), show_default=True,
    help="samples, a folder, files (repeat the option), torchvision:NAME or hf:NAME.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), help="Use N images: the first, of class folders by turns.")
@click.option("--split", help="Split of a data set, or sub-folder of a folder.")
@click.option("--labels", help="predicted, or a CSV file with columns file and label.  [default: the source's own]")
@click.option("--metrics", help="Names of `privlab list metrics`, with commas.")
@click.option("--lpips-weights", help="File or folder with LPIPS backbones.")
@click.option("--eight-bit", is_flag=True, help="Round reconstructions to 8 bits before they are scored.")
@click.option("--geometry", default="in_place", show_default=True, help="Rows of the table: in_place or oracle.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--batch-size", default="auto", show_default=True, help="Images at a time: auto or a number.")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory.  [default: runs/TIME-MODEL-SETTING]")
@click.option("--overwrite", is_flag=True, help="Let an earlier run in --out give way.")
@click.option("--strips/--no-strips", default=True, show_default=True, help="Write one PNG per image.")
@click.option("--force", is_flag=True, help="With --block stock|april: run attacks that do not hold there.")
@_common
def attack(
    model: str,
    setting: str | None,
    attack: str | None,
    images: tuple[str, ...],
    metrics: str | None,
    geometry: str,
    device: str,
    batch_size: str,
    out: Path | None,
    overwrite: bool,
    strips: bool,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> int:
    """Attack a victim's released gradients, score the reconstructions, and write a run directory."""
    from privlab.evaluate import GEOMETRIES
    from privlab.metrics import METRICS
    from privlab.report.summary import flags, summarise, verdicts
    from privlab.run import execute, specify

    if geometry not in GEOMETRIES:
        raise unknown_name("geometry", geometry, GEOMETRIES)
    spec = specify(model, setting, attack=attack, images=images, metrics=metrics, **options)
    path = out or _new_directory(spec.models, spec.settings)
    with _progress("attacking") as progress:
        outcome = execute(
            spec,
            device=device,
            batch_size=_batch_size(batch_size),
            out=path,
            overwrite=overwrite,
            strips=strips,
            progress=progress,
        )
    table = summarise(outcome.records, spec.metrics, geometry)
    for message in outcome.warnings:
        err.print(f"Warning: {message}", style="yellow", markup=False)
    if as_json:
        _print_json(
            {
                "run": str(path),
                "verdict": [*verdicts(outcome), *flags(table)],
                "geometry": geometry,
                "leaks": {name: METRICS[name].direction for name in spec.metrics},
                "rows": [{name: _plain(value) for name, value in row.items()} for row in table.to_dict("records")],
                "warnings": outcome.warnings,
                "missing_metrics": outcome.missing,
                "failed": outcome.failed,
            }
        )
    else:
        _print_attack(outcome, table, geometry)
    for image, reason in outcome.failed.items():
        err.print(f"Failed: {image}: {reason}", style="red", markup=False)
    return 2 if outcome.failed else 0


@cli.command("list")
@click.argument("what", type=click.Choice(["victims", "attacks", "defenses", "metrics"]))
@_common
def list_(what: str, as_json: bool) -> None:
    """List what is installed, with papers, equations and the capabilities that attacks need."""
    from privlab.report.catalogue import catalogue

    _print_rows(catalogue(what), as_json)


@cli.command()
@click.option("--lpips-weights", type=click.Path(path_type=Path), help="File or folder with LPIPS backbones.")
@_common
def doctor(lpips_weights: Path | None, as_json: bool) -> None:
    """Say what this machine has, and what is missing for which feature."""
    from privlab.report.doctor import examine

    with err.status("examining"):
        rows = examine(lpips_weights)
    _print_rows(rows, as_json)


@cli.command()
@click.argument("name")
@click.option("--model", default="deit_s", show_default=True, help="The victim.")
@click.option("--images", "n_images", type=click.IntRange(min=2), default=32, show_default=True, help="Images timed.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds; medians are shown.")
@click.option(
    "--memory/--no-memory", default=True, show_default=True, help="Measure peak memory with 40 and 400 images."
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@_common
def bench(name: str, as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Measure speed side by side in one run, as ratios. NAME is: attack."""
    from privlab.bench import BENCHES

    if name not in BENCHES:
        raise unknown_name("bench", name, BENCHES)
    with _progress(f"bench {name}") as progress:
        result = BENCHES[name](progress=progress, **options)
    if as_json:
        _print_json(result.as_dict())
        return
    for table in result.tables():
        _print(table)


def _new_directory(models: Sequence[str], settings: Sequence[str]) -> Path:
    """Return a run directory that is not there yet."""
    what = "-".join([*models, *settings]).replace(":", "_").replace("/", "_")[:80]
    stem = Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}-{what}")
    return next(path for n in count(1) if not (path := stem if n == 1 else stem.with_name(f"{stem.name}-{n}")).exists())


def _batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise PrivlabError(f"--batch-size must be auto or a positive number. Found '{text}'.")
    return int(text)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=err)
    task = bar.add_task(what, total=None)

    def show(done: int, total: int | None) -> None:
        bar.start()  # not before all is checked: a mistake then is one line
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def _print_attack(outcome: "Outcome", table: "DataFrame", geometry: str) -> None:
    from privlab.report.summary import flags, shown_metrics, to_rich, verdicts

    shown = shown_metrics(outcome.spec.metrics)
    wide = to_rich(table, shown)
    fits = _width(wide) <= Console().width or not sys.stdout.isatty()
    _print(wide if fits else to_rich(table, shown, stacked=True))
    arrows = "mean ± standard deviation over the images; arrows show the direction that leaks"
    click.echo(f"{arrows}; geometry {geometry}, controls as they are")
    for name in shown:
        if name in outcome.missing:
            click.echo(f"{name}: n/a ({outcome.missing[name].partition(':')[0]}; see the warning)")
    for line in (*verdicts(outcome), *flags(table)):
        click.echo(line)
    click.echo(f"run: {outcome.path}")


def _print_rows(rows: Sequence[Mapping[str, object]], as_json: bool) -> None:
    if as_json:
        _print_json(rows)
        return
    table = Table(header_style="bold", show_lines=True)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    out = Console(highlight=False)
    (out if out.is_terminal else Console(highlight=False, width=160)).print(table)


def _print(table: Table) -> None:
    """Print a table of numbers to standard output, whole: a terminal that is too narrow wraps it, nothing is cut."""
    Console(highlight=False, width=_width(table)).print(table)


def _width(table: Table) -> int:
    return Console(width=10_000).measure(table).maximum


def _plain(value: object) -> object:
    """Return a value that JSON can hold: what was not measured is null, an infinite PSNR is "Infinity"."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))

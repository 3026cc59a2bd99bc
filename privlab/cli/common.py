"""Options, progress and printing for all commands. Data goes to standard output, messages to standard error."""

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from privlab.base import Stream
from privlab.experiments.tables.named import experiment_names

if TYPE_CHECKING:
    from privlab.evaluation import Specification
    from privlab.training import TrainingProgress

__all__ = [
    "EVERY",
    "MANIFEST",
    "OFFSET",
    "Commands",
    "Interrupted",
    "attack_on_trained",
    "begun_directory",
    "command_line",
    "common",
    "err",
    "fits",
    "interruptible",
    "kept",
    "plain",
    "print_json",
    "print_on_trained",
    "print_rows",
    "print_table",
    "progress_bar",
    "table_on_trained",
    "warned",
]


EVERY = "Use every K-th image, before --limit: those at positions J, J + K, … from 0; J is --offset."
OFFSET = "Leave out the first J images, before --limit; of class folders by turns."
MANIFEST = "Use the images that it names, checked by SHA-256: columns name, sha256; label, member if known."


class _Fitted(Console):
    """A console that spells what its stream cannot write before a table is laid out, so that columns stay in line."""

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401
        """Return a text as the stream will write it."""
        return super().render_str(self.file.fitted(text) if isinstance(self.file, Stream) else text, **options)


err = _Fitted(stderr=True, highlight=False, soft_wrap=True)


class Commands(click.Group):
    """A group whose help shows the whole first sentence of each command, which click cuts to one line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names of the commands, each with its first sentence."""
        with formatter.section("Commands"):
            rows = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
            formatter.write_dl([(name, each.get_short_help_str(limit=1000)) for name, each in rows if each])


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every command has."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
    debug = click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails.")
    return as_json(debug(command))


class _Count(MofNCompleteColumn):
    """The number done of the total; empty while the total is unknown."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


def command_line(context: click.Context) -> str:
    """Return the command as it was typed, quoted so that a shell runs it when it is pasted."""
    return shlex.join(["privlab", *(context.find_root().obj or ())])


class Interrupted(Exception):
    """The user pressed Ctrl-C; the message says what was kept, and how to continue."""


@contextmanager
def interruptible(kept: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C within the context into an error that says what was kept and how to continue.

    Raises:
        Interrupted: if the user presses Ctrl-C; `kept` returns its message.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(kept()) from error


def begun_directory(spec: "Specification", what: str, *, overwrite: bool) -> Path | None:
    """Return the directory of an unfinished run of a specification in `runs`, and say so; None if a new one starts.

    Args:
        spec: what is run.
        what: the word for it, "run" or "audit".
        overwrite: whether a new one is asked for.
    """
    from privlab.runs import unfinished

    begun = None if overwrite else unfinished(Path("runs"), spec)
    if begun is not None:
        err.print(f"Continuing the unfinished {what} '{begun}'; --overwrite starts a new one.", markup=False)
    return begun


def kept(path: Path, go_on: str = "The same command goes on where it was.") -> str:
    """Return what an interrupted run has kept in its directory, and `go_on`, how to continue it."""
    from privlab.stores import Store

    if not (path / "run.json").exists():
        return "Nothing had been run yet, and nothing is kept."
    rows = Store(path).read(["image_sha256", "image"]).to_pylist()
    images = len({row["image_sha256"] or row["image"] for row in rows})
    there = f"the records of {images} {'image' if images == 1 else 'images'}, which `privlab report {path}` shows"
    return f"'{path}' keeps {there if images else 'no image yet'}. {go_on}"


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar on standard error, with the steps and the remaining time of a search or training inside."""
    from privlab.training import listening  # this imports torch, which is slow

    columns = (TextColumn("{task.description}"), BarColumn(), _Count(), TimeRemainingColumn())
    bar = Progress(*columns, console=err)
    task = bar.add_task(what, total=None)

    def show(done: int, total: int | None) -> None:
        bar.start()  # only after all checks, so that a mistake prints one line
        bar.update(task, description=what, completed=done, total=total)

    def step(now: "TrainingProgress") -> None:
        bar.start()
        left = timedelta(seconds=round(now.seconds_left))
        bar.update(task, description=f"{what}: step {now.step} of {now.steps}, {left} left")

    try:
        with listening(step):
            yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def print_rows(rows: Sequence[Mapping[str, object]], as_json: bool) -> None:
    """Print rows of words as a table, or as JSON."""
    if as_json:
        print_json(rows)
        return
    table = Table(header_style="bold", show_lines=True)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    out = _Fitted(highlight=False)
    (out if out.is_terminal else _Fitted(highlight=False, width=160)).print(table)


def print_table(table: Table) -> None:
    """Print a whole table to standard output; a terminal that is too narrow wraps it, and nothing is cut."""
    _Fitted(highlight=False, width=_width(table)).print(table)


def fits(table: Table) -> bool:
    """Return whether a table is no wider than the terminal; it always fits a file."""
    return _width(table) <= Console().width or not sys.stdout.isatty()


def _width(table: Table) -> int:
    return _Fitted(width=10_000).measure(table).maximum


def plain(value: object) -> object:
    """Return a value that JSON can hold: NaN becomes None, and an infinite PSNR becomes "Infinity"."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def print_json(value: object) -> None:
    """Print plain data to standard output as JSON; in UTF-8 as it is, elsewhere escaped, for a spelled γ is another."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=not Console().encoding.startswith("utf")))


@contextmanager
def warned() -> Iterator[None]:
    """Print each of privlab's warnings within the context once, on a line of its own, after the context."""
    from privlab.base import collect_warnings

    messages: list[str] = []
    with collect_warnings(messages):
        yield
    for message in messages:
        err.print(f"Warning: {message}", style="yellow", markup=False)


_SAME = ("setting", "attack", "defense", "options_", "release", "client_batch", "gradient_batch", "gamma", "masked_pe")
_SAME += ("cut_layer", "client", "limit", "draws", "seed", "geometry")
"""The options that hold for any victim and images: what the user gave of them stands in the command too."""


def attack_on_trained(context: click.Context, victims: Iterable[str]) -> str:
    """Return `privlab attack` on the trained victims in the place of these, with the options that the user gave.

    Args:
        context: the command.
        victims: the names of those whose weights are random.
    """
    words = ["privlab", "attack", "--model", ",".join(_twins(victims))]
    for option in context.command.params:
        if option.name in _SAME and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            value = context.params[option.name]
            for each in value if option.multiple else (value,):  # pyright: ignore[reportAttributeAccessIssue]
                words += [option.opts[0], str(each)]
    return shlex.join(words)


def table_on_trained(experiment: str, victims: Iterable[str], settings: Iterable[str]) -> str:
    """Return `privlab table` with the same experiment on CIFAR's victims if there is one, or else `privlab attack`.

    Args:
        experiment: its name or file.
        victims: the names of those whose weights are random.
        settings: those of the cases.
    """
    if (twin := f"{experiment}_cifar") in experiment_names():
        return shlex.join(["privlab", "table", twin])
    chosen = ",".join(sorted(set(settings)))
    return shlex.join(["privlab", "attack", "--model", ",".join(_twins(victims)), "--setting", chosen])


def print_on_trained(command: str, *, machine: bool) -> None:
    """Print the line that names the command: on standard error if standard output is for a machine."""
    line = f"Only random weights could be had. The same on trained weights, which came with privlab:  {command}"
    if machine:
        err.print(line, markup=False)
    else:
        click.echo(line)


def _twins(victims: Iterable[str]) -> list[str]:
    """Return the trained victims of the same variants, each once."""
    ends = (next((end for end in ("_mjp", "_nope") if name.endswith(end)), "") for name in victims)
    return [*dict.fromkeys(f"cifar_vit{end}" for end in ends)]

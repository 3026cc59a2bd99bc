"""Options, progress and printing for all commands. Data goes to standard output, messages to standard error."""

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from importlib.resources import files
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TimeRemainingColumn
from rich.protocol import rich_cast
from rich.table import Column, Table
from rich.text import Text

from privlab.base import CONTROLS_BEYOND_ASCII, Stream, plain_data, printable, unwritable
from privlab.cli.options import debug, json_
from privlab.evaluation.names import check_stated
from privlab.experiments.tables.named import experiment_names

if TYPE_CHECKING:
    from privlab.evaluation import Case
    from privlab.training import TrainingProgress


EXAMPLES: Mapping[str, list[str]] = tomllib.loads(
    files("privlab.inventory").joinpath("command_examples.toml").read_text("utf-8")
)
"""Whole command lines by the words of their command, without `privlab`; a test checks their options."""


WIDTH = 80
"""The columns of a terminal that every reader has."""


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Fitted(Console):
    """A console that escapes what its stream cannot write before a table is laid out, so that columns stay in line."""

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401
        """Return a text as the stream will write it, without control characters of others."""
        text = printable(text)
        return super().render_str(self.file.fitted(text) if isinstance(self.file, Stream) else text, **options)


err = _Fitted(stderr=True, highlight=False, soft_wrap=True)


class Commands(click.Group):
    """A group whose help shows the whole first sentence of each command, which click cuts to one line.

    The help of each command ends with its examples.
    """

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a name."""
        command = super().get_command(ctx, cmd_name)
        lines = EXAMPLES.get(f"{ctx.command_path} {cmd_name}".partition(" ")[2])
        if command is not None and lines is not None:
            command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
        return command

    def command_list(self, ctx: click.Context) -> list[tuple[str, str]]:
        """Return the names of the commands, each with its first sentence."""
        rows = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        return [(name, command.get_short_help_str(limit=1000)) for name, command in rows if command]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names of the commands, each with its first sentence."""
        with formatter.section("Commands"):
            formatter.write_dl(self.command_list(ctx))


def echo(text: object) -> None:
    """Print lines to standard output, without control characters of others."""
    click.echo(printable(str(text)))


def echo_data(text: str) -> None:
    """Print a text whose lines may have any length, such as CSV, as `echo` does; it has its own line end."""
    click.echo(printable(text, longest=None), nl=False)


def all_of(*options: Decorator) -> Decorator:
    """Return several options as one decorator."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


common = all_of(json_(), debug())
"""The options that every command has."""


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


def begun_directory(spec: "Case", what: str, *, overwrite: bool) -> Path | None:
    """Return the directory of an unfinished run of a case in `runs`, and say so; None if a new one starts.

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


@contextmanager
def reserved(out: Path | None, what: Sequence[str]) -> Iterator[Path]:
    """Yield the directory of a run: `out`, or else a new one in `runs` that no other process can take.

    A new one is removed at the end if it is empty.

    Args:
        out: the directory that is known; None for a new one.
        what: the victims and the settings, for its name.

    Raises:
        PrivlabError: if a new one cannot be made.
    """
    if out is not None:
        yield out
        return
    words = [each if each.startswith("timm:") else Path(each).absolute().name for each in what]  # not a whole path
    name = "-".join(words).replace(":", "_").replace("/", "_")[:80]
    stem = Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}-{name}")
    try:
        path = _first_free(stem)
    except OSError as error:
        raise unwritable(stem, error) from error
    try:
        yield path
    finally:
        with suppress(OSError):  # a directory with files in it stays, and so does `runs` with other runs
            path.rmdir()
            path.parent.rmdir()


def _first_free(stem: Path) -> Path:
    """Make STEM, STEM-2, STEM-3, …, whichever is the first that does not exist, and return it."""
    path, n = stem, 1
    while True:
        with suppress(FileExistsError):  # another process was first
            path.mkdir(parents=True)
            return path
        n += 1
        path = stem.with_name(f"{stem.name}-{n}")


def check_together(stated: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other, as far as that costs no import of torch.

    Args:
        stated: the values of options by name; an audit has some of them.

    Raises:
        PrivlabError: for the first of them.
    """
    absent = {"block": "auto", "force": False, "release": "auto", "client": None, "gradient_batch": 1}
    settings = [name.strip() for name in (stated.get("setting") or "").split(",")]
    check_stated({**absent, **stated, "settings": settings})


def kept(path: Path, go_on: str = "The same command goes on where it was.") -> str:
    """Return what an interrupted run has kept in its directory, and `go_on`, how to continue it."""
    from privlab.stores import Store

    if not (path / "run.json").exists():
        return "Nothing had been run yet, and nothing is kept."
    rows = Store(path).read(["image_sha256", "image"]).to_pylist()
    images = len({row["image_sha256"] or row["image"] for row in rows})
    there = f"the records of {images} {'image' if images == 1 else 'images'}, which `privlab report {path}` shows"
    return f"'{path}' keeps {there if images else 'no image yet'}. {go_on}"


class _Count(MofNCompleteColumn):
    """The number done of the total; empty while the total is unknown."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


def progress_of(**options: Any) -> Progress:  # noqa: ANN401
    """Return bars that show a name, the number done of the total, and the remaining time."""
    return Progress("{task.description}", BarColumn(), _Count(), TimeRemainingColumn(), **options)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar on standard error, with the steps and the remaining time of a search or training inside.

    Yields:
        A function that takes the number done, the total, None if it is not known, and another description.
    """
    from privlab.training import listening  # this imports torch, which is slow

    bar = progress_of(console=err)
    task = bar.add_task(what, total=None)

    def show(done: int, total: int | None, description: str = what) -> None:
        bar.start()  # only after all checks, so that a mistake prints one line
        bar.update(task, description=description, completed=done, total=total)

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


def _width(table: Table) -> int:
    return _Fitted(width=10_000).measure(table).maximum


def print_columns(headings: Sequence[str | Column], rows: Iterable[Sequence[str]]) -> None:
    """Print a table of texts whose cells are wrapped, so that it has at most 80 columns."""
    table = Table(*headings, header_style="bold")
    for row in rows:
        table.add_row(*map(escape, row))
    _Fitted(highlight=False, width=min(_width(table), WIDTH)).print(table)


def print_text(text: str) -> None:
    """Print a paragraph in 80 columns, with the lines after the first indented."""
    click.echo(fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def print_fitted(shown: RenderableType) -> None:
    """Print to standard output in the width of the terminal, or of COLUMNS; no figure is cut.

    Without either, a table is as wide as it is, and all else has 80 columns.
    """
    shown, width = rich_cast(shown), Console().width
    if isinstance(shown, Table):
        measured = _Fitted(width=10_000).measure(shown)
        known = sys.stdout.isatty() or "COLUMNS" in os.environ
        width = max(width, measured.minimum) if known else measured.maximum
    _Fitted(highlight=False, width=width).print(shown, crop=False)


def print_json(value: object) -> None:
    """Print data to standard output as JSON, as `plain_data` has it; γ is escaped where the output is not UTF-8."""
    text = json.dumps(plain_data(value), indent=2, ensure_ascii=not Console().encoding.startswith("utf"))
    # JSON need not escape these.
    click.echo(re.sub(f"[{CONTROLS_BEYOND_ASCII}]", lambda found: f"\\u{ord(found[0]):04x}", text))


def print_either(as_json: bool, data: object, *lines: object) -> None:
    """Print data as JSON, or else the lines that say the same."""
    if as_json:
        print_json(data)
        return
    for line in lines:
        echo(line)


def print_paths(paths: Iterable[object], as_json: bool) -> None:
    """Print the paths of files that were written, one a line."""
    words = [str(path) for path in paths]
    print_either(as_json, words, *words)


def print_warnings(messages: Iterable[str]) -> None:
    """Print each warning on a separate line."""
    for message in messages:
        err.print(f"Warning: {message}", style="yellow", markup=False)


def print_failed(failures: Iterable[tuple[str, str]]) -> None:
    """Print what failed, each with its reason, on a separate line."""
    for what, reason in failures:
        err.print(f"Failed: {what}: {reason}", style="red", markup=False)


@contextmanager
def warned() -> Iterator[None]:
    """Print each of privlab's warnings within the context once, after the context, even if that raises."""
    from privlab.base import collect_warnings

    messages: list[str] = []
    try:
        with collect_warnings(messages):
            yield
    finally:
        print_warnings(messages)


_SAME = ("setting", "attack", "defense", "options", "release", "client_batch", "gradient_batch", "gamma", "masked_pe")
_SAME += ("cut_layer", "client", "limit", "draws", "seed", "geometry")
"""The options that hold for any victim and images: what the user gave of them is part of the command too."""


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
        echo(line)


def _twins(victims: Iterable[str]) -> list[str]:
    """Return the trained victims of the same variants, each once."""
    ends = (next((end for end in ("_mjp", "_nope") if name.endswith(end)), "") for name in victims)
    return [*dict.fromkeys(f"cifar_vit{end}" for end in ends)]

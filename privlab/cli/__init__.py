"""The command line: it turns options into tables and holds no logic. One file holds one group of commands."""

import logging
import sys
import traceback
from collections import ChainMap

import click

from privlab import __version__
from privlab.base import CLOSED, OutputClosed, PrivlabError, end_streams, memory_ended, one_line, prepare_streams
from privlab.cli.attack import attack
from privlab.cli.audit import audit
from privlab.cli.benchmark import admit, benchmark
from privlab.cli.common import WIDTH, Commands, Interrupted, err
from privlab.cli.elsewhere import TRAINED, bench, study
from privlab.cli.inventory import doctor, explain, list_
from privlab.cli.keys import keys
from privlab.cli.models import models
from privlab.cli.options import debug
from privlab.cli.split.commands import split
from privlab.cli.store import figures, identify, report, store
from privlab.cli.table import table

__all__ = ["cli", "main"]


def main() -> None:
    """Run the command line; every mistake ends with one line and exit status 2, an interrupt with 130.

    If standard output is closed, the command still runs to completion, and its exit status is 141.
    """
    prepare_streams()
    logging.getLogger("matplotlib").addHandler(logging.NullHandler())  # it reports each home that it cannot write to
    sys.exit(end_streams(_status(sys.argv[1:])))


def _status(arguments: list[str]) -> int:
    """Run the command line and return its exit status."""
    debug = "--debug" in arguments
    try:
        return cli.main(arguments, prog_name="privlab", standalone_mode=False, obj=tuple(arguments)) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        return _complain(error.format_message(), debug)
    except PrivlabError as error:
        return _complain(str(error), debug)
    except Interrupted as stop:
        err.print(f"Interrupted. {stop}", markup=False)
        return 130
    except (KeyboardInterrupt, click.Abort):
        err.print("Interrupted. What was finished stays readable.")
        return 130
    except OutputClosed:
        return CLOSED
    except Exception as error:  # the last resort: no traceback reaches a user who did not ask for it
        if (memory := memory_ended(error)) is not None:
            return _complain(memory, debug)
        return _complain(f"{one_line(error, kind=True)} (a fault of privlab, not yours; --debug shows where)", debug)


def _complain(message: str, debug: bool) -> int:
    if debug:
        err.print(traceback.format_exc(), markup=False)
    err.print(f"Error: {' '.join(message.split())}", style="red", markup=False)
    return 2


_STARTS = (
    "attack --model cifar_vit_mjp27 --setting a,c --limit 2",
    "audit update BEFORE AFTER --model NAME --client sgd",
    "table quick",
    "list attacks",
    "explain mjp-full",
)
"""What `privlab` shows to start with; the commands are the first of its help."""


class _Root(Commands):
    """The group of all commands, whose help fits a screen of 80 columns and 24 lines."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, those to start with first."""
        first = [line.split()[0] for line in _STARTS]
        return [*first, *sorted({*self.commands} - {*first})]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands alone: the usage has the options."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_dl(self.command_list(ctx))


@click.group(
    cls=_Root,
    commands=ChainMap({}, TRAINED),
    invoke_without_command=True,
    options_metavar="[--version] [--debug] [--help]",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, message="%(version)s")
@debug()
@click.pass_context
def cli(context: click.Context) -> None:
    """Measure how much of a private image leaks from a Vision Transformer."""
    if context.invoked_subcommand is not None:
        return
    click.echo(f"{cli.help}\n\nStart with one of these commands:\n")
    for line in _STARTS:
        click.echo(f"  privlab {line}\n      {cli.commands[line.split()[0]].get_short_help_str(WIDTH)}")
    click.echo("\n`privlab --help` lists all commands, `privlab COMMAND --help` their options.")


COMMANDS = (
    *(attack, audit, admit, list_, explain, doctor, bench, keys, split, study, models),
    *(table, store, report, figures, identify, benchmark),
)
for command in COMMANDS:
    cli.add_command(command)

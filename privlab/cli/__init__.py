"""The command line: it turns options into tables and holds no logic. One file holds one group of commands."""

import logging
import sys
import traceback
from collections import ChainMap

import click

from privlab import __version__
from privlab.base import CLOSED, OutputClosed, PrivlabError, end_streams, memory_ended, prepare_streams
from privlab.cli.attack import attack
from privlab.cli.benchmark import admit, benchmark
from privlab.cli.common import Commands, Interrupted, err
from privlab.cli.elsewhere import TRAINED, bench, study
from privlab.cli.keys import keys
from privlab.cli.machine import doctor, explain, list_
from privlab.cli.models import models
from privlab.cli.split.commands import split
from privlab.cli.store import figures, identify, report, store
from privlab.cli.table import table

__all__ = ["cli", "main"]


def main() -> None:
    """Run the command line; every mistake ends with one line and exit status 2, an interrupt with 130.

    Where nobody reads standard output any more, the command goes on to its end, and its exit status is 141.
    """
    prepare_streams()
    logging.getLogger("matplotlib").addHandler(logging.NullHandler())  # it tells of each home that it cannot write to
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
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return _complain(f"{what} (a fault of privlab, not yours; --debug shows where)", debug)


def _complain(message: str, debug: bool) -> int:
    if debug:
        err.print(traceback.format_exc(), markup=False)
    err.print(f"Error: {' '.join(message.split())}", style="red", markup=False)
    return 2


@click.group(
    cls=Commands,
    commands=ChainMap({}, TRAINED),
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, message="%(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails.")
def cli() -> None:
    """Measure how much of a private image leaks from a Vision Transformer, and what a defense really stops."""


COMMANDS = (
    *(attack, admit, list_, explain, doctor, bench, keys, split, study, models),
    *(table, store, report, figures, identify, benchmark),
)
for command in COMMANDS:
    cli.add_command(command)

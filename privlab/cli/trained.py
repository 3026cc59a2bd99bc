"""The command that shows a run on trained weights, which come with privlab, where only random ones could be had."""

import shlex
from collections.abc import Iterable

import click
from click.core import ParameterSource

from privlab.cli.common import err
from privlab.experiments.tables.named import experiment_names

__all__ = ["attack_on_trained", "print_on_trained", "table_on_trained"]

_SAME = ("setting", "attack", "defense", "options_", "release", "client_batch", "gradient_batch", "gamma", "masked_pe")
_SAME += ("limit", "draws", "seed", "geometry")
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

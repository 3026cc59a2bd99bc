"""Commands of `experiments/` and `benchmarks/`, such as `privlab study`, which are imported when they are used."""

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from privlab.base import PrivlabError, Registry, unknown_name
from privlab.cli.common import Commands

CLONE = Path(__file__).parents[2]
"""The root of a clone, if privlab runs in one."""


def _benches() -> dict[str, click.Command]:
    """Return the commands of the clone's folder `benchmarks`."""
    if not (CLONE / "benchmarks" / "commands.py").is_file():
        raise PrivlabError(f"`privlab bench` runs in a clone of privlab. Found no folder benchmarks in '{CLONE}'.")
    return import_module("privlab.benchmarks.commands").bench.commands


class _Benches(Commands):
    """A group that answers an unknown name with the most similar ones."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the bench of a name."""
        if cmd_name not in self.commands:
            raise unknown_name("bench", cmd_name, self.commands)
        return super().get_command(ctx, cmd_name)


def _experiments(module: str) -> Any:  # noqa: ANN401
    """Return a module of `experiments/commands`."""
    return import_module(f"privlab.experiments.commands.{module}")


TRAINED: Registry[click.Command] = Registry(
    lambda: {"evaluate": _experiments("evaluate").evaluate, "train": _experiments("train").train}
)
"""The commands on trained models, of `privlab` itself."""

FINETUNE: Registry[click.Command] = Registry(lambda: {"finetune-study": _experiments("studies").finetune_study})
"""The study that is a command of `privlab keys`."""


@click.group(cls=_Benches, commands=Registry(_benches))
def bench() -> None:
    """Measure the speed of privlab, as ratios with targets.

    What is compared is measured side by side in one run. Each bench takes --json and --debug.
    """


@click.group(cls=Commands, commands=Registry(lambda: _experiments("studies").study.commands))
def study() -> None:
    """Run a study of the papers on images of your own."""

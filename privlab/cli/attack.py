"""`privlab attack`: it attacks what a simulated client releases and prints a table of scores."""

from pathlib import Path
from typing import Any

import click
import cloup

from privlab import images as sources
from privlab.base import PrivlabError
from privlab.cli import common as shared
from privlab.cli import names
from privlab.cli import options as option
from privlab.cli.live import engine_of, run_display
from privlab.victims.names import check_img_size

_MOVED = {
    "--update": "privlab audit update BEFORE AFTER --model NAME --client OPTIMISER",
    "--gradients": "privlab audit gradients FILE --model NAME",
    "--features": "privlab audit features DIR --model NAME",
    "--reference": "privlab audit update BEFORE AFTER --reference IMAGE --model NAME --client OPTIMISER",
}
"""The options of earlier versions that made `privlab attack` an audit, and the command that has their place."""


def _refuse_moved(_context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        name = parameter.opts[0]
        raise PrivlabError(f"{name} is no longer an option of `privlab attack`. Use `{_MOVED[name]}`.")


_moved = shared.all_of(
    *(
        click.option(
            name, is_flag=False, flag_value="", hidden=True, expose_value=False, is_eager=True, callback=_refuse_moved
        )
        for name in _MOVED
    )
)


@cloup.command()
@cloup.option_group("Victim", option.model(), option.weights(), option.block(), *option.VICTIM)
@cloup.option_group("Data", option.images(), *option.CHOICE, option.split(), option.labels(), option.bit_depth())
@cloup.option_group(
    *("Release and client", option.release(), option.client()),
    *(option.gradient_batch(), option.client_batch(), option.cut_layer()),
)
@cloup.option_group("Defense", option.setting(), *option.DEFENSE, option.draws())
@cloup.option_group(
    *("Adversary", option.attack(), option.effort(), option.set_(), option.force()),
    *(option.public(), option.public_limit(), option.reassembly()),
)
@cloup.option_group("Scores", *option.SCORES, option.eight_bit(), option.geometry())
@cloup.option_group(
    "Output", option.out(), option.overwrite(), option.strips(), option.details(), option.quiet(), option.json_()
)
@cloup.option_group("Execution", option.device(), option.batch_size(), *option.ENGINE, option.seed())
@option.debug()
@_moved
@click.pass_context
def attack(
    context: click.Context,
    geometry: str,
    device: str,
    batch_size: str,
    quiet: bool,
    out: Path | None,
    overwrite: bool,
    strips: bool,
    details: bool,
    as_json: bool,
    **options: Any,  # noqa: ANN401
) -> int:
    """Attack a simulated client, and score the reconstructions.

    The client releases gradients, features, or the update of a round of training. Records, images and a page are
    written to a directory; the same command continues a run that was interrupted.
    """
    for name in names.several(options["model"]):
        check_img_size(name, options["img_size"])
    size, where = _batch_size(batch_size), engine_of(options)
    shared.check_together(context.params)
    sources.check_choice(*(options[name] for name in ("limit", "every", "offset", "manifest")))
    from privlab.evaluation import check_geometry
    from privlab.grids import check_shuffled, specify
    from privlab.runs import execute

    spec = specify(**options)
    check_shuffled([spec])
    check_geometry(geometry, spec)
    given = out or shared.begun_directory(spec, "run", overwrite=overwrite)
    search = ", a search of gradient-matching too" if "gradient-matching" in (spec.words.attacks or ()) else ""
    go_on = f"The same command goes on where it was{search}."
    with (
        shared.reserved(given, [*spec.victim.models, *spec.settings]) as path,
        shared.interruptible(lambda: shared.kept(path, go_on)),
        run_display(quiet=quiet) as shown,
    ):
        outcome = execute(
            spec,
            device=device,
            batch_size=size,
            out=path,
            overwrite=overwrite,
            strips=strips,
            command=shared.command_line(context),
            engine=where,
            warn=shown.warn,
            progress=shown.progress,
        )
    from privlab.cli.result import print_result  # after the run, whose first image need not wait for its imports

    return print_result(context, outcome, geometry, shown.warn, as_json=as_json, details=details)


def _batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) == 0:
        raise PrivlabError(f"--batch-size must be auto or a positive number. Found '{text}'.")
    return int(text)

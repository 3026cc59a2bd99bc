"""`privlab report` and `privlab figures`: the page and the figures of a run, from its records alone."""

from pathlib import Path

import click

from privlab.base import PrivlabError
from privlab.cli.common import common, err, print_json
from privlab.cli.store import warned

__all__ = ["figures", "report"]

_FORMATS = ("pdf", "svg", "png")


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The HTML file.  [default: DIRECTORY/report.html]")
@common
def report(directory: Path, out: Path | None, as_json: bool) -> None:
    """Write one self-contained HTML page on the run in DIRECTORY."""
    from privlab.report.page import write_page
    from privlab.report.tables import load_results

    with warned():
        path = write_page(load_results(directory), out or directory / "report.html")
    _say([path], as_json)


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the figures.  [default: DIRECTORY/figures]")
@click.option("--format", "formats", default="pdf,svg", show_default=True, help="pdf, svg or png, with commas.")
@common
def figures(directory: Path, out: Path | None, formats: str, as_json: bool) -> None:
    """Draw the figures that the experiment of the run in DIRECTORY asks for."""
    from privlab.report.figures import write_figures
    from privlab.report.tables import load_results

    wanted = formats.split(",")
    if unknown := [name for name in wanted if name not in _FORMATS]:
        raise PrivlabError(f"--format must be {', '.join(_FORMATS)}. Found '{unknown[0]}'.")
    with warned():
        paths = write_figures(load_results(directory), out or directory / "figures", wanted)
    if not paths:
        err.print("The run asks for no figures: [[figure]] of an experiment does.", markup=False)
    _say(paths, as_json)


def _say(paths: list[Path], as_json: bool) -> None:
    if as_json:
        print_json([str(path) for path in paths])
        return
    for path in paths:
        click.echo(path)

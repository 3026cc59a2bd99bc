"""`privlab store`, `report`, `figures` and `identify`: what is done with the directory of a run."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape
from rich.table import Table

from privlab.base import PrivlabError, parse_object, plain_data
from privlab.cli import common as shared
from privlab.cli import options as option
from privlab.cli.names import CLASSIFIERS, IMAGES, PATH, POSITIVE

if TYPE_CHECKING:
    from pandas import DataFrame

_DIRECTORY = click.argument("directory", type=PATH)
_SUFFIXES = (".csv", ".parquet", ".json")
_FORMATS = ("pdf", "svg", "png")
_PICTURES = ("case", "attack", "images", "PSNR, median")
"""The first columns of both tables of `identify`, which `_start` fills."""


@click.group(cls=shared.Commands)
def store() -> None:
    """Show, check, export or merge the records of runs."""


@store.command()
@_DIRECTORY
@shared.common
def check(directory: Path, as_json: bool) -> int:
    """Check every part of a run, and report what is damaged, foreign or contradictory."""
    from privlab.base import collect_warnings
    from privlab.stores import check as checked

    messages: list[str] = []
    with collect_warnings(messages):
        found = checked(directory)
    shared.print_warnings(messages)
    counts = (
        f"{found.records} records ({found.failed} failed) in {found.parts} parts of {found.rows} rows; "
        f"{found.cells} cells, {found.images} images" + (f"; {found.external} external" if found.external else "")
    )
    left = [f"left behind by a run that was killed: {name}" for name in found.unfinished]
    shared.print_either(as_json, asdict(found) | {"warnings": messages}, counts, *found.conflicts, *left)
    return 2 if found.conflicts else 0


@store.command()
@_DIRECTORY
@click.option("--limit", type=POSITIVE, default=20, help="Largest number of rows that are shown.")
@shared.common
def show(directory: Path, limit: int, as_json: bool) -> None:
    """Show records: what was run on which image, and how it scored."""
    from privlab.stores import case_labels, existing

    with shared.warned():
        frame = existing(directory).frame()
    columns = ["victim", "defense", "setting", "attack", "geometry", "image", "psnr", "ssim", "status"]
    if labels := case_labels(directory):
        conditions = (each if isinstance(each, str) else "{}" for each in frame.conditions)
        stated = (parse_object(text, "conditions of a record").get("case") for text in conditions)
        frame = frame.assign(case=[labels.get(cell, of) for cell, of in zip(frame.cell, stated, strict=True)])
        columns.insert(0, "case")
    rows = frame[columns].head(limit).to_dict("records")
    if not rows:
        raise PrivlabError(f"'{directory}' holds no records yet.")
    shown = [{str(name): _four_digits(value, as_json) for name, value in row.items()} for row in rows]
    shared.print_rows(shown, as_json)
    if len(frame) > limit:
        more = f"{len(frame) - limit} more; --limit shows them, `privlab store export` writes all."
        shared.err.print(more, markup=False)


def _four_digits(value: object, whole: bool) -> object:
    if isinstance(value, float) and not whole:
        return "n/a" if math.isnan(value) else f"{value:.4g}"
    return value


@store.command()
@_DIRECTORY
@click.argument("file", type=PATH)
@shared.common
def export(directory: Path, file: Path, as_json: bool) -> None:
    """Write all records, each once, into one FILE: .csv, .parquet or .json (one object a line)."""
    from privlab.base import write_whole
    from privlab.report.tables.writers import csv_cell
    from privlab.stores import existing

    if file.suffix not in _SUFFIXES:
        raise PrivlabError(f"FILE must end in {', '.join(_SUFFIXES)}. Found '{file.name}'.")
    if not file.absolute().parent.is_dir():
        raise PrivlabError(f"There is no folder '{file.parent}'. Give FILE in a folder that is there.")
    with shared.warned():
        frame = existing(directory).frame()
    writers = {
        ".csv": lambda path: frame.map(lambda value: csv_cell(value) if isinstance(value, str) else value).to_csv(
            path, index=False
        ),
        ".parquet": lambda path: frame.to_parquet(path, index=False),
        ".json": lambda path: path.write_text(_json_lines(frame), "utf-8"),
    }
    write_whole(file, writers[file.suffix])
    shared.print_either(as_json, {"file": str(file), "records": len(frame)}, f"{len(frame)} records: {file}")


def _json_lines(frame: "DataFrame") -> str:
    """Return the records as JSON, one object per line, with every number in full precision."""
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return "".join(json.dumps(plain_data(row), ensure_ascii=False) + "\n" for row in rows)


@store.command()
@click.argument("target", type=PATH)
@click.argument("sources", nargs=-1, required=True, type=PATH)
@shared.common
def merge(target: Path, sources: tuple[Path, ...], as_json: bool) -> int:
    """Copy what SOURCES hold into TARGET; nothing is replaced, contradictions are reported."""
    from privlab.stores import check as checked
    from privlab.stores import merge as merged

    with shared.warned():
        conflicts = merged(target, sources)
        found = checked(target)
    data = {"records": found.records, "conflicts": [asdict(conflict) for conflict in conflicts]}
    shared.print_either(as_json, data, f"{found.records} records: {target}", *conflicts)
    return 2 if conflicts else 0


@store.command("add-external")
@_DIRECTORY
@click.argument("file", type=PATH)
@shared.common
def add_external(directory: Path, file: Path, as_json: bool) -> None:
    """Take results measured elsewhere from a TOML FILE: numbers with a reference, or a folder of reconstructions."""
    from privlab.grids import add_external as add

    count = add(directory, file)
    shared.print_either(as_json, {"records": count}, f"{count} external records: {directory}")


@click.command()
@click.argument("directory", type=PATH)
@click.option("--out", type=PATH, help="The file, HTML or, of an audit, .md.  [default: DIRECTORY/report.html]")
@shared.common
def report(directory: Path, out: Path | None, as_json: bool) -> None:
    """Write one self-contained HTML page about a run."""
    from privlab.report.run import Run
    from privlab.report.tables import read_from

    path = out or directory / "report.html"
    with shared.warned(), read_from(directory):
        run = Run(directory)
        if path.suffix == ".md":
            run.to_markdown(path)
        else:
            run.to_html(path)
    shared.print_paths([path], as_json)


@click.command()
@click.argument("directory", type=PATH)
@click.option("--out", type=PATH, help="Folder of the figures.  [default: DIRECTORY/figures]")
@click.option("--format", "formats", default="pdf,svg", help="Formats, separated by commas: pdf, svg, png.")
@shared.common
def figures(directory: Path, out: Path | None, formats: str, as_json: bool) -> None:
    """Draw the figures that the experiment of a run asks for."""
    from privlab.report.figures import write_figures
    from privlab.report.tables import load_results, read_from

    wanted = formats.split(",")
    if unknown := [name for name in wanted if name not in _FORMATS]:
        raise PrivlabError(f"--format must be {', '.join(_FORMATS)}. Found '{unknown[0]}'.")
    with shared.warned(), read_from(directory):
        paths = write_figures(load_results(directory), out or directory / "figures", wanted)
    if not paths:
        shared.err.print("The run asks for no figures: [[figure]] of an experiment does.", markup=False)
    shared.print_paths(paths, as_json)


@click.command()
@click.argument("directory", type=PATH)
@click.option("--candidates", type=IMAGES, help="Images that include the private ones: a folder or a data set.")
@click.option("--split", help="Split of the candidates.")
@click.option(
    "--by",
    type=click.Choice(["image", "class"]),
    default="image",
    help="Find the private image itself, or its class (a person's folder) by other images of the class.",
)
@click.option(
    "--compare",
    type=click.Choice(["pictures", "releases"]),
    default="pictures",
    help="Compare the pictures that the run kept, or its gradients or updates, with those of candidates.",
)
@click.option("--among", metavar="N,…", help="Numbers of candidates.  [default: 10, 100 and all]")
@click.option(
    "--embedding", metavar="timm:NAME@FILE", help="Network whose features are compared too, with its weights."
)
@click.option("--classifier", type=CLASSIFIERS, help="Network that names the class, in place of the attacked one.")
@click.option("--weights", default="auto", help="Weights of --classifier.")
@option.device()
@shared.common
def identify(
    directory: Path,
    candidates: str | None,
    split: str | None,
    by: str,
    compare: str,
    among: str | None,
    embedding: str | None,
    classifier: str | None,
    weights: str,
    device: str,
    as_json: bool,
) -> None:
    """Test whether the images of a run still show whose they are.

    It compares the pictures or the releases of the run in DIRECTORY with candidates, and names their class.
    """
    from privlab.base import pick_device, read_numbers
    from privlab.experiments.training.classifiers import classifier as classifier_of
    from privlab.images import open_images
    from privlab.metrics import load_embedding
    from privlab.report.identity import Question, identity_of
    from privlab.report.tables import load_results

    numbers = () if among is None else read_numbers("--among", among)
    if wrong := [number for number in numbers if number != int(number)]:
        raise PrivlabError(f"--among takes whole numbers. Found {wrong[0]:g}.")
    if compare == "releases" and (embedding or classifier):
        raise PrivlabError("--embedding and --classifier look at pictures. Leave them out, or --compare releases.")
    picked = pick_device(device)
    with shared.warned():
        question = Question(
            candidates=None if candidates is None else open_images(candidates, split=split),
            people=by == "class",
            among=tuple(map(int, numbers)),
            embedding=None if embedding is None else load_embedding(embedding, picked),
            released=compare == "releases",
            judge=None if classifier is None else classifier_of(classifier, weights=weights).to(picked),
            device=picked,
        )
        rows = identity_of(load_results(directory), question)
    if as_json:
        shared.print_json(rows)
        return
    if rows["identity"]:
        table = Table(*_PICTURES, "features", "n", "rank 1 %", "95 %", "1/rank", "chance %", header_style="bold")
        for row in rows["identity"]:
            rank = (f"{100 * row['rank_1']:.2f}", _between(row), f"{row['reciprocal_rank']:.3f}")
            table.add_row(*_start(row), row["features"], str(row["n"]), *rank, f"{100 * row['chance']:.2f}")
        shared.print_table(table)
    if rows["class"]:
        table = Table(*_PICTURES, "same class %", "95 %", header_style="bold")
        for row in rows["class"]:
            table.add_row(*_start(row), f"{100 * row['agreement']:.1f}", _between(row))
        shared.print_table(table)


def _start(row: dict[str, Any]) -> tuple[str, str, str, str]:
    count = str(row["images"]) if row["images"] == row["attacked"] else f"{row['images']} of {row['attacked']}"
    return escape(row["case"]), escape(row["attack"]), count, "—" if row["psnr"] is None else f"{row['psnr']:.1f}"


def _between(row: dict[str, Any]) -> str:
    return f"{100 * row['low']:.1f} to {100 * row['high']:.1f}"

"""An experiment as data: a TOML file with what is compared, the layout of its table, and what a paper printed."""

import csv
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from privlab.attacks import attacks as installed_attacks
from privlab.base import PrivlabError, check_name, read_text
from privlab.evaluation import Case
from privlab.evaluation.lpips_choice import choose_lpips, named_lpips
from privlab.grids.specify import OPTIONS, check_shuffled, specify
from privlab.grids.toml_file import ANYTHING, TomlFile
from privlab.metrics import METRICS, OF_WEIGHTS, PLACEMENT, STRUCTURE
from privlab.metrics.names import LPIPS
from privlab.threat import Client

OF_IMAGES = {**METRICS, **PLACEMENT}
KNOWN = {**OF_IMAGES, **OF_WEIGHTS}
"""The metrics that may be a column of a table or an axis of a figure."""

FIGURES: dict[str, str] = {
    "curve": "a score against an option, such as gamma, paper's attack next to the worst case",
    "trade-off": "utility against leakage, a point for each case",
    "distribution": "a score's distribution over the images, for each case and attack",
    "sheet": "reconstructions at the best, the median and the worst score",
    "claim": "the paper's figure next to the worst case, as paired bars",
}
"""The kinds of figure, each with what it shows."""

_MOST_RUNS = 2**14
"""The most runs of an experiment: cases by values of the grid, seeds and draws."""
_IN_BATCH = ("client_batch", "gradient_batch", "client.batch_size")
_MOST_IN_BATCH = 2**16

CHOICE = ("limit", "every", "offset", "manifest")
"""The keys of `[run]` that choose images."""


@dataclass(frozen=True, eq=False)
class GridRow:
    """One row of the grid: what is run, under which name, and what a paper printed for it.

    `runs` has one case for each seed and draw; where it has several settings, the row is of `setting`, and
    they are attacked together. `options` holds what the file says of this case alone; figures take their axes from it.
    """

    label: str
    group: str | None
    runs: tuple[Case, ...]
    options: Mapping[str, str | float | int]
    published: Mapping[str, float] = field(default_factory=dict)
    setting: str | None = None


@dataclass(frozen=True)
class Layout:
    """How the table looks.

    `columns` are metrics, `decimals` override theirs, `bold` sets the leakiest figure of each column and group in bold,
    and `interval` is the level of the confidence intervals, by Student's t over the images.
    """

    columns: tuple[str, ...] = ("mse", "fft2d_mjp", "psnr", "ssim", LPIPS)
    decimals: Mapping[str, int] = field(default_factory=dict)
    bold: bool = True
    interval: float = 0.95
    geometry: str = "in_place"
    paper_attack: str | None = None


@dataclass(frozen=True)
class Figure:
    """One figure: its kind, the metric on `y`, the option or metric on `x`, and a name for the file."""

    kind: str
    name: str
    y: str = "psnr"
    x: str | None = None


@dataclass(frozen=True, eq=False)
class Experiment:
    """Everything that a file states. `conditions` are those under which the `source` measured its figures."""

    name: str
    title: str
    source: str | None
    cases: tuple[GridRow, ...]
    layout: Layout
    figures: tuple[Figure, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)


def name_lpips(experiment: Experiment, begun: Mapping[str, Any]) -> tuple[Experiment, str | None]:
    """Return an experiment without the name "lpips", and a warning where the metric in its place is not AlexNet's.

    One metric takes its place everywhere, so that cases can be compared. Where no case asks for "lpips", its column is
    that of the metric which the cases name, AlexNet's if they name several or none.

    Raises:
        LpipsUnavailable: if a case names a place of the backbones that holds none.
    """
    specs = [spec for case in experiment.cases for spec in case.runs]
    asked = [spec.lpips_weights for spec in specs if LPIPS in spec.metrics]
    measured = {name for spec in specs for name in spec.metrics}
    first = next((name for name in ("lpips_alex", "lpips_squeeze", "lpips_vgg") if name in measured), "lpips_alex")
    metric, warning = choose_lpips(asked, begun) if asked else (first, None)

    def named(name: str) -> str:
        return metric if name == LPIPS else name

    cases = tuple(
        replace(case, runs=tuple(replace(spec, metrics=named_lpips(spec.metrics, metric)) for spec in case.runs))
        for case in experiment.cases
    )
    figures = tuple(replace(each, y=named(each.y), x=each.x and named(each.x)) for each in experiment.figures)
    layout = experiment.layout
    decimals = {named(name): places for name, places in layout.decimals.items()}
    layout = replace(layout, columns=named_lpips(layout.columns, metric), decimals=decimals)
    return replace(experiment, cases=cases, layout=layout, figures=figures), warning


PAPERS_ATTACKS: Mapping[str, set[str]] = {
    "april": {"none", "mjp"},
    "inversion-mae": {"none", "row-permutation", "column-permutation"},
}
"""The attacks that papers report, MJP's and Permutation Equivariance's, each with the defenses against which."""


def papers_attack(attacks: Iterable[str]) -> str | None:
    """Return the one of the attacks that the defenses' papers report: MJP's, or else Permutation Equivariance's."""
    there = set(attacks)
    return next((name for name in PAPERS_ATTACKS if name in there), None)


def beside(metrics: Iterable[str]) -> set[str]:
    """Return the metrics that only the records show, because the variant that MJP prints was measured too."""
    there = set(metrics)
    return {name for name, printed in {"fft2d": "fft2d_mjp", "ssim_skimage": "ssim"}.items() if printed in there}


def columns_of(metrics: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics of a run that are the columns of its table."""
    known = [name for name in metrics if name in KNOWN]
    return tuple(name for name in known if name not in beside(known)) or tuple(metrics)


_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
_RUN = {
    name: next((words for kind, words in _WORDS.items() if kind in str(f.type)), "a text")
    for name, f in OPTIONS.items()
    if name not in ("settings", "options", "seed", "draw", "force")
}
_RUN |= dict.fromkeys(("attack", "metrics", "images", "public", "set"), "a list of texts")
_RUN |= {f"client.{f.name}": ANYTHING for f in fields(Client)}
_RUN |= {"model": "the name of one victim", "setting": "a, b or c"}
_RUN |= {"seeds": "a list of whole numbers", "draws": "a positive whole number"}
_TABLES: Mapping[str, Mapping[str, str]] = {
    "": {
        **dict.fromkeys(("title", "source"), "a text"),
        **dict.fromkeys(("run", "grid", "table", "paper"), "a table"),
        **dict.fromkeys(("case", "figure"), ANYTHING),
    },
    "run": _RUN,
    "grid": {name: words for name, words in _RUN.items() if "list" not in words and name != "draws"},
    "case": _RUN | {"label": "a text", "group": "a text", "published": "a table"},
    "table": {
        **{"columns": "a list of metrics", "decimals": "a table of METRIC = 0 … 12", "bold": "true or false"},
        **{"interval": "a number in (0, 1)", "geometry": "in_place, oracle or reassembled"},
        "paper_attack": "an attack",
    },
    "figure": {"kind": ANYTHING, "name": "a text", "x": ANYTHING, "y": ANYTHING},
    "paper": {"file": "the name of a CSV file", "conditions": "a table of texts"},
}
"""What the values of each table of a file must be, by key."""


def read_experiment(path: Path, overrides: Sequence[str] = (), **run: Any) -> Experiment:  # noqa: ANN401
    """Parse and check an experiment; nothing is loaded or run.

    Args:
        path: the TOML file.
        overrides: TABLE.KEY=VALUE, with the value in TOML ("run.limit=4", "grid.gamma=[0.1, 0.2]").
        run: fields of `[run]` that replace those of the file; a manifest replaces all that choose images.

    Raises:
        PrivlabError: for unknown keys, wrong types, or impossible cases, with the line and the nearest valid name.
    """
    file = TomlFile.parse(path, read_text(path, "experiment"), _TABLES, overrides)
    data = file.data
    paper, own = data.get("paper", {}), data.get("run", {})
    file.check(paper, "paper")
    file.check(own, "run")
    given = {name: value for name, value in run.items() if value is not None}
    if "manifest" in given:
        own = {name: value for name, value in own.items() if name not in CHOICE}
    layout = _layout(file)
    cases = tuple(_cases(file, own | given, layout))
    figures = tuple(_figures(file, cases))
    try:
        check_shuffled([run for case in cases for run in case.runs])
    except PrivlabError as error:
        raise file.refuse(str(error), "grid" if data.get("grid") else "run") from None
    return Experiment(
        name=path.stem,
        title=data.get("title", path.stem),
        source=data.get("source"),
        cases=cases,
        layout=layout,
        figures=figures,
        conditions=paper.get("conditions", {}),
    )


def _layout(file: TomlFile) -> Layout:
    given = file.data.get("table", {})
    file.check(given, "table")
    for where in ("columns", "decimals"):
        with file.at("table", 0, where):
            for name in given.get(where, ()):
                check_name("metric", name, [*OF_IMAGES, LPIPS])
    with file.at("table", 0, "paper_attack"):
        if "paper_attack" in given:
            check_name("attack", given["paper_attack"], installed_attacks())
    return Layout(**given | ({"columns": tuple(given["columns"])} if "columns" in given else {}))


def _figures(file: TomlFile, cases: Sequence[GridRow]) -> Iterator[Figure]:
    known = [*OF_IMAGES, LPIPS, *dict.fromkeys(name for case in cases for name in case.options)]
    for number, figure in enumerate(file.tables("figure", [])):
        kind = str(figure.get("kind"))
        with file.at("figure", number, "kind"):
            check_name("figure", kind, FIGURES)
        for axis in ("x", "y"):
            with file.at("figure", number, axis):
                if axis in figure:
                    check_name(axis, str(figure[axis]), known)
        if kind == "curve" and "x" not in figure:
            raise file.refuse("a curve needs x, an option that its cases differ in.", "figure", number)
        yield Figure(**({"name": f"{kind}-{number + 1}"} | figure))


def _cases(file: TomlFile, shared: Mapping[str, Any], layout: Layout) -> Iterator[GridRow]:
    grid, printed, runs_in_all = file.data.get("grid", {}), _printed(file), 0
    for name, values in grid.items():
        if name in _TABLES["grid"] and not (isinstance(values, list) and values):
            raise file.refuse(f"{name} must be a list of the values to try. Found {values!r}.", "grid", 0, name)
        for value in values if isinstance(values, list) else [values]:
            file.check({name: value}, "grid")
    for number, case in enumerate(file.tables("case", [{}])):
        with file.at("case", number, "published"):
            figures = _published(case.get("published", {}), file, printed)
        own = {name: value for name, value in case.items() if name in _RUN}
        varied = [name for name in grid if name not in own]
        size = math.prod(len(grid[name]) for name in varied)
        for name, default in (("seeds", [0]), ("draws", 1)):
            value = own.get(name, shared.get(name, default))
            size *= value if type(value) is int else len(value)
        if (runs_in_all := runs_in_all + size) > _MOST_RUNS:
            found = f"{runs_in_all} or more with the values of [grid], the seeds and the draws"
            raise file.refuse(f"an experiment has at most {_MOST_RUNS} runs. Found {found}.", "case", number)
        for values in itertools.product(*(grid[name] for name in varied)):
            point = dict(zip(varied, values, strict=True)) | own
            label = case.get("label") or ", ".join(f"{name} {value}" for name, value in point.items())
            if "label" in case:
                label += "".join(f", {name} {point[name]}" for name in varied)
            runs = tuple(_runs(file, dict(shared) | point, number, layout))
            plain = {
                name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in point.items()
            }
            yield GridRow(label or runs[0].victim.models[0], case.get("group"), runs, plain, figures)


def _printed(file: TomlFile) -> list[dict[str, str]]:
    """Return the rows of the CSV file with a paper's figures; none if [paper] names no file."""
    if (name := file.data.get("paper", {}).get("file")) is None:
        return []
    try:
        lines = read_text(file.path.parent / name, "paper's figures").splitlines()
    except PrivlabError as error:
        raise file.refuse(str(error), "paper", 0, "file") from None
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def _published(wanted: Mapping[str, Any], file: TomlFile, printed: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return what a paper printed for a case: figures by metric, or the row of its file with the wanted values."""
    if all(key in KNOWN and isinstance(value, int | float) for key, value in wanted.items()):
        return {key: float(value) for key, value in wanted.items()}
    if (name := file.data.get("paper", {}).get("file")) is None:
        right = "figures by metric, or names a row of the file that [paper] gives"
        raise PrivlabError(f"published holds {right}. Found {wanted!r}.")
    found = [row for row in printed if all(row.get(key) == str(value) for key, value in wanted.items())]
    if len(found) != 1:
        raise PrivlabError(f"{len(found)} rows of {name} have {dict(wanted)}. Give what names one.")
    # MJP prints FFT2D by its authors' formula, which is not the mended one that bears the short name here.
    named = {"lpips": "lpips_alex", "fft2d": "fft2d_mjp", "acc": "correct", "vit_base_acc": "correct"}
    values = {named.get(key, key): value for key, value in found[0].items() if key not in wanted and value}
    try:
        return {key: float(value) for key, value in values.items() if key in KNOWN}
    except ValueError as error:
        raise PrivlabError(f"{name} must hold numbers: {error}.") from None


def _runs(file: TomlFile, values: dict[str, Any], number: int, layout: Layout) -> Iterator[Case]:
    """Return the cases of one row: one for each seed and draw."""
    keys = [*values]
    if "model" not in values:
        raise file.refuse("model must be the name of one victim. Found None.", "run")
    leaky = any(name == LPIPS or METRICS[name].arrow for name in layout.columns if name not in PLACEMENT)
    structure = [name for name in STRUCTURE if leaky and name not in layout.columns]
    metrics = _several(values.pop("metrics", [*layout.columns, *structure]))
    model, setting = values.pop("model"), values.pop("setting", "a")
    for name in _IN_BATCH:
        if type(values.get(name)) is int and values[name] > _MOST_IN_BATCH:
            raise file.refuse(f"{name} must be at most {_MOST_IN_BATCH}. Found {values[name]}.", "case", number)
    seeds, draws, options = values.pop("seeds", [0]), values.pop("draws", 1), _several(values.pop("set", []))
    options += [f"{name}={_text(values.pop(name))}" for name in keys if name.startswith("client.")]
    values |= {"gamma": float(values["gamma"])} if "gamma" in values else {}
    try:
        metrics = [name for name in metrics if name not in PLACEMENT]
        first = specify(model, setting, metrics=metrics, options=options, **values)
        for seed, draw in itertools.product(seeds, range(draws)):
            yield replace(first, seed=seed, draw=draw)
    except PrivlabError as error:
        key = _blamed(str(error), keys)
        places = (("case", number, key), ("grid", 0, key))  # a key of the case, of the grid, or of the whole run
        place = next((place for place in places if place in file.places), ("run", 0, key))
        raise file.refuse(str(error), *place) from None


def _several(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else [*value]


def _text(value: object) -> str:
    """Return a value of TOML as `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _blamed(message: str, keys: Sequence[str]) -> str:
    """Return the first key that an error message names, under its own name or that of the field."""
    words = {word.strip("'.,:-").partition("=")[0] for word in message.split()}
    names = {"model": "models", "setting": "settings", "attack": "attacks", "set": "options"}
    by_key = {key: names.get(key, key) for key in keys}
    return next((key for key, name in by_key.items() if words & {key, name, name.removesuffix("s")}), "")

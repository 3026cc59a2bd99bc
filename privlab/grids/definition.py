"""An experiment as data: a TOML file with what is compared, the layout of its table, and what a paper printed."""

import csv
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from privlab.attacks import attacks as installed_attacks
from privlab.base import PrivlabError, parse_toml, read_text, unknown_name
from privlab.evaluation import Specification
from privlab.evaluation.lpips_choice import choose_lpips, named_lpips
from privlab.metrics import METRICS, PLACEMENT, STRUCTURE
from privlab.metrics.names import LPIPS
from privlab.threat import Client

KNOWN = {**METRICS, **PLACEMENT}
"""The metrics that may be a column of a table or an axis of a figure."""

FIGURES: dict[str, str] = {
    "curve": "a score against an option, such as gamma, paper's attack beside worst case",
    "trade-off": "utility against leakage, a point for each case",
    "distribution": "a score's distribution over the images, for each case and attack",
    "sheet": "reconstructions at the best, the median and the worst score",
    "claim": "the paper's figure beside the worst case, as paired bars",
}
"""The kinds of figure, each with what it shows."""

CHOICE = ("limit", "every", "offset", "manifest")
"""The keys of `[run]` that choose images."""

_ALIASES = {"model": "models", "setting": "settings", "attack": "attacks", "set": "options"}
_SEVERAL = {"attacks", "metrics", "images", "public", "options"}
_RUN = {f.name for f in fields(Specification)} - set(_ALIASES.values()) - {"seed", "draw", "force"} | set(_ALIASES)
_RUN |= {"seeds", "draws"}
_CLIENT = {f"client.{f.name}" for f in fields(Client)}
_RUN |= _CLIENT
_CASE = {"label", "group", "published"}
_NO_GRID = {"attack", "metrics", "images", "public", "set", "seeds", "draws"}


@dataclass(frozen=True, eq=False)
class Case:
    """One row of the grid: what is run, under which name, and what a paper printed for it.

    `runs` has one specification for each seed and draw; where it has several settings, the case is of `setting`, and
    they are attacked together. `options` holds what the file says of this case alone; figures take their axes from it.
    """

    label: str
    group: str | None
    runs: tuple[Specification, ...]
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
    cases: tuple[Case, ...]
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
    runs = [spec for case in experiment.cases for spec in case.runs]
    metrics = {name for spec in runs for name in spec.metrics}
    warning = None
    if LPIPS in metrics:
        asked = (spec.lpips_weights for spec in runs if LPIPS in spec.metrics)
        metric, warning = choose_lpips(asked, begun)
    else:
        measured = [name for name in ("lpips_alex", "lpips_squeeze", "lpips_vgg") if name in metrics]
        metric = (*measured, "lpips_alex")[0]
    layout = experiment.layout
    cases = tuple(
        replace(case, runs=tuple(replace(spec, metrics=named_lpips(spec.metrics, metric)) for spec in case.runs))
        for case in experiment.cases
    )
    figures = tuple(
        replace(figure, y=named_lpips([figure.y], metric)[0], x=figure.x and named_lpips([figure.x], metric)[0])
        for figure in experiment.figures
    )
    decimals = {named_lpips([name], metric)[0]: places for name, places in layout.decimals.items()}
    layout = replace(layout, columns=named_lpips(layout.columns, metric), decimals=decimals)
    return replace(experiment, cases=cases, layout=layout, figures=figures), warning


def papers_attack(attacks: Iterable[str]) -> str | None:
    """Return the one of the attacks that the defenses' papers report: MJP's, or else Permutation Equivariance's."""
    there = set(attacks)
    return next((name for name in ("april", "inversion-mae") if name in there), None)


def beside(metrics: Iterable[str]) -> set[str]:
    """Return the metrics that only the records show, because the variant that MJP prints was measured too."""
    there = set(metrics)
    return {name for name, printed in {"fft2d": "fft2d_mjp", "ssim_skimage": "ssim"}.items() if printed in there}


@dataclass(frozen=True)
class _File:
    """A TOML file that can tell the line of a key; those `overridden` by --set, as (table, key), have none."""

    path: Path
    text: str
    overridden: frozenset[tuple[str, str]] = frozenset()

    def refuse(self, message: str, table: str = "", number: int = 0, key: str = "") -> PrivlabError:
        """Return an error that names the line of a key within the `number`-th table of that name."""
        if (table, key) in self.overridden:
            return PrivlabError(f"--set {table}.{key}: {message}")
        return PrivlabError(f"{self.path}, line {self.line(table, number, key)}: {message}")

    def unknown(self, kind: str, name: str, choices: Sequence[str], table: str, number: int = 0) -> PrivlabError:
        """Return an error for a key that is none of the `choices`, with the nearest ones."""
        return self.refuse(str(unknown_name(kind, name, choices)), table, number, name)

    def line(self, table: str, number: int, key: str) -> int:
        """Return the line of a key or of its sub-table, or else of the table's header; without a table, the file's."""
        header = re.compile(rf"\s*\[+\s*{re.escape(table)}\s*\]+\s*(#.*)?$")
        starts = [i for i, line in enumerate(self.text.splitlines(), 1) if table and header.match(line)]
        if table and number >= len(starts):  # an inline table, or none
            return self.line("", 0, table)
        start, inside = (starts[number], rf"{re.escape(table)}\s*\.\s*") if table else (0, "")
        plain = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[.=]")
        below = re.compile(rf"\s*\[+\s*{inside}[\"']?{re.escape(key)}[\"']?\s*[.\]]")
        own = True
        for i, line in enumerate(self.text.splitlines()[start:], start + 1):
            if key and ((own and plain.match(line)) or below.match(line)):
                return i
            if line.lstrip().startswith("["):
                own = False
                if not re.match(rf"\s*\[+\s*{inside}", line):
                    break
        return max(start, 1)


def read_experiment(path: Path, overrides: Sequence[str] = (), **run: Any) -> Experiment:  # noqa: ANN401
    """Parse and check an experiment; nothing is loaded or run.

    Args:
        path: the TOML file.
        overrides: TABLE.KEY=VALUE, with the value in TOML ("run.limit=4", "grid.gamma=[0.1, 0.2]").
        run: fields of `[run]` that replace those of the file; a manifest replaces all that choose images.

    Raises:
        PrivlabError: for unknown keys, wrong types, or impossible cases, with the line and the nearest valid name.
    """
    file = _File(path, read_text(path, "experiment"))
    data = parse_toml(file.text, str(path))
    _keys(file, data, ("title", "source", "run", "grid", "case", "table", "figure", "paper"), "")
    for name, kind in {"title": str, "source": str, "run": dict, "grid": dict, "table": dict, "paper": dict}.items():
        if name in data and not isinstance(data[name], kind):
            right = "table" if kind is dict else "text"
            raise file.refuse(f"{name} must be a {right}. Found {data[name]!r}.", "", 0, name)
    file = replace(file, overridden=frozenset(_override(data, override) for override in overrides))
    paper = data.get("paper", {})
    _keys(file, paper, ("file", "conditions"), "paper")
    given = {name: value for name, value in run.items() if value is not None}
    own = {name: value for name, value in data.get("run", {}).items() if "manifest" not in given or name not in CHOICE}
    shared = own | given
    _keys(file, shared, sorted(_RUN), "run")
    layout = _layout(file, data.get("table", {}))
    published = _Published.read(file, paper.get("file"))
    cases = tuple(_cases(file, data, shared, published, layout))
    conditions = paper.get("conditions", {})
    if not isinstance(conditions, dict) or not all(isinstance(value, str) for value in conditions.values()):
        raise file.refuse(f"conditions must be a table of texts. Found {conditions!r}.", "paper", 0, "conditions")
    return Experiment(
        name=path.stem,
        title=data.get("title", path.stem),
        source=data.get("source"),
        cases=cases,
        layout=layout,
        figures=tuple(_figures(file, data.get("figure", []), cases)),
        conditions=conditions,
    )


def _override(data: dict[str, Any], override: str) -> tuple[str, str]:
    """Put TABLE.KEY=VALUE into the data, and return table and key."""
    where, equals, text = override.partition("=")
    table, dot, key = where.strip().partition(".")
    if not (equals and dot and key):
        raise PrivlabError(f"--set must be TABLE.KEY=VALUE, such as run.limit=4. Found '{override}'.")
    try:
        value = parse_toml(f"value = {text}", override)["value"]
    except PrivlabError:
        value = text.strip()  # a bare word is a text
    if table not in ("run", "grid", "table"):
        raise unknown_name("table of --set", table, ("run", "grid", "table"))
    data.setdefault(table, {})[key] = value
    return table, key


def _keys(file: _File, given: Mapping[str, Any], known: Sequence[str], table: str, number: int = 0) -> None:
    for name in given:
        if name not in known:
            raise file.unknown(f"key of [{table}]" if table else "table or key", name, known, table or name, number)


def _layout(file: _File, given: Mapping[str, Any]) -> Layout:
    _keys(file, given, [f.name for f in fields(Layout)], "table")
    wanted = {
        "columns": lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v) and v,
        "decimals": lambda v: isinstance(v, dict) and all(type(n) is int and 0 <= n <= 12 for n in v.values()),
        "bold": lambda v: isinstance(v, bool),
        "interval": lambda v: isinstance(v, float) and 0 < v < 1,
        "geometry": lambda v: v in ("in_place", "oracle", "reassembled"),
        "paper_attack": lambda v: isinstance(v, str),
    }
    right = {
        "columns": "a list of metrics",
        "decimals": "a table of METRIC = 0 … 12",
        "bold": "true or false",
        "interval": "a number in (0, 1)",
        "geometry": "in_place, oracle or reassembled",
        "paper_attack": "an attack",
    }
    for name, value in given.items():
        if not wanted[name](value):
            raise file.refuse(f"{name} must be {right[name]}. Found {value!r}.", "table", 0, name)
    for where in ("columns", "decimals"):
        for name in given.get(where, ()):
            if name not in (known := [*KNOWN, LPIPS]):
                raise file.refuse(str(unknown_name("metric", name, known)), "table", 0, where)
    if (paper := given.get("paper_attack")) is not None and paper not in installed_attacks():
        raise file.refuse(str(unknown_name("attack", paper, installed_attacks())), "table", 0, "paper_attack")
    columns: dict[str, Any] = {"columns": tuple(given["columns"])} if "columns" in given else {}
    return Layout(**dict(given) | columns)


def _figures(file: _File, given: object, cases: Sequence[Case]) -> Iterator[Figure]:
    if not isinstance(given, list) or not all(isinstance(figure, dict) for figure in given):
        raise file.refuse("figures are written as [[figure]].", "figure")
    for number, figure in enumerate(given):
        _keys(file, figure, [f.name for f in fields(Figure)], "figure", number)
        if (kind := str(figure.get("kind"))) not in FIGURES:
            raise file.refuse(str(unknown_name("figure", kind, FIGURES)), "figure", number, "kind")
        if not isinstance(figure.get("name", ""), str):
            raise file.refuse(f"name must be a text. Found {figure['name']!r}.", "figure", number, "name")
        for axis in ("x", "y"):
            known = [*KNOWN, LPIPS, *dict.fromkeys(name for case in cases for name in case.options)]
            if axis in figure and figure[axis] not in known:
                raise file.refuse(str(unknown_name(axis, str(figure[axis]), known)), "figure", number, axis)
        if kind == "curve" and "x" not in figure:
            raise file.refuse("a curve needs x, an option that its cases differ in.", "figure", number)
        yield Figure(**({"name": f"{kind}-{number + 1}"} | figure))


@dataclass(frozen=True)
class _Published:
    """The rows of a CSV file with a paper's figures."""

    name: str
    rows: Sequence[Mapping[str, str]]

    @classmethod
    def read(cls, file: _File, name: object) -> "_Published | None":
        if name is None:
            return None
        if not isinstance(name, str):
            raise file.refuse(f"file must be the name of a CSV file. Found {name!r}.", "paper", 0, "file")
        try:
            lines = (file.path.parent / name).read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise file.refuse(f"cannot read '{name}': {reason}.", "paper", 0, "file") from None
        return cls(name, list(csv.DictReader(line for line in lines if not line.startswith("#"))))

    def row(self, wanted: Mapping[str, object]) -> dict[str, float]:
        """Return the figures of the only row with these values, by privlab's names of the metrics."""
        found = [row for row in self.rows if all(row.get(key) == str(value) for key, value in wanted.items())]
        if len(found) != 1:
            raise PrivlabError(f"{len(found)} rows of {self.name} have {dict(wanted)}. Give what names one.")
        # MJP prints FFT2D by its authors' formula, which is not the mended one that bears the short name here.
        named = {"lpips": "lpips_alex", "fft2d": "fft2d_mjp", "acc": "correct", "vit_base_acc": "correct"}
        values = {named.get(key, key): value for key, value in found[0].items() if key not in wanted and value}
        try:
            return {key: float(value) for key, value in values.items() if key in KNOWN}
        except ValueError as error:
            raise PrivlabError(f"{self.name} must hold numbers: {error}.") from None


def _cases(
    file: _File, data: Mapping[str, Any], shared: Mapping[str, Any], published: _Published | None, layout: Layout
) -> Iterator[Case]:
    grid, given = data.get("grid", {}), data.get("case", [{}])
    _keys(file, grid, sorted(_RUN - _NO_GRID), "grid")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise file.refuse(f"{name} must be a list of the values to try. Found {values!r}.", "grid", 0, name)
    if not isinstance(given, list) or not given or not all(isinstance(case, dict) for case in given):
        raise file.refuse("cases are written as [[case]].", "case")
    for number, case in enumerate(given):
        _keys(file, case, sorted(_RUN | _CASE), "case", number)
        for name in ("label", "group"):
            if name in case and not isinstance(case[name], str):
                raise file.refuse(f"{name} must be a text. Found {case[name]!r}.", "case", number, name)
        figures = _figures_of(file, case.get("published", {}), published, number)
        own = {name: value for name, value in case.items() if name not in _CASE}
        varied = [name for name in grid if name not in own]
        for values in itertools.product(*(grid[name] for name in varied)):
            point = dict(zip(varied, values, strict=True)) | own
            label = case.get("label") or ", ".join(f"{name} {value}" for name, value in point.items())
            if "label" in case:
                label += "".join(f", {name} {point[name]}" for name in varied)
            runs = tuple(_runs(file, dict(shared) | point, number, layout))
            plain = {
                name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in point.items()
            }
            yield Case(label or runs[0].models[0], case.get("group"), runs, plain, figures)


def _figures_of(file: _File, wanted: object, published: _Published | None, number: int) -> dict[str, float]:
    """Return what a paper printed for a case: figures by metric, or a row of the paper's file."""
    if not isinstance(wanted, dict):
        raise file.refuse(f"published must be a table. Found {wanted!r}.", "case", number, "published")
    if all(name in KNOWN and isinstance(value, int | float) for name, value in wanted.items()):
        return {name: float(value) for name, value in wanted.items()}
    if published is None:
        raise file.refuse(
            f"published holds figures by metric, or names a row of the file that [paper] gives. Found {wanted!r}.",
            *("case", number, "published"),
        )
    try:
        return published.row(wanted)
    except PrivlabError as error:
        raise file.refuse(str(error), "case", number, "published") from None


def _runs(file: _File, values: dict[str, Any], number: int, layout: Layout) -> Iterator[Specification]:
    """Return the specifications of one case: one for each seed and draw."""
    keys = list(values)
    seeds, draws = values.pop("seeds", [0]), values.pop("draws", 1)
    if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds) or not seeds:
        raise file.refuse(f"seeds must be a list of whole numbers. Found {seeds!r}.", *_where(file, number, "seeds"))
    if type(draws) is not int or draws < 1:
        raise file.refuse(f"draws must be a positive whole number. Found {draws!r}.", *_where(file, number, "draws"))
    for name, right in (("model", "the name of one victim"), ("setting", "a, b or c")):
        if not isinstance(value := values.get(name, None if name == "model" else ""), str):
            raise file.refuse(f"{name} must be {right}. Found {value!r}.", *_where(file, number, name))
    leaky = any(name == LPIPS or METRICS[name].arrow for name in layout.columns if name not in PLACEMENT)
    values.setdefault("metrics", [*layout.columns, *(n for n in STRUCTURE if leaky and n not in layout.columns)])
    plain = {f.name: f.type for f in fields(Specification)}
    of_client = tuple(f"{name}={_text(values.pop(name))}" for name in [*values] if name in _CLIENT)
    given: dict[str, Any] = {}
    for name, value in values.items():
        target = _ALIASES.get(name, name)
        if target in _SEVERAL:
            value = [value] if isinstance(value, str) else value
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise file.refuse(f"{name} must be a list of texts. Found {value!r}.", *_where(file, number, name))
            given[target] = tuple(value)
        elif target in ("models", "settings"):
            given[target] = (value,)
        elif not _fits(value, kind := str(plain[target])):
            raise file.refuse(f"{name} must be {_said(kind)}. Found {value!r}.", *_where(file, number, name))
        else:
            given[target] = float(value) if target == "gamma" else value
    given["options"] = (*given.get("options", ()), *of_client)
    given["metrics"] = tuple(name for name in given["metrics"] if name not in PLACEMENT)
    try:
        first = Specification(**given)
        for seed, draw in itertools.product(seeds, range(draws)):
            yield replace(first, seed=seed, draw=draw)
    except PrivlabError as error:
        raise file.refuse(str(error), *_where(file, number, _blamed(str(error), keys))) from None


def _text(value: object) -> str:
    """Return a value of TOML as `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _blamed(message: str, keys: Sequence[str]) -> str:
    """Return the first key that an error message names, under its own name or that of the specification's field."""
    words = {word.strip("'.,:-").partition("=")[0] for word in message.split()}
    fields_of = {key: _ALIASES.get(key, key) for key in keys}
    return next((key for key, name in fields_of.items() if words & {key, name, name.removesuffix("s")}), "")


def _where(file: _File, number: int, key: str) -> tuple[str, int, str]:
    """Return the table in which a case's key stands: its own, the grid's, or the one of the whole run."""
    if not key:
        return ("case" if "[[case" in file.text else "run"), number, key
    for table, n in (("case", number), ("grid", 0)):
        if (table, key) in file.overridden or file.line(table, n, key) != file.line(table, n, ""):
            return table, n, key
    return "run", 0, key


def _fits(value: object, annotation: str) -> bool:
    kinds = {"bool": bool, "int": int, "float": (int, float), "str": str}
    wanted = next(kind for name, kind in kinds.items() if name in annotation)
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _said(annotation: str) -> str:
    names = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
    return next(said for name, said in names.items() if name in annotation)

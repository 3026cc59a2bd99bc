"""Results that were measured elsewhere: scores with a reference, or reconstructions that are scored here."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import torch
from timm.data import resolve_data_config
from timm.models import get_pretrained_cfg
from torchvision.transforms.functional import to_tensor

import privlab
from privlab.base import PrivlabError, read_toml, unknown_name
from privlab.evaluation import COLUMNS, CONTROL, GEOMETRIES, SCHEMA, SETTINGS, Record, Specification, cell_key
from privlab.grids.definition import KNOWN
from privlab.images import ImageSource, NamedImage, Preprocessing, as_text, open_images, to_png
from privlab.metrics import METRICS, Learned, LpipsUnavailable, load_embedding, load_lpips, score
from privlab.stores import RunDirectory, Store, merge_records, part_frame

__all__ = ["add_external", "case_names"]

_KEYS = ("reference", "case", "attack", "setting", "scores", "reconstructions", "images")
_NEEDED_KEYS = ("reference", "case", "attack")
_RESERVED = ("worst case", "best single attack")
_COMPARED = ("cell", "image", "image_sha256", "geometry", "batch", "status", "reason", "metrics", "external")
_BATCH = 32
_SCORE_TOLERANCE = 1e-4
"""Relative difference above which two scores contradict each other; smaller ones are rounding of float32."""


def add_external(directory: Path, file: Path) -> int:
    """Add what a TOML file states to the records of an experiment, and return the number of records added.

    `reference`, `case` (a name of `case_names`) and `attack` say what was measured. `setting` is the case's own where
    it is left out. [scores] holds numbers by metric, which belong to no image. `reconstructions` is a folder of images
    as large as the victim's input; they are matched by their stems with the private `images`, a folder or "samples".
    Paths of folders are relative to the file. An image that cannot be matched, read or scored becomes a failed record.
    A record that the store has already is not added again.

    Raises:
        PrivlabError: for keys, values or names that do not fit, or scores that contradict those in the store.
    """
    run = RunDirectory(directory)
    stated = _Stated.read(file, _cases_of(directory, run.read_run()))
    rows = [stated.row(stated.scores)] if stated.scores else list(_scored(stated, run))
    new = list(_new(rows, run.store))
    run.store.add(pa.Table.from_pylist(new, schema=COLUMNS))
    return len(new)


def case_names(cases: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the place of each case by its name: the label, or group and label where several have that label."""
    labels = Counter(case["label"] for case in cases)
    names = [
        case["label"] if labels[case["label"]] == 1 else f"{case['group'] or ''} {case['label']}".strip()
        for case in cases
    ]
    return {name: place for place, name in enumerate(names) if names.count(name) == 1}


@dataclass(frozen=True, eq=False)
class _Case:
    """A case of an experiment as `run.json` states it. `missing` names the metrics that could not be computed there."""

    name: str
    spec: Specification
    cells: frozenset[str]
    missing: frozenset[str]


def _cases_of(directory: Path, facts: Mapping[str, Any]) -> dict[str, _Case]:
    if "experiment" not in facts:
        raise PrivlabError(f"'{directory}' holds no experiment: give a directory that `privlab table` wrote.")
    found = {}
    for name, place in case_names(facts["cases"]).items():
        jobs = facts["cases"][place]["jobs"]
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in jobs[0]["specification"].items()
        }
        spec = Specification(**given)
        cells = frozenset(cell for job in jobs for cell in job["cells"].values())
        found[name] = _Case(name, spec, cells, frozenset(facts["missing_metrics"]))
    return found


@dataclass(frozen=True, eq=False)
class _Stated:
    """The checked contents of a file."""

    file: Path
    reference: str
    case: _Case
    attack: str
    setting: str
    scores: Mapping[str, float]
    reconstructions: str | None
    images: str | None

    @classmethod
    def read(cls, file: Path, cases: Mapping[str, _Case]) -> "_Stated":
        data = read_toml(file, "external result")
        _check(file, data)
        if (name := data["case"]) not in cases:
            raise PrivlabError(f"{file}: {unknown_name('case', name, cases)}")
        scores = {key: float(value) for key, value in data.get("scores", {}).items()}
        setting = data.get("setting", cases[name].spec.settings[0])
        given = (data.get("reconstructions"), data.get("images"))
        if given[0] is not None and setting == "b":
            raise PrivlabError(
                f"{file}: setting b is scored against the shuffled image, which nobody else has. Give its [scores]."
            )
        return cls(file, data["reference"], cases[name], data["attack"], setting, scores, *given)

    def row(self, scores: Mapping[str, float | None], **more: Any) -> Record:  # noqa: ANN401
        """Return a record; weights, labels and devices of results from elsewhere are not known, and stay null."""
        spec = self.case.spec
        row = {
            "victim": spec.models[0],
            "release": spec.released,
            "cut_layer": spec.cut_layer if spec.features_released else None,
            "setting": self.setting,
            "attack": self.attack,
            "geometry": GEOMETRIES[0],
            "image": "",
            "image_sha256": "",
            "seed": 0,
            "draw": 0,
            "status": "ok",
            "metrics": " ".join(sorted(scores)),
            "conditions": json.dumps({"case": self.case.name}, ensure_ascii=False),
            "external": self.reference,
            "schema": SCHEMA,
            "privlab_version": privlab.__version__,
        }
        row |= dict(scores) | more
        return row | {"cell": cell_key(row)}


def _check(file: Path, data: Mapping[str, Any]) -> None:
    """Check that the file has a reference, a case, an attack, and scores or images, and that their values fit.

    Raises:
        PrivlabError: if anything is missing, unknown, or out of range.
    """
    for name, value in data.items():
        if name not in _KEYS:
            raise PrivlabError(f"{file}: {unknown_name('key', name, _KEYS)}")
        wanted, said = (dict, "a table of METRIC = NUMBER") if name == "scores" else (str, "a text")
        if not isinstance(value, wanted) or not value:
            raise PrivlabError(f"{file}: {name} must be {said}. Found {value!r}.")
    if lacking := [name for name in _NEEDED_KEYS if name not in data]:
        raise PrivlabError(f"{file} does not state {lacking[0]}. Give {', '.join(_NEEDED_KEYS)}.")
    pictures = "reconstructions" in data
    if pictures == ("scores" in data) or pictures != ("images" in data):
        found = [name for name in _KEYS if name in data and name not in (*_NEEDED_KEYS, "setting")]
        raise PrivlabError(
            f"{file} must hold [scores], or reconstructions with images. Found {', '.join(found) or 'none of them'}."
        )
    if data["attack"].startswith(CONTROL) or data["attack"] in _RESERVED:
        raise PrivlabError(f"{file}: '{data['attack']}' is a name of ours. Give the attack another name.")
    if data.get("setting", "a") not in SETTINGS:
        raise PrivlabError(f"{file}: {unknown_name('setting', data['setting'], SETTINGS)}")
    for name, value in data.get("scores", {}).items():
        _check_score(file, name, value)


def _check_score(file: Path, name: str, value: object) -> None:
    if name not in KNOWN:
        raise PrivlabError(f"{file}: {unknown_name('metric', name, KNOWN)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PrivlabError(f"{file}: {name} must be a number. Found {value!r}.")
    low, high = KNOWN[name].range
    if not low <= value <= high:
        raise PrivlabError(f"{file}: {name} must be in [{low:g}, {high:g}]. Found {value:g}.")


def _scored(stated: _Stated, run: RunDirectory) -> Iterator[Record]:
    """Yield a record for each private image and each reconstruction: scored, or failed with its reason."""
    assert stated.reconstructions is not None
    assert stated.images is not None
    folder = stated.file.parent
    images = stated.images if stated.images == "samples" else folder / stated.images
    theirs, private = _Folder.open(folder / stated.reconstructions), _Folder.open(images)
    scorer = _Scorer(stated, run)
    both = [stem for stem in private.places if stem in theirs.places]
    if not both:
        stems = f"'{next(iter(theirs.places))}' … and '{next(iter(private.places))}' …"
        raise PrivlabError(f"{stated.file}: no reconstruction has the name of a private image. Found {stems}.")
    for start in range(0, len(both), _BATCH):
        yield from scorer([(private.at(stem), theirs.at(stem)) for stem in both[start : start + _BATCH]])
    for stem in private.places.keys() - theirs.places.keys():
        yield scorer.failed(private.at(stem), "There is no reconstruction of that name.")
    for stem in theirs.places.keys() - private.places.keys():
        yield scorer.failed(replace(theirs.at(stem), sha256=""), "There is no private image of that name.")


@dataclass(frozen=True, eq=False)
class _Folder:
    """Images by their stems."""

    source: ImageSource
    places: Mapping[str, int]

    @classmethod
    def open(cls, source: str | Path) -> "_Folder":
        if source != "samples" and not Path(source).is_dir():
            raise PrivlabError(f"'{source}' is not a folder of images.")
        opened, places = open_images(source), {}
        names = opened.names or ()
        for place, name in enumerate(names):
            if places.setdefault(Path(name).stem, place) != place:
                first = names[places[Path(name).stem]]
                raise PrivlabError(f"'{source}' has two images of one name: '{first}' and '{name}'.")
        return cls(opened, places)

    def at(self, stem: str) -> NamedImage:
        return self.source.pick([self.places[stem]])[0]


@dataclass(frozen=True, eq=False)
class _Scorer:
    """Scores reconstructions by the metrics of the case; PNGs are kept of images of which the run has some already."""

    stated: _Stated
    run: RunDirectory

    def __call__(self, pairs: Sequence[tuple[NamedImage, NamedImage]]) -> Iterator[Record]:
        height, width = self.preprocessing.size
        fine = []
        for private, theirs in pairs:
            if (problem := private.problem or theirs.problem) is not None:
                yield self.failed(private, problem)
            elif theirs.pixels is not None and theirs.pixels.size != (width, height):
                found = f"{theirs.pixels.width}×{theirs.pixels.height}"
                yield self.failed(private, f"The reconstruction has {found} pixels; the victim takes {width}×{height}.")
            else:
                fine.append((private, theirs))
        if not fine:
            return
        ours = torch.stack([self.preprocessing(private.pixels) for private, _ in fine if private.pixels])
        reconstruction = torch.stack([to_tensor(theirs.pixels) for _, theirs in fine])
        scores = {
            name: values.tolist() for name, values in score(reconstruction, ours, self.metrics, self.learned).items()
        }
        for i, (private, _) in enumerate(fine):
            values = {name: None if math.isnan(of_all[i]) else of_all[i] for name, of_all in scores.items()}
            row = self.stated.row(values, **self._of(private))
            folder = f"pictures/{private.sha256[:16]}"
            if (self.run.path / folder).is_dir():
                self.run.write_file(f"{folder}/{row['cell']}.png", to_png(reconstruction[i]))
            yield row

    def failed(self, image: NamedImage, reason: str) -> Record:
        return self.stated.row({}, **self._of(image), status="failed", reason=reason)

    def _of(self, image: NamedImage) -> Record:
        return {"image": as_text(image.name), "image_sha256": image.sha256, "victim_params": self.params}

    @cached_property
    def params(self) -> str:
        """Return what the records of the case say of its victim."""
        table = self.run.store.read(["cell", "victim_params"])
        own = table.filter(pc.field("cell").cast(pa.string()).isin(sorted(self.stated.case.cells)))
        if not len(own):
            raise PrivlabError(
                f"{self.stated.file}: case '{self.stated.case.name}' has no records yet, which say how large its "
                "images are. Run `privlab table` first."
            )
        return own["victim_params"][0].as_py()

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """Return the victim's preprocessing; crop and interpolation are those that timm states for its architecture."""
        params = json.loads(self.params)
        known = get_pretrained_cfg(params["architecture"])
        config = resolve_data_config({"input_size": tuple(params["input"])}, known.to_dict() if known else {})
        return Preprocessing(
            size=tuple(params["input"][1:]),
            mean=tuple(params["mean"]),
            std=tuple(params["std"]),
            crop_pct=config["crop_pct"],
            interpolation=config["interpolation"],
        )

    @cached_property
    def learned(self) -> dict[str, Learned]:
        """Load those of the case's metrics with trained weights whose weights are on this machine."""
        spec, found = self.stated.case.spec, {}
        weights = None if spec.lpips_weights is None else Path(spec.lpips_weights)
        for name in self._wanted:
            with suppress(LpipsUnavailable):
                if name.startswith("lpips_"):
                    found[name] = load_lpips(name.removeprefix("lpips_"), weights)
                elif name == "f_sim" and spec.embedding is not None:
                    found[name] = load_embedding(spec.embedding, torch.device("cpu"))
        return found

    @cached_property
    def metrics(self) -> list[str]:
        return [name for name in self._wanted if METRICS[name].function is not None or name in self.learned]

    @property
    def _wanted(self) -> list[str]:
        return [name for name in self.stated.case.spec.metrics if name not in self.stated.case.missing]


def _new(rows: Sequence[Record], store: Store) -> Iterator[Record]:
    """Yield the records that add something to the store: new ones, those that had failed, and those with new metrics.

    Raises:
        PrivlabError: if a score contradicts that of the store.
    """
    table = store.read([*_COMPARED, *KNOWN])
    there = merge_records(part_frame(table.filter(pc.field("external").is_valid())))
    image = there.image_sha256.where(there.image_sha256 != "", there.image)
    found: dict[tuple[str, str], dict[str, Any]] = dict(
        zip(zip(there.cell, image, strict=True), there.to_dict("records"), strict=True)
    )
    for row in rows:
        old = found.get((row["cell"], row["image_sha256"] or row["image"]))
        if old is None or (old["status"] != "ok" and row["status"] == "ok"):
            yield row
        elif row["status"] == "ok":
            names = str(row["metrics"]).split()
            for name in names:
                _check_same(row, name, old[name])
            if not set(names) <= set(old["metrics"].split()):
                yield row


def _check_same(row: Record, name: str, old: float) -> None:
    new = row[name]
    if new is None or pd.isna(old) or new == old or abs(new - old) <= _SCORE_TOLERANCE * max(abs(old), 1e-3):
        return
    of = f" of {row['image']}" if row["image"] else ""
    raise PrivlabError(
        f"{row['attack']} ({row['external']}): {name}{of} is {old:g} in the store. Found {new:g}: give a reference of "
        "its own."
    )

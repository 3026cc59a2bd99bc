"""Results that were measured elsewhere: scores with a reference, or reconstructions that are scored here."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from timm.data import resolve_data_config
from timm.models import get_pretrained_cfg
from torch import Tensor
from torchvision.transforms.functional import to_tensor

import privlab
from privlab.base import PrivlabError, parse_toml, read_text, unknown_name
from privlab.evaluation import (
    COLUMNS,
    CONTROL,
    GEOMETRIES,
    SCHEMA,
    SETTINGS,
    Record,
    Specification,
    cell_key,
    learned_metric,
    score_images,
)
from privlab.grids.definition import KNOWN
from privlab.images import ImageSource, NamedImage, Preprocessing, as_text, open_images, to_png
from privlab.metrics import METRICS, Learned, LpipsUnavailable
from privlab.stores import RunDirectory, Store, differs, merge_records, part_frame

_KEYS = ("reference", "case", "attack", "setting", "scores", "reconstructions", "images")
_NEEDED_KEYS = ("reference", "case", "attack")
_RESERVED = ("worst case", "best single attack")
_COMPARED = ("cell", "image", "image_sha256", "geometry", "batch", "status", "reason", "metrics", "external")
_BATCH = 32


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
    stated = _Stated.read(file, run)
    scores = {name: float(value) for name, value in stated.given.get("scores", {}).items()}
    rows = [stated.row(scores)] if scores else list(_scored(stated, run))
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
class _Stated:
    """The checked contents of a file, and its case as `run.json` states it, with the metrics that can be computed."""

    file: Path
    given: Mapping[str, Any]
    spec: Specification
    cells: frozenset[str]
    metrics: Sequence[str]

    @classmethod
    def read(cls, file: Path, run: RunDirectory) -> "_Stated":
        facts = run.read_run()
        if "experiment" not in facts:
            raise PrivlabError(f"'{run.path}' holds no experiment: give a directory that `privlab table` wrote.")
        data = parse_toml(read_text(file, "external result"), str(file))
        _check(file, data)
        places = case_names(facts["cases"])
        if (name := data["case"]) not in places:
            raise PrivlabError(f"{file}: {unknown_name('case', name, places)}")
        jobs = facts["cases"][places[name]]["jobs"]
        stated: dict[str, Any] = dict(jobs[0]["specification"])
        stated = {key: tuple(value) if isinstance(value, list) else value for key, value in stated.items()}
        spec = Specification(**stated)
        data.setdefault("setting", spec.settings[0])
        if "reconstructions" in data and data["setting"] == "b":
            raise PrivlabError(
                f"{file}: setting b is scored against the shuffled image, which nobody else has. Give its [scores]."
            )
        cells = frozenset(cell for job in jobs for cell in job["cells"].values())
        metrics = [name for name in spec.metrics if name not in facts["missing_metrics"]]
        return cls(file, data, spec, cells, metrics)

    def row(self, scores: Mapping[str, float | None], **more: Any) -> Record:  # noqa: ANN401
        """Return a record; weights, labels and devices of results from elsewhere are not known, and stay null."""
        spec, given = self.spec, self.given
        row = {
            "victim": spec.models[0],
            "release": spec.released,
            "cut_layer": spec.cut_layer if spec.features_released else None,
            "setting": given["setting"],
            "attack": given["attack"],
            "geometry": GEOMETRIES[0],
            "image": "",
            "image_sha256": "",
            "seed": 0,
            "draw": 0,
            "status": "ok",
            "metrics": " ".join(sorted(scores)),
            "conditions": json.dumps({"case": given["case"]}, ensure_ascii=False),
            "external": given["reference"],
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
    folder, images = stated.file.parent, stated.given["images"]
    theirs = _Folder.open(folder / stated.given["reconstructions"])
    private = _Folder.open(images if images == "samples" else folder / images)
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
        fine: list[tuple[NamedImage, Tensor, Tensor]] = []
        for private, theirs in pairs:
            if (problem := private.problem or theirs.problem) is not None:
                yield self.failed(private, problem)
            elif theirs.pixels is not None and theirs.pixels.size != (width, height):
                found = f"{theirs.pixels.width}×{theirs.pixels.height}"
                yield self.failed(private, f"The reconstruction has {found} pixels; the victim takes {width}×{height}.")
            elif private.pixels is not None and theirs.pixels is not None:
                fine.append((private, self.preprocessing(private.pixels), to_tensor(theirs.pixels)))
        if not fine:
            return
        named, ours, reconstructions = zip(*fine, strict=True)
        scores = score_images(torch.stack(reconstructions), torch.stack(ours), self.metrics, self.learned)
        wrong = scores.pop("levels_wrong")
        for i, private in enumerate(named):
            own = {name: values[i] for name, values in scores.items()}
            row = self.stated.row(own, levels_wrong=wrong[i], **self._of(private))
            folder = f"pictures/{private.sha256[:16]}"
            if (self.run.path / folder).is_dir():
                self.run.write_file(f"{folder}/{row['cell']}.png", to_png(reconstructions[i]))
            yield row

    def failed(self, image: NamedImage, reason: str) -> Record:
        return self.stated.row({}, **self._of(image), status="failed", reason=reason)

    def _of(self, image: NamedImage) -> Record:
        return {"image": as_text(image.name), "image_sha256": image.sha256, "victim_params": self.params}

    @cached_property
    def params(self) -> str:
        """Return what the records of the case say of its victim."""
        table = self.run.store.read(["cell", "victim_params"])
        own = table.filter(pc.field("cell").cast(pa.string()).isin(sorted(self.stated.cells)))
        if not len(own):
            raise PrivlabError(
                f"{self.stated.file}: case '{self.stated.given['case']}' has no records yet, which say how large its "
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
        spec, found = self.stated.spec, {}
        weights = None if spec.lpips_weights is None else Path(spec.lpips_weights)
        for name in self.stated.metrics:
            with suppress(LpipsUnavailable):
                found[name] = learned_metric(name, weights, spec.embedding, torch.device("cpu"))
        return {name: metric for name, metric in found.items() if metric is not None}

    @cached_property
    def metrics(self) -> list[str]:
        return [name for name in self.stated.metrics if METRICS[name].function is not None or name in self.learned]


def _new(rows: Sequence[Record], store: Store) -> Iterator[Record]:
    """Yield the records that add something to the store: new ones, those that had failed, and those with new metrics.

    Raises:
        PrivlabError: if a score contradicts that of the store.
    """
    table = store.read([*_COMPARED, *KNOWN])
    there = merge_records(part_frame(table.filter(pc.field("external").is_valid())))
    found = {(old["cell"], old["image_sha256"] or old["image"]): old for old in there.to_dict("records")}
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
    if row[name] is None or not differs(old, row[name]):
        return
    of = f" of {row['image']}" if row["image"] else ""
    raise PrivlabError(
        f"{row['attack']} ({row['external']}): {name}{of} is {old:g} in the store. Found {row[name]:g}: give a "
        "reference of its own."
    )

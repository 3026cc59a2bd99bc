"""Results that were measured elsewhere: scores with a reference, or reconstructions that are scored here."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from timm.data import resolve_data_config
from timm.models import get_pretrained_cfg
from torchvision.transforms.functional import to_tensor

import privlab
from privlab.base import PrivlabError, check_name, check_range, read_text
from privlab.evaluation import (
    CONTROL,
    GEOMETRIES,
    SCHEMA,
    SETTINGS,
    Case,
    Record,
    cell_key,
    learned_metric,
    score_images,
)
from privlab.grids.definition import KNOWN, OF_IMAGES
from privlab.grids.specify import case_of
from privlab.grids.toml_file import TomlFile
from privlab.images import NamedImage, Preprocessing, as_text, open_images, to_png
from privlab.metrics import METRICS, Learned, LpipsUnavailable
from privlab.stores import RunDirectory, Store, differs, merge_records, part_frame

_NEEDED = ("reference", "case", "attack")
_MEASURED = ("scores", "reconstructions", "images")
_RIGHT = {
    **dict.fromkeys((*_NEEDED, "setting", "reconstructions", "images"), "a text"),
    "scores": "a table of METRIC = NUMBER",
}
_RESERVED = ("worst case", "best single attack")
_COMPARED = ("cell", "image", "image_sha256", "geometry", "batch", "status", "reason", "metrics", "external")
_NO_RECONSTRUCTION = "There is no reconstruction of that name."
_NO_IMAGE = "There is no private image of that name."


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
    rows = [stated.row(scores)] if scores else _scored(stated, run)
    new = list(_new(rows, run.store))
    run.write_records(new)
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

    path: Path
    given: Mapping[str, Any]
    spec: Case
    cells: frozenset[str]
    metrics: Sequence[str]

    @classmethod
    def read(cls, path: Path, run: RunDirectory) -> "_Stated":
        facts = run.read_run()
        if "experiment" not in facts:
            raise PrivlabError(f"'{run.path}' holds no experiment: give a directory that `privlab table` wrote.")
        file = TomlFile.parse(path, read_text(path, "external result"), {"": _RIGHT})
        _check(file)
        places, data = case_names(facts["cases"]), file.data
        with file.at("", 0, "case"):
            check_name("case", data["case"], places)
        jobs = facts["cases"][places[data["case"]]]["jobs"]
        stated = jobs[0]["specification"] | {"attacks": None}
        spec = case_of(stated, jobs[0]["released"])
        data.setdefault("setting", spec.settings[0])
        if "reconstructions" in data and data["setting"] == "b":
            raise PrivlabError(
                f"{path}: setting b is scored against the shuffled image, which nobody else has. Give its [scores]."
            )
        cells = frozenset(cell for job in jobs for cell in job["cells"].values())
        metrics = [name for name in spec.metrics if name not in facts["missing_metrics"]]
        return cls(path, data, spec, cells, metrics)

    def row(self, scores: Mapping[str, float | None], **more: Any) -> Record:  # noqa: ANN401
        """Return a record; weights, labels and devices of results from elsewhere are not known, and stay null."""
        spec, given = self.spec, self.given
        row = {
            "victim": spec.victim.models[0],
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


def _check(file: TomlFile) -> None:
    """Check that the file has a reference, a case, an attack, and scores or images, and that their values fit.

    Raises:
        PrivlabError: if anything is missing, unknown, or out of range.
    """
    data = file.data
    if lacking := [name for name in _NEEDED if not data.get(name)]:
        raise PrivlabError(f"{file.path} does not state {lacking[0]}. Give {', '.join(_NEEDED)}.")
    found = [name for name in _MEASURED if name in data]
    if found not in (["scores"], ["reconstructions", "images"]):
        raise PrivlabError(
            f"{file.path} must hold [scores], or reconstructions with images. Found "
            f"{', '.join(found) or 'none of them'}."
        )
    with file.at("", 0, "attack"):
        if data["attack"].startswith(CONTROL) or data["attack"] in _RESERVED:
            raise PrivlabError(f"'{data['attack']}' is a name of ours. Give the attack another name.")
    with file.at("", 0, "setting"):
        check_name("setting", data.get("setting", "a"), SETTINGS)
    for name, value in data.get("scores", {}).items():
        with file.at("scores", 0, name):
            check_score(name, value)


def check_score(name: str, value: object) -> None:
    """Refuse an unknown metric, or a value that it cannot have."""
    check_name("metric", name, OF_IMAGES)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PrivlabError(f"{name} must be a number. Found {value!r}.")
    low, high = KNOWN[name].range
    check_range(low <= value <= high, name, f"in [{low:g}, {high:g}]", f"{value:g}")


def _scored(stated: _Stated, run: RunDirectory) -> list[Record]:
    """Return a record for each private image and each reconstruction: scored, or failed with its reason.

    PNGs are kept of images of which the run has some already.
    """
    folder, images = stated.path.parent, stated.given["images"]
    theirs = _by_stem(folder / stated.given["reconstructions"])
    private = _by_stem(images if images == "samples" else folder / images)
    params = _victim_params(stated, run)
    cut = preprocessing_of(json.loads(params))
    learned = _learned(stated)
    metrics = [name for name in stated.metrics if METRICS[name].function is not None or name in learned]
    if not theirs.keys() & private.keys():
        raise PrivlabError(
            f"{stated.path}: no reconstruction has the name of a private image. Found '{next(iter(theirs))}' … and "
            f"'{next(iter(private))}' …."
        )

    def row(image: NamedImage, scores: Mapping[str, float | None], **more: Any) -> Record:  # noqa: ANN401
        own = {"image": as_text(image.name), "image_sha256": image.sha256, "victim_params": params}
        return stated.row(scores, **own, **more)

    rows: list[Record] = []
    for stem, read in private.items():
        image = read()
        made = theirs[stem]() if stem in theirs else NamedImage("", "", None, problem=_NO_RECONSTRUCTION)
        reason = image.problem or made.problem
        if reason is not None or image.pixels is None or made.pixels is None:
            rows.append(row(image, {}, status="failed", reason=reason))
            continue
        found, (height, width) = to_tensor(made.pixels), cut.size
        if found.shape[1:] != (height, width):
            size = f"{found.shape[2]}×{found.shape[1]}"
            reason = f"The reconstruction has {size} pixels; the victim takes {width}×{height}."
            rows.append(row(image, {}, status="failed", reason=reason))
            continue
        values = score_images(found[None], cut(image.pixels)[None], metrics, learned)
        scores = {name: value for name, (value,) in values.items()}
        rows.append(row(image, {name: scores[name] for name in metrics}, levels_wrong=scores["levels_wrong"]))
        pictures = f"pictures/{image.sha256[:16]}"
        if (run.path / pictures).is_dir():
            run.write_file(f"{pictures}/{rows[-1]['cell']}.png", to_png(found))
    strangers = [replace(read(), sha256="") for stem, read in theirs.items() if stem not in private]
    return [*rows, *(row(image, {}, status="failed", reason=_NO_IMAGE) for image in strangers)]


def _by_stem(source: str | Path) -> dict[str, Callable[[], NamedImage]]:
    """Return what reads each image of a folder, by the image's stem."""
    if source != "samples" and not Path(source).is_dir():
        raise PrivlabError(f"'{source}' is not a folder of images.")
    images, found = open_images(source), dict[str, Callable[[], NamedImage]]()
    names: dict[str, str] = {}
    for place, name in enumerate(images.names or ()):
        if (first := names.setdefault(Path(name).stem, name)) != name:
            raise PrivlabError(f"'{source}' has two images of one name: '{first}' and '{name}'.")
        found[Path(name).stem] = lambda place=place: images[place]
    return found


def _victim_params(stated: _Stated, run: RunDirectory) -> str:
    """Return what the records of the case say of its victim."""
    table = run.store.read(["cell", "victim_params"])
    own = table.filter(pc.field("cell").cast(pa.string()).isin(sorted(stated.cells)))
    if not len(own):
        raise PrivlabError(
            f"{stated.path}: case '{stated.given['case']}' has no records yet, which say how large its images are. Run "
            "`privlab table` first."
        )
    return own["victim_params"][0].as_py()


def preprocessing_of(params: Mapping[str, Any]) -> Preprocessing:
    """Return a victim's preprocessing; crop and interpolation are those that timm states for its architecture.

    Args:
        params: what `Victim.params` returned.
    """
    known = get_pretrained_cfg(params["architecture"])
    config = resolve_data_config({"input_size": tuple(params["input"])}, known.to_dict() if known else {})
    size, mean, std = (tuple(params[name]) for name in ("input", "mean", "std"))
    return Preprocessing(size[1:], mean, std, crop_pct=config["crop_pct"], interpolation=config["interpolation"])


def _learned(stated: _Stated) -> dict[str, Learned]:
    """Load those of the case's metrics with trained weights whose weights are on this machine."""
    spec, found = stated.spec, dict[str, Learned]()
    weights = None if spec.lpips_weights is None else Path(spec.lpips_weights)
    for name in stated.metrics:
        with suppress(LpipsUnavailable):
            metric = learned_metric(name, weights, spec.embedding, torch.device("cpu"))
            found |= {} if metric is None else {name: metric}
    return found


def _new(rows: Sequence[Record], store: Store) -> Iterator[Record]:
    """Yield the records that add something to the store: new ones, those that had failed, and those with new metrics.

    Raises:
        PrivlabError: if a score contradicts that of the store.
    """
    table = store.read([*_COMPARED, *OF_IMAGES])
    there = merge_records(part_frame(table.filter(pc.field("external").is_valid())))
    found = {(old["cell"], old["image_sha256"] or old["image"]): old for old in there.to_dict("records")}
    for row in rows:
        old = found.get((row["cell"], row["image_sha256"] or row["image"]))
        if old is None or (old["status"] != "ok" and row["status"] == "ok"):
            yield row
        elif row["status"] == "ok":
            names = str(row["metrics"]).split()
            for name in names:
                if row[name] is not None and differs(old[name], row[name]):
                    of = f" of {row['image']}" if row["image"] else ""
                    raise PrivlabError(
                        f"{row['attack']} ({row['external']}): {name}{of} is {old[name]:g} in the store. Found "
                        f"{row[name]:g}: give a reference of its own."
                    )
            if not set(names) <= set(old["metrics"].split()):
                yield row

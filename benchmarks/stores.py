"""Large finished runs for a bench: a few images are run, and the others get copies of their results."""

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageChops

from privlab.base import PrivlabError
from privlab.grids import Experiment, Options, Result, prepare, read_experiment, run_task
from privlab.images import NamedImage, open_images
from privlab.stores import RunDirectory


def photographs(folder: Path, n: int) -> Path:
    """Write n different photographs into a new folder: the bundled ones, shifted cyclically."""
    folder.mkdir()
    samples = [image.pixels for image in open_images("samples") if image.pixels is not None]
    for i in range(n):
        square: Image.Image = samples[i % len(samples)]
        ImageChops.offset(square, i, i // square.width).save(folder / f"{i:05d}.jpg", quality=90)
    return folder


def experiment_file(file: Path, images: Path, tables: str = "", **run: object) -> Experiment:
    """Write an experiment with both closed-form attacks on a victim with random weights, and read it.

    Args:
        file: where the TOML is written.
        images: folder of the images.
        tables: further TOML tables, such as `[grid]` or `[[case]]`.
        **run: entries of `[run]`, which replace those that are written by default.
    """
    shared = {"weights": "random", "attack": ["april", "patch-gradient"], "images": [str(images)]} | run
    lines = ["[run]", *(f"{name} = {json.dumps(value)}" for name, value in shared.items()), tables]
    lines += ["[table]", 'columns = ["mse", "psnr", "ssim", "fft2d"]', 'paper_attack = "april"', ""]
    file.write_text("\n".join(lines), "utf-8")
    return read_experiment(file)


def finished_run(experiment: Experiment, path: Path, options: Options, *, real: int) -> int:
    """Create a directory like that of a finished `privlab table`, and return the number of its records.

    Scores are changed by up to a tenth. Parts are as large as the tasks that `options` ask for.

    Args:
        experiment: the experiment of the run.
        path: the directory, which is created.
        options: how the run is cut into tasks, and how many images have PNGs.
        real: number of the first images of each case that are run, at most those of its first task; all images of the
            case get rows and PNGs like theirs.
    """
    grid, tasks = prepare(experiment, path, options)
    run, draws, patterns, count = RunDirectory.create(path), np.random.default_rng(0), {}, 0
    for number, task in enumerate(tasks):
        if task.case not in patterns:
            patterns[task.case] = _Pattern.of(run_task(replace(task, images=task.images[:real])))
        rows = patterns[task.case].rows_of(task.images, draws)
        # `Store.add` would be slow: it waits for the disk and lists the folder each time.
        pq.write_table(rows, run.store.records / f"part-{number:06d}-{uuid.uuid4().hex[:12]}.parquet")
        patterns[task.case].link([image for image in task.images if image.place < options.pictures], path)
        count += len(rows)
    run.write_run(grid.facts() | {"status": "finished", "warnings": list(grid.messages)})
    return count


@dataclass(frozen=True, eq=False)
class _Pattern:
    """The results of a few images: their rows, the places of each image's rows, and its PNGs by the file's name."""

    rows: pa.Table
    places: Sequence[np.ndarray]
    pictures: Sequence[Mapping[str, bytes]]

    @classmethod
    def of(cls, result: Result) -> "_Pattern":
        hashes = np.array(result.rows["image_sha256"].to_pylist())
        images = [image.sha256 for image in result.task.images]
        if missing := set(images) - set(hashes):
            raise PrivlabError(f"{len(missing)} of {len(images)} images left no record.")
        pictures = [
            {Path(name).name: content for name, content in result.files.items() if f"/{sha[:16]}/" in name}
            for sha in images
        ]
        return cls(result.rows, [np.flatnonzero(hashes == sha) for sha in images], pictures)

    def rows_of(self, images: Sequence[NamedImage], draws: np.random.Generator) -> pa.Table:
        """Return rows for other images, copied from these with scores changed by up to a tenth."""
        own = [self.places[i % len(self.places)] for i in range(len(images))]
        rows = self.rows.take(pa.array(np.concatenate(own)))
        whose = pa.array(np.repeat(np.arange(len(images)), [len(places) for places in own]))
        columns = {"image": [image.name for image in images], "image_sha256": [image.sha256 for image in images]}
        for i, name in enumerate(rows.column_names):
            if name in columns:
                rows = rows.set_column(i, name, pa.array(columns[name]).take(whose))
            elif pa.types.is_floating(rows.schema.field(i).type):
                values = rows[name].to_numpy() * draws.uniform(0.9, 1.0, len(rows))
                rows = rows.set_column(i, name, pa.array(values, pa.float64(), from_pandas=True))
        return rows

    def link(self, images: Sequence[NamedImage], path: Path) -> None:
        """Give other images the same PNGs, as hard links to the same files."""
        for i, image in enumerate(images):
            for name, content in self.pictures[i % len(self.pictures)].items():
                first = path / "pictures" / "first" / f"{i % len(self.pictures)}-{name}"
                if not first.exists():
                    first.parent.mkdir(parents=True, exist_ok=True)
                    first.write_bytes(content)
                file = path / "pictures" / image.sha256[:16] / name
                file.parent.mkdir(exist_ok=True)
                os.link(first, file)

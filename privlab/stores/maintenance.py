"""Checks and merges of stores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from filecmp import cmp
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd

from privlab.base import PrivlabError, read_bytes, read_text, sha256_of
from privlab.metrics import DECIBELS, EXACT_DB, METRICS
from privlab.stores.store import KEY, RunDirectory, Store, part_frame

_MERGED = ("records/part-*.parquet", "kept/*.safetensors", "pictures/**/*.png", "strips/*.png")

_MOST_BYTES = 2**32
"""The most bytes of a file that is merged."""

_SCORE_TOLERANCE = 1e-4
"""Relative difference above which two scores of a record contradict each other; smaller ones are float32's rounding."""


@dataclass(frozen=True)
class Conflict:
    """Two scores of one record that differ by more than rounding."""

    cell: str
    image: str
    metric: str
    ours: float
    theirs: float

    def __str__(self) -> str:
        """Say it in one line."""
        return f"conflict: {self.image}, cell {self.cell}: {self.metric} is {self.ours:g} and {self.theirs:g}"


@dataclass(frozen=True)
class Checked:
    """What a store holds: rows as they lie in its parts, records (each counted once), and what is wrong.

    `external` records were measured elsewhere; those that belong to no image are not counted in `images`.
    """

    parts: int
    rows: int
    records: int
    failed: int
    cells: int
    images: int
    external: int
    conflicts: tuple[Conflict, ...]
    unfinished: tuple[str, ...]


def check(path: Path) -> Checked:
    """Read every part of a store, and return what it holds.

    Raises:
        PrivlabError: if there is no store.

    Warns:
        PrivlabWarning: for each file that is damaged or foreign, which is left out.
    """
    store = existing(path)
    rows = part_frame(store.read())
    once = store.frame()
    return Checked(
        parts=len(store.parts()),
        rows=len(rows),
        records=len(once),
        failed=int((once.status != "ok").sum()),
        cells=once.cell.nunique(),
        images=rows.image_id[rows.image_id.fillna("") != ""].nunique(),
        external=int(once.external.notna().sum()),
        conflicts=tuple(_conflicts(rows)),
        unfinished=tuple(sorted(file.name for file in path.rglob(".tmp-*"))),
    )


def case_labels(path: Path) -> dict[str, str]:
    """Return the labels of the cases that each cell of an experiment belongs to; nothing where there is none."""
    facts = RunDirectory(path).read_run() if (path / "run.json").exists() else {}
    labels: dict[str, list[str]] = {}
    for case in facts.get("cases", ()) if "experiment" in facts else ():
        for cell in {cell for job in case["jobs"] for cell in job["cells"].values()}:
            labels.setdefault(cell, []).append(f"{case['group'] or ''} {case['label']}".strip())
    return {cell: "; ".join(of_cell) for cell, of_cell in labels.items()}


def merge(target: Path, sources: Sequence[Path]) -> list[Conflict]:
    """Copy the parts, images and kept reconstructions of other directories into one; no file of it is replaced.

    Returns:
        the scores of records that two directories have, where they differ by more than rounding.

    Raises:
        PrivlabError: if a directory holds no store, or the target cannot be written.
    """
    stores = [existing(source) for source in sources]
    run = RunDirectory.create(target, resume=True)
    for store in stores:
        for file in chain.from_iterable(sorted(store.path.glob(pattern)) for pattern in _MERGED):
            name = file.relative_to(store.path)
            if file.suffix == ".parquet" and (target / name).exists() and not cmp(target / name, file, shallow=False):
                name = name.with_stem(f"{name.stem}-{sha256_of(file)[:12]}")
            if not (target / name).exists():
                run.write_file(str(name), read_bytes(file, "part of a run", _MOST_BYTES))
    if not run.begun():
        first = next((source for source in sources if (source / "run.json").exists()), None)
        if first is not None:
            run.write_run(RunDirectory(first).read_run())
            run.write_manifests({file.name: read_text(file, "manifest") for file in RunDirectory(first).manifests})
    return list(_conflicts(part_frame(run.store.read())))


def existing(path: Path) -> Store:
    """Return the store of a directory.

    Raises:
        PrivlabError: if there is none.
    """
    if not (path / "records").is_dir():
        raise PrivlabError(f"'{path}' holds no records: give the directory of a run.")
    return Store(path)


def differs(one: float | np.ndarray, other: float | np.ndarray) -> np.ndarray | np.bool_:
    """Return whether scores contradict others: they differ by more than float32 rounds; NaN contradicts nothing."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.subtract(one, other)) > _SCORE_TOLERANCE * np.maximum(np.abs(one), 1e-3)
    return apart & np.not_equal(one, other)


def _conflicts(rows: pd.DataFrame) -> Iterator[Conflict]:
    """Yield the scores of one record that differ between its rows."""
    again = rows[rows.duplicated(KEY, keep=False) & rows.cell.notna() & (rows.status == "ok")].copy()
    metrics = [name for name in METRICS if name in rows]
    if again.empty:
        return
    exact = [name for name in DECIBELS if name in again]
    again[exact] = again[exact].clip(upper=EXACT_DB)
    groups = again.groupby(KEY, sort=False, dropna=False)[metrics]
    least, most = groups.min(), groups.max()
    for place, column in np.argwhere(differs(most.to_numpy(), least.to_numpy())):
        cell, image, *_ = least.index[place]
        ours, theirs = float(least.iat[place, column]), float(most.iat[place, column])
        yield Conflict(str(cell), str(image), metrics[column], ours, theirs)

"""The run directory is the store: records as Parquet parts that are only ever added, `run.json`, and image files.

A part is written under a temporary name, synced and renamed, so it is there whole or not at all. There is no lock:
several processes may add parts at once, and a record that two of them made counts once.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from privlab.base import (
    UNFINISHED,
    PrivlabError,
    delete_unfinished,
    one_line,
    read_json,
    refuse_links,
    unwritable,
    warn,
    write_whole,
)
from privlab.evaluation import COLUMNS, SCHEMA

if TYPE_CHECKING:
    import pandas as pd  # it costs a third of a second, which a run need not wait for before its first image

KEY = ["cell", "image_id", "geometry", "batch"]
"""The columns that identify a record; `image_id` is the image's hash, or its name where it could not be read."""

_KEYED_SCHEMA = 3
"""The first version of the records whose rows have a key; columns that later versions add are null in older rows."""

_MOST_ROWS = 2**17
"""The most rows of one part; a run writes a part for each batch of images."""
_TEXT_BYTES = 2**14
"""The most bytes of text that a row may have on average, of which at least 64 MiB are read."""


@dataclass(frozen=True)
class Store:
    """The records of a directory, written by one process or by several, now or in an earlier version.

    Raises:
        PrivlabError: if its path is not text, which Arrow needs.
    """

    path: Path

    def __post_init__(self) -> None:
        """Check that the locale can read the path as text: Parquet files could not be opened there otherwise."""
        try:
            str(self.path).encode()
        except UnicodeEncodeError:
            name = os.fsencode(self.path).decode("ascii", "backslashreplace")
            raise PrivlabError(f"'{name}' is not a text in this locale, as the directory of a run must be.") from None

    @property
    def records(self) -> Path:
        """Return the folder of the records."""
        return self.path / "records"

    def parts(self) -> list[Path]:
        """Return the parts, in the order in which one process wrote them."""
        return sorted(self.records.glob("part-*.parquet"))

    def add(self, rows: pa.Table) -> Path | None:
        """Add rows as one Parquet part, whole or not at all, and return its path; without rows nothing is written.

        Raises:
            PrivlabError: if the disk is full or the directory cannot be written.
        """
        if not len(rows):
            return None
        part = self.records / f"part-{len(self.parts()):06d}-{uuid.uuid4().hex[:12]}.parquet"
        write_whole(part, lambda temporary: pq.write_table(rows, temporary))
        return part

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return these columns of all rows, in this version's schema; strings come dictionary-encoded.

        Raises:
            PrivlabError: if the directory holds links, pipes or devices, or records of a later version.

        Warns:
            PrivlabWarning: for each file that is torn or foreign, which is left out, and for rows of older versions.
        """
        refuse_links(self.path)
        wanted = list(COLUMNS.names if columns is None else columns)
        asked = list(dict.fromkeys([*wanted, "schema"]))
        parts = self.parts()
        for file in sorted(self.records.glob("[!._]*")):
            if file.is_file() and not file.match("part-*.parquet"):
                _warn_of(file, "its name is none of a part")
        try:
            table = _read(parts, asked)
        except (pa.ArrowException, OSError):  # one of them is no part
            table = None
        if table is None or table["schema"].null_count:
            table = pa.concat_tables([_read([], asked), *_sound(parts, asked)])
        return _migrate(table, self.path).select(wanted)

    def frame(self) -> "pd.DataFrame":
        """Return every record once: rows of one record that hold different metrics are joined."""
        return merge_records(part_frame(self.read()))


def _sound(parts: Sequence[Path], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows of each part that can be read; nothing is moved, for the directory may be anybody's."""
    for part in parts:
        try:
            table = _read([part], columns)
        except FileNotFoundError:  # another process has removed it
            continue
        except (pa.ArrowException, OSError) as error:
            _warn_of(part, one_line(error))
            continue
        if table["schema"].null_count:
            _warn_of(part, "it holds no records")
        else:
            yield table


def _warn_of(file: Path, reason: str) -> None:
    warn(f"{file.name} is not a part of a store ({reason}): left out.")


def part_frame(table: pa.Table) -> "pd.DataFrame":
    """Return rows as a data frame with plain strings and the column `image_id` that `KEY` needs."""
    import pandas as pd

    frame = pd.DataFrame(table.cast(pa.schema([COLUMNS.field(name) for name in table.column_names])).to_pandas())
    unread = frame.image_sha256.eq("") | frame.image_sha256.isna()
    return frame.assign(image_id=frame.image_sha256.where(~unread, frame.image))


def merge_records(frame: "pd.DataFrame") -> "pd.DataFrame":
    """Return every record once, in the order of first rows: finished rows come first, and others fill their gaps."""
    import pandas as pd

    again = frame.duplicated(KEY, keep=False) & frame.cell.notna()  # rows of earlier versions have no key
    if again.any():
        several = frame[again].assign(place=frame.index[again], failed=frame.status[again] != "ok")
        groups = several.sort_values(["failed", "place"]).groupby(KEY, sort=False, dropna=False)
        joined = groups.first()
        joined["metrics"] = groups.metrics.agg(lambda names: " ".join(sorted(set(" ".join(names.dropna()).split()))))
        joined.loc[~joined.failed, "reason"] = None
        joined["place"] = groups.place.min()
        joined = joined.reset_index().set_index("place")[frame.columns].astype(frame.dtypes)
        frame = pd.concat([frame.loc[~again], joined]).sort_index()
    return frame.drop(columns="image_id").reset_index(drop=True)


def _read(parts: Sequence[Path], columns: Sequence[str]) -> pa.Table:
    """Return these columns of all parts; rows are packed while they are read, since there may be ten thousand parts."""
    import pyarrow.dataset as ds  # it imports pandas

    fields = [COLUMNS.field(name) for name in columns]
    strings = {f.name: f.with_type(pa.dictionary(pa.int32(), f.type)) for f in fields if pa.types.is_string(f.type)}
    coded = pa.schema([strings.get(field.name, field) for field in fields])
    form = ds.ParquetFileFormat(ds.ParquetReadOptions(dictionary_columns=[*strings]))
    tables = [coded.empty_table()]
    for start in range(0, len(parts), 128):
        group = ds.dataset([str(part) for part in parts[start : start + 128]], schema=coded, format=form)
        for fragment in group.get_fragments():
            if (rows := fragment.metadata.num_rows) > _MOST_ROWS:  # a few bytes may stand for any number of them
                raise pa.ArrowInvalid(f"it states {rows} rows; at most {_MOST_ROWS} are read")
        table = group.to_table(list(columns))
        _check_text(table)
        tables.append(table.unify_dictionaries().combine_chunks())
    return pa.concat_tables(tables)


def _check_text(table: pa.Table) -> None:
    """Check the length that dictionary-encoded texts have in all rows: one long text may be in each of them.

    Raises:
        pyarrow.ArrowInvalid: if it is too long to be read.
    """
    import pyarrow.compute as pc

    total = 0
    for column in table.columns:
        for chunk in column.chunks if pa.types.is_dictionary(column.type) else ():
            lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
            total += pc.sum(lengths.cast(pa.int64())).as_py() or 0
    if total > max(2**26, _TEXT_BYTES * len(table)):
        raise pa.ArrowInvalid(f"its {len(table)} rows would take {total / 2**20:.0f} MiB of text")


def _migrate(table: pa.Table, path: Path) -> pa.Table:
    """Return the rows in this version's schema.

    Rows of version 2 and before state no conditions and have no key: they can be shown and scored, but a plan does not
    count them as done.

    Raises:
        PrivlabError: for rows of a later version than this one.
    """
    versions = set(table["schema"].unique().to_pylist())
    if newer := sorted(v for v in versions if v > SCHEMA):
        raise PrivlabError(f"'{path}' holds records of schema {newer[0]}, and this privlab knows {SCHEMA}: update it.")
    if older := sorted(v for v in versions if v < _KEYED_SCHEMA):
        warn(
            f"'{path}' holds records of schema {older[0]}: they are shown as they are, and no plan takes them as done.",
        )
    return table


@dataclass(frozen=True)
class RunDirectory:
    """A directory that a run writes: `run.json`, `manifest.csv`, `records/*.parquet`, `strips/*.png`, `pictures/…`.

    What writes into it raises PrivlabError if the disk is full or the directory cannot be written.
    """

    path: Path

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False, resume: bool = False) -> "RunDirectory":
        """Make the run directory, or take an empty one, and return it.

        Args:
            path: the directory; its parents are made too.
            overwrite: whether an earlier run in it is deleted.
            resume: whether records are added to an earlier run in it, or to a folder of records without `run.json`.

        Raises:
            PrivlabError: if it holds another run or foreign files, or cannot be written.
        """
        run = cls(path)
        run.check(overwrite=overwrite, resume=resume)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if overwrite and run.begun():
                run._clear()
            for folder in (path, run.store.records, path / "strips", path / "kept", *path.glob("pictures/*/")):
                delete_unfinished(folder)  # also of a run that was killed before it had written run.json
            run.store.records.mkdir(exist_ok=True)
            if not resume:
                (path / "strips").mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(path, error) from error
        return run

    def check(self, *, overwrite: bool = False, resume: bool = False) -> None:
        """Check that `create` can take the directory, before work begins that would be lost; nothing is written.

        Raises:
            PrivlabError: if it holds another run or foreign files, or cannot be read.
        """
        parts = self.store.parts
        try:
            if not self.path.exists():
                return
            refuse_links(self.path)
            there = (entry for entry in self.path.iterdir() if not entry.name.startswith(UNFINISHED))
            held = sorted(entry.name for entry in there if not entry.is_dir() or any(entry.iterdir()))
        except OSError as error:
            raise unwritable(self.path, error) from error
        if self.begun():
            if not overwrite and not resume:
                raise PrivlabError(
                    f"'{self.path}' holds another run. Overwrite it (--overwrite) or give another directory."
                )
        elif held and not (resume and parts()):
            raise PrivlabError(
                f"'{self.path}' holds files of something else ({held[0]}). Give a new or empty directory."
            )

    @property
    def store(self) -> Store:
        """Return the records."""
        return Store(self.path)

    @property
    def manifests(self) -> list[Path]:
        """Return the manifests of the run: manifest.csv, manifest-1.csv and so on. Others are the user's."""
        files = sorted(self.path.glob("manifest*.csv"))
        return [file for file in files if re.fullmatch(r"manifest(-[1-9]\d*)?\.csv", file.name)]

    def write_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add records as one Parquet part, whole or not at all."""
        self.store.add(pa.Table.from_pylist(list(records), schema=COLUMNS))

    def write_run(self, facts: Mapping[str, Any]) -> None:
        """Write `run.json`, whole or not at all."""
        text = json.dumps(facts, indent=2, ensure_ascii=False, sort_keys=False) + "\n"
        write_whole(self.path / "run.json", lambda temporary: temporary.write_text(text, "utf-8", "backslashreplace"))

    @contextmanager
    def noted(self, facts: Mapping[str, Any], messages: Sequence[str]) -> Iterator[None]:
        """Write `run.json` when a run starts or goes on, and again when it is finished, interrupted or failed.

        The context may add to the facts and to the warnings. Status and time, of earlier sessions too, are added here.

        Raises:
            PrivlabError: if the directory cannot be written when the run starts or is finished.
        """
        earlier = self.begun()
        started, before, start = earlier.get("started", facts["written"]), earlier.get("seconds", 0.0), perf_counter()

        def note(status: str) -> None:
            seconds = round(before + perf_counter() - start, 3)
            now = {"started": started, "status": status, "seconds": seconds, "warnings": messages}
            self.write_run({**facts, **now})

        note("running")
        try:
            yield
        except BaseException as error:
            with suppress(PrivlabError):  # the disk may be full, and the first error must not be hidden
                note("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
            raise
        note("finished")

    def write_manifests(self, manifests: Mapping[str, str]) -> None:
        """Write manifests by the names of their files, each whole or not at all; those of earlier runs are deleted."""
        for name, text in manifests.items():
            write_whole(self.path / name, lambda temporary, text=text: temporary.write_text(text, "utf-8", newline=""))
        for file in self.manifests:
            if file.name not in manifests:
                file.unlink(missing_ok=True)

    def read_run(self) -> dict[str, Any]:
        """Return `run.json`.

        Raises:
            PrivlabError: if there is none, or it cannot be read.
        """
        refuse_links(self.path)
        path = self.path / "run.json"
        if not path.exists():
            raise PrivlabError(f"'{self.path}' is not the directory of a run: it has no run.json.")
        return read_json(path, "run")

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file of the run, such as an image, whole or not at all."""
        write_whole(self.path / name, lambda temporary: temporary.write_bytes(content), durable=False)

    def begun(self) -> dict[str, Any]:
        """Return what `run.json` states of the part of a run that is here; empty where none is."""
        try:
            facts = read_json(self.path / "run.json", "run")
        except PrivlabError:  # none, or one of another program
            return {}
        return facts if "specification" in facts or "experiment" in facts else {}

    def _clear(self) -> None:
        for folder in (self.store.records, self.path / "strips", self.path / "pictures", self.path / "kept"):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (*self.manifests, self.path / "run.json"):
            file.unlink()

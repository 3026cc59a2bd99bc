"""The run directory: records as Parquet, the specification as JSON, a picture strip for each image."""

import errno
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from privlab.errors import PrivlabError

__all__ = ["COLUMNS", "RunDirectory", "to_frame"]

_ORDER = (
    "victim block weights weights_sha256 release defense setting attack geometry image image_sha256 label label_origin "
    "seed device dtype mse psnr ssim ssim_skimage fft2d fft2d_mjp lpips_alex lpips_vgg lpips_squeeze f_sim "
    "psnr_unmasked psnr_masked placement_accuracy neighbour_accuracy key_recovered key_bits correct grad_norm "
    "seconds_observe seconds_attack seconds_score status reason schema privlab_version "
    "defense_params attack_params victim_params"
)
_REAL = "mse psnr ssim fft2d lpips seconds grad f placement neighbour key correct"
_WHOLE = "label seed schema"


def _type(column: str) -> pa.DataType:
    if column in _WHOLE.split():
        return pa.int64()
    return pa.float64() if column.partition("_")[0] in _REAL.split() else pa.string()


COLUMNS = pa.schema([(name, _type(name)) for name in _ORDER.split()])
"""The columns of a record. What was not measured is null, never zero."""

Record = Mapping[str, Any]


def to_frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return records as a table with all columns."""
    return pa.Table.from_pylist(list(records), schema=COLUMNS).to_pandas()


@dataclass(frozen=True)
class RunDirectory:
    """A directory that one run writes: `run.json`, `records/*.parquet`, `strips/*.png`."""

    path: Path

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> "RunDirectory":
        """Make the directory, or take an empty one; an earlier run gives way only if told so.

        Raises:
            PrivlabError: if it holds another run or foreign files, or cannot be written.
        """
        run = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            held = sorted(entry.name for entry in path.iterdir() if not entry.is_dir() or any(entry.iterdir()))
            if run._is_run():
                if not overwrite:
                    raise PrivlabError(f"'{path}' holds another run. Use --overwrite, or another --out.")
                run._clear()
            elif held:
                raise PrivlabError(f"'{path}' holds files of something else ({held[0]}). Give a new or empty --out.")
            run.records.mkdir(exist_ok=True)
            run.strips.mkdir(exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from error
        return run

    @property
    def records(self) -> Path:
        """Return the folder of the records."""
        return self.path / "records"

    @property
    def strips(self) -> Path:
        """Return the folder of the strips."""
        return self.path / "strips"

    def write_records(self, records: Sequence[Record]) -> None:
        """Add records as one Parquet part, whole or not at all.

        Raises:
            PrivlabError: if the disk is full or the directory cannot be written.
        """
        if records:
            table = pa.Table.from_pylist(list(records), schema=COLUMNS)
            part = self.records / f"part-{len(list(self.records.glob('part-*.parquet'))):06d}.parquet"
            self._write(part, lambda temporary: pq.write_table(table, temporary))

    def write_run(self, facts: Mapping[str, Any]) -> None:
        """Write `run.json`, whole or not at all.

        Raises:
            PrivlabError: if the disk is full or the directory cannot be written.
        """
        text = json.dumps(facts, indent=2, ensure_ascii=False, sort_keys=False) + "\n"
        self._write(self.path / "run.json", lambda temporary: temporary.write_text(text, "utf-8", "backslashreplace"))

    def write_strip(self, name: str, save: Callable[[Path], object]) -> None:
        """Write a picture by `save(path)`, whole or not at all."""
        self._write(self.strips / name, save)

    def read(self) -> pd.DataFrame:
        """Return all records of the run."""
        parts = sorted(self.records.glob("part-*.parquet"))
        tables = [pq.read_table(part, schema=COLUMNS) for part in parts]
        return pa.concat_tables([COLUMNS.empty_table(), *tables]).to_pandas()

    def _write(self, path: Path, write: Callable[[Path], object]) -> None:
        temporary = path.with_name(f".tmp-{path.name}")
        try:
            write(temporary)
            temporary.replace(path)
        except OSError as error:
            raise _unwritable(path, error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def _is_run(self) -> bool:
        try:
            return "specification" in json.loads((self.path / "run.json").read_bytes())
        except (FileNotFoundError, TypeError, ValueError):  # none, or one of another program
            return False

    def _clear(self) -> None:
        shutil.rmtree(self.records, ignore_errors=True)
        shutil.rmtree(self.strips, ignore_errors=True)
        (self.path / "run.json").unlink()


def _unwritable(path: Path, error: OSError) -> PrivlabError:
    if error.errno == errno.ENOSPC:
        return PrivlabError(f"No space left on the device of '{path}'. What was finished before stays readable.")
    return PrivlabError(f"'{path}' cannot be written: {error.strerror or error}. Give another --out.")

"""Small tables, TOML and JSON that stand for much: reading one takes at most 4 GiB and 30 seconds."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from privlab.benchmark.cards import read_card
from privlab.benchmark.form import MOST_COLUMNS, MOST_ROWS, Rows, check_form
from privlab.benchmark.results import from_rows, read_result
from privlab.grids import read_experiment
from privlab.images.manifest import read_labels, read_manifest

bombs = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("bombs.py"))))
BOMBS, NESTED, bomb, images_of = bombs.BOMBS, bombs.NESTED, bombs.bomb, bombs.images_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="measures a copy of this process"),
]


# Tables


@bomb("Parquet: a value of 64 MiB, repeated", "a.parquet", images_of)
def _(path: Path) -> None:
    indices = pa.array(np.zeros(2**17, np.int32))
    column = pa.DictionaryArray.from_arrays(indices, pa.array([b"x" * 2**26]))
    pq.write_table(pa.table({"image": column}), path, compression="zstd", store_schema=False)


@bomb("Parquet: two million labels of one row", "a.parquet", images_of)
def _(path: Path) -> None:
    labels = pa.ListArray.from_arrays(pa.array([0, 2**21], pa.int32()), pa.array(np.zeros(2**21, np.int64)))
    pq.write_table(pa.table({"image": [b"x"], "label": labels}), path)


@bomb("Parquet: two million labels that are long texts", "a.parquet", images_of)
def _(path: Path) -> None:
    labels = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**21, np.int32)), pa.array(["x" * 2**16]))
    table = pa.table({"image": pa.array([b"x"] * 2**21), "label": labels})
    pq.write_table(table, path, compression="zstd", store_schema=False)


@bomb("Parquet: thirty thousand columns", "a.parquet", images_of)
def _(path: Path) -> None:
    pq.write_table(pa.table({"image": [b"x"], **{f"c{i}": [1] for i in range(30_000)}}), path, compression="zstd")


@bomb("Parquet: pages that hold more than the metadata state", "a.parquet", images_of)
def _(path: Path) -> None:
    pq.write_table(
        pa.table({"image": [bytes(2**28)] * 4}), path, compression="zstd", compression_level=1, use_dictionary=False
    )
    data = path.read_bytes()
    # The footer is Thrift, whose numbers are zigzag varints: the size of the column before it was packed.
    stated = pq.ParquetFile(path).metadata.row_group(0).total_byte_size
    path.write_bytes(data.replace(varint(stated), varint(1000)))


def varint(number: int) -> bytes:
    """Return a number as Thrift's compact protocol has it, padded to five bytes."""
    value, found = 2 * number, bytearray()
    for _ in range(4):
        found.append(value & 127 | 128)
        value >>= 7
    return bytes(found) + bytes([value])


@bomb("CSV: one line of 9 MB", "a.csv", read_manifest)
def _(path: Path) -> None:
    path.write_text("name,sha256,label\na.png," + "0" * 64 + "," + "1;" * 4_700_000)


@bomb("CSV: a cell of 9 MB", "a.csv", read_manifest)
def _(path: Path) -> None:
    path.write_text('name,sha256\n"' + "x" * 9_000_000 + '",0\n')


@bomb("CSV: four million columns", "a.csv", read_manifest)
def _(path: Path) -> None:
    path.write_text("name,sha256," + "," * 9_000_000 + "\n")


@bomb("CSV: labels of 600,000 files", "a.csv", read_labels)
def _(path: Path) -> None:
    path.write_text("file,label\n" + "".join(f"{i},{i}\n" for i in range(600_000)))


@bomb("CSV: a soft label of four million classes", "a.csv", read_labels)
def _(path: Path) -> None:
    path.write_text("file,label\na," + "0|" * 4_000_000 + "1\n")


# Text


@bomb("TOML: nested tables", "a.toml", read_experiment)
def _(path: Path) -> None:
    path.write_text("x = " + "[" * 10**6 + "]" * 10**6)


@bomb("TOML: a name of a million parts", "a.toml", read_experiment)
def _(path: Path) -> None:
    path.write_text("[" + "a." * 10**6 + "b]\nx = 1\n")


@bomb("TOML: many names of many parts", "a.toml", read_experiment)
def _(path: Path) -> None:
    path.write_text("".join(f"[{'a.' * 98}b{i}]\n" for i in range(9500)))


@bomb("TOML: dotted keys in dotted tables", "a.toml", read_card)
def _(path: Path) -> None:
    path.write_text("".join(f"{'a.' * 90}b{i} = 1\n" for i in range(10_000)))


@bomb("TOML: a million small tables", "a.toml", read_experiment)
def _(path: Path) -> None:
    path.write_text("x = [" + "{}," * 690_000 + "]\n")


@bomb("TOML: a million tables in a list", "a.toml", read_experiment)
def _(path: Path) -> None:
    path.write_text("[[run]]\n" * 260_000)


@bomb("TOML: a number of two million digits", "a.toml", read_experiment)
def _(path: Path) -> None:
    path.write_text("x = " + "9" * 2_000_000)


@bomb("TOML: a text of escapes", "a.toml", read_card)
def _(path: Path) -> None:
    path.write_text('x = "' + "\\u0000" * 340_000)


@bomb("JSON: nested lists", "a.json", read_result)
def _(path: Path) -> None:
    path.write_text("[" * NESTED + "]" * NESTED)


@bomb("JSON: four million empty objects", "a.json", read_result)
def _(path: Path) -> None:
    path.write_text('{"x": [' + "{}," * 3_000_000 + "{}]}")


@bomb("JSON: wide at every depth", "a.json", read_result)
def _(path: Path) -> None:
    path.write_text('{"x": [' + ",".join(["[" * 90 + "]" * 90] * 50_000) + "]}")


def rows_of(path: Path) -> object:
    """Read the rows of a result."""
    given = json.loads(path.read_text())
    check_form(given, Rows, path)
    return from_rows(given)


@bomb("JSON: one text for each of a hundred columns of a result", "a.json", rows_of)
def _(path: Path) -> None:
    columns = {f"c{i}": {"all": "x"} for i in range(MOST_COLUMNS)}
    path.write_text(json.dumps({"count": MOST_ROWS, "columns": columns}))


@pytest.mark.parametrize("description", BOMBS)
def test_a_small_file_takes_little(description: str, tmp_path: Path, separately: Any, capsys: Any) -> None:
    bombs.takes_little(description, tmp_path, separately, capsys)

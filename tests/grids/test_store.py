"""The store: parts are whole or not there, nothing of anybody is deleted, and every record counts once."""

import errno
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privlab.base import PrivlabError, PrivlabWarning, files
from privlab.evaluation import COLUMNS, SCHEMA
from privlab.stores import KEY, RunDirectory, Store, check, merge_records, part_frame

SYNC = files.sync  # the real one: conftest.py replaces it


def row(image: int = 0, **values: Any) -> dict[str, Any]:
    """Return a record of an image."""
    stated = {
        "cell": "c",
        "attack": "april",
        "geometry": "in_place",
        "schema": SCHEMA,
        "status": "ok",
        "metrics": "psnr",
    }
    return stated | {"image": f"{image}.png", "image_sha256": f"{image:064x}", "psnr": float(image)} | values


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=COLUMNS)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return the store of an empty run."""
    run = RunDirectory.create(tmp_path / "run")
    run.write_run({"experiment": {}})
    return run.store


def images(store: Store) -> list[str]:
    return sorted(store.read(["image"])["image"].to_pylist())


# Parts


def test_part_is_there_whole_or_not_at_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write = pq.write_table

    def halfway(rows: pa.Table, path: Path) -> None:
        assert not list(store.records.glob("part-*"))
        assert path.name.startswith(".tmp-")
        write(rows, path)
        assert store.parts() == []  # not before it is renamed
        if rows["image"][0].as_py() == "1.png":
            path.write_bytes(path.read_bytes()[:100])
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("privlab.stores.store.pq.write_table", halfway)
    with pytest.raises(PrivlabError, match=r"Input/output.*--out"):
        store.add(table(row(1)))
    assert list(store.records.iterdir()) == []
    assert store.add(table(row(2))) in store.parts()
    assert images(store) == ["2.png"]


def test_no_part_for_no_rows(store: Store) -> None:
    assert store.add(table()) is None
    assert store.parts() == []
    assert len(store.frame()) == len(store.read()) == 0
    assert list(store.frame().columns) == COLUMNS.names


def test_parts_have_names_of_their_own_and_keep_their_order(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in (3, 1, 2):
        store.add(table(row(i)))
    assert store.frame().image.tolist() == ["3.png", "1.png", "2.png"]
    monkeypatch.setattr(Store, "parts", lambda self: [])  # two processes count at the same time
    names = {path.name for _ in range(20) if (path := store.add(table(row(0))))}
    assert len(names) == 20
    assert all(name.startswith("part-000000-") for name in names)


def test_part_is_synced_before_it_is_renamed_and_its_folder_after(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    def sync(path: Path) -> None:
        seen.append((path.name[:5], len(store.parts())))
        SYNC(path)

    monkeypatch.setattr(files, "sync", sync)
    store.add(table(row()))
    assert seen == [(".tmp-", 0), ("recor", 1)]


def test_clock_is_never_asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: pytest.fail("the clock was asked"))
    store.add(table(row(1)))
    store.add(table(row(2)))
    assert images(store) == ["1.png", "2.png"]


def test_several_processes_write_at_once(store: Store) -> None:
    children = []
    for process in range(3):
        if not (child := os.fork()):
            for i in range(15):
                Store(store.path).add(table(row(100 * process + i), row(7000 + i)))
            os._exit(0)
        children.append(child)
    while len(store.parts()) < 45:  # what is there can be read at any moment
        assert len(store.read(["image"])) % 2 == 0
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert len(store.read(["image"])) == 90
    assert len(store.frame()) == 45 + 15  # those that all three made count once
    assert not list(store.records.glob(".tmp-*"))


@pytest.mark.parametrize("moment", range(4))
def test_killed_while_it_writes(store: Store, moment: int) -> None:
    store.add(table(row(1)))
    if not (child := os.fork()):
        while True:
            store.add(table(*(row(i) for i in range(300))))
    time.sleep(0.005 + 0.013 * moment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(store.read(["image"])) % 300 == 1
    assert check(store.path).unfinished == tuple(sorted(path.name for path in store.records.glob(".tmp-*")))


# What is torn or foreign


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flipped(path: Path) -> None:
    """Spoil the pages of one column, not what stands at the end."""
    data, columns = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(0)
    column = columns.column(COLUMNS.names.index("image"))
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)


def foreign(path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), path)


def mistyped(path: Path) -> None:
    pq.write_table(pa.table({"schema": ["v1"], "attack": [1.5], "image": ["x"]}), path)


SPOILED: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "no parquet": lambda path: path.write_text("mine"),
    **{"torn": torn, "flipped": flipped, "foreign": foreign, "mistyped": mistyped},
}


@pytest.mark.parametrize("name", SPOILED)
@pytest.mark.parametrize("columns", [None, ["image"]])
def test_spoiled_part_is_left_out_and_stays(store: Store, name: str, columns: list[str] | None) -> None:
    for i in range(3):
        store.add(table(row(i)))
    bad = store.parts()[1]
    SPOILED[name](bad)
    content = bad.read_bytes()
    with pytest.warns(PrivlabWarning, match=rf"^{bad.name} is not a part of a store \(.*\): left out\.$") as said:
        found = store.read(columns)
    assert [str(warning.message).count("\n") for warning in said] == [0]
    assert found["image"].to_pylist() == ["0.png", "2.png"]
    assert bad.read_bytes() == content
    store.add(table(row(1)))
    with pytest.warns(PrivlabWarning, match=f"^{bad.name} is not a part of a store"):
        assert len(store.frame()) == 3


@pytest.mark.parametrize("name", ["mine.parquet", "notes.txt"])
def test_file_of_another_name_is_left_where_it_is(store: Store, name: str) -> None:
    store.add(table(row(1)))
    (store.records / name).write_bytes(b"mine")
    (store.records / ".tmp-12345678-part-000001-x.parquet").write_bytes(b"half of a part")  # another process is at it
    with pytest.warns(PrivlabWarning, match=f"^{name} is not a part of a store"):
        assert images(store) == ["1.png"]
    assert (store.records / name).read_bytes() == b"mine"
    assert len(list(store.records.iterdir())) == 3


def test_folder_that_is_no_run_is_left_as_it_is(tmp_path: Path) -> None:
    part = tmp_path / "records" / "part-00000-of-spark.parquet"
    part.parent.mkdir()
    foreign(part)
    before = part.read_bytes()
    with pytest.warns(PrivlabWarning, match=f"^{part.name} is not a part of a store .*: left out.$"):
        assert len(Store(tmp_path).read()) == 0
    assert part.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records"]


def test_folder_of_records_that_is_a_link_is_refused(store: Store, tmp_path: Path) -> None:
    """It led to a folder of the reader's, whose files were moved."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("mine")
    foreign_run = RunDirectory(tmp_path / "foreign")
    foreign_run.write_run({"experiment": {}})
    (foreign_run.path / "records").symlink_to(home)
    for read in (
        foreign_run.store.read,
        foreign_run.read_run,
        lambda: RunDirectory.create(foreign_run.path, overwrite=True),
        lambda: RunDirectory.create(foreign_run.path, resume=True),
    ):
        with pytest.raises(PrivlabError, match="holds a link"):
            read()
    assert [path.name for path in home.iterdir()] == ["thesis.txt"]


def test_pipe_in_the_records_is_refused(store: Store) -> None:
    os.mkfifo(store.records / "part-000000-pipe.parquet")
    with pytest.raises(PrivlabError, match="pipe or device"):
        store.read()


def test_small_part_that_unpacks_to_much_is_left_out(store: Store) -> None:
    store.add(table(row(1)))
    for name, rows, text in (("rows", 2**18, "x"), ("text", 2**12, "x" * 2**16)):
        repeated = pa.Table.from_pylist([{**row(2), "conditions": text}], schema=COLUMNS).take(pa.array([0] * rows))
        pq.write_table(repeated, store.records / f"part-000001-{name}.parquet", compression="zstd")
    with pytest.warns(PrivlabWarning, match=r"rows; at most|MiB of text") as said:
        assert store.read()["image"].to_pylist() == ["1.png"]
    assert len(said) == 2


def test_part_that_another_process_has_just_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add(table(row(1)))
    listed = [*store.parts(), store.records / "part-000001-gone.parquet"]
    monkeypatch.setattr(Store, "parts", lambda self: listed)
    assert images(store) == ["1.png"]


# Directories that cannot be written


def test_read_only_store_can_be_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add(table(row(1)))
    torn(store.add(table(row(2))) or Path())

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "rename", "replace"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.warns(PrivlabWarning, match="store"):
        assert images(store) == ["1.png"]
    with pytest.raises(PrivlabError, match=r"records'.*Read-only.*--out"):
        store.add(table(row(3)))


def test_file_system_that_is_really_read_only(small_disk: Callable[..., Path]) -> None:
    place = small_disk("size=1m")
    run = RunDirectory.create(place / "run")
    run.write_run({"experiment": {}})
    run.store.add(table(row(1)))
    torn(run.store.add(table(row(2))) or Path())
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    with pytest.warns(PrivlabWarning, match=r"left out.$"):
        assert len(run.store.frame()) == 1
    for write in (
        lambda: run.store.add(table(row(3))),
        lambda: run.write_run({}),
        lambda: run.write_file("a/b", b""),
    ):
        with pytest.raises(PrivlabError, match=r"Read-only.*--out"):
            write()
    with pytest.raises(PrivlabError, match="Read-only"):
        RunDirectory.create(place / "other")
    assert RunDirectory.create(place / "run", resume=True).store.parts() == run.store.parts()


def test_disk_that_is_really_full(small_disk: Callable[..., Path]) -> None:
    run = RunDirectory.create(small_disk("size=128k") / "run")
    run.write_run({"experiment": {}})
    written = 0
    with pytest.raises(  # noqa: PT012
        PrivlabError, match=r"'.*'.*readable"
    ):
        for written in range(100):
            run.store.add(table(row(written)))
    assert images(run.store) == sorted(f"{i}.png" for i in range(written))
    assert written > 2
    assert not list(run.store.records.glob(".tmp-*"))
    run.store.parts()[0].unlink()
    run.store.add(table(row(0)))
    assert len(run.store.frame()) == written


# Versions

OLD = [name for name in COLUMNS.names if name not in ("draw", "conditions", "metrics", "cell", "batch", "external")]


def older(*rows: dict[str, Any]) -> pa.Table:
    """Return rows as version 2 wrote them: without a key."""
    return table(*({**each, "schema": 2} for each in rows)).select(OLD)


def test_store_of_an_earlier_version(store: Store) -> None:
    rows = [
        row(i, attack=attack, geometry=where) for i in (0, 1) for attack in "ab" for where in ("in_place", "oracle")
    ]
    pq.write_table(older(*rows), store.records / "part-000000.parquet")
    said = rf"^'{store.path}' holds records of schema 2: they are shown as they are, and no plan takes them as done\.$"
    with pytest.warns(PrivlabWarning, match=said):
        frame = store.frame()
    assert len(frame) == len(rows)  # none has a key, and none is another's double
    names = ("image", "attack", "geometry", "psnr")
    assert [tuple(each) for each in frame[[*names]].to_numpy()] == [
        tuple(each[name] for name in names) for each in rows
    ]
    assert frame.schema.eq(2).all()
    store.add(table(row(5)))
    with pytest.warns(PrivlabWarning, match=r"schema 2"):
        found = check(store.path)
    assert (found.records, found.conflicts) == (len(rows) + 1, ())


def test_store_of_a_later_version(store: Store) -> None:
    store.add(table(row(0), row(1, schema=SCHEMA + 1)))
    message = rf"^'{store.path}' holds records of schema {SCHEMA + 1}, and this privlab knows {SCHEMA}: update it\.$"
    for read in (store.read, store.frame, lambda: check(store.path), lambda: store.read(["cell"])):
        with pytest.raises(PrivlabError, match=message):
            read()
    assert len(store.parts()) == 1


# Every record once

values = st.fixed_dictionaries(
    {
        "image": st.integers(0, 2),
        "cell": st.sampled_from("xy"),
        "geometry": st.sampled_from(["in_place", "oracle"]),
        "batch": st.sampled_from([None, "b1", "b2"]),
        "status": st.sampled_from(["ok", "failed"]),
        "psnr": st.none() | st.floats(0, 50) | st.just(math.inf),
        "ssim": st.none() | st.floats(-1, 1),
        "label": st.none() | st.integers(0, 9),
        "seed": st.integers(0, 3),
    }
)


def made(given_: dict[str, Any]) -> dict[str, Any]:
    metrics = " ".join(name for name in ("psnr", "ssim") if given_[name] is not None)
    reason = "because" if given_["status"] == "failed" else None
    return row(given_.pop("image"), **given_, metrics=metrics, reason=reason)


@pytest.mark.slow
@settings(max_examples=60)
@given(given_=st.lists(values.map(made), max_size=12))
def test_merged_rows(given_: list[dict[str, Any]]) -> None:
    frame = part_frame(table(*given_))
    once = merge_records(frame)
    keys = [tuple(each[name] for name in ("cell", "image_sha256", "geometry", "batch")) for each in given_]
    order = list(dict.fromkeys(keys))
    assert list(once.columns) == COLUMNS.names
    assert len(once) == len(order)
    pd.testing.assert_frame_equal(merge_records(once.assign(image_id=once.image_sha256)), once)
    assert once.dtypes.drop("label").equals(frame.dtypes.drop(["label", "image_id"]))
    for key, record in zip(order, once.to_dict("records"), strict=True):
        rows = sorted(
            (each for each, k in zip(given_, keys, strict=True) if k == key), key=lambda e: e["status"] != "ok"
        )
        assert tuple(record[name] if record[name] == record[name] else None for name in KEY_COLUMNS) == key
        assert record["status"] == rows[0]["status"]
        assert (record["reason"] == "because") == (rows[0]["status"] == "failed")
        assert record["seed"] == rows[0]["seed"]
        for name in ("psnr", "ssim", "label"):
            first = next((each[name] for each in rows if each[name] is not None), math.nan)
            np.testing.assert_equal(float(record[name]), float(first))
        assert set(record["metrics"].split()) == {name for each in rows for name in each["metrics"].split()}


KEY_COLUMNS = ("cell", "image_sha256", "geometry", "batch")


def test_image_that_could_not_be_read_goes_by_its_name() -> None:
    failed = [row(i, image_sha256=nothing, status="failed") for i in (1, 2, 1) for nothing in ("", None)]
    assert merge_records(part_frame(table(*failed))).image.tolist() == ["1.png", "2.png"]
    assert KEY == ["cell", "image_id", "geometry", "batch"]

"""Stores of several machines become one: nothing twice, nothing replaced, contradictions told."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from privlab.base import PrivlabError, PrivlabWarning
from privlab.evaluation import COLUMNS, SCHEMA
from privlab.stores import Checked, Conflict, RunDirectory, Store, check, existing, merge


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


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of runs with these rows, each part one row."""

    def make(name: str, *rows: dict[str, Any]) -> Path:
        run = RunDirectory.create(tmp_path / name)
        run.write_run({"experiment": {"name": name}})
        for each in rows:
            run.write_records([each])
        return run.path

    return make


def files(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_check(store: Callable[..., Path]) -> None:
    path = store(
        "run",
        *(row(0), row(0), row(1, status="failed"), row(1), row(2, cell="d", status="failed")),
        *(row(3, psnr=20.0), row(3, psnr=20.001), row(4, psnr=20.0), row(4, psnr=21.0, metrics="psnr")),
    )
    (path / "records" / ".tmp-1234-part.parquet").write_bytes(b"half")
    (path / "pictures").mkdir()
    (path / "pictures" / ".tmp-1234-x.png").write_bytes(b"half")
    conflict = Conflict("c", f"{4:064x}", "psnr", 20.0, 21.0)
    assert check(path) == Checked(
        **{"parts": 9, "rows": 9, "records": 5, "failed": 1, "cells": 2, "images": 5, "external": 0},
        conflicts=(conflict,),
        unfinished=(".tmp-1234-part.parquet", ".tmp-1234-x.png"),
    )
    assert str(conflict) == f"conflict: {4:064x}, cell c: psnr is 20 and 21"


@pytest.mark.parametrize(
    ("ours", "theirs", "apart"),
    [
        (20.0, 20.001, False),  # float32 rounds
        (20.0, 20.01, True),
        (0.0, 0.0, False),
        (0.0, 1e-8, False),
        (-0.5, -0.6, True),
        (None, 20.0, False),  # not measured is no contradiction
        (float("inf"), float("inf"), False),
        (float("inf"), 159.6, False),  # both are exact
        (float("inf"), 20.0, True),
    ],
)
def test_conflict(store: Callable[..., Path], ours: float | None, theirs: float, apart: bool) -> None:
    path = store("run", row(psnr=ours), row(psnr=theirs))
    assert [each.metric for each in check(path).conflicts] == ["psnr"] * apart


def test_failure_contradicts_nothing(store: Callable[..., Path]) -> None:
    path = store("run", row(psnr=20.0), row(psnr=None, status="failed", reason="no memory"), row(psnr=20.0))
    assert check(path).conflicts == ()
    (found,) = Store(path).frame().to_dict("records")
    assert (found["status"], found["psnr"]) == ("ok", 20.0)


def test_no_store(tmp_path: Path) -> None:
    for call in (check, existing, lambda path: merge(tmp_path / "all", [path])):
        with pytest.raises(PrivlabError, match="directory"):
            call(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_merge(store: Callable[..., Path], tmp_path: Path) -> None:
    one = store("one", row(0), row(1), row(3, status="failed", reason="killed"))
    two = store("two", row(1), row(2), row(3))
    for path, name in ((one, "pictures/00/x.png"), (two, "pictures/01/y.png"), (two, "kept/z.safetensors")):
        RunDirectory(path).write_file(name, b"kept")
    before, target = files(one) | files(two), tmp_path / "all"
    assert merge(target, [one, two]) == []
    assert Store(target).frame().sort_values("image").image.tolist() == ["0.png", "1.png", "2.png", "3.png"]
    assert set(Store(target).frame().status) == {"ok"}
    assert RunDirectory(target).read_run()["experiment"]["name"] == "one"
    assert files(target).keys() == before.keys()
    again = files(target)
    assert merge(target, [one, two]) == merge(target, [target]) == []
    assert files(target) == again
    assert files(one) | files(two) == before  # the sources stay as they are


def test_merge_is_the_same_in_any_order(store: Callable[..., Path], tmp_path: Path) -> None:
    parts = [store(f"part-{i}", row(i), row(i + 1)) for i in range(3)]
    merge(tmp_path / "all", parts)
    for part in reversed(parts):
        merge(tmp_path / "each", [part])
    once, each = (Store(tmp_path / name).frame().sort_values("image", ignore_index=True) for name in ("all", "each"))
    pd.testing.assert_frame_equal(once, each)
    assert len(once) == 4


def test_merge_tells_contradictions_and_keeps_both(store: Callable[..., Path], tmp_path: Path) -> None:
    parts = [store("one", row(1, psnr=10.0)), store("two", row(1, psnr=12.0))]
    assert merge(tmp_path / "all", parts) == [Conflict("c", f"{1:064x}", "psnr", 10.0, 12.0)]
    assert len(Store(tmp_path / "all").read()) == 2


def test_merge_of_parts_that_have_one_name(tmp_path: Path) -> None:
    """As earlier versions wrote them: the second is no double of the first."""
    old = [name for name in COLUMNS.names if name not in ("cell", "metrics", "conditions", "batch", "draw", "external")]
    for i in (0, 1):
        (tmp_path / str(i) / "records").mkdir(parents=True)
        part = tmp_path / str(i) / "records" / "part-000000.parquet"
        pq.write_table(pa.Table.from_pylist([row(i, schema=2)], schema=COLUMNS).select(old), part)
    with pytest.warns(PrivlabWarning, match=r"schema 2"):  # noqa: PT031
        merge(tmp_path / "all", [tmp_path / "0", tmp_path / "1"])
        merge(tmp_path / "all", [tmp_path / "1", tmp_path / "0"])
        assert sorted(Store(tmp_path / "all").frame().image) == ["0.png", "1.png"]


def test_merge_sets_aside_what_is_torn(store: Callable[..., Path], tmp_path: Path) -> None:
    one = store("one", row(0), row(1))
    part = Store(one).parts()[0]
    part.write_bytes(part.read_bytes()[:50])
    with pytest.warns(PrivlabWarning, match=f"^{part.name} is not a part of a store"):  # noqa: PT031
        merge(tmp_path / "all", [one])
        assert Store(tmp_path / "all").frame().image.tolist() == ["1.png"]
    assert part.stat().st_size == 50


def test_merge_into_something_else(store: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "thesis.tex").write_text("mine")
    with pytest.raises(PrivlabError, match=r"\(thesis.tex\).*empty directory"):
        merge(tmp_path / "all", [store("one", row(0))])
    assert files(tmp_path / "all") == {"thesis.tex": b"mine"}


def test_merge_where_nothing_can_be_written(
    store: Callable[..., Path], tmp_path: Path, small_disk: Callable[..., Path]
) -> None:
    one, place = store("one", row(0)), small_disk("size=64k")
    shutil.copytree(one, place / "all")
    RunDirectory(one).write_file("pictures/00/x.png", b"x" * 100_000)
    with pytest.raises(PrivlabError, match="device"):
        merge(place / "all", [one])
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    with pytest.raises(PrivlabError, match=r"Read-only.*--out"):
        merge(place / "all", [one])
    assert Store(place / "all").frame().image.tolist() == ["0.png"]

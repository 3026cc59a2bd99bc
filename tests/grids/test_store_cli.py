"""`privlab store`, `report` and `figures` as users type them, on runs of this version and of others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from privlab.base import PrivlabWarning
from privlab.evaluation import COLUMNS, SCHEMA
from privlab.grids import read_experiment
from privlab.stores import Store

CASES = """
[[case]]
label = "plain"
setting = "a"
published = { psnr = 19.27 }
[[case]]
label = "shuffled"
setting = "c"
gamma = 0.5
[table]
columns = ["mse", "psnr"]
paper_attack = "patch-gradient"
[[figure]]
kind = "claim"
name = "claim"
[[figure]]
kind = "sheet"
name = "sheet"
"""
ROWS = 3 * (6 + 10)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, written: Any, done: Any) -> tuple[Path, Path]:
    """Return an experiment's file, and its run on three images; not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    file = written(folder / "two.toml", CASES, metrics=None, limit=3)
    done(read_experiment(file), folder / "run", chunk=1, pictures=3)
    return file, folder / "run"


@pytest.fixture
def run(made: Any, tmp_path: Path) -> Path:
    """Return a copy of the run."""
    return shutil.copytree(made[1], tmp_path / "run")


@pytest.fixture
def older(run: Path) -> Path:
    """Return the run as version 2 would have written its records."""
    names = [
        name for name in COLUMNS.names if name not in ("cell", "metrics", "conditions", "batch", "draw", "external")
    ]
    rows = Store(run).read().cast(COLUMNS).to_pandas().assign(schema=2)
    shutil.rmtree(run / "records")
    (run / "records").mkdir()
    rows[names].to_parquet(run / "records" / "part-000000.parquet", index=False)
    return run


def torn(run: Path) -> Path:
    part = Store(run).parts()[0]
    part.write_bytes(part.read_bytes()[:-9])
    return part


def test_check(cli: Any, made: Any) -> None:
    said = cli("store", "check", made[1])
    assert (said.status, said.err) == (0, "")
    assert said.out == f"{ROWS} records (0 failed) in 6 parts of {ROWS} rows; 10 cells, 3 images\n"
    found = json.loads(cli("store", "check", made[1], "--json").out)
    assert (found["records"], found["conflicts"], found["unfinished"], found["warnings"]) == (ROWS, [], [], [])


def test_check_of_a_store_that_was_spoiled(cli: Any, run: Path) -> None:
    part = torn(run)
    (run / "records" / ".tmp-1-part.parquet").write_bytes(b"half")
    rows = pq.read_table(Store(run).parts()[1]).to_pandas()
    rows.assign(psnr=rows.psnr / 2).to_parquet(run / "records" / "part-000099-x.parquet", index=False)
    said = cli("store", "check", run)
    assert said.status == 2
    assert said.err.splitlines()[0].startswith(f"Warning: {part.name} is not a part of a store (")
    assert len(said.err.splitlines()) == 1
    lines = said.out.splitlines()
    assert lines[0] == f"{ROWS - 6} records (0 failed) in 7 parts of {ROWS} rows; 10 cells, 3 images"
    assert sum(line.startswith("conflict: ") for line in lines) == 6 - 2 * (rows.psnr > 200).sum()
    assert lines[-1] == "left behind by a run that was killed: .tmp-1-part.parquet"


@pytest.mark.slow
def test_run_goes_on_after_a_part_was_spoiled(cli: Any, made: Any, run: Path, same: Callable[..., None]) -> None:
    part = torn(run)
    said = cli("table", made[0], "--out", run, "--device", "cpu")
    assert said.status == 0
    start = f"Warning: {part.name} is not a part of a store ("
    assert sum(line.startswith(start) for line in said.err.splitlines()) == 1
    with pytest.warns(PrivlabWarning, match="is not a part of a store"):
        same(run, made[1])  # it compares all rows
    assert part.exists()


def test_show(cli: Any, made: Any) -> None:
    said = cli("store", "show", made[1], "--limit", 4)
    assert said.status == 0
    assert said.out.count("vit_ti") == 4
    assert said.err == f"{ROWS - 4} more; --limit shows them, `privlab store export` writes all.\n"
    rows = json.loads(cli("store", "show", made[1], "--json", "--limit", 100).out)
    assert len(rows) == ROWS
    first = [row["psnr"] for row in rows[:4]]
    assert all(f" {value:.4g} " in said.out for value in first)
    assert not any(repr(value)[:8] in said.out for value in first)
    columns = {"case", "victim", "defense", "setting", "attack", "geometry", "image", "psnr", "ssim", "status"}
    assert set(rows[0]) == columns
    assert [row["case"] for row in rows] == ["plain"] * 18 + ["shuffled"] * 30
    assert {row["ssim"] for row in rows} == {None}


@pytest.mark.parametrize(
    ("suffix", "read"),
    [
        ("csv", pd.read_csv),
        ("parquet", pd.read_parquet),
        ("json", lambda path: pd.read_json(path, orient="records", lines=True)),
    ],
)
def test_export(cli: Any, run: Path, tmp_path: Path, suffix: str, read: Callable[[Path], pd.DataFrame]) -> None:
    shutil.copy(Store(run).parts()[0], run / "records" / "part-000098-y.parquet")  # a record counts once
    file = tmp_path / f"all.{suffix}"
    assert cli("store", "export", run, file).out == f"{ROWS} records: {file}\n"
    frame, wanted = read(file), Store(run).frame()
    assert list(frame.columns) == list(wanted.columns)
    pd.testing.assert_series_equal(frame.psnr, wanted.psnr)
    pd.testing.assert_series_equal(frame.mse, wanted.mse, rtol=1e-12, atol=0)  # 1e-14 is no zero
    assert frame.cell.tolist() == wanted.cell.tolist()
    assert json.loads(cli("store", "export", run, file, "--json").out) == {"file": str(file), "records": ROWS}


def test_reading_as_the_readme_says(made: Any) -> None:
    records = pd.read_parquet(made[1] / "records")
    assert len(records) == ROWS
    assert records[records.geometry == "in_place"].groupby("attack").psnr.count()["patch-gradient"] == 6


def test_merge_of_contradictions(cli: Any, made: Any, run: Path, tmp_path: Path) -> None:
    part = Store(run).parts()[0]
    rows = pd.read_parquet(part)
    rows.assign(mse=rows.mse + 1).to_parquet(part.with_name("part-000000-other.parquet"), index=False)
    part.unlink()
    said = cli("store", "merge", tmp_path / "all", made[1], run)
    assert said.status == 2
    assert said.out.count("conflict: ") == 6
    found = json.loads(cli("store", "merge", tmp_path / "all", made[1], run, "--json").out)
    assert (found["records"], len(found["conflicts"])) == (ROWS, 6)


# Earlier and later versions


def test_earlier_version(cli: Any, made: Any, older: Path, tmp_path: Path) -> None:
    warning = (
        f"Warning: '{older}' holds records of schema 2: they are shown as they are, and no plan takes them as done."
    )
    shown = cli("store", "show", older, "--json", "--limit", 100)
    assert len(json.loads(shown.out)) == ROWS
    assert shown.err == f"{warning}\n"
    assert cli("store", "export", older, tmp_path / "all.csv").err == f"{warning}\n"
    assert cli("store", "check", older).err == f"{warning}\n"
    assert cli("store", "merge", tmp_path / "all", older).status == 0
    said = cli("table", made[0], "--out", older, "--device", "cpu")
    assert said.status == 0
    assert warning in said.err.splitlines()
    assert len(Store(older).parts()) == 1 + 2  # nothing of it was taken as done, and nothing was lost
    assert len(json.loads(cli("store", "show", older, "--json", "--limit", 100).out)) == 2 * ROWS


@pytest.mark.parametrize("command", ["show", "check", "export", "merge", "table", "report", "figures"])
def test_later_version(cli: Any, made: Any, run: Path, tmp_path: Path, command: str) -> None:
    part = Store(run).parts()[0]
    pd.read_parquet(part).assign(schema=SCHEMA + 1).to_parquet(part, index=False)
    asked = {
        "export": ("store", "export", run, tmp_path / "all.csv"),
        "merge": ("store", "merge", tmp_path / "all", run),
        "table": ("table", made[0], "--out", run, "--device", "cpu"),
        "report": ("report", run),
        "figures": ("figures", run),
    }
    error = cli(*asked.get(command, ("store", command, run))).error
    place = tmp_path / "all" if command == "merge" else run
    assert error == f"'{place}' holds records of schema {SCHEMA + 1}, and this privlab knows {SCHEMA}: update it."


# The page and the figures


@pytest.mark.slow
def test_report(cli: Any, made: Any, run: Path, tmp_path: Path) -> None:
    assert cli("report", run).out == f"{run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    for word in ("<!doctype html>", "plain", "shuffled", "patch-gradient"):
        assert word.lower() in page.lower()
    said = cli("report", made[1], "--out", tmp_path / "page.html", "--json")
    assert json.loads(said.out) == [str(tmp_path / "page.html")]
    assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.slow
def test_figures(cli: Any, run: Path, tmp_path: Path) -> None:
    said = cli("figures", run)
    names = [f"{name}.{kind}" for name in ("claim", "sheet") for kind in ("pdf", "svg")]
    assert said.out.splitlines() == [str(run / "figures" / name) for name in names]
    assert (run / "figures" / "claim.pdf").read_bytes().startswith(b"%PDF")
    said = cli("figures", run, "--out", tmp_path / "drawn", "--format", "png", "--json")
    assert json.loads(said.out) == [str(tmp_path / "drawn" / f"{name}.png") for name in ("claim", "sheet")]
    assert (tmp_path / "drawn" / "sheet.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_report_of_a_spoiled_store(cli: Any, run: Path) -> None:
    part = torn(run)
    said = cli("report", run)
    assert said.status == 0
    assert said.err.startswith(f"Warning: {part.name} is not a part of a store (")


# Mistakes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("store", "check", "/nowhere"), "'/nowhere' holds no records: give the directory of a run."),
        (("store", "show", "/nowhere"), "'/nowhere' holds no records: give the directory of a run."),
        (("store", "export", "/nowhere", "x.csv"), "'/nowhere' holds no records: give the directory of a run."),
        (("store", "merge", "all", "/nowhere"), "'/nowhere' holds no records: give the directory of a run."),
        (("store", "merge", "all"), "Missing argument 'SOURCES...'."),
        (("store", "export", "RUN", "all.xls"), "FILE must end in .csv, .parquet, .json. Found 'all.xls'."),
        (
            ("store", "export", "RUN", "/nowhere/all.csv"),
            "There is no folder '/nowhere'. Give FILE in a folder",
        ),
        (("store", "show", "RUN", "--limit", 0), "Invalid value for '--limit': 0 is not in the range x>=1."),
        (("store", "shw"), "No such command 'shw'."),
        (("report", "/nowhere"), "'/nowhere' is not the directory of a run: it has no run.json."),
        (("report", "RUN", "--out", "/dev/null/x.html"), "'/dev/null' cannot be written: "),
        (("figures", "/nowhere"), "'/nowhere' is not the directory of a run: it has no run.json."),
        (("figures", "RUN", "--format", "pdf,gif"), "--format must be pdf, svg, png. Found 'gif'."),
        (
            ("figures", "RUN", "--out", "/dev/null/x"),
            "'/dev/null/x' cannot be written: Not a directory. Give another --out.",
        ),
    ],
)
def test_mistake(
    cli: Any, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[Any, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(*(made[1] if word == "RUN" else word for word in asked)).error.startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_store_without_records(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    assert cli("store", "show", tmp_path).error == f"'{tmp_path}' holds no records yet."
    assert cli("store", "check", tmp_path).out == "0 records (0 failed) in 0 parts of 0 rows; 0 cells, 0 images\n"

"""`privlab table`, `report`, `figures` and `store`: from a TOML file to tables, a page and figures, and back again."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from privlab.records import CONTROLS

TOML = """
title = "Noise"
[run]
model = "vit_ti"
weights = "random"
img_size = 32
attack = ["april", "patch-gradient"]
images = ["{photos}"]
[grid]
gamma = [0.3, 0.9]
[[case]]
label = "jigsaw"
setting = "c"
published = {{ psnr = 8.07 }}
[table]
columns = ["mse", "psnr"]
paper_attack = "april"
[[figure]]
kind = "curve"
name = "psnr"
x = "gamma"
"""


@pytest.fixture
def experiment(photos: Path, tmp_path: Path) -> Path:
    path = tmp_path / "noise.toml"
    path.write_text(TOML.format(photos=photos), encoding="utf-8")
    return path


@pytest.fixture
def table(cli: Callable[..., Any], experiment: Path, tmp_path: Path) -> Callable[..., Any]:
    return lambda *arguments: cli("table", experiment, "--out", tmp_path / "run", *arguments)


def test_second_run_does_nothing_and_prints_the_same(table: Callable[..., Any], tmp_path: Path) -> None:
    first = table()
    assert first.status == 0
    for word in ("jigsaw, gamma 0.3", "jigsaw, gamma 0.9", "8.07", "MSE ↓", "PSNR ↑", "worst"):
        assert word in first.out
    assert first.out.splitlines()[-1] == f"run: {tmp_path / 'run'}"
    assert "Warning: vit_ti has RANDOM weights" in first.err
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    second = table()
    assert second.out == first.out
    assert "Warning: vit_ti has RANDOM weights" in second.err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len([path for path in (tmp_path / "run").rglob("*") if path.is_file()]) == len(before)


def test_records_hold_every_case_attack_image_and_control_once(table: Callable[..., Any], tmp_path: Path) -> None:
    table("--chunk", "1")
    records = pd.read_parquet(tmp_path / "run" / "records")
    assert len(list((tmp_path / "run" / "records").iterdir())) == 2 * 3
    counts = records.groupby(["cell", "image_sha256", "geometry"]).size()
    assert (counts == 1).all()
    assert len(counts) == 2 * 3 * (2 * 2 + len(CONTROLS))
    assert set(records.attack) == {"april", "patch-gradient", *CONTROLS}
    assert records.metrics.unique().tolist() == ["mse psnr"]


def test_plan_shows_what_is_done_and_runs_nothing(table: Callable[..., Any], tmp_path: Path) -> None:
    told = json.loads(table("--plan", "--json").out)
    assert [case["done"] for case in told["cases"]] == [0, 0]
    assert told["tasks"] == 2
    assert told["seconds"] > 0
    assert not (tmp_path / "run").exists()
    table("--set", "grid.gamma=[0.9]")
    told = json.loads(table("--plan", "--json").out)
    assert [(case["label"], case["done"]) for case in told["cases"]] == [
        ("jigsaw, gamma 0.3", 0),
        ("jigsaw, gamma 0.9", 3),
    ]
    assert "1 tasks" in table("--plan").out


@pytest.mark.parametrize(
    ("form", "start"), [("latex", "\\begin{tabular}"), ("csv", "group,case,"), ("markdown", "**Noise**"), ("json", "{")]
)
def test_formats(table: Callable[..., Any], form: str, start: str) -> None:
    done = table("--format", form)
    assert done.status == 0
    assert done.out.startswith(start)
    assert "8.07" in done.out


def test_standalone_document_every_attack_and_comparison(table: Callable[..., Any], tmp_path: Path) -> None:
    done = table("--format", "latex", "--standalone", "--all-attacks")
    assert done.out.startswith("\\documentclass")
    assert "patch-gradient" in done.out
    assert "control" in done.out
    assert table("--compare", tmp_path / "run").status == 0


def test_metrics_that_come_later_are_scored_from_what_was_kept(table: Callable[..., Any], tmp_path: Path) -> None:
    table("--keep", "reconstructions", "--set", 'run.metrics=["mse"]')
    kept = list((tmp_path / "run" / "kept").iterdir())
    both = ("--set", 'run.metrics=["mse", "ssim"]', "--set", 'table.columns=["mse", "ssim"]')
    later = table(*both, "--format", "csv")
    assert list((tmp_path / "run" / "kept").iterdir()) == kept
    records = pd.read_parquet(tmp_path / "run" / "records")
    again = records[records.metrics == "ssim"]
    assert again[~again.attack.str.startswith("control")].seconds_attack.isna().all()  # nothing was attacked again
    at_once = table(*both, "--format", "csv", "--out", tmp_path / "other")
    assert later.out == at_once.out


def test_report_and_figures_from_the_directory_alone(
    table: Callable[..., Any], cli: Callable[..., Any], experiment: Path, tmp_path: Path
) -> None:
    table()
    experiment.unlink()
    page = cli("report", tmp_path / "run")
    assert page.out == f"{tmp_path / 'run' / 'report.html'}\n"
    assert "jigsaw, gamma 0.9" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    drawn = json.loads(cli("figures", tmp_path / "run", "--format", "svg", "--json").out)
    assert drawn == [str(tmp_path / "run" / "figures" / "psnr.svg")]
    assert (tmp_path / "run" / "figures" / "psnr.svg").stat().st_size > 1000


def test_report_of_a_single_attack_run(attack: Callable[..., Any], cli: Callable[..., Any], tmp_path: Path) -> None:
    attack()
    assert cli("report", tmp_path / "run", "--out", tmp_path / "page.html").out == f"{tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_shards_merge_to_the_whole(table: Callable[..., Any], cli: Callable[..., Any], tmp_path: Path) -> None:
    whole = table("--format", "csv").out
    for i in (1, 2):
        table("--shard", f"{i}/2", "--out", tmp_path / f"part{i}")
    merged = cli("store", "merge", tmp_path / "all", tmp_path / "part1", tmp_path / "part2", "--json")
    assert json.loads(merged.out) == {"records": 42, "conflicts": []}
    again = table("--out", tmp_path / "all", "--format", "csv").out  # batches of other sizes round otherwise
    assert_frame_equal(pd.read_csv(io.StringIO(again)), pd.read_csv(io.StringIO(whole)), rtol=1e-3)
    assert json.loads(table("--out", tmp_path / "all", "--plan", "--json").out)["tasks"] == 0


def test_store_check_show_and_export(table: Callable[..., Any], cli: Callable[..., Any], tmp_path: Path) -> None:
    table()
    run = tmp_path / "run"
    checked = json.loads(cli("store", "check", run, "--json").out)
    assert (checked["records"], checked["failed"], checked["images"], checked["conflicts"]) == (42, 0, 3, [])
    assert cli("store", "check", run).out.startswith("42 records (0 failed)")
    assert len(json.loads(cli("store", "show", run, "--limit", "5", "--json").out)) == 5
    for suffix, read in ((".csv", pd.read_csv), (".parquet", pd.read_parquet)):
        assert cli("store", "export", run, tmp_path / f"all{suffix}").out.startswith("42 records")
        assert len(read(tmp_path / f"all{suffix}")) == 42
    cli("store", "export", run, tmp_path / "all.json")
    assert len(pd.read_json(tmp_path / "all.json", lines=True)) == 42


def test_torn_part_is_set_aside_and_its_records_made_again(
    table: Callable[..., Any], cli: Callable[..., Any], tmp_path: Path
) -> None:
    whole = table("--chunk", "1", "--format", "csv").out
    part = min((tmp_path / "run" / "records").iterdir())
    part.write_bytes(part.read_bytes()[:200])
    again = table("--chunk", "1", "--format", "csv")
    assert again.out == whole
    assert (tmp_path / "run" / "set-aside" / part.name).stat().st_size == 200
    assert json.loads(cli("store", "check", tmp_path / "run", "--json").out)["records"] == 42


BAD: dict[tuple[str, ...], str] = {
    ("--shard", "3/2"): "--shard must be I/N with 1 ≤ I ≤ N. Found 3/2.",
    ("--shard", "2"): "--shard must be I/N, such as 1/4. Found '2'.",
    ("--workers", "0"): "--workers must be a positive number. Found 0.",
    ("--engine", "rai"): "Unknown engine 'rai'. Did you mean ray?",
    ("--ray-address", "auto"): "--ray-address is for --engine ray. Found --engine local.",
    ("--chunk", "0"): "--chunk must be a positive number. Found 0.",
    ("--batch-size", "0"): "--batch-size must be a positive number. Found 0.",
    ("--set", "run.limt=2"): "Unknown key of [run] 'limt'. Did you mean limit",
    ("--set", "limit=2"): "--set must be TABLE.KEY=VALUE, such as run.limit=4. Found 'limit=2'.",
    ("--set", 'run.model="vit_tii"'): "Unknown model 'vit_tii'. Did you mean vit_ti",
    ("--images", "nowhere"): "No file or folder 'nowhere'.",
    ("--compare", "nowhere"): "'nowhere' is no run: it has no run.json. Give the directory of a run.",
}


@pytest.mark.parametrize("options", BAD, ids=" ".join)
def test_bad_options_in_one_line(table: Callable[..., Any], options: tuple[str, ...]) -> None:
    done = table(*options)
    assert done.status == 2
    assert BAD[options] in done.err.splitlines()[-1]
    assert done.err.splitlines()[-1].startswith("Error: ")


def test_unknown_experiment_and_directory_of_something_else(
    cli: Callable[..., Any], attack: Callable[..., Any], table: Callable[..., Any], tmp_path: Path
) -> None:
    assert cli("table", "mjp_tabel5").error.startswith("Unknown experiment 'mjp_tabel5'. Did you mean mjp_table5")
    assert cli("table", tmp_path / "none.toml").error.startswith(
        f"Cannot read the experiment '{tmp_path / 'none.toml'}'"
    )
    assert cli("report", tmp_path).error == f"'{tmp_path}' is no run: it has no run.json. Give the directory of a run."
    assert cli("figures", tmp_path, "--format", "gif").error == "--format must be pdf, svg, png. Found 'gif'."
    for command in (("check",), ("show",), ("export", tmp_path / "x.csv")):
        assert "holds no records" in cli("store", command[0], tmp_path / "nothing", *command[1:]).error
    attack()
    assert "holds a run of privlab attack. Give another --out." in table().err
    assert cli("store", "export", tmp_path / "run", tmp_path / "x.txt").error.startswith("FILE must end in .csv")


def test_images_that_cannot_be_read_are_counted_and_named(table: Callable[..., Any], photos: Path) -> None:
    (photos / "broken.png").write_bytes(b"no picture")
    done = table()
    assert done.status == 2
    assert "Failed: broken.png: " in done.err
    rows = json.loads(table("--json").out)["rows"]
    assert {row["failed"] for row in rows if row["kind"] in ("paper", "worst")} == {1}

"""The bench of tables: a run that is made by copying is one that `privlab table` would leave; what its figures are."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyarrow.parquet as pq
import pytest
import torch

from privlab.base import PrivlabError, PrivlabWarning, core_count
from privlab.benchmarks import stores, table
from privlab.benchmarks.first_paint import find_chromium, first_paint
from privlab.benchmarks.stores import experiment_file, finished_run, photographs
from privlab.benchmarks.table import _a_core_each, _Pace
from privlab.evaluation import COLUMNS
from privlab.grids import Experiment, Options, prepare
from privlab.grids.fill import fill
from privlab.images import open_images
from privlab.report.tables import load_results
from privlab.stores import KEY, RunDirectory, Store

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
TABLES = '[[case]]\nlabel = "a"\nsetting = "a"\n\n[[case]]\nlabel = "c"\nsetting = "c"\n'
FIGURES = ["pipeline_over_bare", "two_workers_over_one", "ray_two_over_one"]
LARGE = ["resume_seconds_1e6", "resume_rss_gb_1e6", "imports_rss_gb", "report_seconds_1000"]
needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="needs a Chromium")


@pytest.fixture
def made(tmp_path: Path) -> Experiment:
    """Return an experiment of two cases on five photographs and a tiny victim."""
    images = photographs(tmp_path / "images", 5)
    return experiment_file(tmp_path / "e.toml", images, TABLES, model="vit_ti", img_size=32)


def options(**given: Any) -> Options:
    return Options(device="cpu", **given)


# ---- finished runs


def test_photographs_differ_and_are_the_same_each_time(tmp_path: Path) -> None:
    one, other = (open_images(photographs(tmp_path / name, 16)) for name in ("one", "other"))
    hashes = [image.sha256 for image in one]
    assert len(set(hashes)) == 16
    assert hashes == [image.sha256 for image in other]
    assert all(image.pixels is not None and min(image.pixels.size) >= 200 for image in one)


@pytest.mark.slow
def test_a_copied_run_is_one_that_was_run(made: Experiment, tmp_path: Path) -> None:
    """The same parts, records, images and facts, but for the scores."""
    how = options(chunk=2, pictures=3)
    assert finished_run(made, tmp_path / "copied", how, real=1) == 5 * (8 + 13)
    grid, tasks = prepare(made, tmp_path / "run", how)
    fill(grid, tasks, tmp_path / "run", how)
    copied, run = Store(tmp_path / "copied"), Store(tmp_path / "run")
    assert len(copied.parts()) == len(run.parts()) == len(tasks) == 6
    for one, other in zip(copied.parts(), run.parts(), strict=True):
        assert pq.read_schema(one).equals(COLUMNS)
        assert pq.read_metadata(one).num_rows == pq.read_metadata(other).num_rows
    names = [name for name in COLUMNS.names if not pd.api.types.is_float_dtype(run.frame()[name])]
    key = ["cell", "image", "geometry"]
    mine, theirs = (store.frame().sort_values(key).reset_index(drop=True) for store in (copied, run))
    names.remove("label")  # which the victim predicts
    pd.testing.assert_frame_equal(mine.loc[:, names], theirs.loc[:, names])
    assert {"attack", "image_sha256", "cell", "defense_params", "status", "metrics"} <= set(names)
    assert mine.psnr.notna().equals(theirs.psnr.notna())
    assert pictures(tmp_path / "copied") == pictures(tmp_path / "run")
    facts = [RunDirectory(tmp_path / name).read_run() for name in ("copied", "run")]
    for name in ("experiment", "cases", "image_lists", "images", "status", "missing_metrics"):
        assert facts[0][name] == facts[1][name]


def pictures(path: Path) -> set[str]:
    """Return the names of the images of a run."""
    found = path.glob("pictures/*/*.png")
    return {f"{file.parent.name}/{file.name}" for file in found if file.parent.name != "first"}


@pytest.mark.slow
def test_nothing_is_missing_of_a_copied_run_until_a_part_is(made: Experiment, tmp_path: Path) -> None:
    finished_run(made, tmp_path / "run", options(chunk=2, pictures=0), real=2)
    _, tasks = prepare(made, tmp_path / "run", options())
    assert tasks == []
    records = Store(tmp_path / "run").frame()
    assert (
        len(records.drop_duplicates([name if name != "image_id" else "image" for name in KEY])) == len(records) == 105
    )
    Store(tmp_path / "run").parts()[0].unlink()
    _, tasks = prepare(made, tmp_path / "run", options())
    assert sum(len(task.images) for task in tasks) == 2
    with pytest.raises(PrivlabError, match=r"1.*finished"):
        table.resume_child(str(tmp_path / "e.toml"), str(tmp_path / "run"))


@pytest.mark.slow
def test_scores_differ_by_up_to_a_tenth(made: Experiment, tmp_path: Path) -> None:
    finished_run(made, tmp_path / "run", options(pictures=0), real=1)
    records = Store(tmp_path / "run").frame()
    own = records[(records.geometry == "in_place") & records.psnr.notna()]
    spread = own.groupby("cell").psnr.agg(["min", "max", "nunique"])
    assert (spread["min"] >= 0.9 * spread["max"] - 1e-9).all()
    assert (spread["nunique"] == 5).all()


@pytest.mark.slow
def test_an_image_without_records_is_no_pattern(made: Experiment, tmp_path: Path, monkeypatch: Any) -> None:
    real = stores.run_task

    def half(task: Any) -> Any:
        result = real(task)
        object.__setattr__(result, "rows", result.rows.slice(0, 0))
        return result

    monkeypatch.setattr(stores, "run_task", half)
    with pytest.raises(PrivlabError, match=r"2.*2.*record"):
        finished_run(made, tmp_path / "run", options(), real=2)


# ---- what is timed


@pytest.mark.slow
def test_both_stages_attack_the_same_labelled_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Experiment
) -> None:
    labels = table._labels(tmp_path / "labels.csv", tmp_path / "images", 3)
    timed = experiment_file(
        *(tmp_path / "timed.toml", tmp_path / "images"),
        **{"model": "vit_ti", "img_size": 32, "setting": "a", "limit": 3, "labels": str(labels)},
    )
    stages, seen = table._stages(timed, tmp_path, torch.device("cpu")), []
    real = table.observe

    def observe(model: Any, x: torch.Tensor, y: torch.Tensor, parameters: Any) -> Any:
        seen.append((x.shape, y.tolist()))
        return real(model, x, y, parameters)

    monkeypatch.setattr(table, "observe", observe)
    stages[table._BARE]()
    assert seen == [((3, 3, 32, 32), [0, 0, 0])] * 2  # april runs on a block of its own
    stages[table._TABLE]()
    stages[table._TABLE]()  # each time anew
    for number in (0, 1):
        records = load_results(tmp_path / f"run-{number}").records
        assert set(records.attack[~records.attack.str.startswith("control:")]) == {"april", "patch-gradient"}
        assert (records.image_sha256.nunique(), len(records)) == (3, 24)
        assert set(records.label_origin) == {"file"}  # none was predicted
        assert len(pictures(tmp_path / f"run-{number}")) == 3 * 4


def test_names_of_images_may_hold_commas(tmp_path: Path) -> None:
    folder = photographs(tmp_path / "images", 2)
    (folder / "00000.jpg").rename(folder / 'a, "b".jpg')
    labels = table._labels(tmp_path / "labels.csv", folder, 2)
    assert [image.label for image in open_images(folder, labels=labels)] == [0, 0]


def test_a_pace_begins_when_every_worker_has_brought_something() -> None:
    results = [(3.0, "a", 2), (4.0, "a", 2), (9.0, "b", 2), (10.0, "a", 2), (11.0, "b", 1), (13.0, "b", 2)]
    assert _Pace.of(1.0, results, 2) == _Pace(per_image=4.0 / 5, start=8.0)
    assert _Pace.of(1.0, results, 1) == _Pace(per_image=4.0 / 5, start=8.0)  # it was two
    assert _Pace.of(1.0, [(t, "a", n) for t, _, n in results], 1) == _Pace(per_image=10.0 / 9, start=2.0)
    assert _Pace.of(1.0, results, 3) is None
    assert _Pace.of(1.0, results[:3], 2) is None  # nothing came later
    assert _Pace.of(1.0, [], 1) is None


@pytest.fixture
def paces(made: Experiment, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, list[_Pace | None]]], Any]:
    """Return `_paces` over three rounds, with these paces by engine instead of measured ones."""

    def measured(given: dict[str, list[_Pace | None]]) -> Any:
        left = {name: iter(values) for name, values in given.items()}
        monkeypatch.setattr(
            table, "_pace", lambda experiment, path, engine, device: next(left[f"{engine.name} {engine.workers}"])
        )
        monkeypatch.setattr(table, "core_count", lambda: 2)
        steps: list[int] = []
        found = table._paces(made, Path(), 3, "cpu", lambda: steps.append(1))
        assert len(steps) == 9
        return found

    return measured


ONE = [_Pace(4.0, 1.0), _Pace(9.0, 1.0), _Pace(5.0, 7.0)]
TWO = [_Pace(2.0, 8.0), _Pace(3.0, 9.0), _Pace(2.5, 7.0)]


def test_paces_are_medians(paces: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    found, absent = paces({"local 1": ONE, "local 2": TWO, "ray 2": TWO[::-1]})
    assert found == {table._ONE: _Pace(5.0, 1.0), table._TWO: _Pace(2.5, 8.0), table._RAY: _Pace(2.5, 8.0)}
    assert absent == {}


def test_what_cannot_be_measured_is_absent_with_its_reason(
    paces: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found, absent = paces({"local 1": ONE, "local 2": [TWO[0], None]})
    assert set(found) == {table._ONE}
    assert absent["two_workers_over_one"].startswith("too few tasks")
    assert absent["ray_two_over_one"] == "Ray is not installed: pip install 'privlab[ray]'"
    found, absent = paces({"local 1": [None], "local 2": TWO})
    assert found == {}
    assert set(absent) == {"two_workers_over_one", "ray_two_over_one"}
    monkeypatch.setattr(table, "_WORKERS", 3)
    found, absent = paces({"local 1": ONE})
    assert set(found) == {table._ONE}
    assert set(absent.values()) == {"it needs 3 cores"}


def test_workers_have_a_core_each_and_this_process_gets_its_own_back() -> None:
    before = torch.get_num_threads(), psutil.Process().cpu_affinity()
    seen = []

    def inside() -> None:
        with _a_core_each():
            seen.append((torch.get_num_threads(), core_count()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inside()
    assert seen == [(1, min(2, len(before[1])))]
    assert (torch.get_num_threads(), psutil.Process().cpu_affinity()) == before


# ---- the whole


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million records, a thousand images and processes that load torch take longer than this suite has."""
    monkeypatch.setattr(table, "_RECORDS", 40)
    monkeypatch.setattr(table, "_RESUMED_IMAGES", 3)
    monkeypatch.setattr(table, "_SHOWN", 2)
    pace = {table._ONE: _Pace(0.6, 1.0), table._TWO: _Pace(0.3, 2.0), table._RAY: _Pace(0.4, 3.0)}
    monkeypatch.setattr(table, "_paces", lambda *given: (pace, {}))


def bench(**given: Any) -> dict[str, Any]:
    """Run the bench on a small victim; return what `--json` prints."""
    shared = {"model": "vit_ti", "n_images": 2, "images_dir": None, "repeats": 1, "large": False, "device": "cpu"}
    return json.loads(json.dumps(table.bench_table(**(shared | given)).as_dict()))


@pytest.mark.slow
def test_every_figure_is_a_key(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "find_chromium", lambda: "chromium")
    monkeypatch.setattr(table, "first_paint", lambda chromium, page: float(page.stat().st_size > 10_000))
    steps: list[tuple[int, int]] = []
    result = bench(large=True, progress=lambda done, total: steps.append((done, total)))
    figures = [*FIGURES, *LARGE, "report_first_paint_seconds"]
    assert list(result)[: len(figures)] == figures
    assert list(result["targets"]) == figures
    assert (result["two_workers_over_one"], result["ray_two_over_one"]) == (2.0, pytest.approx(1.5))
    seconds = result["seconds_per_image"]
    assert result["pipeline_over_bare"] == pytest.approx(seconds["table run"] / seconds["bare observation and attacks"])
    assert 0 < result["resume_seconds_1e6"] < 60
    assert 0.1 < result["imports_rss_gb"] < result["resume_rss_gb_1e6"] < 4
    assert result["report_first_paint_seconds"] == 1
    assert result["setup"]["start_seconds"] == {table._ONE: 1, table._TWO: 2, table._RAY: 3}
    assert (result["setup"]["images"], result["setup"]["absent"]) == (2, {})
    assert [done for done, _ in steps] == list(range(1, 8))  # without those of the workers


@pytest.mark.slow
def test_without_a_browser_its_figure_is_absent_and_not_zero(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(table, "find_chromium", lambda: None)
    figures, absent = table._open_page(tmp_path)
    assert list(figures) == ["report_seconds_1000"]
    assert absent == {"report_first_paint_seconds": "there is no Chromium on the path"}
    (tmp_path / "again").mkdir()
    monkeypatch.setattr(table, "find_chromium", lambda: "false")
    figures, absent = table._open_page(tmp_path / "again")
    assert (list(figures), absent) == (["report_seconds_1000"], {"report_first_paint_seconds": "Chromium died"})


@pytest.mark.slow
def test_images_of_a_folder_are_timed(small: None, tmp_path: Path) -> None:
    folder = photographs(tmp_path / "mine", 3)
    assert bench(images_dir=folder)["pipeline_over_bare"] > 0
    with pytest.raises(PrivlabError, match=r"No file or folder"):
        bench(images_dir=tmp_path / "none")


@pytest.mark.slow
def test_a_run_that_is_not_resumed_is_an_error(small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def torn(*given: Any, **more: Any) -> int:
        count = finished_run(*given, **more)
        Store(tmp_path / "scaled").parts()[0].unlink()
        return count

    monkeypatch.setattr(table, "finished_run", torn)
    with pytest.raises(PrivlabError, match=r"resumed.*1"):
        table._resume(tmp_path, lambda: None)


# ---- the browser


@pytest.mark.slow
@needs_chromium
def test_first_paint_waits_for_what_blocks_it(tmp_path: Path) -> None:
    chromium, page = find_chromium(), tmp_path / "page.html"
    assert chromium is not None
    page.write_text("<!doctype html><p>at once")
    at_once = first_paint(chromium, page, times=1)
    page.write_text("<!doctype html><script>const t = Date.now(); while (Date.now() - t < 1500);</script><p>late")
    assert at_once > 0
    assert first_paint(chromium, page, times=1) > 1.4


def test_a_browser_that_dies_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"Chromium died"):
        first_paint("false", tmp_path / "page.html")


@pytest.mark.slow
def test_weights_are_random_and_it_is_no_news(small: None, recwarn: pytest.WarningsRecorder) -> None:
    bench()
    assert not [warning for warning in recwarn if issubclass(warning.category, PrivlabWarning)]

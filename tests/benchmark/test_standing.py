"""The kept rows of the package's entries: they are those that the result files give, and are not believed otherwise."""

import importlib.util
import json
import runpy
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privlab.benchmark import entries, standing, standings
from privlab.benchmark.standing import PACKAGE, concluded_rows, listed, result_texts

SCRIPT = "Run python .ci/conclude_entries.py"


def test_the_rows_are_kept_for_the_result_files_that_are_there() -> None:
    assert len(concluded_rows()) > 30, SCRIPT
    assert listed() == [*concluded_rows()]


@pytest.mark.slow
def test_the_kept_rows_are_those_that_the_results_give() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / ".ci/conclude_entries.py"))
    found = script["standing_text"](standings(entries(), again=True))
    assert found == standing.CONCLUDED.read_text("utf-8"), SCRIPT


def test_after_an_edited_result_no_kept_row_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    edited = result_texts()
    edited["gradients-svt.json"] = edited["gradients-svt.json"].replace(b'"verdict":"holds"', b'"verdict":"broken"')
    assert edited != result_texts()
    monkeypatch.setattr(standing, "result_texts", lambda: edited)
    assert concluded_rows.__wrapped__() == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: kept["rows"][0][0].update(verdict="holds", worst_case=0.0),
        lambda kept: kept["rows"].pop(),
        lambda kept: kept.update(evidence="0" * 64),
        lambda kept: kept.pop("sha256"),
    ],
)
def test_an_edited_file_of_rows_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], object]
) -> None:
    kept = json.loads(standing.CONCLUDED.read_text("utf-8"))
    change(kept)
    monkeypatch.setattr(standing, "CONCLUDED", tmp_path / "standing.json")
    assert concluded_rows.__wrapped__() == ()
    standing.CONCLUDED.write_text(json.dumps(kept), "utf-8")
    assert concluded_rows.__wrapped__() == ()


@pytest.mark.slow
def test_the_archive_of_a_wheel_holds_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    spec = importlib.util.spec_from_file_location("packing", Path(__file__).parents[2] / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    packing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packing)
    folder = tmp_path / "privlab/experiments/benchmark"
    (folder / "results").mkdir(parents=True)
    for name, text in result_texts().items():
        (folder / "results" / name).write_bytes(text)
    before = result_texts()
    packing.pack(folder / "results")
    monkeypatch.setattr(standing, "PACKAGE", folder)
    assert result_texts() == before
    assert [path.name for path in folder.iterdir()] == ["results.tar.xz"]
    assert tarfile.is_tarfile(folder / "results.tar.xz")
    assert (folder / "results.tar.xz").stat().st_size < 0.15 * sum(map(len, before.values()))


def test_the_package_is_read_where_its_results_are() -> None:
    assert {each.path.name for each in entries()} == {path.name for path in (PACKAGE / "results").glob("*.json")}

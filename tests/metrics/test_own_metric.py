"""A metric of a separately installed package: in runs, records, tables and lists by its name."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from privlab.base import PrivlabError, PrivlabWarning
from privlab.metrics import Metric, mse, registry, score
from privlab.metrics.names import METRIC_NAMES
from privlab.report.tables import shown_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "plugins.md").read_text(encoding="utf-8")
CODE = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "EDGE_ERROR" in block)
POINT = next(block for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "EDGE_ERROR" in block)
POINTS = POINT.replace('project.entry-points."privlab.metrics"', "privlab.metrics").replace('"', "")

TABLE = """
title = "Edges"
[run]
images = ["samples"]
limit = 2
attack = ["patch-gradient"]
[table]
columns = ["psnr", "edge_error"]
[[case]]
label = "undefended"
model = "cifar_vit"
"""

PROGRAM = """
import sys
from privlab.cli import _status
statuses = [_status(line.split()) for line in sys.argv[1:]]
sys.exit(any(statuses))
"""


def run(site: Path, *commands: str) -> "subprocess.CompletedProcess[str]":
    """Run commands in one process that finds the package."""
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = (sys.executable, "-c", PROGRAM, *commands)
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the docs' metric as a distribution."""
    return install(tmp_path_factory.mktemp("site"), CODE, POINTS)


def install(site: Path, code: str, points: str) -> Path:
    """Lay a distribution out where Python finds it."""
    info = site / "my_package-1.0.dist-info"
    info.mkdir()
    (site / "my_package.py").write_text(code, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    return site


@pytest.mark.slow
def test_it_runs_in_attacks_tables_and_lists(site: Path) -> None:
    """Its column is its formula, on the images that the run kept; the table has it beside PSNR."""
    (site / "edges.toml").write_text(TABLE, encoding="utf-8")
    attack = "attack --model cifar_vit --attack patch-gradient --limit 2 --metrics psnr,edge_error --out run"
    done = run(site, attack, "list metrics --json", "table edges.toml --out table")
    assert done.returncode == 0, done.stderr
    assert "mean difference of edges" in done.stdout
    rows = pd.read_parquet(site / "run" / "records").set_index(["attack", "image"])
    assert rows.edge_error.dtype == "float64"
    assert rows.loc["patch-gradient"].edge_error.max() < 1e-4
    assert rows.loc["control:mean"].edge_error.min() > 0.01
    table = pd.read_parquet(site / "table" / "records")
    assert set(table.edge_error.dropna()) == set(rows.edge_error.dropna())
    printed = pd.read_csv(io.StringIO(run(site, "table edges.toml --out table --format csv").stdout))
    assert {"psnr", "edge_error"} <= set(printed.columns)
    assert printed.edge_error.notna().all()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["my_package", "privlab.metrics", "privlab.runs"])
def test_the_package_can_be_imported_before_and_after_privlab(site: Path, first: str) -> None:
    """Its module imports `privlab.metrics`, which must not load the module that is half imported then."""
    told = f"import {first}, my_package, privlab.metrics as m; print(m.METRICS['edge_error'] is my_package.EDGE_ERROR)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    command = (sys.executable, "-W", "error::UserWarning", "-c", told)
    done = subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def test_entry_points_are_loaded_at_the_first_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    own, loaded = Metric("own", mse, "lower leaks", (0.0, 1.0), 4, "a test"), []

    class Point(EntryPoint):
        def load(self) -> object:
            loaded.append(self.name)
            assert "own" not in table  # a package may look up metrics while it is imported
            if self.name == "broken":
                raise ImportError("no such module")
            return own

    points = tuple(Point(name, "package:OWN", "privlab.metrics") for name in ("own", "mse", "broken", "other"))
    monkeypatch.setattr(registry, "installed_plugins", lambda group: points)
    table = registry._Metrics()
    assert table["mse"].function is mse
    assert "psnr" in table
    assert loaded == []
    assert table["own"] is own
    assert loaded == ["own", "broken", "other"]
    assert {name: why.partition(" of privlab.metrics ")[2][:16] for name, why in table.broken.items()} == {
        "broken": "cannot be loaded",
        "other": "must be a Metric",
    }
    with pytest.raises(PrivlabError, match=r"'broken'.*privlab\.metrics"):
        table["broken"]
    assert [*table] == [*METRIC_NAMES, "own"]
    assert len(table) == len({**table}) == len(METRIC_NAMES) + 1
    assert loaded == ["own", "broken", "other"]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Return a function that adds a metric named 'own', with the range 5 to 6, as another package would."""

    def add(function: Callable[..., Any]) -> None:
        own = Metric("own", function, "lower leaks", (5.0, 6.0), 4, "a test")
        monkeypatch.setattr(registry.METRICS, "_added", {"own": own})

    return add


def test_a_metric_that_raises_or_leaves_its_range_is_named(added: Callable[[Callable[..., Any]], None]) -> None:
    x = torch.zeros(2, 3, 4, 4)
    added(lambda x, y: 1 / 0)
    with pytest.raises(PrivlabError, match=r"'own'.*ZeroDivisionError"):
        score(x, x, ["own"])
    added(lambda x, y: 3)
    with pytest.raises(PrivlabError, match="'own'"):
        score(x, x, ["own"])
    added(lambda x, y: x.new_tensor([5.5, 6.5]))
    with pytest.warns(PrivlabWarning, match=r"'own'.*5.*6"):
        assert score(x, x, ["own"])["own"].tolist() == [5.5, 6.5]
    added(lambda x, y: x.new_tensor([5.0, torch.nan]))
    assert score(x, x, ["own"])["own"][0] == 5


def test_the_table_of_a_run_shows_metrics_of_other_packages(added: Callable[[Callable[..., Any]], None]) -> None:
    added(mse)
    assert shown_metrics(["own", "psnr"]) == ("psnr", "own")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            CODE.replace(".mean(dim=(1, 2, 3))", ".mean()"),
            "must return one value per image, of shape (1,). Found shape ().",
        ),
        (CODE.replace('Metric("edge_error"', 'Metric("edges"'), "Entry point 'edge_error' of privlab.metrics must be"),
    ],
    ids=["wrong-shape", "wrong-name"],
)
def test_what_is_no_metric_is_named(code: str, message: str, tmp_path: Path) -> None:
    site = install(tmp_path, code, POINTS)
    done = run(site, "attack --model cifar_vit --attack patch-gradient --limit 2 --metrics psnr,edge_error --out run")
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr

"""A metric of a separately installed package: in runs, records, tables and lists by its name."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

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

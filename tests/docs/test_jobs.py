"""Each whole job of the docs runs as it is shown: it trains, records what leaves, audits it, and says what it found."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from privlab.report.run import LEAKS, load

JOBS = Path(__file__).parents[2] / "docs" / "jobs"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}


def run(job: str, folder: Path) -> tuple[int, str]:
    """Run a job into a folder; return its exit status and what it printed."""
    done = subprocess.run(
        (sys.executable, str(JOBS / job), str(folder)),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | QUIET,
    )
    assert "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "package"),
    [("pytorch_job.py", "torch"), ("lightning_job.py", "lightning"), ("trainer_job.py", "transformers")],
)
def test_a_job_of_one_client_ends_with_3_where_its_image_came_back(job: str, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    status, said = run(job, tmp_path)
    assert (status, f"leaks: {LEAKS[True]}" in said) == (3, True), said
    assert load(tmp_path / "audit").leaks
    assert '<section id="evidence"' in (tmp_path / "evidence.html").read_text("utf-8")


@pytest.mark.slow
def test_the_server_of_the_flower_job_leaves_out_both_updates(tmp_path: Path) -> None:
    if not all(map(importlib.util.find_spec, ("flwr", "ray"))):
        pytest.skip("needs flwr and ray")
    status, said = run("flower/job.py", tmp_path)
    assert (status, said.count("left out, leaks: yes")) == (3, 2), said
    assert "Received 0 results and 2 failures" in said
    assert [load(audit).leaks for audit in tmp_path.glob("updates/round-1/node-*/audit")] == [True, True]


@pytest.mark.slow
def test_the_clients_of_the_nvflare_job_send_differences_behind_filters(tmp_path: Path) -> None:
    """The filter that drops a tenth of the entries hides nothing; noise hides the image from these attacks."""
    if importlib.util.find_spec("nvflare") is None:
        pytest.skip("needs nvflare")
    status, said = run("nvflare/job.py", tmp_path)
    assert status == 3, said
    assert [load(tmp_path / "audits" / f"site-{n}").leaks for n in (1, 2, 3)] == [True, True, None]
    exported = {path.name for path in (tmp_path / "exported" / "job").rglob("custom/*")}
    assert exported == {"client.py", "net.py", "gaussian.py"}  # and not privlab, which is installed

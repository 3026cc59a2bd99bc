"""Each whole job of the docs runs as it is shown: it trains, records what leaves, audits it, and says what it found."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
def test_the_clients_of_a_server_that_cheats_do_not_train(tmp_path: Path) -> None:
    if not all(map(importlib.util.find_spec, ("flwr", "ray"))):
        pytest.skip("needs flwr and ray")
    status, said = run("cheating_server.py", tmp_path)
    assert (status, said.count("patches can be read from blocks.0.mlp.fc1") > 0) == (3, True), said
    assert "Received 0 results and 2 failures" in said


@contextmanager
def process(name: str, *options: str, log: Path, env: dict[str, str]) -> Iterator[None]:
    """Run a command of Flower, and end it with all processes that it started."""
    with log.open("wb") as file:
        command = (str(Path(sys.executable).parent / name), *options)
        own = subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)
        try:
            yield
        finally:
            os.killpg(own.pid, signal.SIGKILL)
            own.wait()


def wait_for(text: str, count: int, log: Path) -> None:
    """Wait until a log has a text so many times."""
    end = time.monotonic() + 600  # a busy machine starts six processes of Flower and audits two updates
    while log.read_text("utf-8").count(text) < count:
        assert time.monotonic() < end, log.read_text("utf-8")
        time.sleep(0.2)


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.slow
def test_the_flower_job_runs_as_a_server_process_and_two_client_processes(tmp_path: Path) -> None:
    """The commands of docs/how-to/jobs.md, on free ports."""
    if importlib.util.find_spec("flwr") is None:
        pytest.skip("needs flwr")
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "config.toml").write_text(f'[superlink.here]\naddress = "{address}"\ninsecure = true\n', "utf-8")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | QUIET | {"FOLDER": str(tmp_path), "FLWR_HOME": str(tmp_path), "PATH": path}
    logs = [tmp_path / f"{name}.log" for name in ("server", "client-0", "client-1", "job")]
    with ExitStack() as running:
        own = ("--insecure", "--disable-runtime-dependency-installation", "--port", address.split(":")[1])
        running.enter_context(process("flower-superlink", *own, log=logs[0], env=env))
        wait_for("running on http", 1, logs[0])
        for number in (0, 1):
            own = ("--insecure", "--superlink", address, "--port", str(free_port()))
            own += ("--node-config", f"partition-id={number}")
            running.enter_context(process("flower-supernode", *own, log=logs[1 + number], env=env))
        wait_for("Activated node_id", 2, logs[0])
        job = ("run", str(JOBS / "flower"), "here", "--stream")
        running.enter_context(process("flwr", *job, log=logs[3], env=env))
        wait_for("Received 0 results and 2 failures", 1, logs[3])
    said = logs[3].read_text("utf-8")
    assert said.count("left out, leaks: yes") == 2, said
    assert "Traceback" not in said
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

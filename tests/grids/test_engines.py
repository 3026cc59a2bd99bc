"""Tasks in this process, in several, and on a Ray cluster: the same records, whatever dies meanwhile."""

import importlib.util
import json
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from privlab.base import PrivlabError, core_count
from privlab.grids import ENGINES, Engine, Experiment, Result, Task, engines, prepare, read_experiment
from privlab.grids.fill import fill
from privlab.stores import Store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning", "ignore:`fork` start method"),
]

CASES = """
[[case]]
setting = "a"
[[case]]
setting = "c"
gamma = 0.5
[[case]]
label = "features"
setting = "c"
defense = "row-permutation"
attack = ["least-squares", "pe-assignment"]
client_batch = 2
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, written: Any, done: Any) -> tuple[Path, Experiment, Path]:
    """Return an experiment's file, itself, and what this process alone makes of it."""
    folder = tmp_path_factory.mktemp("alone")
    file = written(folder / "cases.toml", CASES, attack=["april", "patch-gradient"], metrics=["mse", "psnr", "ssim"])
    experiment = read_experiment(file)
    assert (done(experiment, folder / "run"), done(experiment, folder / "run")) == (10, 0)
    return file, experiment, folder / "run"


@pytest.fixture
def fork(uncollected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers be copies of this process, which has all loaded, and what a test has changed."""
    monkeypatch.setattr("privlab.grids.engines._START", "fork")


@pytest.mark.usefixtures("fork")
def test_two_workers_make_the_same_records(alone: Any, tmp_path: Path, done: Any, same: Any, rows: Any) -> None:
    _, experiment, reference = alone
    seen: list[str] = []
    assert done(experiment, tmp_path, say=seen.append, engine=Engine(workers=2)) == 10
    same(tmp_path, reference)
    assert rows(tmp_path) == rows(reference)
    assert done(experiment, tmp_path) == 0
    assert seen == []
    facts = json.loads((tmp_path / "run.json").read_bytes())
    assert (facts["engine"], facts["workers"], facts["status"]) == ("local", 2, "finished")


def test_worker_that_is_started_afresh(alone: Any, tmp_path: Path, options: Any, same: Any, done: Any) -> None:
    """As workers are, where no test makes copies of this process: it has nothing but its task."""
    _, experiment, reference = alone
    how = options(engine=Engine(workers=2), chunk=4)
    grid, tasks = prepare(experiment, tmp_path, how)
    fill(grid, tasks[:1], tmp_path, how)
    assert Store(tmp_path).frame().status.eq("ok").all()
    assert done(experiment, tmp_path, chunk=4) == len(tasks) - 1
    same(tmp_path, reference, 1e-4)


@pytest.mark.usefixtures("fork")
def test_worker_that_is_killed(alone: Any, tmp_path: Path, options: Any, same: Any, rows: Any) -> None:
    _, experiment, reference = alone
    how, killed, said = options(engine=Engine(workers=2)), [], []
    grid, tasks = prepare(experiment, tmp_path, how)

    def kill(done: int, total: int, last: Result | None) -> None:
        if last is not None and len(killed) < 2 and done % 3 == 0:
            killed.append(int(last.worker.rpartition(":")[2]))
            os.kill(killed[-1], signal.SIGKILL)

    fill(grid, tasks, tmp_path, how, say=said.append, progress=kill)
    assert len(killed) == 2
    assert len({*said}) == 1
    assert "SIGKILL" in said[0]
    same(tmp_path, reference)
    assert rows(tmp_path) == rows(reference)  # nothing was made twice


def die(task: Task) -> Result:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.usefixtures("fork")
def test_workers_that_die_again_and_again(
    alone: Any, tmp_path: Path, done: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, experiment, reference = alone
    run_task, said = engines.run_task, []
    monkeypatch.setattr(engines, "run_task", lambda task: die(task) if task.case == 2 else run_task(task))
    with pytest.raises(PrivlabError, match=r"3.*SIGKILL"):
        done(experiment, tmp_path, say=said.append, engine=Engine(workers=2))
    assert len(said) >= 2
    assert json.loads((tmp_path / "run.json").read_bytes())["status"] == "failed"
    kept = Store(tmp_path).frame()
    assert not kept.duplicated(["cell", "image", "geometry"]).any()
    assert set(kept.release) == {"gradients"}
    monkeypatch.setattr(engines, "run_task", run_task)
    assert done(experiment, tmp_path) >= 2
    same(tmp_path, reference)


@pytest.mark.usefixtures("fork")
def test_a_worker_that_ends_by_itself_is_not_said_to_lack_memory(
    alone: Any, tmp_path: Path, done: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "run_task", lambda task: os._exit(3))
    with pytest.raises(PrivlabError, match="ended with exit status 3") as error:
        done(alone[1], tmp_path, engine=Engine(workers=2))
    assert "memory" not in str(error.value)


@pytest.mark.usefixtures("fork")
def test_two_workers_need_nothing_that_linux_alone_has(
    alone: Any, tmp_path: Path, done: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked workers lack what this process lacks."""
    others = {"sched_getaffinity", "sched_setaffinity", "sysconf", "getloadavg", "memfd_create", "pidfd_open"}
    for name in sorted(others | {"posix_fadvise", "sendfile", "setresuid", "eventfd", "copy_file_range"}):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.delattr(psutil.Process, "cpu_affinity")  # macOS has none
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)  # that of Linux reads os.sysconf, those of others do not
    assert core_count() == 2
    assert done(alone[1], tmp_path, engine=Engine(workers=2)) == 10
    same(tmp_path, alone[2])


@pytest.mark.usefixtures("fork")
def test_mistake_in_a_worker_is_told_as_such(
    alone: Any, tmp_path: Path, done: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(task: Task) -> Result:
        raise PrivlabError("One line.")

    monkeypatch.setattr(engines, "run_task", refuse)
    with pytest.raises(PrivlabError, match=r"^One line\.$"):
        done(alone[1], tmp_path, engine=Engine(workers=2))
    workers = [child.pid or 0 for child in multiprocessing.active_children()]
    until(lambda: all(map(gone, workers)))


def gone(process: int) -> bool:
    """Return whether a process has ended, whoever is to bury it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.usefixtures("fork")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_run_that_they_work_for(
    alone: Any, tmp_path: Path, forked: Any, ended: Any, until: Any, how: signal.Signals
) -> None:
    run = forked(tmp_path / "said", "table", alone[0], "--out", tmp_path / "run", "--workers", 2, "--chunk", 1)
    until(lambda: list((tmp_path / "run").glob("records/part-*")))
    workers = children_of(run)
    assert len(workers) == 2
    os.kill(run, how)
    assert ended(run) == (130 if how == signal.SIGINT else -signal.SIGKILL)
    until(lambda: all(map(gone, workers)))


def children_of(process: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        own = list(map(int, (thread / "children").read_text().split()))
        found += [each for child in own for each in (child, *children_of(child))]
    return found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "lokal"}, "Unknown engine 'lokal'. Did you mean local?"),
        ({"workers": 0}, "--workers must be a positive number. Found 0."),
        ({"address": "auto"}, "--ray-address is for --engine ray. Found --engine local."),
        ({"cpus": 0.0}, "--task-cpus must be positive, --task-gpus not negative. Found 0 and 0."),
        ({"gpus": -1.0}, "--task-cpus must be positive, --task-gpus not negative. Found 1 and -1."),
    ],
)
def test_no_such_engine(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivlabError) as caught:
        Engine(**given)
    assert str(caught.value) == message
    assert set(ENGINES) == {"local", "ray"}


# Ray


def test_ray_is_not_installed(alone: Any, tmp_path: Path, done: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(engines.importlib, "import_module", no)
    with pytest.raises(PrivlabError, match=r"^--engine.*'privlab\[ray\]'"):
        done(alone[1], tmp_path, engine=Engine("ray"))


def ask(head: engines._Head) -> None:
    time.sleep(0.002)
    head.check()


def test_head_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(engines, "_HEARTBEAT", 0.001)
        head = engines._Head(address)
        for _ in range(5):
            ask(head)
    ask(head)
    ask(head)
    with pytest.raises(engines._HeadLost, match=f"^its head at {address} does not answer$"):
        ask(head)
    engines._Head(None).check()  # of a client of Ray, whose server says so itself


needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")


@pytest.fixture(scope="module")
def on_ray(
    tmp_path_factory: pytest.TempPathFactory, alone: Any, written: Any, forked: Any, ended: Any, until: Any
) -> dict[str, Any]:
    """Run two experiments in a child on a Ray cluster of two workers, whose head is killed in the second."""
    folder = tmp_path_factory.mktemp("ray")
    many = written(folder / "many.toml", f"[grid]\nsetting = ['b']\ngamma = {[i / 32 for i in range(32)]}")
    engine = ("--engine", "ray", "--workers", 2, "--chunk", 1, "--pictures", 0, "--device", "cpu")

    def first() -> None:
        import ray  # pyright: ignore[reportMissingImports]

        from privlab.cli import _status

        engines._HEARTBEAT = 0.2
        busy = {"worker_register_timeout_seconds": 600}  # on a busy machine Ray's minute is not enough
        quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        ray.init("local", num_cpus=2, _system_config=busy, **quiet)
        status = _status([*map(str, ("table", alone[0], "--out", folder / "whole", *engine))])
        (folder / "status").write_text(str(status))

    driver = forked(folder / "said", "table", many, "--out", folder / "broken", *engine, first=first)
    processes: list[int] = []
    try:
        until(lambda: gone(driver) or len(list((folder / "broken").glob("records/part-*"))) >= 3, 900)
        assert not gone(driver), (folder / "said").read_text()
        processes = children_of(driver)
        for process in processes:
            if b"gcs_server" in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0]:
                os.kill(process, signal.SIGKILL)
        status = ended(driver)
    finally:
        for process in (driver, *processes):
            if not gone(process):
                os.kill(process, signal.SIGKILL)
    said = (folder / "said").read_text()
    return {"folder": folder, "status": status, "said": said, "many": many}


@needs_ray
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_ray_makes_the_same_records(alone: Any, on_ray: Any, same: Any, rows: Any) -> None:
    whole = on_ray["folder"] / "whole"
    assert (on_ray["folder"] / "status").read_text() == "0", on_ray["said"]
    same(whole, alone[2])
    assert rows(whole) == rows(alone[2])
    facts = json.loads((whole / "run.json").read_bytes())
    assert (facts["engine"], facts["status"]) == ("ray", "finished")


def in_place(path: Path) -> int:
    return int((Store(path).frame().geometry == "in_place").sum())


@needs_ray
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_head_of_the_cluster_is_killed(on_ray: Any, done: Any, rows: Callable[[Path], int]) -> None:
    path = on_ray["folder"] / "broken"
    errors = [line for line in on_ray["said"].splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("Error: The Ray cluster failed: ")
    assert errors[0].endswith("What was finished is kept; run again.")
    assert on_ray["status"] == 2
    assert json.loads((path / "run.json").read_bytes())["status"] == "failed"
    kept, rest = divmod(in_place(path), 5)  # of each image the attack, and four controls
    assert rest == 0
    assert 3 <= kept < 32 * 4
    experiment = read_experiment(on_ray["many"])
    assert done(experiment, path, chunk=4) == 32 * 4 - kept or done(experiment, path) == 0
    assert in_place(path) == 32 * 4 * 5
    assert rows(path) == len(Store(path).frame())

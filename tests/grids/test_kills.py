"""`privlab attack` and `table` are killed at their file operations: nothing is lost, double or torn."""

import importlib
import json
import multiprocessing
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image

from privlab.evaluation import COLUMNS
from privlab.grids import engines
from privlab.stores import Store, check

KILLS = int(os.environ.get("PRIVLAB_KILLS", "8"))
"""The number of kills of each command; docs/security.md states those of 50."""
OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove"}
"""Names of the audit events of what a run does to files."""
COMMAND = ("attack", "--model", "cifar_vit", "--attack", "april,patch-gradient", "--metrics", "mse,psnr")
COMMAND += ("--limit", 3, "--batch-size", 1, "--device", "cpu")
TIMES = ["seconds_observe", "seconds_attack", "seconds_score"]
KEY = ["cell", "image", "attack", "geometry"]
EXPERIMENT = """
[run]
model = "cifar_vit"
attack = ["april", "patch-gradient"]
limit = 2
[table]
columns = ["psnr"]
[[case]]
label = "plain"
[[case]]
label = "noise"
defense = "gradient-noise"
"""

Death = Callable[[], object]


def killed_by(number: int) -> Death:
    return lambda: os.kill(os.getpid(), number)


def killed_with_its_workers() -> None:
    os.killpg(0, signal.SIGKILL)


def mortal(path: Path, moment: int, die: Death) -> None:
    """Let this process die at an operation on the files of a run, or at the beginning of a task; at 0 it never does."""
    count = 0
    os.setpgid(0, 0)

    def step() -> None:
        nonlocal count
        count += 1
        if count == moment:
            die()

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event in OPERATIONS and str(arguments[0]).startswith(str(path)):
            step()

    sys.addaudithook(heard)
    run_task = engines.run_task
    engines.run_task = lambda task: (step(), run_task(task))[1]


def with_mortal_workers(path: Path, moment: int, die: Death | None) -> None:
    """Let workers be forked; at a task, one of them dies, or they and this process do as `mortal` says."""
    forking, run_task, owner = multiprocessing.get_context("fork"), engines.run_task, os.getpid()
    engines._START = "fork"
    left = forking.Value("i", moment)
    if die is not None:
        mortal(path, 2 * moment, lambda: os.getpid() == owner and die())  # workers have counters of their own
        return

    def work(task: Any) -> Any:
        with left.get_lock():
            left.value -= 1
            last = left.value == 0
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_task(task)

    engines.run_task = work


def records(path: Path) -> pd.DataFrame:
    """Return every row that lies in the parts, in the order of their keys, without times."""
    frame = pd.DataFrame(Store(path).read().to_pylist(), columns=COLUMNS.names).drop(columns=TIMES)
    return frame.sort_values(KEY).reset_index(drop=True)


def stated(path: Path) -> dict[str, Any]:
    """Return what `run.json` states of the results: not the times, the command line, the commit and the processes."""
    facts = json.loads((path / "run.json").read_bytes())
    return {key: facts[key] for key in facts.keys() - {"started", "written", "seconds", "command", "commit", "workers"}}


def strips(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("[!.]*.png")}


def sound(path: Path, said: str) -> set[tuple[str, ...]]:
    """Check that what lies there is whole, and holds every image that was reported; return the keys of its records."""
    if not (path / "run.json").exists():
        assert not list(path.rglob("part-*"))
        return set()
    stated(path)
    for file in path.rglob("[!.]*.png"):  # one that begins with a point is unfinished
        with Image.open(file) as strip:
            strip.load()
    frame = records(path)
    assert not frame.duplicated(KEY).any()
    assert set(re.findall(r"\d of \d: ([^:]+):", said)) <= set(frame.image)
    for image, sha256 in set(frame[["image", "image_sha256"]].itertuples(index=False, name=None)):
        assert any(image.replace("/", "-") in name or sha256[:16] in name for name in strips(path))  # with its records
    return set(frame[KEY].itertuples(index=False, name=None))


def same(path: Path, whole: Path) -> None:
    """Check that a run which was killed and went on left what one that was not has left, and nothing else."""
    pd.testing.assert_frame_equal(records(path), records(whole), check_exact=True)
    assert strips(path) == strips(whole)
    assert (path / "manifest.csv").read_bytes() == (whole / "manifest.csv").read_bytes()
    first, second = (stated(each) for each in (path, whole))
    assert {key for key in first if first[key] != second[key]} <= {"title", "experiment"}  # the name of the directory
    assert first["status"] == "finished"
    held = [{re.sub(r"-[0-9a-f]{12}\.", ".", file.name) for file in each.rglob("*")} for each in (path, whole)]
    assert held[0] == held[1]
    assert check(path).unfinished == ()


Command = tuple[object, ...]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Command]:
    """Return the commands that are killed, by name."""
    experiment = tmp_path_factory.mktemp("experiment") / "quick.toml"
    experiment.write_text(EXPERIMENT)
    return {"attack": COMMAND, "table": ("table", experiment, "--device", "cpu", "--batch-size", 1)}


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, forked: Any, ended: Any, commands: dict[str, Command]
) -> Callable[[str], Path]:
    """Return what an undisturbed run of a command leaves."""
    for name in ("privlab.runs.attack", "privlab.report.page", "privlab.report.tables.summary"):
        importlib.import_module(name)  # here, and not in every child

    @cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        assert ended(forked(folder / "said", *commands[name], "--out", folder / "run")) == 0
        return folder / "run"

    return run


def kill_again_and_again(
    kills: int, seed: int, how: Callable[[Path, int, random.Random], Callable[[], None]], whole: Path, folder: Path,
    forked: Any, ended: Any, *command: object,
) -> tuple[int, int]:  # fmt: skip
    """Kill a run at random moments, let the same command go on, and so on; return how many kills and how many runs."""
    moments, done, runs = random.Random(seed), 0, 0
    while done < kills:
        path, held, alive = folder / f"run-{runs}", set(), True
        while alive:
            moment = moments.randint(1, 40) if done < kills else 0
            said = folder / f"said-{runs}-{done}"
            status = ended(forked(said, *command, "--out", path, first=how(path, moment, moments)))
            alive = status != 0
            assert status in (0, 130, -signal.SIGKILL), said.read_text()
            assert "Traceback" not in said.read_text()
            done += alive
            now = sound(path, said.read_text())
            assert now >= held
            held = now
        same(path, whole)
        runs += 1
    return done, runs


def one_process(path: Path, moment: int, moments: random.Random) -> Callable[[], None]:
    return partial(mortal, path, moment, killed_by(moments.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT])))


def two_workers(path: Path, moment: int, moments: random.Random) -> Callable[[], None]:
    die = moments.choice([killed_by(signal.SIGKILL), killed_with_its_workers, None])
    return partial(with_mortal_workers, path, min(moment, 20) if die else 1 + moment % 2, die)


@pytest.mark.parametrize(
    ("name", "kills", "seed"),
    [
        ("attack", 3, 1),
        pytest.param("attack", KILLS, 0, marks=pytest.mark.slow),
        pytest.param("table", KILLS, 0, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_goes_on(
    name: str, kills: int, seed: int, whole: Any, commands: Any, tmp_path: Path, forked: Any, ended: Any
) -> None:
    given = (whole(name), tmp_path, forked, ended, *commands[name])
    done, runs = kill_again_and_again(kills, seed, one_process, *given)
    assert done >= kills > runs


@pytest.mark.slow
def test_a_run_with_workers_that_is_killed_goes_on(whole: Any, tmp_path: Path, forked: Any, ended: Any) -> None:
    """The run dies alone or with its workers; where one worker dies, the run goes on by itself."""
    given = (whole("attack"), tmp_path, forked, ended, *COMMAND)
    done, _ = kill_again_and_again(15, 2, two_workers, *given, "--workers", 2)
    assert done >= 15
    assert any("A worker died" in said.read_text() for said in tmp_path.glob("said-*"))

"""A tiny victim on a few pictures of noise, experiments on it, and what runs them: no network, nobody's caches."""

import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from privlab.base import PrivlabError
from privlab.cli import _status
from privlab.grids import Experiment, Options, prepare, read_experiment
from privlab.grids.fill import fill
from privlab.stores import Store

TINY = {
    **{"model": "vit_ti", "weights": "random", "img_size": 32, "setting": "a"},
    **{"attack": ["patch-gradient"], "metrics": ["mse", "psnr"]},
}


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Processes are killed here, the machine is not: waiting for the disk would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privlab.base.files.sync", lambda path: None)
        yield


@pytest.fixture(autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = str(tmp_path_factory.getbasetemp() / "caches")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TORCH_HOME", empty)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", empty)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def draw(path: Path, seed: int) -> Path:
    """Write an image of coloured noise, 40 × 36, different for each seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((40, 36), Image.Resampling.BICUBIC).save(path)
    return path


@pytest.fixture(scope="session")
def image() -> Callable[[Path, int], Path]:
    """Write an image of coloured noise, different for each seed."""
    return draw


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of four pictures; not to be written to."""
    folder = tmp_path_factory.mktemp("photos")
    for seed, name in enumerate("abcd"):
        draw(folder / f"{name}.png", seed)
    return folder


@pytest.fixture(scope="session")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two public pictures; not to be written to."""
    folder = tmp_path_factory.mktemp("public")
    for seed in (100, 101):
        draw(folder / f"{seed}.png", seed)
    return folder


def as_toml(value: object) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {as_toml(each)}' for name, each in value.items())} }}"
    return str(value) if isinstance(value, int | float) else f'"{value}"'


@pytest.fixture(scope="session")
def written(photos: Path, public: Path) -> Callable[..., Path]:
    """Write an experiment on the tiny victim; keywords change `[run]`, None leaves a key out."""

    def save(path: Path, more: str = "", **run: Any) -> Path:
        shared = TINY | {"images": [str(photos)], "public": [str(public)]} | run
        lines = [f"{key} = {as_toml(value)}" for key, value in shared.items() if value is not None]
        path.write_text("\n".join(["[run]", *lines, more, ""]))
        return path

    return save


@pytest.fixture
def write(tmp_path: Path, written: Callable[..., Path]) -> Callable[..., Path]:
    """Write an experiment on the tiny victim into the test's own folder."""
    return lambda more="", name="tiny", **run: written(tmp_path / f"{name}.toml", more, **run)


@pytest.fixture
def parse(tmp_path: Path) -> Callable[..., Experiment]:
    """Parse the text of an experiment."""

    def read(text: str, *overrides: str, **run: Any) -> Experiment:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return read_experiment(path, overrides, **run)

    return read


@pytest.fixture
def refused(parse: Callable[..., Experiment]) -> Callable[..., tuple[int, str]]:
    """Return how the text of an experiment is refused: the line, counted from 1, and what is wrong, in one line."""

    def error(text: str, *overrides: str) -> tuple[int, str]:
        with pytest.raises(PrivlabError) as caught:
            parse(text, *overrides)
        where, _, message = str(caught.value).partition(": ")
        file, _, line = where.rpartition(", line ")
        assert Path(file).name == "mine.toml"
        assert "\n" not in message
        return int(line), message

    return error


@pytest.fixture
def experiment(write: Callable[..., Path]) -> Callable[..., Experiment]:
    """Return an experiment on the tiny victim."""
    return lambda more="", **run: read_experiment(write(more, **run))


@pytest.fixture(scope="session")
def options() -> Callable[..., Options]:
    """Return options on the CPU, without pictures, one image a task."""
    return lambda **given: Options(**({"device": "cpu", "chunk": 1, "pictures": 0} | given))


@pytest.fixture(scope="session")
def done(options: Callable[..., Options]) -> Callable[..., int]:
    """Do what a directory lacks of an experiment; return how many tasks that were."""

    def run(experiment: Experiment, path: Path, say: Callable[[str], object] = lambda _: None, **given: Any) -> int:
        how = options(**given)
        grid, tasks = prepare(experiment, path, how)
        fill(grid, tasks, path, how, say=say)
        return len(tasks)

    return run


KEY = ["cell", "image_sha256", "geometry", "batch"]
TIMES = ["seconds_observe", "seconds_attack", "seconds_score"]


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Return records without what time says of them, in the order of their keys.

    A PSNR beyond 100 dB says that a reconstruction is exact; the rest is rounding, which differs with the batch's size.
    """
    exact = {name: frame[name].clip(upper=100) for name in ("psnr", "psnr_affine", "psnr_masked", "psnr_unmasked")}
    return frame.assign(**exact).drop(columns=TIMES).sort_values([*KEY, "image"]).reset_index(drop=True)


@pytest.fixture
def same() -> Callable[..., None]:
    """Check that two stores hold the same records, each once: keys bit for bit, metrics to float32's rounding.

    In chunks of another size, attacks that solve equations multiply the rounding.
    """

    def check(one: Path, other: Path, rtol: float = 1e-6) -> None:
        mine, theirs = in_order(Store(one).frame()), in_order(Store(other).frame())
        assert len(mine) == len(mine.drop_duplicates([*KEY, "image"])) > 0
        near_zero = ["correlation", "gms_affine"]  # of pictures that have nothing in common
        pd.testing.assert_frame_equal(
            mine.drop(columns=near_zero), theirs.drop(columns=near_zero), rtol=rtol, atol=1e-12
        )
        pd.testing.assert_frame_equal(mine[near_zero], theirs[near_zero], rtol=rtol, atol=1e-4)

    return check


@pytest.fixture
def rows() -> Callable[[Path], int]:
    """Return how many rows lie in the parts of a store, a record that was made twice counted twice."""
    return lambda path: len(Store(path).read(["image"]))


@pytest.fixture(scope="session")
def forked() -> Iterator[Callable[..., int]]:
    """Run `privlab` in a child that this process forks, warm; return its process id. Its output goes to a file.

    `first` is called in the child before that.
    """
    for name in ("privlab.report.tables.writers", "privlab.report.tables.compare", "privlab.experiments.tables.named"):
        importlib.import_module(name)  # here, and not in every child
    gc.collect()
    gc.freeze()  # what is there by now need not be looked through again

    def start(out: Path, *arguments: object, first: Callable[[], object] = lambda: None) -> int:
        gc.collect()
        gc.disable()
        if child := os.fork():
            gc.enable()
            return child
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            warnings.simplefilter("ignore")
            for number in (1, 2):
                os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            first()
            status = _status([str(argument) for argument in arguments])
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)  # pytest, of which this is a copy, has nothing to do here

    yield start
    gc.unfreeze()


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Wait for something to come true."""

    def wait(true: Callable[[], object], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    return wait


@pytest.fixture(scope="session")
def ended(until: Callable[..., None]) -> Callable[[int], int]:
    """Wait for a child to end, and return its exit status; a signal's number is negative."""

    def wait(child: int) -> int:
        found: list[int] = []

        def over() -> bool:
            process, status = os.waitpid(child, os.WNOHANG)
            found.extend([status] * (process != 0))
            return process != 0

        until(over)
        return os.waitstatus_to_exitcode(found[0])

    return wait


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a maker of tiny file systems; skip where none may be mounted."""
    places: list[Path] = []

    def mount(*options: str) -> Path:
        place = tmp_path / f"disk-{len(places)}"
        place.mkdir()
        command: Sequence[str] = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(place)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no file system may be mounted here")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", str(place)], check=True)

"""What a run shows while it goes: lines in a pipe, a table on a terminal, its warnings at once; where its tasks run."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from rich.console import Console, ConsoleDimensions

import privlab.cli.live
from privlab.base import PrivlabError
from privlab.cli.live import engine_of, run_display
from privlab.evaluation import COLUMNS
from privlab.grids import Engine, Result, Task, specify
from privlab.images import NamedImage

SEARCH = ("--model", "vit_ti_mjp", "--setting", "c", "--attack", "mjp-full,april", "--metrics", "psnr")


def result(image: str, seconds: float = 1.0, worker: str = "here", **scores: float | None) -> Result:
    """Return the result of one image: of each attack a score in place, a worse one re-assembled, a better oracle's."""
    own = {"image": image, "victim": "vit", "setting": "c"}
    rows = [
        own | {"attack": attack, "geometry": geometry, "psnr": None if score is None else score + more}
        for attack, score in scores.items()
        for geometry, more in (("in_place", 0.0), ("reassembled", -1.0), ("oracle", 5.0))
    ]
    rows.append(own | {"attack": "control:mean", "geometry": "in_place", "psnr": 12.0})
    spec = specify(model=("vit_ti",), metrics=("mse", "psnr"))
    task = Task(0, spec, ("c",), (NamedImage(image, image, None),), dict.fromkeys(scores, ""), ())
    return Result(task, pa.Table.from_pylist(rows, schema=COLUMNS), seconds=seconds, worker=worker)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[..., io.StringIO]:
    """Return a function that lets progress go into a text, on a terminal or in a pipe."""

    def to(*, terminal: bool) -> io.StringIO:
        text = io.StringIO()
        monkeypatch.setattr(privlab.cli.live, "err", Console(file=text, force_terminal=terminal, width=100))
        return text

    return to


def test_a_pipe_has_a_line_for_each_image_and_each_warning_once(said: Callable[..., io.StringIO]) -> None:
    text = said(terminal=False)
    with run_display(quiet=False) as shown:
        shown.warn("odd")
        shown.progress(0, 3, None)
        assert text.getvalue() == "Warning: odd\n"
        shown.progress(1, 3, result("a.png", april=8.0, full=47.25))
        shown.warn("odd")
        shown.progress(2, 3, result("b.png", april=None))
    assert text.getvalue().splitlines()[1:] == [
        "1 of 3: a.png: psnr, vit, setting c: full 47.25, april 8",
        "2 of 3: b.png: psnr, vit, setting c: april n/a",
    ]


def test_quiet_leaves_the_warnings(said: Callable[..., io.StringIO]) -> None:
    for terminal in (False, True):
        text = said(terminal=terminal)
        with run_display(quiet=True) as shown:
            shown.progress(1, 1, result("a.png", april=8.0))
            assert text.getvalue() == ""
            shown.warn("odd")
        assert "Warning: odd" in text.getvalue()


def test_a_terminal_shows_the_means_so_far(said: Callable[..., io.StringIO]) -> None:
    text = said(terminal=True)
    with run_display(quiet=False) as shown:
        shown.progress(0, 4, None)
        shown.progress(1, 4, result("a.png", april=8.0))
        shown.progress(2, 4, result("b.png", april=11.0, worker="there"))
        shown.progress(3, 4, result("c.png", april=None, worker="there"))
        assert [(task.description, task.completed, task.total) for task in shown.bar.tasks] == [("images", 3, 4)]
    row = next(line for line in reversed(text.getvalue().splitlines()) if "april" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["vit, setting c", "april", "2", "9.50"]


@pytest.mark.parametrize("width", [20, 5, 1])
def test_a_terminal_may_be_narrow_and_change(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    monkeypatch.setattr(privlab.cli.live, "err", console)
    with run_display(quiet=False) as shown:
        shown.progress(1, 3, result("a.png", april=8.0))
        console.size = ConsoleDimensions(width, 2)
        shown.progress(2, 3, result("b.png", april=11.0))
        console.size = ConsoleDimensions(120, 30)
        shown.progress(3, 3, result("c.png", april=11.0))
    assert "10.00" in text.getvalue()
    assert text.getvalue().rfind("\x1b[?25h") > text.getvalue().rfind("\x1b[?25l")  # the cursor can be seen again


def test_a_terminal_that_cannot_redraw_has_lines(said: Callable[..., io.StringIO], monkeypatch: Any) -> None:
    text = said(terminal=True)
    monkeypatch.setattr(privlab.cli.live.err, "_environ", {"TERM": "dumb"})
    with run_display(quiet=False) as shown:
        shown.progress(0, 1, None)
        shown.progress(1, 1, result("a.png", april=8.0))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue())
    assert plain == "1 of 1: a.png: psnr, vit, setting c: april 8\n"


@pytest.mark.slow
def test_searches_are_on_disk_image_by_image_and_closed_forms_batch_by_batch(
    attack: Callable[..., Any], tmp_path: Path
) -> None:
    done = attack(*SEARCH)
    assert done.err.count(" of 3: ") == 3
    assert len([*(tmp_path / "run" / "records").glob("*.parquet")]) == 3
    attack("--setting", "a", "--attack", "april", "--metrics", "psnr", "--overwrite")
    assert len([*(tmp_path / "run" / "records").glob("*.parquet")]) == 1
    assert " of 3: " not in attack(*SEARCH, "--overwrite", "--quiet").err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "threads", "workers"),
    [
        (SEARCH, 4, 3),
        (SEARCH, 2, 2),
        (SEARCH, 1, 1),
        ((*SEARCH, "--limit", "1"), 4, 1),
        ((*SEARCH, "--workers", "2"), 4, 2),
        ((*SEARCH, "--attack", "april,patch-gradient"), 4, 1),
        ((*SEARCH, "--attack", "mjp-full,gradient-matching", "--set", "gradient-matching.steps=1"), 4, 1),
    ],
)
def test_searches_of_several_images_have_a_process_for_each_thread(
    given: tuple[str, ...],
    threads: int,
    workers: int,
    attack: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    seen: list[Engine] = []

    def run_tasks(tasks: Any, engine: Engine, say: Any) -> None:
        seen.append(engine)
        raise PrivlabError("enough")

    monkeypatch.setattr("privlab.grids.fill.run_tasks", run_tasks)
    assert "enough" in attack(*given).err
    assert seen == [Engine(workers=workers)]


@pytest.mark.slow
@pytest.mark.usefixtures("uncollected")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning", "ignore:`fork` start method")
def test_two_workers_make_the_same_records(
    attack: Callable[..., Any], records: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privlab.grids.engines._START", "fork")
    attack(*SEARCH)
    alone = records()
    attack(*SEARCH, "--workers", "2", "--overwrite")
    assert json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["workers"] == 2
    order = ["image", "attack", "geometry"]
    columns = [*order, "psnr", "status"]
    same = [frame[columns].sort_values(order, ignore_index=True) for frame in (alone, records())]
    assert same[0].equals(same[1])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--workers", "two"), "--workers must be auto or a positive number. Found 'two'."),
        (("--workers", "0"), "--workers must be a positive number. Found 0."),
        (("--engine", "slurm"), "Unknown engine 'slurm'"),
        (("--ray-address", "auto"), "--ray-address is for --engine ray. Found --engine local."),
    ],
)
def test_where_tasks_run_is_checked_first(given: tuple[str, ...], reason: str, attack: Callable[..., Any]) -> None:
    done = attack(*given)
    assert (done.status, reason in done.err) == (2, True)


def test_auto_is_decided_by_the_run() -> None:
    local = {"engine": "local", "workers": "auto", "ray_address": None, "task_cpus": 1.0, "task_gpus": 0.0}
    assert engine_of({**local}) is None
    assert engine_of(local | {"workers": "3"}) == Engine(workers=3)
    assert engine_of(local | {"engine": "ray", "task_cpus": 2.0}) == Engine("ray", cpus=2.0)

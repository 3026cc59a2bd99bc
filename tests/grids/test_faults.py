"""A run is killed, interrupted, out of disk, or its images change: nothing is lost, and nothing made twice."""

import itertools
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest

from privlab.base import PrivlabError
from privlab.grids import Result, engines, prepare, read_experiment
from privlab.grids.fill import fill
from privlab.stores import Store, check

KILLS = 50
IMAGES = 40
EACH = 9
"""Rows of an image: two geometries of the attack and of three controls, and one more control as it is."""
ROWS = IMAGES * EACH
TABLE = ("--device", "cpu", "--chunk", 1)


def facts(path: Path) -> dict[str, Any]:
    return json.loads((path / "run.json").read_bytes())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, written: Any, done: Any, image: Any) -> tuple[Path, Path]:
    """Return an experiment's file, and what an undisturbed run leaves."""
    folder = tmp_path_factory.mktemp("whole")
    for seed in range(IMAGES):
        image(folder / "images" / f"{seed:02d}.png", seed)
    file = written(folder / "many.toml", images=[str(folder / "images")], metrics=["psnr"], setting="b")
    assert done(read_experiment(file), folder / "run", chunk=8) == IMAGES // 8
    return file, folder / "run"


def parts(path: Path) -> int:
    return len(list(path.glob("records/part-*")))


@pytest.mark.slow
def test_killed_at_random_moments(
    whole: Any, tmp_path: Path, forked: Any, ended: Any, until: Any, done: Any, same: Any, rows: Any
) -> None:
    file, reference = whole
    moments, path, inside = random.Random(0), tmp_path / "run", 0
    for kill in range(KILLS):
        before = parts(path)
        run = forked(
            tmp_path / "said", "table", file, "--out", path, *TABLE, "--pictures", 2, "--keep", "reconstructions"
        )
        if kill % 2:  # in the midst of its work, however slow this machine is
            until(lambda before=before: parts(path) > before or before == IMAGES)
            time.sleep(moments.uniform(0, 0.06))
        else:
            time.sleep(moments.uniform(0, 0.3))
        inside += parts(path) < IMAGES
        os.kill(run, signal.SIGKILL)
        assert ended(run) in (-signal.SIGKILL, 0)
        held = Store(path).frame()  # whatever is there is whole
        assert not held.duplicated(["cell", "image", "geometry"]).any()
    assert inside >= KILLS // 3
    done(read_experiment(file), path)
    assert done(read_experiment(file), path) == 0
    assert rows(path) == ROWS  # each once, and none torn
    assert not check(path).conflicts
    same(path, reference)
    assert facts(path)["status"] == "finished"


@pytest.mark.slow
def test_two_at_once(whole: Any, tmp_path: Path, forked: Any, ended: Any, done: Any) -> None:
    file, path = whole[0], tmp_path / "run"
    asked = ("table", file, "--out", path, *TABLE, "--limit", 20, "--format", "csv")
    runs = [forked(tmp_path / f"said-{i}", *asked) for i in (0, 1)]
    assert [ended(run) for run in runs] == [0, 0]
    found = check(path)
    assert (found.records, found.failed, found.conflicts, found.unfinished) == (ROWS // 2, 0, (), ())
    assert found.rows > found.records  # both were at it, and each record counts once
    assert facts(path)["status"] == "finished"
    assert done(read_experiment(file, limit=20), path) == 0
    tables = [(tmp_path / f"said-{i}").read_text().splitlines()[-1] for i in (0, 1)]
    assert tables[0] == tables[1]


@pytest.mark.slow
def test_interrupt(
    whole: Any, tmp_path: Path, forked: Any, ended: Any, until: Any, done: Any, same: Any, rows: Any
) -> None:
    file, reference = whole
    path = tmp_path / "run"
    run = forked(tmp_path / "said", "table", file, "--out", path, *TABLE)
    until(lambda: parts(path) >= 2)
    os.kill(run, signal.SIGINT)
    assert ended(run) == 130
    said = (tmp_path / "said").read_text()
    assert re.search(r"'.*' keeps the records of \d+ images?, which .* shows\. The same command goes on .*\n$", said)
    assert "Traceback" not in said
    assert facts(path)["status"] == "interrupted"
    kept = rows(path)
    assert 2 * EACH <= kept < ROWS
    assert done(read_experiment(file), path) == (ROWS - kept) // EACH
    assert rows(path) == ROWS
    same(path, reference)
    assert facts(path)["status"] == "finished"


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock jump: an hour back whenever it is asked."""
    hours = itertools.count()

    class Back(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.fromtimestamp(time.time(), tz)

    monkeypatch.setattr(time, "time", lambda: 2e9 - 3600 * next(hours))
    monkeypatch.setattr("privlab.grids.fill.datetime", Back)


@pytest.mark.slow
@pytest.mark.usefixtures("backwards")
def test_clock_that_jumps(whole: Any, tmp_path: Path, cli: Any, rows: Any) -> None:
    times = []
    for limit in (2, 4, 6):
        assert cli("table", whole[0], "--out", tmp_path, *TABLE, "--limit", limit).status == 0
        assert rows(tmp_path) == EACH * limit
        times.append(facts(tmp_path)["written"])
    assert times == sorted(times, reverse=True)
    assert cli("table", whole[0], "--out", tmp_path, *TABLE, "--limit", 6).status == 0
    assert facts(tmp_path)["written"] == times[-1]  # nothing was missing
    found = check(tmp_path)
    assert (found.rows, found.records, found.failed, found.conflicts) == (6 * EACH, 6 * EACH, 0, ())


# Images


@pytest.fixture
def album(image: Callable[[Path, int], Path], tmp_path: Path) -> Path:
    """Return a folder of four pictures."""
    for seed, name in enumerate("abcd"):
        image(tmp_path / "album" / f"{name}.png", seed)
    return tmp_path / "album"


Change = Callable[[Path], object]


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def swap(path: Path) -> None:
    path.write_bytes(path.with_name("d.png").read_bytes())


CHANGED = "The file has changed since the run was planned."
GONE = "The file has gone since the run was planned."


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (Path.unlink, GONE),
        (lambda path: path.rename(path.with_name("z.png")), GONE),
        (swap, CHANGED),
        (spoil, "Truncated or damaged: "),
    ],
)
@pytest.mark.parametrize("features", [False, True])
def test_image_that_is_another_one_when_it_is_run(
    experiment: Any, options: Any, album: Path, tmp_path: Path, change: Change, reason: str, features: bool
) -> None:
    """Only that image fails, under its own name; the others are what they were."""
    sent = {"release": "features", "attack": ["least-squares"], "client_batch": 2} if features else {}
    asked, how = experiment(images=[str(album)], **sent), options(chunk=2)
    grid, tasks = prepare(asked, tmp_path / "run", how)
    change(album / "b.png")
    fill(grid, tasks, tmp_path / "run", how)
    frame = Store(tmp_path / "run").frame()
    failed = frame[frame.status == "failed"]
    assert set(failed.image_sha256) == {grid.tasks[0].images[1].sha256}
    assert all(text.startswith(reason) for text in failed.reason)
    assert len(failed) == 2  # geometries
    fine = frame[(frame.status == "ok") & ~frame.attack.str.startswith("control:")]
    assert sorted(set(fine.image)) == ["a.png", "c.png", "d.png"]
    assert dict(zip(fine.image, fine.image_sha256, strict=True)) == {
        image.name: image.sha256 for image in grid.tasks[0].images if image.name != "b.png"
    }


def test_image_that_came_meanwhile(
    experiment: Any, options: Any, done: Any, album: Path, image: Any, tmp_path: Path
) -> None:
    asked, how = experiment(images=[str(album)]), options()
    grid, tasks = prepare(asked, tmp_path / "run", how)
    image(album / "0.png", 9)
    fill(grid, tasks, tmp_path / "run", how)
    assert set(Store(tmp_path / "run").frame().status) == {"ok"}
    assert done(asked, tmp_path / "run") == 1
    assert sorted(set(Store(tmp_path / "run").frame().image)) == ["0.png", "a.png", "b.png", "c.png", "d.png"]


def test_images_that_cannot_be_read(experiment: Any, options: Any, done: Any, album: Path, tmp_path: Path) -> None:
    """They are counted, and not tried again unless told so."""
    spoil(album / "b.png")
    (album / "c.png").write_bytes(b"")
    (album / "d.png").unlink()
    os.mkfifo(album / "d.png")  # to read it would be to wait for ever
    asked, path = experiment(images=[str(album)]), tmp_path / "run"
    assert done(asked, path) == 4
    frame = Store(path).frame()
    reasons = dict(zip(frame.image, frame.reason, strict=True))
    assert reasons["b.png"].startswith("Truncated or damaged: ")
    assert reasons["c.png"] == "Empty file: 0 bytes."
    assert reasons["d.png"] == "Cannot be read: it is not a regular file."
    assert done(asked, path) == 0
    assert done(asked, path, retry_failed=True) == 3
    assert len(Store(path).frame()) == len(frame)


def test_image_that_is_mended(experiment: Any, done: Any, album: Path, image: Any, tmp_path: Path) -> None:
    path, asked = tmp_path / "run", experiment(images=[str(album)])
    image(tmp_path / "whole.png", 1)
    spoil(album / "b.png")
    assert done(asked, path) == 4
    (tmp_path / "whole.png").rename(album / "b.png")
    assert done(asked, path) == 1  # another content is another image
    assert done(asked, path) == 0


def test_folder_of_the_images_is_gone(experiment: Any, options: Any, album: Path, tmp_path: Path) -> None:
    asked, how = experiment(images=[str(album)]), options()
    grid, tasks = prepare(asked, tmp_path / "run", how)
    album.rename(tmp_path / "elsewhere")
    with pytest.raises(PrivlabError, match=f"^No file or folder '{album}'."):
        fill(grid, tasks, tmp_path / "run", how)
    assert facts(tmp_path / "run")["status"] == "failed"
    (tmp_path / "elsewhere").rename(album)
    fill(grid, tasks, tmp_path / "run", how)
    assert len(Store(tmp_path / "run").frame()) == 24


# Disks


@pytest.mark.slow
def test_full_disk_and_resume(whole: Any, small_disk: Any, cli: Any, done: Any, same: Any, rows: Any) -> None:
    file, reference = whole
    place = small_disk("size=1m")
    (ballast := place / "ballast").write_bytes(bytes(800_000))
    error = cli("table", file, "--out", place / "run", *TABLE).error
    assert error.startswith(f"No space left on the device of '{place}/run")
    assert error.endswith("What was finished before stays readable.")
    kept = rows(place / "run")
    assert kept < ROWS
    ballast.unlink()
    assert not list((place / "run").rglob(".tmp-*"))
    done(read_experiment(file), place / "run", chunk=8)
    assert rows(place / "run") <= ROWS + kept
    same(place / "run", reference)


@pytest.mark.slow
def test_finished_run_that_is_read_only(whole: Any, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file, reference = whole

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    before = cli("table", file, "--out", reference, "--device", "cpu").out
    monkeypatch.setattr("privlab.stores.store.write_whole", refuse)
    assert cli("table", file, "--out", reference, "--device", "cpu").out == before


@pytest.mark.slow
def test_task_that_fails_leaves_what_others_did(
    whole: Any, options: Any, done: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: Any, rows: Any
) -> None:
    file, reference = whole
    run_task: Callable[..., Result] = engines.run_task
    left = iter(range(7))

    def seven(task: Any) -> Result:
        if next(left, None) is None:
            raise PrivlabError("That is enough.")
        return run_task(task)

    with monkeypatch.context() as patch:
        patch.setattr(engines, "run_task", seven)
        with pytest.raises(PrivlabError, match=r"^That is enough\.$"):
            done(read_experiment(file), tmp_path)
    assert facts(tmp_path)["status"] == "failed"
    assert rows(tmp_path) == 7 * EACH
    done(read_experiment(file), tmp_path, chunk=8)
    assert rows(tmp_path) == ROWS
    same(tmp_path, reference)

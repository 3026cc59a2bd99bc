"""The run directory: what is finished stays readable, and nothing of anybody is overwritten."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from privlab.stores import store

SCORED = "attack == 'patch-gradient' and status == 'ok'"
PRIVLAB = Path(sys.executable).parent / "privlab"


def facts(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


@pytest.mark.parametrize("place", ["/dev/null/run", "file", "file/run"])
def test_directory_that_cannot_be_made(attack: Callable[..., Any], tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    error = attack("--out", tmp_path / place).error
    assert error.startswith(f"'{tmp_path / place}' cannot be written: ")
    assert error.endswith("Give another --out.")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_directory_that_is_write_protected(attack: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    assert "cannot be written: Permission denied" in attack("--out", tmp_path / "shut" / "run").error


def test_other_run_gives_way_only_with_overwrite(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert attack("--batch-size", "1", "--strips").status == 0
    (run / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert attack("--limit", "1").error == f"'{run}' holds another run. Use --overwrite, or another --out."
    assert attack("--limit", "1", "--overwrite", "--attack", "aprl").error.startswith("Unknown attack")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert attack("--limit", "1", "--overwrite").status == 0
    assert set(records().image) == {"a.png"}
    assert facts(run)["specification"]["limit"] == 1
    assert not any((run / "strips").iterdir())
    assert (run / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["thesis.tex", "records/my.parquet", "run.json"])
@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_foreign_files_are_left_alone(
    attack: Callable[..., Any], tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"mine": 1}')
    expected = f"'{tmp_path / 'run'}' holds files of something else ({name.split('/')[0]}). Give a new or empty --out."
    assert attack(*options).error == expected
    assert path.read_text() == '{"mine": 1}'
    assert [entry for entry in (tmp_path / "run").rglob("*") if entry.is_file()] == [path]


def test_empty_folders_are_no_files(attack: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "run" / "records").mkdir(parents=True)
    assert attack().status == 0


# No disk


def test_no_space_left(
    attack: Callable[..., Any],
    records: Callable[..., pd.DataFrame],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, parts = pq.write_table, []

    def full(table: Any, path: Path) -> None:
        parts.append(path)
        if len(parts) > 1:
            path.write_bytes(b"PAR1 half of a part")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(table, path)

    monkeypatch.setattr("privlab.stores.store.pq.write_table", full)
    run = tmp_path / "run"
    done = attack("--batch-size", "1")
    where = run / "records"
    assert done.error == f"No space left on the device of '{where}'. What was finished before stays readable."
    assert len(list(where.iterdir())) == len(list(where.glob("part-000000-*.parquet"))) == 1
    assert list(records().query(SCORED).image.unique()) == ["a.png"]
    assert facts(run)["status"] == "failed"


def test_first_error_is_told_although_the_disk_is_full(
    attack: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run.json` cannot be brought up to date either; what it said before stays."""
    write = store.write_whole

    def full(path: Path, save: Callable[[Path], object], **options: Any) -> None:
        def fail(temporary: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        write(path, save if path.name == "run.json" and not path.exists() else fail, **options)

    monkeypatch.setattr(store, "write_whole", full)
    assert "records'. What was finished before stays readable." in attack().error
    assert facts(tmp_path / "run")["status"] == "running"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; skipped where none may be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system may be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_disk_that_is_really_full(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], small_disk: Path
) -> None:
    run = small_disk / "run"
    error = attack("--batch-size", "1", "--images", "samples", "--out", run).error
    assert error.startswith(f"No space left on the device of '{run}")
    assert error.endswith("What was finished before stays readable.")
    assert len(records(run).query(SCORED)) > 0
    assert facts(run)["specification"]["models"] == ["vit_ti"]


# Ctrl-C


def test_interrupt_leaves_what_is_finished(
    attack: Callable[..., Any],
    records: Callable[..., pd.DataFrame],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, parts = pq.write_table, []

    def interrupted(table: Any, path: Path) -> None:
        parts.append(path)
        if len(parts) > 2:
            raise KeyboardInterrupt
        write(table, path)

    monkeypatch.setattr("privlab.stores.store.pq.write_table", interrupted)
    done = attack("--batch-size", "1")
    assert (done.status, done.out) == (130, "")
    path = tmp_path / "run"
    shown = f"'{path}' keeps the records of 2 images, which `privlab report {path}` shows."
    assert done.err.endswith(f"Interrupted. {shown} The same command with --overwrite starts anew.\n")
    assert list(records().query(SCORED).image.unique()) == ["a.png", "b.png"]
    assert facts(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.parametrize("attack_name", ["patch-gradient", "gradient-matching"])
def test_an_interrupt_before_any_image(
    attack: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack_name: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("privlab.runs.attack._score", interrupted)
    done = attack("--attack", attack_name)
    assert done.status == 130
    search = " A search of gradient-matching goes on where it was." if attack_name == "gradient-matching" else ""
    left = f"'{tmp_path / 'run'}' keeps no image yet. The same command with --overwrite starts anew.{search}"
    assert done.err.endswith(f"Interrupted. {left}\n")
    assert attack("--overwrite", "--attack", attack_name).status == 130
    monkeypatch.setattr("privlab.runs.attack._prepare", interrupted)
    done = attack("--attack", attack_name, "--out", tmp_path / "other")
    assert done.err.endswith("Interrupted. Nothing had been run yet, and nothing is kept.\n")


def privlab(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start the real command; a child of a background job would ignore Ctrl-C."""
    return subprocess.Popen(
        [str(PRIVLAB), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def test_ctrl_c_in_the_real_command(
    picture: Callable[..., Path], records: Callable[..., pd.DataFrame], tmp_path: Path
) -> None:
    paths = [picture(f"many/{i:03d}.png", size=(16, 16)) for i in range(300)]
    options = "attack --model vit_ti --weights random --img-size 32 --batch-size 1 --device cpu --images"
    run = tmp_path / "run"
    with privlab(*options.split(), tmp_path / "many", "--out", run) as command:
        deadline = time.monotonic() + 90
        while not list(run.glob("records/part-*.parquet")):
            assert command.poll() is None, command.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=60)
    assert command.returncode == 130
    assert out == ""
    assert re.search(r"(?:^|\n)Interrupted\. '.*' keeps the records of \d+ images?, which .* starts anew\.\n$", err)
    assert "Traceback" not in err
    assert facts(run)["status"] == "interrupted"
    scored = records().query(SCORED)
    assert 0 < scored.image.nunique() < len(paths)
    assert scored.psnr.notna().all()
    assert not list(run.rglob(".tmp-*"))


def test_reader_that_goes_away() -> None:
    """`privlab list victims | head -0` says nothing about the pipe that broke."""
    with privlab("list", "attacks", "--json") as command:
        assert command.stdout is not None
        command.stdout.close()
        assert command.stderr is not None
        assert command.stderr.read() == ""

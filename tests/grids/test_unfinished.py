"""What a process that was killed had begun to write is deleted when a run goes on; what others write is left alone."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from privlab.base import PrivlabError, delete_unfinished, write_whole
from privlab.stores import RunDirectory, Store


def begun(folder: Path) -> Path:
    """Return the file that a process which is gone had begun to write."""
    code = f"""
import os, pathlib
from privlab.base import write_whole
write_whole(pathlib.Path({str(folder / "part.parquet")!r}), lambda path: (path.write_bytes(b"half"), os._exit(0)))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    (file,) = folder.glob(".tmp-*")
    return file


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> str:
    return begun(tmp_path_factory.mktemp("left")).name


def test_only_what_nobody_writes_any_more_is_deleted(tmp_path: Path, left: str) -> None:
    machine, _, rest = left.removeprefix(".tmp-").partition("-")
    ours, elsewhere = (f".tmp-{where}-{os.getpid()}-12345678-x" for where in (machine, "0" * 8))
    stays = [ours, elsewhere, f".tmp-{'0' * 8}-{rest}", ".tmp-12345678-part.parquet", "part.parquet"]
    for name in (left, *stays):
        (tmp_path / name).write_bytes(b"half")
    delete_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*stays}
    days = time.time() - 2 * 24 * 3600
    os.utime(tmp_path / elsewhere, (days, days))
    delete_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*stays} - {elsewhere}
    delete_unfinished(tmp_path / "nowhere")


def test_a_file_that_this_process_writes_stays(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"all")
        delete_unfinished(tmp_path)

    write_whole(tmp_path / "file", write)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_that_goes_on_deletes_what_was_left(tmp_path: Path, left: str) -> None:
    run = RunDirectory.create(tmp_path / "run")
    run.write_run({"experiment": "x"})
    folders = [run.path, run.store.records, run.path / "strips", run.path / "kept", run.path / "pictures" / "0123"]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / left).write_bytes(b"half")
    RunDirectory.create(tmp_path / "run", resume=True)
    assert not list(run.path.rglob(".tmp-*"))


def test_a_path_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff")
    for make in (RunDirectory.create, Store):
        with pytest.raises(PrivlabError, match=r"'.*\\xff'"):
            make(path)
    assert not path.exists()


def test_a_run_that_was_killed_before_its_first_file_was_whole_leaves_nothing(tmp_path: Path, left: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / left).write_bytes(b"half of run.json")
    RunDirectory.create(tmp_path / "run", resume=True)
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["records"]

"""The disk is full from some write on: one line says so, what was finished is kept, and with room the same goes on."""

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure
from PIL import Image

from privlab.stores import Store

FULL = re.compile(r"No space left on the device of '.*'\. What was finished before stays readable\.")
TIMES = ["seconds_observe", "seconds_attack", "seconds_score"]
Cli = Callable[..., Any]


@contextmanager
def full_from(moment: int, folder: Path) -> Iterator[list[str]]:
    """Let the disk be full from this write into a folder on, each of which leaves a torn file; yield the writes."""
    writes: list[str] = []

    def limited(write: Callable[..., Any], place: int) -> Callable[..., Any]:
        def limited_write(*given: Any, **options: Any) -> Any:
            path = Path(given[place])
            if not path.is_relative_to(folder):
                return write(*given, **options)
            writes.append(path.name)
            if len(writes) < moment:
                return write(*given, **options)
            with path.open("wb") as file:
                file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

        return limited_write

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", limited(Path.write_text, 0))
        patch.setattr(Path, "write_bytes", limited(Path.write_bytes, 0))
        patch.setattr(pq, "write_table", limited(pq.write_table, 1))
        patch.setattr(Figure, "savefig", limited(Figure.savefig, 1))
        yield writes


def whole_files(path: Path) -> None:
    """Check that what lies in a folder is whole: no write leaves half of a file."""
    for file in path.rglob("*"):
        assert file.is_dir() or file.read_bytes() != b"half"
        if file.suffix == ".png":
            with Image.open(file) as image:
                image.load()
    assert not list(path.rglob(".*"))


def records(path: Path) -> pd.DataFrame:
    frame = pd.DataFrame(Store(path).read().to_pylist())
    return frame.drop(columns=TIMES).sort_values(["cell", "image", "geometry"]).reset_index(drop=True)


def at_every_write(command: Callable[[Path], Any], folder: Path, again: Callable[[Path], Any] | None = None) -> int:
    """Run a command on a disk that is full from the first, second, … write on, then with room; return how many."""
    whole = folder / "whole"
    assert command(whole).status == 0
    for moment in range(1, 100):
        path = folder / f"at-{moment}"
        with full_from(moment, path) as writes:
            done = command(path)
        if len(writes) < moment:
            assert done.status == 0
            return moment - 1
        assert FULL.fullmatch(done.error)
        whole_files(path)
        held = [*path.rglob("part-*")]
        after = (again or command)(path)
        assert (after.status, after.err.count("Error")) == (0, 0)
        assert again is not None or all(part.exists() for part in held)
        if (whole / "records").exists():
            pd.testing.assert_frame_equal(records(path), records(whole), check_exact=True)
    raise AssertionError("the command never ends")


@pytest.mark.slow
def test_attack(attack: Cli, tmp_path: Path) -> None:
    chosen = ("--attack", "april", "--metrics", "psnr", "--limit", "1", "--strips", "--quiet")
    # run.json, the manifest, a strip, records, and run.json again
    assert at_every_write(lambda path: attack(*chosen, "--out", path), tmp_path / "disk") == 5


@pytest.mark.slow
def test_table(cli: Cli, photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text(
        f"""
        [run]
        model = "vit_ti"
        weights = "random"
        img_size = 32
        attack = ["april"]
        metrics = ["psnr"]
        images = ["{photos}"]
        limit = 1
        [[case]]
        label = "none"
        setting = "a"
        [[figure]]
        kind = "distribution"
        name = "psnr"
        y = "psnr"
        """,
        encoding="utf-8",
    )
    kept = ("--pictures", "1", "--keep", "reconstructions")
    run = partial(cli, "table", file, "--quiet", *kept, "--out")
    assert at_every_write(run, tmp_path / "disk") >= 5
    whole = tmp_path / "disk" / "whole"
    for command in ("report", "figures"):
        out = tmp_path / ("page/page.html" if command == "report" else "drawn")
        with full_from(1, tmp_path):
            assert FULL.fullmatch(cli(command, whole, "--out", out).error)
        assert not [*out.parent.glob("page*.html"), *out.glob("*"), *out.parent.glob(".*")]
        assert cli(command, whole, "--out", out).status == 0


@pytest.mark.slow
def test_audit_of_a_step(audit: Cli, step: Cli, tmp_path: Path) -> None:
    file = step()
    run = partial(audit, file, "--attack", "patch-gradient", "--out")
    assert at_every_write(run, tmp_path / "disk", lambda path: run(path, "--overwrite")) >= 3


@pytest.mark.slow
def test_audit_of_a_recording(cli: Cli, recording: Path, tmp_path: Path) -> None:
    victim = ("--model", "vit_ti", "--weights", "random", "--img-size", "64", "--attack", "least-squares")
    run = partial(cli, "audit", "features", recording, *victim, "--out")
    assert at_every_write(run, tmp_path / "disk") >= 3

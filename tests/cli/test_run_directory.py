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
from safetensors.torch import save_file

from privlab.evaluation import check
from privlab.stores import store
from privlab.victims import victim

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


@pytest.mark.slow
def test_other_run_gives_way_only_with_overwrite(
    attack: Callable[..., Any], records: Callable[..., pd.DataFrame], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert attack("--batch-size", "1", "--strips").status == 0
    (run / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert (
        attack("--limit", "1").error
        == f"'{run}' holds another run. Overwrite it (--overwrite) or give another directory."
    )
    assert attack("--limit", "1", "--overwrite", "--attack", "aprl").error.startswith("Unknown attack")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert attack("--limit", "1", "--overwrite").status == 0
    assert set(records().image) == {"a.png"}
    assert facts(run)["specification"]["limit"] == 1
    assert not any((run / "strips").iterdir())
    assert (run / "notes.txt").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["thesis.tex", "records/my.parquet", "run.json"])
@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_foreign_files_are_left_alone(
    attack: Callable[..., Any], tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"mine": 1}')
    expected = f"'{tmp_path / 'run'}' holds files of something else ({name.split('/')[0]}). "
    expected += "Give a new or empty directory."
    assert attack(*options).error == expected
    assert path.read_text() == '{"mine": 1}'
    assert [entry for entry in (tmp_path / "run").rglob("*") if entry.is_file()] == [path]


@pytest.mark.slow
def test_empty_folders_are_no_files(attack: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "run" / "records").mkdir(parents=True)
    assert attack().status == 0


# No disk


@pytest.mark.slow
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

        whole = path.name == "manifest.csv" or (path.name == "run.json" and not path.exists())
        write(path, save if whole else fail, **options)

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


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert done.err.endswith(f"Interrupted. {shown} The same command goes on where it was.\n")
    assert list(records().query(SCORED).image.unique()) == ["a.png", "b.png"]
    assert facts(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("attack_name", ["patch-gradient", "gradient-matching"])
def test_an_interrupt_before_any_image(
    attack: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack_name: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("privlab.grids.fill.run_tasks", interrupted)
    done = attack("--attack", attack_name)
    assert done.status == 130
    search = ", a search of gradient-matching too" if attack_name == "gradient-matching" else ""
    left = f"'{tmp_path / 'run'}' keeps no image yet. The same command goes on where it was{search}."
    assert done.err.endswith(f"Interrupted. {left}\n")
    assert attack("--overwrite", "--attack", attack_name).status == 130
    monkeypatch.setattr("privlab.grids.fill.lay_out", interrupted)
    done = attack("--attack", attack_name, "--out", tmp_path / "other")
    assert done.err.endswith("Interrupted. Nothing had been run yet, and nothing is kept.\n")


# The same command again


TIMES = ["seconds_attack", "seconds_observe", "seconds_score"]
TWICE = ("--batch-size", "1", "--setting", "b,c", "--draws", "2", "--strips", "--attack", "april", "--metrics", "psnr")
"""Two records of every image in each of two settings and draws."""


def untimed(frame: pd.DataFrame) -> pd.DataFrame:
    key = ["image", "attack", "setting", "draw", "geometry"]
    return frame.drop(columns=TIMES).sort_values(key).reset_index(drop=True)


def attacked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each attack that is run adds its name."""
    names: list[str] = []
    run = check.attack_batch
    monkeypatch.setattr(check, "attack_batch", lambda each, seen: (names.append(each.name), run(each, seen))[1])
    return names


@pytest.mark.slow
@pytest.mark.parametrize("status", ["interrupted", "running", "failed"])
def test_an_unfinished_run_goes_on_with_the_same_command(
    attack: Callable[..., Any],
    records: Callable[..., pd.DataFrame],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
) -> None:
    """What a killed process leaves is a run that says "running"; its records are those of a run that was not killed."""
    whole = attack(*TWICE, "--out", tmp_path / "whole")
    assert attack(*TWICE).status == 0
    run = tmp_path / "run"
    parts = sorted((run / "records").iterdir())
    assert len(parts) == 6  # an image of a draw each: both settings are attacked together
    for part in parts[-2:]:
        part.unlink()
    strips = {strip.name: strip.read_bytes() for strip in (run / "strips").iterdir()}
    (run / "strips" / "vit_ti-00002-c.png").unlink()
    parts[2].unlink()  # of the first draw, whose strips are kept
    (run / "run.json").write_text(json.dumps(facts(run) | {"status": status}))
    kept = {part: part.read_bytes() for part in (run / "records").iterdir()}
    names = attacked(monkeypatch)
    again = attack(*TWICE)
    assert again.status == 0
    assert names.count("april") == 3  # nothing that was finished is attacked again
    assert {part: part.read_bytes() for part in kept} == kept
    assert len(list((run / "records").iterdir())) == 6
    assert facts(run)["status"] == "finished"
    assert {strip.name: strip.read_bytes() for strip in (run / "strips").iterdir()} == strips
    pd.testing.assert_frame_equal(untimed(records()), untimed(records(tmp_path / "whole")))
    assert again.out.replace(str(run), "") == whole.out.replace(str(tmp_path / "whole"), "")


@pytest.mark.slow
def test_strips_are_of_the_first_draw(attack: Callable[..., Any], tmp_path: Path) -> None:
    assert attack(*TWICE).status == 0
    assert attack(*TWICE, "--draws", "1", "--out", tmp_path / "one").status == 0
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name / "strips").iterdir()} for name in ("one", "run"))
    assert (len(one), two) == (3, one)


@pytest.mark.slow
def test_a_finished_run_is_shown_again(
    attack: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = attack(*TWICE)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    names = attacked(monkeypatch)
    again = attack(*TWICE)
    assert (again.status, again.out, names) == (0, first.out, [])
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:vit_ti has RANDOM:privlab.base.warnings.PrivlabWarning")
def test_another_victim_under_the_same_name_is_another_run(
    cli: Callable[..., Any], photos: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "mine.safetensors"
    options = ("--model", "vit_ti", "--img-size", "32", "--images", photos, "--out", tmp_path / "run")
    for seed in (0, 1):
        vit = victim("vit_ti", weights="random", img_size=32, seed=seed).model.vit
        save_file(vit.state_dict(), weights)
        done = cli("attack", *options, "--weights", weights, "--attack", "april")
        if seed:
            assert (
                done.error
                == f"'{tmp_path / 'run'}' holds another run. Overwrite it (--overwrite) or give another directory."
            )
        else:
            assert done.status == 0


@pytest.mark.slow
def test_the_same_command_without_out_goes_on_with_the_last_unfinished_run(
    cli: Callable[..., Any], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("attack", "--model", "vit_ti", "--weights", "random", "--img-size", "32", "--images", photos)
    command += ("--attack", "april", "--no-strips", "--json")
    first = cli(*command).json["run"]
    assert cli(*command).json["run"] != first  # it is finished: a new one
    (tmp_path / first / "run.json").write_text(json.dumps(facts(tmp_path / first) | {"status": "interrupted"}))
    other = cli(*command, "--seed", "1")
    assert other.json["run"] != first
    again = cli(*command)
    assert again.json["run"] == first
    assert f"Continuing the unfinished run '{first}'; --overwrite starts a new one." in " ".join(again.err.split())
    (tmp_path / first / "run.json").write_text(json.dumps(facts(tmp_path / first) | {"status": "interrupted"}))
    assert cli(*command, "--overwrite").json["run"] not in (first, other.json["run"])


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


@pytest.mark.slow
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
    assert re.search(
        r"(?:^|\n)Interrupted\. '.*' keeps the records of \d+ images?, which .* goes on where it was\.\n$", err
    )
    assert "Traceback" not in err
    assert facts(run)["status"] == "interrupted"
    scored = records().query(SCORED)
    assert 0 < scored.image.nunique() < len(paths)
    assert scored.psnr.notna().all()
    assert not list(run.rglob(".tmp-*"))


@pytest.mark.slow
def test_reader_that_goes_away() -> None:
    """`privlab list victims | head -0` says nothing about the pipe that broke."""
    with privlab("list", "attacks", "--json") as command:
        assert command.stdout is not None
        command.stdout.close()
        assert command.stderr is not None
        assert command.stderr.read() == ""

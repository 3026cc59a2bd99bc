"""Standard output and error whose reader goes away, whose disk is full, or whose encoding is not UTF-8."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from privlab.base import collect_warnings, warn
from privlab.base.streams import CLOSED, OutputClosed, Stream, end_streams
from privlab.cli.common import print_json, print_table

PRIVLAB = Path(sys.executable).parent / "privlab"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Stream, int]]]:
    """Make a stream into a pipe, in place of standard output or error; return it and the end that is read."""
    ends: list[int] = []

    def make(*, kept: bool = True, encoding: str = "utf-8") -> tuple[Stream, int]:
        reader, writer = os.pipe()
        ends.extend((reader, writer))
        stream = Stream(writer, encoding, kept=kept)
        monkeypatch.setattr(sys, "stdout" if kept else "stderr", stream)
        return stream, reader

    yield make
    for end in ends:
        try:
            os.close(end)
        except OSError:  # the test has closed it
            continue


def written(stream: Stream, reader: int) -> bytes:
    stream.flush()
    return os.read(reader, 65536)


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", b"\\u03b3 \\xb1 \\xf6 \\udcff"),
        ("latin-1", b"\\u03b3 \xb1 \xf6 \\udcff"),
        ("utf-8", "γ ± ö \\udcff".encode()),
    ],
)
def test_a_stream_writes_every_text(pipe: Any, encoding: str, expected: bytes) -> None:
    stream, reader = pipe(encoding=encoding)
    assert stream.write("γ ± ö \udcff") == 7
    assert written(stream, reader) == expected
    with pytest.raises(TypeError):
        stream.write(b"")  # by which click tells binary streams


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_columns_of_a_table_stay_in_line(pipe: Any, encoding: str) -> None:
    stream, reader = pipe(encoding=encoding)
    table = Table("γ", "mean")
    table.add_row("0.3", "8 ± 1")
    table.add_row("…", "17")
    print_table(table)
    lines = written(stream, reader).decode("latin-1").splitlines()
    assert any("\\u03b3" in line for line in lines)
    assert len({len(line) for line in lines}) == 1


def test_json_is_the_same_in_every_encoding(pipe: Any) -> None:
    value = {"γ": "ö\udcff"}
    for encoding in ("ascii", "utf-8"):
        stream, reader = pipe(encoding=encoding)
        print_json(value if encoding == "ascii" else {"γ": "ö"})
        text = written(stream, reader)
        assert b"\\x" not in text  # no escape of JSON
        assert json.loads(text) == (value if encoding == "ascii" else {"γ": "ö"})
        assert text.isascii() == (encoding == "ascii")


def test_output_without_a_reader_ends_the_command_with_141(pipe: Any) -> None:
    stream, reader = pipe()
    os.close(reader)
    stream.write("unread")
    assert end_streams(0) == CLOSED == 141
    stream.write("more")
    assert end_streams(0) == 0  # nothing is left that Python could fail to write when it ends
    stream, reader = pipe()
    os.close(reader)
    with pytest.raises(OutputClosed):
        stream.write("x" * 100_000)


def test_messages_without_a_reader_are_dropped(pipe: Any, capfd: pytest.CaptureFixture[str]) -> None:
    stream, reader = pipe(kept=False)
    os.close(reader)
    Console(stderr=True).print("1 of 3")
    stream.write("2 of 3\n")
    assert end_streams(2) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_on_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w") as full:
        number = os.dup(full.fileno())
    stream = Stream(number, "utf-8", kept=True)
    monkeypatch.setattr(sys, "stdout", stream)
    stream.write("a table")
    assert end_streams(0) == 2
    assert capsys.readouterr().err == (
        "Error: Standard output cannot be written: No space left on device. What a run has finished is kept.\n"
    )
    quiet = Stream(os.open("/dev/full", os.O_WRONLY), "utf-8", kept=False)
    assert quiet.write("a message\n") == 10
    os.close(number)
    os.close(quiet.fileno())


def test_privlab_s_warnings_are_collected_and_those_of_others_shown_except_torch_s_of_its_own_code() -> None:
    messages: list[str] = ["old"]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with collect_warnings(messages):
            for text in ("old", "new", "new"):
                warn(text)
            for each in (FutureWarning("`torch.jit.script` is deprecated."), FutureWarning("of another library")):
                warnings.warn(each, stacklevel=1)
    assert messages == ["old", "new"]
    assert [str(each.message) for each in shown] == ["of another library"]


def privlab(*arguments: object, more: dict[str, str], **streams_: Any) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | more
    return subprocess.run([str(PRIVLAB), *map(str, arguments)], env=environment, **streams_)


RUN = ("attack", "--model", "cifar_vit", "--attack", "april", "--metrics", "psnr", "--limit", 2, "--batch-size", 1)


@pytest.mark.slow
def test_a_run_that_nobody_watches_goes_on_in_a_plain_locale_and_without_a_home(tmp_path: Path) -> None:
    """Both streams are pipes whose reader has gone, from the first line on; then they are read, in ASCII."""
    reader, writer = os.pipe()
    os.close(reader)
    nowhere = {"HOME": os.devnull, "XDG_CACHE_HOME": os.devnull, "PRIVLAB_CACHE": os.devnull}
    try:
        done = privlab(*RUN, "--out", tmp_path / "run", more=nowhere, stdout=writer, stderr=writer)
    finally:
        os.close(writer)
    assert done.returncode == CLOSED
    assert json.loads((tmp_path / "run" / "run.json").read_bytes())["status"] == "finished"
    assert len([*(tmp_path / "run" / "records").glob("part-*")]) == 2
    done = privlab(*RUN, "--out", tmp_path / "run", more=nowhere | ASCII, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    assert b"PSNR \\u2191" in done.stdout
    done = privlab("report", tmp_path / "run", more=nowhere, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")

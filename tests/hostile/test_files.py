"""Files that somebody made to do harm: each is refused in one line, with little memory and in little time."""

import gc
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from privlab.base import (
    PrivlabError,
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
    read_text,
    refuse_links,
    write_whole,
)
from privlab.evaluation import COLUMNS, SCHEMA
from privlab.grids import read_experiment
from privlab.images.datasets import parquet
from privlab.images.manifest import read_manifest
from privlab.keys.key_file import load_key
from privlab.release.gradient_file import read_gradient_file
from privlab.report.evidence import pictures_of
from privlab.report.tables.results import results_of
from privlab.report.tables.writers import csv_cell
from privlab.split import read_token
from privlab.stores import RunDirectory
from privlab.victims.weights import read_state

READERS: dict[str, Callable[[Path], object]] = {
    "experiment.toml": read_experiment,
    "weights.safetensors": read_state,
    "weights.npz": read_state,
    "weights.pt": read_state,
    "images.parquet": parquet,
    "manifest.csv": read_manifest,
    "gradients.safetensors": read_gradient_file,
    "model.key": load_key,
    "token": read_token,
    "run.json": lambda path: read_json(path, "run"),
}
"""What reads each kind of file."""


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path, 0o600)
    with pytest.raises(PrivlabError) as caught:
        READERS[name](path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parse", [parse_json, parse_toml])
@pytest.mark.parametrize("depth", [101, 500, 200_000])
def test_nested_text_is_refused(parse: Callable[[str, str], Any], depth: int) -> None:
    nested = "[" * depth + "]" * depth
    with pytest.raises(PrivlabError, match="nested too deeply"):
        parse(nested if parse is parse_json else f"x = {nested}", "this")


def test_number_of_ten_thousand_digits_is_refused() -> None:
    with pytest.raises(PrivlabError, match="is no JSON"):
        parse_json("1" * 10_000, "this")


def test_nested_text_within_the_limit_is_read() -> None:
    assert len(parse_json("[" * 90 + "]" * 90, "this")) == 1


def test_text_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "card.toml").open("wb") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(PrivlabError, match="at most"):
        read_text(tmp_path / "card.toml", "card")


def test_a_high_limit_reserves_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "release"
    path.write_bytes(b"small")
    assert read_bytes(path, "release", 2**60) == b"small"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_a_file_that_grows_while_it_is_read_is_refused() -> None:
    path = Path("/proc/self/stat")  # a regular file of 0 bytes, which has some when it is read
    with pytest.raises(PrivlabError, match="grows"):
        read_bytes(path, "file")


def test_a_link_is_never_written_through(tmp_path: Path) -> None:
    mine, link = tmp_path / "mine", tmp_path / "report.html"
    mine.write_text("mine")
    link.symlink_to(mine)
    write_whole(link, lambda temporary: temporary.write_text("page"))
    assert (mine.read_text(), link.read_text(), link.is_symlink()) == ("mine", "page", False)


def test_the_temporary_file_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was opened by its name, which led through a link that somebody had put there."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    monkeypatch.setattr(Path, "with_name", lambda path, name: path.parent / ".tmp-known")
    (tmp_path / ".tmp-known").symlink_to(mine)
    with pytest.raises(PrivlabError, match="exists"):
        write_whole(tmp_path / "page", lambda temporary: temporary.write_text("page"))
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("text", ["=1+1", "+1+1", "-1+1", "@A1", " =1+1", "\x00=1+1", '"=1+1', "\uff1d1+1"])
def test_a_formula_is_a_text_in_a_spreadsheet(text: str) -> None:
    assert csv_cell(text) == f"'{text}"
    assert csv_cell("-1.5") == "-1.5"


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        *(("\t=1", "\t'=1"), ("\r=1", "\r'=1"), ("\n=1", "\n'=1"), ("cat;=1", "cat;'=1"), ('cat"; =1', "cat\";' =1")),
        *(('cat;"@A1', "cat;'\"@A1"), ("-x;\n-y", "'-x;\n'-y"), ("a-b; c=1", "a-b; c=1"), ("'=1", "'=1")),
    ],
)
def test_a_formula_that_begins_within_a_cell_is_a_text_in_a_spreadsheet(text: str, cell: str) -> None:
    """Where the comma is the decimal mark, a spreadsheet divides the lines of CSV at semicolons."""
    assert csv_cell(text) == cell


@pytest.mark.parametrize(
    "odd", [{"versions": 1.5}, {"images": ["x"]}, {"commit": "x"}, {"attacks": 1}, {"hardware": True}, {"flags": 1}]
)
def test_a_report_of_a_run_that_states_anything_ends_in_one_line(
    tmp_path: Path, cli: Callable[..., Any], odd: dict[str, Any]
) -> None:
    """Such a run was called a fault of privlab, after it had been read."""
    run = RunDirectory.create(tmp_path)
    names = {"cell": "c", "attack": "april", "geometry": "in_place", "status": "ok", "victim": "v", "setting": "a"}
    run.write_records([{**names, "schema": SCHEMA, "image": "x", "image_sha256": "0" * 64, "psnr": 1.0}])
    run.write_run({"specification": {"metrics": ["psnr"]}, "status": "finished", "written": "2026"} | odd)
    assert "is not a run that privlab wrote, or it is damaged" in cli("report", tmp_path).error


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_folder_with_a_way_out_is_refused(tmp_path: Path, kind: str) -> None:
    deep = tmp_path / "pictures" / "0123"
    deep.mkdir(parents=True)
    refuse_links(tmp_path)
    (deep / "x.png").symlink_to("/etc/hostname") if kind == "link" else os.mkfifo(deep / "x.png")
    with pytest.raises(PrivlabError, match=kind):
        refuse_links(tmp_path)


@pytest.mark.parametrize("name", ["{}", "../mine.png", "pictures/../../mine.png", "pictures/a/../../../mine.png", 5])
def test_the_page_of_a_run_shows_no_file_outside_it(tmp_path: Path, name: Any) -> None:
    """An audit's run.json of a stranger could name any file of the reader, which the page then held."""
    (tmp_path / "run" / "pictures" / "a").mkdir(parents=True)
    for path in ("mine.png", "run/pictures/x.png"):
        (tmp_path / path).write_bytes(b"mine")
    name = name.format(tmp_path / "mine.png") if isinstance(name, str) else name
    rows = [{"attack": "april", "files": [name, "pictures/x.png"]}]
    facts = {"attacks": rows, "batches": [{"attack": "april", "sheet": f"../{name}"}]}
    results = replace(results_of(pd.DataFrame(columns=COLUMNS.names), ["psnr"]), facts=facts, path=tmp_path / "run")
    assert pictures_of(results) == [("april", tmp_path / "run/pictures/x.png")]


# Small files that stand for much


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Check that what is read inside takes at most 2 GiB that stay."""
    before = psutil.Process().memory_info().rss
    yield
    gc.collect()
    pa.default_memory_pool().release_unused()  # it keeps for a while what nothing uses
    assert psutil.Process().memory_info().rss - before < 2**31


def repeated(path: Path, value: bytes, times: int) -> Path:
    indices = pa.array(np.zeros(times, np.int32))
    column = pa.DictionaryArray.from_arrays(indices, pa.array([value]))
    pq.write_table(pa.table({"image": column}), path, compression="zstd", store_schema=False)
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(("size", "times"), [(2**20, 20_000), (2**26, 200), (1, 2**22)])
def test_parquet_that_unpacks_to_much_is_refused(tmp_path: Path, size: int, times: int) -> None:
    path = repeated(tmp_path / "a.parquet", b"x" * size, times)
    assert path.stat().st_size < 10**7
    with pytest.raises(PrivlabError, match=r"stand for more|values; at most"):
        parquet(path)


def test_label_with_very_many_classes_is_refused(tmp_path: Path) -> None:
    labels = pa.ListArray.from_arrays(pa.array([0, 2**22], pa.int32()), pa.array(np.zeros(2**22, np.int64)))
    pq.write_table(pa.table({"image": [b"x"], "label": labels}), tmp_path / "a.parquet")
    with pytest.raises(PrivlabError, match="values; at most"):
        parquet(tmp_path / "a.parquet")


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory")
def test_archive_that_unpacks_to_much_is_refused(tmp_path: Path) -> None:
    for name in ("a.npz", "a.pt"):
        with (
            zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("x.npy", "w", force_zip64=True) as member,
        ):
            for _ in range(80):
                member.write(bytes(2**24))
        assert (tmp_path / name).stat().st_size < 10**7
        with pytest.raises(PrivlabError, match="would unpack"):
            read_state(tmp_path / name)


@pytest.mark.slow
@pytest.mark.usefixtures("little_memory")
def test_checkpoint_that_repeats_itself_is_refused(tmp_path: Path) -> None:
    tables: Any = {"x": torch.zeros(1)}
    for _ in range(40):  # 2⁴⁰ tensors
        tables = {"a": tables, "b": tables}
    endless: Any = {}
    endless["again"] = endless
    for content in (tables, endless, {"x": torch.zeros(1).expand(10**10)}):
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(PrivlabError, match="entries or"):
            read_state(tmp_path / "a.pt")


def test_experiment_of_very_many_runs_is_refused(tmp_path: Path) -> None:
    start = '[run]\nmodel = "tiny_vit"\n'
    many = json.dumps([*range(100)])
    for text in (
        f"{start}draws = 1000000000\n",
        f"{start}client_batch = 1000000000\n",
        f'{start}"client.batch_size" = 1000000000\n',
        f"{start}seeds = {many}\ndraws = 1000\n",
        f"{start}[grid]\ngamma = {many}\nevery = {many}\noffset = {many}\nlimit = {many}\n",
    ):
        (tmp_path / "a.toml").write_text(text)
        with pytest.raises(PrivlabError, match=r"at most \d+"):
            read_experiment(tmp_path / "a.toml")

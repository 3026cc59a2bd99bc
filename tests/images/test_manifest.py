"""Which images of a source are chosen, by position and by manifest, and what a manifest may say."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from privlab.base import PrivlabError
from privlab.evaluation import batches
from privlab.grids import references, specify
from privlab.images import (
    Data,
    NamedImage,
    Preprocessing,
    choose_images,
    open_images,
    read_manifest,
    to_csv,
)
from privlab.images.data import Spool

A, B, C = (hashlib.sha256(name.encode()).hexdigest() for name in "abc")


def saved(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 20, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of three classes with 4, 2 and 3 images; not to be written to."""
    root = tmp_path_factory.mktemp("classes")
    for seed, name in enumerate(["a/1", "a/2", "a/3", "a/4", "b/1", "b/2", "c/1", "c/2", "c/3"]):
        saved(root / f"{name}.png", seed)
    return root


TURNS = ["a/1", "b/1", "c/1", "a/2", "b/2", "c/2", "a/3", "c/3", "a/4"]
"""The order in which class folders are taken where anything chooses: by turns."""


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names(source: Data) -> list[str]:
    return [image.name for image in source]


def written(path: Path, *rows: str, header: str = "name,sha256") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


# Positions


@settings(max_examples=40)
@given(st.none() | st.integers(1, 12), st.none() | st.integers(1, 12), st.none() | st.integers(0, 8))
def test_positions_are_those_of_a_slice(
    classes: Path, limit: int | None, every: int | None, offset: int | None
) -> None:
    plain = (limit, every, offset) == (None, None, None)
    order = sorted(TURNS) if plain else TURNS
    wanted = [
        f"{name}.png" for i, name in enumerate(order) if i >= (offset or 0) and (i - (offset or 0)) % (every or 1) == 0
    ]
    source = open_images(str(classes), limit=limit, every=every, offset=offset)
    assert names(source) == wanted[:limit] == list(source.names or ())
    assert source.count == len(wanted[:limit])
    assert [source[position].name for position in range(len(source))] == wanted[:limit]
    assert [image.label for image in source] == ["abc".index(name[0]) for name in wanted[:limit]]
    assert [reference.sha256 for reference in references(source)] == [sha(classes / name) for name in wanted[:limit]]


def test_numbers_of_the_tables_in_the_docs(tmp_path: Path) -> None:
    """No. 23, 48, 73, … 498 of 500 by name: positions count from 0."""
    for number in range(500):
        (tmp_path / f"{number + 1:03}.png").touch()
    found = open_images(str(tmp_path), every=25, offset=22, limit=20).names or ()
    assert found == tuple(f"{number:03}.png" for number in range(23, 500, 25))
    assert len(found) == 20


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"every": 0}, r"^every must be a positive integer\. Found 0\.$"),
        ({"every": True}, r"^every must be a positive integer\. Found True\.$"),
        ({"offset": -1}, r"^offset must be an integer from 0 on\. Found -1\.$"),
        ({"offset": 9}, r"^offset must be less than the number of images, 9\. Found 9\.$"),
        ({"offset": 10**9, "every": 3}, r"^offset must be less than the number of images, 9\. Found 1000000000\.$"),
    ],
)
def test_positions_that_there_are_not(classes: Path, choice: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        open_images(str(classes), **choice)


@pytest.mark.parametrize("choice", [{"limit": 3}, {"every": 2}, {"offset": 0}])
def test_manifest_beside_positions(classes: Path, tmp_path: Path, choice: dict[str, Any]) -> None:
    path = written(tmp_path / "m.csv", f"a/1.png,{sha(classes / 'a/1.png')}")
    (name, value), *_ = choice.items()
    message = f"^A manifest names its photographs one by one. Found {name} {value} with it.$"
    with pytest.raises(PrivlabError, match=message):
        open_images(str(classes), manifest=path, **choice)
    with pytest.raises(PrivlabError, match=message):
        specify(model=("vit_ti",), manifest=str(path), **choice)


def stream(pictures: list[NamedImage], count: int | None = None) -> Data:
    items = Spool(lambda: iter(pictures), count)
    return Data("a stream", items, "s/", range(len(items)))


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Data]:
    """Open a stream of five images as if it were a data set of the hub."""
    pictures = [NamedImage(f"s/{i}", hashlib.sha256(str(i).encode()).hexdigest(), None, i, "dataset") for i in range(5)]

    def opened(count: int | None = None, **choice: Any) -> Data:
        monkeypatch.setattr("privlab.images.open.datasets.hugging_face", lambda *_: stream(pictures, count))
        return open_images("hf:x", **choice)

    return opened


@pytest.mark.parametrize("count", [None, 5])
def test_positions_of_a_stream(streamed: Callable[..., Data], count: int | None) -> None:
    assert names(streamed(count, every=2, offset=1)) == ["s/1", "s/3"]
    assert names(streamed(count, every=2, limit=2)) == ["s/0", "s/2"]
    assert streamed(count, every=2).count == (None if count is None else 3)
    with pytest.raises(PrivlabError, match=r"images.*Found.*5"):
        list(streamed(count, offset=5))


def test_manifest_of_a_stream(streamed: Callable[..., Data], tmp_path: Path) -> None:
    everything = list(streamed())
    kept = [everything[i] for i in (3, 0, 4)]
    (tmp_path / "m.csv").write_text(to_csv(kept))
    source = streamed(manifest=tmp_path / "m.csv")
    assert (names(source), source.count) == (["s/3", "s/0", "s/4"], 3)
    assert [source[position].name for position in (2, 0)] == ["s/4", "s/3"]
    written(tmp_path / "m.csv", f"s/1,{everything[1].sha256}", f"s/9,{A}")
    with pytest.raises(PrivlabError, match=r"m\.csv.*3.*'s/9'.*--images"):
        streamed(manifest=tmp_path / "m.csv")


# Manifests


def test_exactly_these_in_the_order_of_the_manifest(classes: Path, tmp_path: Path) -> None:
    rows = [f"{name},{sha(classes / name)}" for name in ("c/2.png", "a/4.png", "b/1.png")]
    path = written(tmp_path / "m.csv", *rows)
    source = open_images(str(classes), manifest=path)
    assert names(source) == ["c/2.png", "a/4.png", "b/1.png"]
    assert [(p.label, p.label_origin, p.member) for p in source] == [(i, "folder", None) for i in (2, 0, 1)]
    assert source.count == len(source.names or ()) == 3
    assert [reference.name for reference in references(source)] == names(source)
    assert f"; 3 of them chosen by m.csv (SHA-256 {sha(path)[:16]})" in source.description


def test_labels_and_memberships_of_a_manifest(classes: Path, tmp_path: Path) -> None:
    rows = (("a/1.png", "8", "", "seen"), ("b/1.png", "", "none", "not seen"), ("c/1.png", "", "", ""))
    lines = [f"{name},{sha(classes / name).upper()},{','.join(rest)}" for name, *rest in rows]
    path = written(tmp_path / "m.csv", *lines, header="name,sha256,label,label_origin,member")
    wanted = [(8, "file", "seen"), (None, "none", "not seen"), (2, "folder", None)]
    source = open_images(str(classes), manifest=path)
    assert [(p.label, p.label_origin, p.member) for p in source] == wanted
    assert [(r.label, r.label_origin, r.member) for r in references(source)] == wanted
    labels = written(tmp_path / "labels.csv", "b/1.png,5", header="file,label")
    told = [(p.label, p.label_origin, p.member) for p in open_images(str(classes), manifest=path, labels=labels)]
    assert told == [(None, "none", "seen"), (5, "file", "not seen"), (None, "none", None)]


@pytest.mark.parametrize("source", ["samples", "files", "folder"])
def test_manifest_of_what_was_read_gives_it_again(classes: Path, tmp_path: Path, source: str) -> None:
    images = {"files": [classes / "b/2.png", classes / "a/1.png"], "folder": str(classes), "samples": "samples"}[source]
    first = open_images(images, limit=3)
    (tmp_path / "m.csv").write_text(to_csv(first.without_pixels()))
    again = open_images(images, manifest=tmp_path / "m.csv")
    for one, other in zip(first, again, strict=True):
        assert one.pixels is not None
        assert other.pixels is not None
        assert one.pixels.tobytes() == other.pixels.tobytes()
        assert replace(one, pixels=None).__dict__ == replace(other, pixels=None).__dict__
    assert to_csv(again.without_pixels()) == (tmp_path / "m.csv").read_text()


def test_chunks_are_those_of_a_source_with_broken_images(classes: Path, tmp_path: Path) -> None:
    """An image that cannot be decoded is chosen again: which images make a batch depends on it."""
    for i in (0, 2, 3):
        saved(tmp_path / "data" / f"{i}.png", i)
    (tmp_path / "data" / "1.png").write_bytes(b"no image")
    first = open_images(str(tmp_path / "data"))
    (tmp_path / "m.csv").write_text(to_csv(first))
    again = open_images(str(tmp_path / "data"), manifest=tmp_path / "m.csv")
    cut = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3, 1.0, "bicubic")
    told = [
        [([p.name for p in chunk.named], [p.name for p in chunk.failed]) for chunk in batches(source, cut, 2)]
        for source in (first, again)
    ]
    assert told[0] == told[1] == [(["0.png", "2.png"], ["1.png"]), (["3.png"], [])]


def test_what_a_manifest_leaves_out() -> None:
    pictures = [
        NamedImage("x", A, None, 3, "folder", member="seen"),
        NamedImage("gone", "", None, 4, "folder", "Cannot be opened."),
        NamedImage('y, "z"', B, None, None, "none"),
        NamedImage("again", A, None, 5, "file"),
        NamedImage("\udcff", C, None, 0, "dataset", member="not seen"),
    ]
    assert to_csv(pictures) == (
        "name,sha256,label,label_origin,member\n"
        f'x,{A},3,folder,seen\n"y, ""z""",{B},,none,unknown\n\\udcff,{C},0,dataset,not seen\n'
    )


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), min_size=1).filter(str.strip)
ROWS = st.lists(
    st.tuples(TEXT, st.integers(0, 2**63 - 1) | st.none(), st.sampled_from(["seen", "not seen", None])),
    min_size=1,
    unique_by=lambda row: row[0],
)


@pytest.mark.slow
@settings(max_examples=40)
@given(ROWS)
def test_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int | None, str | None]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.csv"
    pictures = [
        NamedImage(
            name,
            hashlib.sha256(str(i).encode()).hexdigest(),
            None,
            label,
            "none" if label is None else "file",
            None,
            member,
        )
        for i, (name, label, member) in enumerate(rows)
    ]
    path.write_text(to_csv(pictures), "utf-8", newline="")
    read = [(e.name, e.sha256, e.target, e.origin, e.member) for e in read_manifest(path)]
    assert read == [(p.name, p.sha256, p.label, p.label_origin, p.member) for p in pictures]


def test_byte_order_mark_and_line_ends_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(f"\ufeffsha256,name\r\n{A},é.png\r\n\r\n{B},b.png\r\n".encode())
    assert [(entry.name, entry.sha256, entry.target) for entry in read_manifest(path)] == [
        ("é.png", A, None),
        ("b.png", B, None),
    ]


FULL = "name,sha256,label,label_origin,member"
INTEGER = "label must be an integer from 0 on, of 64 bits. Found "
CELLS = "the line has more or fewer cells than there are columns. Give one for each."

BAD_LINES: dict[str, tuple[str, int, str]] = {
    "nothing": ("", 1, "a manifest has the columns name and sha256. Found: none; add name."),
    "unknown column": ("name,sha256,wnid\n", 1, "Unknown column of a manifest 'wnid'. "),
    "near column": ("name,sha265\n", 1, "Unknown column of a manifest 'sha265'. Did you mean sha256?"),
    "text": ("Not a table\nat all\n", 1, "Unknown column of a manifest 'Not a table'. "),
    "missing": ("name,label\n", 1, "a manifest has the columns name and sha256. Found: name, label; add sha256."),
    "column twice": ("name,sha256,name\n", 1, "the column name is there twice. Keep one of them."),
    "cells": (f"name,sha256\nx,{A},3\n", 2, CELLS),
    "cell": ("name,sha256\nx\n", 2, CELLS),
    "no name": (f"name,sha256\n,{A}\n", 2, "the name is empty. Give the image's name in its source."),
    "no hash": ("name,sha256\nx,\n", 2, "sha256 must have 64 hex digits. Found ''."),
    "short hash": ("name,sha256\nx,abc\n", 2, "sha256 must have 64 hex digits. Found 'abc'."),
    "name twice": (
        *(f"name,sha256\nx,{A}\ny,{B}\nx,{C}\n", 4),
        "the name 'x' stands in line 2 already. Name each photograph once.",
    ),
    "hash twice": (
        *(f"name,sha256\nx,{A}\ny,{A.upper()}\n", 3),
        f"the SHA-256 '{A[:60]}…' stands in line 2 already. Name each photograph once.",
    ),
    "negative": (f"{FULL}\nx,{A},-1,,\n", 2, f"{INTEGER}'-1'."),
    "word": (f"{FULL}\nx,{A},cat,,\n", 2, f"{INTEGER}'cat'."),
    "half": (f"{FULL}\nx,{A},1.5,,\n", 2, f"{INTEGER}'1.5'."),
    "huge": (f"{FULL}\nx,{A},{2**63},,\n", 2, f"{INTEGER}'{2**63}'."),
    "member": (f"{FULL}\nx,{A},,,yes\n", 2, "member must be seen, not seen or unknown. Found 'yes'."),
    "origin": (f"{FULL}\nx,{A},1,mine,\n", 2, "label_origin must be folder, file, dataset, none. Found 'mine'."),
    "predicted": (f"{FULL}\nx,{A},1,predicted,\n", 2, "label_origin must be folder, file, dataset, none. Found 'pred"),
    "label without": (f"{FULL}\nx,{A},1,none,\n", 2, "label_origin 'none' does not go with label 1. Give "),
    "origin without": (f"{FULL}\nx,{A},,file,\n", 2, "label_origin 'file' does not go with no label. Give "),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_line_that_is_refused(tmp_path: Path, name: str) -> None:
    text, line, message = BAD_LINES[name]
    path = tmp_path / "m.csv"
    path.write_text(text)
    with pytest.raises(PrivlabError) as caught:
        read_manifest(path)
    assert str(caught.value).startswith(f"{path}, line {line}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name,sha256\n", "The manifest '{}' names no photograph. Give one or more, each in a separate line."),
        ("name,sha256\né,\n".encode("latin-1"), "Cannot read the manifest '{}': 'utf-8' codec can't decode byte"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "Cannot read the manifest '{}': 'utf-8' codec can't decode byte"),
        (b'name,sha256\n"x,abc\n', "Cannot read the manifest '{}': unexpected end of data."),
        (b'name,sha256\n"x"y,abc\n', "Cannot read the manifest '{}': ',' expected after '\"'."),
    ],
)
def test_file_that_is_no_manifest(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(content)
    with pytest.raises(PrivlabError) as caught:
        read_manifest(path)
    assert str(caught.value).startswith(message.format(path))
    assert "\n" not in str(caught.value)


def test_manifest_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "no.csv", tmp_path):
        with pytest.raises(PrivlabError, match=rf"^Cannot read the manifest '{path}': .*\.$"):
            read_manifest(path)


def test_manifest_of_other_images(classes: Path, tmp_path: Path) -> None:
    own = sha(classes / "a/1.png")
    path = written(tmp_path / "m.csv", f"a/1.png,{own}", f"a/9.png,{A}")
    with pytest.raises(PrivlabError, match=r"m\.csv.*3.*'a/9\.png'.*'a/1"):
        open_images(str(classes), manifest=path)
    written(path, f"a/1.png,{own}", f"b/1.png,{A}")
    there = sha(classes / "b/1.png")[:12]
    message = rf"m\.csv, line 3: the SHA-256 of 'b/1\.png' is {there}…\. The manifest says {A[:12]}…: it names another"
    with pytest.raises(PrivlabError, match=message):
        open_images(str(classes), manifest=path)
    assert names(open_images(str(classes), manifest=path, check=False)) == ["a/1.png", "b/1.png"]


def test_file_that_cannot_be_read_has_no_hash(classes: Path, tmp_path: Path) -> None:
    saved(tmp_path / "data/x.png", 1)
    source = open_images(str(tmp_path / "data"))
    path = written(tmp_path / "m.csv", f"x.png,{sha(tmp_path / 'data/x.png')}")
    (tmp_path / "data/x.png").unlink()
    with pytest.raises(PrivlabError, match=r"2.*SHA-256.*'x\.png'"):
        choose_images(source, path)

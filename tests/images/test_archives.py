"""Data sets as people have them: npz, shards of Parquet, WebDataset's tars, names of classes, hidden files."""

import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from privlab.base import PrivlabError
from privlab.images import Data, open_images
from privlab.images.datasets import imagenet_classes


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def png(seed: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(16, 20, 3, seed=seed)).save(file, "PNG")
    return file.getvalue()


def targets(data: Data) -> list[Any]:
    return [image.target for image in data]


# npz


@pytest.mark.parametrize("colours", [False, True])
def test_medmnist_has_a_split_and_a_label_in_each_row(tmp_path: Path, colours: bool) -> None:
    images = {split: noise(3, 28, 28, *[3] * colours, seed=i) for i, split in enumerate(("train", "val", "test"))}
    arrays: dict[str, Any] = {f"{split}_labels": np.array([[2], [0], [1]], np.uint8) for split in images}
    arrays |= {f"{split}_images": found for split, found in images.items()}
    np.savez_compressed(tmp_path / "m.npz", **arrays)
    data = open_images(tmp_path / "m.npz")
    assert targets(data) == [2, 0, 1]
    assert data[0].name == "m.npz/test/0"
    found = [np.asarray(image.pixels) for image in open_images(tmp_path / "m.npz", split="train")]
    expected = images["train"] if colours else np.repeat(images["train"][..., None], 3, axis=3)
    assert (np.stack(found) == expected).all()
    with pytest.raises(PrivlabError, match="'tets'"):
        open_images(tmp_path / "m.npz", split="tets")
    assert targets(open_images(tmp_path / "m.npz", limit=1)) == [2]


def test_rows_of_several_labels_and_labels_of_volumes(tmp_path: Path) -> None:
    rows = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]], np.uint8)
    np.savez(tmp_path / "chest.npz", test_images=noise(3, 28, 28), test_labels=rows)
    assert targets(open_images(tmp_path / "chest.npz")) == [(0, 2), (), (1,)]
    np.savez(tmp_path / "organ.npz", test_images=noise(2, 28, 28, 28), test_labels=np.array([[1], [4]]))
    assert targets(open_images(tmp_path / "organ.npz")) == [1] * 28 + [4] * 28


@pytest.mark.parametrize("names", [("x_test", "y_test"), ("images", "labels"), ("arr_0", "arr_1")])
def test_usual_names_of_arrays(tmp_path: Path, names: tuple[str, str]) -> None:
    np.savez(tmp_path / "a.npz", **dict[str, Any](zip(names, (noise(2, 16, 16), np.array([5, 6])), strict=True)))
    assert targets(open_images(tmp_path / "a.npz")) == [5, 6]


def bomb(path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**30, 1, 1)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("images.npy", "w") as file:
        file.write(header.getvalue())
        for _ in range(520):
            file.write(bytes(2**20))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: np.savez(p, images=np.array([{}])), "cannot be read as npz.*pickle"),
        (lambda p: np.savez(p, weights=noise(3, 3)), "no array.*Found weights"),
        (lambda p: np.savez(p, images=noise(3, 16, 16), labels=np.arange(2)), "3 images, but labels"),
        (lambda p: p.write_bytes(b"PK\3\4 and no more"), "cannot be read as npz"),
        (bomb, "images.npy unpacks from"),
    ],
)
def test_odd_npz_is_refused_in_one_line(tmp_path: Path, make: Any, match: str) -> None:
    make(tmp_path / "a.npz")
    with pytest.raises(PrivlabError, match=match) as error:
        open_images(tmp_path / "a.npz")
    assert "\n" not in str(error.value)


# Parquet


def shard(path: Path, labels: list[int], column: str = "labels", names: list[str] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": png(label), "path": None} for label in labels]
    table = pa.table({"image": rows, column: labels})
    if names is not None:
        facts = {"info": {"features": {column: {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(facts)})
    pq.write_table(table, path)


@pytest.mark.parametrize("pattern", ["data/{}-0000{}-of-00002.parquet", "{}/000{}.parquet", "{}_{}.parquet"])
def test_shards_of_hugging_face(tmp_path: Path, pattern: str) -> None:
    for split, label in (("train", 0), ("validation", 4)):
        for number in (0, 1):
            shard(tmp_path / pattern.format(split, number), [label + number, label + 2], names=list("abcdefg"))
    (tmp_path / ".cache").mkdir()
    shard(tmp_path / ".cache/train-x.parquet", [9])
    data = open_images(tmp_path)
    assert targets(data) == [4, 6, 5, 6]
    assert data[0].name == f"{tmp_path.name}/validation/0"
    assert data.class_names == tuple("abcdefg")
    assert targets(open_images(tmp_path, split="train")) == [0, 2, 1, 2]
    with pytest.raises(PrivlabError, match="'test'"):
        open_images(tmp_path, split="test")


def test_shards_without_a_split_are_one_data_set(tmp_path: Path) -> None:
    for number in (1, 2):
        shard(tmp_path / f"part-{number}.parquet", [number], column="fine_label")
    assert targets(open_images(tmp_path)) == [1, 2]


# WebDataset


def tar(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def test_tars_of_webdataset(tmp_path: Path) -> None:
    tar(tmp_path / "s-000.tar", {"a.png": png(1), "a.cls": b"3", "b.json": b'{"label": [0, 2]}', "b.PNG": png(2)})
    tar(tmp_path / "s-001.tar", {"sub/c.png": png(3), "sub/._c.png": b"x", "sub/c.txt": b"text", "d.cls": b"1"})
    data = open_images(f"{tmp_path}/s-{{000..001}}.tar")
    assert data.names == ("s-000.tar/a.png", "s-000.tar/b.png", "s-001.tar/sub/c.png")
    assert targets(data) == [3, (0, 2), None]
    for seed, image in enumerate(data, 1):
        assert (np.asarray(image.pixels) == noise(16, 20, 3, seed=seed)).all()
    assert open_images(tmp_path).names == data.names
    assert open_images(tmp_path / "s-001.tar").names == (data.names or ())[2:]
    with pytest.raises(PrivlabError, match=r"No file.*s-002.tar"):
        open_images(f"{tmp_path}/s-{{000..002}}.tar")


def test_names_of_classes_in_tars(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", {"a.png": png(), "a.cls": b"dog", "b.png": png(), "b.json": b'{"label": "cat"}'})
    data = open_images(path)
    assert (targets(data), data.class_names) == ([1, 0], ("cat", "dog"))
    assert targets(open_images(path, class_to_index={"cat": 9, "dog": 8})) == [8, 9]


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"a.txt": b"text"}, "No image"),
        ({"a.png": b"", "a.cls": b"-1"}, "labels of 'a.tar'"),
        ({"a.png": b"", "a.cls": b"cat", "b.png": b"", "b.cls": b"1"}, "only one kind"),
    ],
)
def test_odd_tars_are_refused_in_one_line(tmp_path: Path, members: Mapping[str, bytes], match: str) -> None:
    with pytest.raises(PrivlabError, match=match):
        open_images(tar(tmp_path / "a.tar", members))


def test_damaged_tars(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", {"a.png": png(), "b.png": png()})
    for damaged in (path.read_bytes()[: 512 + 100], b"no tar" * 200, b""):
        path.write_bytes(damaged)
        with pytest.raises(PrivlabError, match="cannot be read as a tar"):
            open_images(path)
    deep = tar(tmp_path / "deep.tar", {"a.png": png(), "a.json": b"[" * 100_000})
    assert targets(open_images(deep)) == [0]


# Names of classes


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder of two classes, with what systems leave in it."""
    for name in ("golden_retriever/a.png", "tench/b.png", "tench/._b.png", "__MACOSX/tench/c.png", ".hidden/d.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png())
    for name in (".DS_Store", "tench/Thumbs.db", "tench/.DS_Store", "desktop.ini"):
        (tmp_path / name).write_bytes(b"\0")
    return tmp_path


def test_files_of_systems_are_no_images(tree: Path) -> None:
    assert open_images(tree).names == ("golden_retriever/a.png", "tench/b.png")


def test_folders_with_names_of_imagenet_have_its_labels(tree: Path) -> None:
    data = open_images(tree, class_to_index=imagenet_classes())
    assert targets(data) == [207, 0]
    assert (data.class_names or ())[:2] == ("n01440764", "n01443537")
    assert imagenet_classes()["crane bird"] == 134
    (tree / "my own class").mkdir()
    (tree / "my own class/a.png").write_bytes(png())
    assert targets(open_images(tree, class_to_index=imagenet_classes())) == [0, 1, 2]


def test_a_file_of_labels_may_hold_names_of_classes(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("labels") / "labels.csv"
    path.write_text("file,label\na.png,tench\nb.png,golden_retriever\n")
    assert targets(open_images(tree, labels=path)) == [1, 0]
    assert targets(open_images(tree, labels=path, class_to_index=imagenet_classes())) == [0, 207]
    path.write_text("file,label\na.png,well\nb.png,ill\n")
    data = open_images(tree, labels=path)
    assert targets(data) == [1, 0]
    assert "2 classes labelled in the order of their names" in data.description
    path.write_text("file,label\na.png,well\nb.png,1\n")
    with pytest.raises(PrivlabError, match="'well'"):
        open_images(tree, labels=path)


def test_a_line_for_a_volume_labels_its_slices(tmp_path: Path) -> None:
    for name in ("one", "two"):
        np.save(tmp_path / f"{name}.npy", noise(9, 16, 16))
    (tmp_path / "labels.csv").write_text("file,label\none.npy,7\ntwo.npy#1,2\n")
    assert targets(open_images(tmp_path, labels=tmp_path / "labels.csv")) == [7] * 9 + [None, 2] + [None] * 7

"""Samples, files, folders and their labels, timm's own evaluation transform, and the chunks."""

import csv
import types
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from timm.data.transforms_factory import create_transform
from torch.testing import assert_close

from privlab.base import PrivlabError, PrivlabWarning
from privlab.evaluation import batches
from privlab.images import Data, Preprocessing, open_images, sources

GREY = Preprocessing((16, 16), (0.5,) * 3, (0.5,) * 3, 1.0, "bicubic")


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def saved(path: Path, image: Image.Image | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (noise(16, 20, zlib.crc32(path.name.encode())) if image is None else image).save(path, **options)
    return path


def raw(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def labels(source: Data) -> dict[str, tuple[int | None, str]]:
    return {image.name: (image.label, image.label_origin) for image in source}


def table(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


# Samples, files, folders


def test_samples_are_distinct_photographs() -> None:
    source = open_images("samples")
    pictures = list(source)
    assert len(pictures) == len(source) == source.count
    assert len(pictures) >= 12
    assert tuple(image.name for image in pictures) == source.names
    assert len({image.sha256 for image in pictures}) == len(pictures)
    assert len({image.name.split("-")[0] for image in pictures[:8]}) == 8
    for image in pictures:
        values = np.asarray(image.pixels)
        assert values.shape[0] == values.shape[1] >= 200
        assert values.std() > 10
        assert (values.max(axis=(0, 1)) > 100).all()  # no crop reaches over the edge into black
        assert image.label is None


def test_samples_need_scikit_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PrivlabError, match="pip install scikit-image"):
        open_images("samples")


def test_missing_sample_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda _: spec)
    assert [p.problem for p in open_images("samples", limit=1)] == ["Cannot be read: No such file or directory."]


def test_files_keep_their_order(tmp_path: Path) -> None:
    paths = [str(saved(tmp_path / name)) for name in ("b.png", "a.png")]
    source = open_images(paths)
    assert [image.name for image in source] == paths == list(source.names or ())
    assert len(open_images(paths[:1])) == len(open_images(Path(paths[0]))) == 1


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"No file or folder '.*/nowhere'"):
        open_images(str(tmp_path / "nowhere"))
    with pytest.raises(PrivlabError, match=r"No file or folder '.*/b.png'"):
        open_images([saved(tmp_path / "a.png"), tmp_path / "b.png"])
    with pytest.raises(PrivlabError, match="folder"):
        open_images([saved(tmp_path / "a.png"), tmp_path])
    with pytest.raises(PrivlabError, match="No image given"):
        open_images([])


def test_flat_folder_is_sorted_and_has_no_labels(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPEG", "c.PPM"):
        saved(tmp_path / name)
    for name in ("notes.txt", ".hidden.png"):
        (tmp_path / name).write_text("")
    source = open_images(str(tmp_path))
    assert labels(source) == {"a.JPEG": (None, "none"), "b.png": (None, "none"), "c.PPM": (None, "none")}
    assert source.class_names is None
    assert open_images([tmp_path]).count == 3


def test_class_folders_are_labelled_as_by_torchvision(tmp_path: Path) -> None:
    for name in ("dog/b.png", "dog/a.png", "Cat/z.png", "ant/y.png"):
        saved(tmp_path / name)
    saved(tmp_path / "dog/deep/er.png")
    source = open_images(str(tmp_path))
    reference = torchvision.datasets.ImageFolder(tmp_path)
    expected = {Path(file).relative_to(tmp_path).as_posix(): (label, "folder") for file, label in reference.samples}
    assert labels(source) == expected
    assert list(labels(source)) == list(expected)
    assert list(source.class_names or ()) == reference.classes


@pytest.mark.parametrize("tool", [".ipynb_checkpoints", "__MACOSX", "@eaDir"])
def test_folders_that_tools_make_do_not_shift_labels(tmp_path: Path, tool: str) -> None:
    saved(tmp_path / "cat/a.png")
    saved(tmp_path / "dog/a.png")
    (tmp_path / tool).mkdir()
    assert labels(open_images(str(tmp_path))) == {"cat/a.png": (0, "folder"), "dog/a.png": (1, "folder")}
    saved(tmp_path / tool / "a.png")
    assert labels(open_images(str(tmp_path))) == {"cat/a.png": (0, "folder"), "dog/a.png": (1, "folder")}


@pytest.mark.parametrize("limit", [None, 2])
def test_a_folder_without_images_is_no_class_and_is_named(tmp_path: Path, limit: int | None) -> None:
    saved(tmp_path / "cat/a.png")
    saved(tmp_path / "dog/a.png")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/a.txt").write_text("cat")
    with pytest.warns(PrivlabWarning, match=r"annotations.*0.*1"):
        source = open_images(str(tmp_path), limit=limit)
    assert labels(source) == {"cat/a.png": (0, "folder"), "dog/a.png": (1, "folder")}
    assert source.class_names == ("cat", "dog")
    known = open_images(str(tmp_path), class_to_index={"cat": 7, "dog": 3})
    assert labels(known) == {"cat/a.png": (7, "folder"), "dog/a.png": (3, "folder")}


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    saved(tmp_path / "data/cat/a.png")
    saved(tmp_path / "dogs/b.png")
    (tmp_path / "data/dog").symlink_to(tmp_path / "dogs")
    (tmp_path / "data/cat/loop").symlink_to(tmp_path / "data")
    assert list(labels(open_images(str(tmp_path / "data")))) == ["cat/a.png", "dog/b.png"]


def test_folder_with_images_beside_folders_has_no_labels(tmp_path: Path) -> None:
    saved(tmp_path / "cat/a.png")
    saved(tmp_path / "b.png")
    assert labels(open_images(str(tmp_path))) == {"b.png": (None, "none"), "cat/a.png": (None, "none")}


def test_class_to_index_is_used_where_it_knows_all_folders(tmp_path: Path) -> None:
    saved(tmp_path / "cat/a.png")
    saved(tmp_path / "dog/a.png")

    def opened(indices: Mapping[str, int]) -> Data:
        return open_images(str(tmp_path), class_to_index=indices)

    known = opened({"ant": 0, "dog": 1, "cat": 2})
    assert labels(known) == {"cat/a.png": (2, "folder"), "dog/a.png": (1, "folder")}
    assert known.class_names == ("ant", "dog", "cat")
    assert "given indices" in known.description
    assert opened({"dog": 1, "cat": 281}).class_names is None
    partial = opened({"cat": 281})
    assert labels(partial) == {"cat/a.png": (0, "folder"), "dog/a.png": (1, "folder")}
    assert "order of their names" in partial.description


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    with pytest.raises(PrivlabError, match="No image in the folder"):
        open_images(str(tmp_path))


def test_unlistable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(top: Path, onerror: Callable[[OSError], None], followlinks: bool) -> list[Any]:
        onerror(PermissionError(13, "Permission denied", str(top)))
        return []

    monkeypatch.setattr(sources.os, "walk", deny)
    with pytest.raises(PrivlabError, match=r"'.*'.*Permission"):
        open_images(str(tmp_path))


def test_split_is_a_sub_folder(tmp_path: Path) -> None:
    saved(tmp_path / "val/cat/a.png")
    saved(tmp_path / "train/cat/b.png")
    assert labels(open_images(str(tmp_path), split="val")) == {"val/cat/a.png": (0, "folder")}
    with pytest.raises(PrivlabError, match="'test'"):
        open_images(str(tmp_path), split="test")
    with pytest.raises(PrivlabError, match="classes"):
        open_images(str(tmp_path))
    with pytest.raises(PrivlabError, match="'val'"):
        open_images("samples", split="val")
    for missing in (str(tmp_path / "none.parquet"), str(tmp_path / "none")):
        with pytest.raises(PrivlabError, match="No file or folder"):
            open_images(missing, split="val")


def test_limit(tmp_path: Path) -> None:
    for name in "abc":
        saved(tmp_path / f"{name}.png")
    source = open_images(str(tmp_path), limit=2)
    assert (len(source), source.names) == (2, ("a.png", "b.png"))
    assert [image.name for image in source] == [image.name for image in source] == ["a.png", "b.png"]
    assert open_images(str(tmp_path), limit=9).count == 3


def test_limit_takes_the_classes_in_turn(tmp_path: Path) -> None:
    for name in ("a/1.png", "a/2.png", "a/3.png", "b/1.png", "c/1.png", "c/deep/2.png"):
        saved(tmp_path / "val" / name)
    turns = ["a/1.png", "b/1.png", "c/1.png", "a/2.png", "c/deep/2.png", "a/3.png"]
    classes = [0, 1, 2, 0, 2, 0]
    for limit in (1, 2, 4, 6, 9):
        source = open_images(str(tmp_path / "val"), limit=limit)
        expected = list(zip(turns, classes, strict=True))[:limit]
        assert [(image.name, image.label) for image in source] == expected
        assert source.names == tuple(turns[:limit])
        assert (len(source), source.class_names) == (len(expected), ("a", "b", "c"))
    assert sorted(turns) == list(labels(open_images(str(tmp_path / "val"))))
    path = table(tmp_path / "labels.csv", "file,label", "val/b/1.png,8")
    relabelled = open_images(str(tmp_path), split="val", limit=2, labels=path)
    assert labels(relabelled) == {"val/a/1.png": (None, "none"), "val/b/1.png": (8, "file")}


@pytest.mark.parametrize("limit", [0, -1, True])
def test_limit_must_be_positive(limit: int) -> None:
    with pytest.raises(PrivlabError, match=f"limit must be a positive integer. Found {limit}"):
        open_images("samples", limit=limit)


def test_nothing_is_read_before_iteration(tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"{i:03}.png") for i in range(50)]
    source = open_images(str(tmp_path))
    for path in paths[1:]:
        path.unlink()
    assert source.count == 50
    first, second, *_ = source
    assert first.problem is None
    assert second.problem == "Cannot be read: No such file or directory."


# Labels from a file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cat/a.png", "cat/b.png", "dog/a.png"):
        saved(tmp_path / "data" / name)
    return tmp_path / "data"


@pytest.mark.parametrize("column", ["label", "class_index"])
def test_labels_from_a_file_replace_all_others(folder: Path, tmp_path: Path, column: str) -> None:
    path = table(tmp_path / "labels.csv", f"{column},file", "7,./cat/a.png", "9,b.png")
    source = open_images(str(folder), labels=path)
    assert labels(source) == {"cat/a.png": (7, "file"), "cat/b.png": (9, "file"), "dog/a.png": (None, "none")}
    assert source.class_names is None


def test_class_index_goes_before_a_label_that_is_a_word(folder: Path, tmp_path: Path) -> None:
    path = table(tmp_path / "labels.csv", "\ufefffile,label,class_index", "dog/a.png,dog,4")
    assert labels(open_images(str(folder), labels=str(path)))["dog/a.png"] == (4, "file")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["name,label", "a.png,1"],
            r"line 1: expected the columns file and class_index .* Found: name, label",
        ),
        (
            ["file,class", "a.png,1"],
            r"line 1: expected the columns file and class_index .* Found: file, class",
        ),
        ([""], "line 1: expected the columns .* Found: none"),
        (
            ["file,label", "b.png,1", "cat/a.png,dog"],
            r"line 3: label must be an integer from 0 on, of 64 bits. Found 'dog'",
        ),
        (["file,label", "b.png,-1"], r"line 2: label must be an integer from 0 on, of 64 bits. Found '-1'"),
        (["file,label", f"b.png,{2**63}"], "line 2: label must be an integer .* Found '9223372036854775808'"),
        (["file,label", "b.png,1.5"], "line 2: label must be an integer .* Found '1.5'"),
        (["file,label", "b.png"], "line 2: label must be an integer .* Found ''"),
        (["file,label", "b.png,1", "./b.png,2"], r"line 3: the file 'b.png' is listed twice"),
        (["file,label", "a.png,1"], "'a.png' could be 2 images; give the path, as in 'cat/a.png'"),
        (["file,label", "x.png,1"], "none of its 1 files is an image of the source, as 'cat/a.png' is"),
    ],
)
def test_bad_labels_are_named(folder: Path, tmp_path: Path, rows: list[str], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        open_images(str(folder), labels=table(tmp_path / "labels.csv", *rows))


def test_unreadable_labels_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PrivlabError, match=r"'.*no.csv'.*No"):
        open_images(str(folder), labels=tmp_path / "no.csv")
    with pytest.raises(PrivlabError, match=r"Cannot read the labels .*utf-8"):
        open_images(str(folder), labels=raw(tmp_path / "a.csv", b"file,label\n\xff\xfe,1\n"))
    long = "x" * (csv.field_size_limit() + 1)
    with pytest.raises(PrivlabError, match="field"):
        open_images(str(folder), labels=table(tmp_path / "b.csv", "file,label", f"{long},1"))


# Preprocessing and chunks

SIZES = [(32, 32), (8, 8), (500, 333), (333, 500), (224, 224), (225, 1000), (57, 640), (1000, 31), (256, 255)]


@pytest.mark.parametrize("size", [(224, 224), (32, 32), (64, 96)])
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_preprocessing_equals_timms(size: tuple[int, int], crop_pct: float, interpolation: str) -> None:
    reference: Any = create_transform(
        (3, *size),
        is_training=False,
        interpolation=interpolation,
        crop_pct=crop_pct,
        crop_mode="center",
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
    )
    ours = Preprocessing(size, (0.5,) * 3, (0.5,) * 3, crop_pct, interpolation)
    for index, (height, width) in enumerate(SIZES):
        image = noise(height, width, index)
        assert_close(ours(image), reference(image), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("size", "crop_pct", "interpolation", "message"),
    [
        ((0, 224), 1.0, "bicubic", "size must be a positive integer. Found 0"),
        ((224, 224), 0.0, "bicubic", r"crop_pct must be in \(0, 1\]. Found 0.0"),
        ((224, 224), 87.5, "bicubic", r"crop_pct must be in \(0, 1\]. Found 87.5"),
        ((224, 224), 1.0, "bicubc", "Unknown interpolation 'bicubc'. Did you mean bicubic"),
    ],
)
def test_bad_preprocessing(size: tuple[int, int], crop_pct: float, interpolation: str, message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        Preprocessing(size, (0.5,) * 3, (0.5,) * 3, crop_pct, interpolation)


def test_chunks_are_full_and_carry_the_failed(tmp_path: Path) -> None:
    for index in range(6):
        saved(tmp_path / f"{index}.png")
    for index in (1, 5):
        raw(tmp_path / f"{index}.png", b"")
    source = open_images(str(tmp_path))
    chunks = list(batches(source, GREY, 2))
    assert [[image.name for image in chunk.named] for chunk in chunks] == [
        ["0.png", "2.png"],
        ["3.png", "4.png"],
        [],
    ]
    assert [[image.name for image in chunk.failed] for chunk in chunks] == [["1.png"], [], ["5.png"]]
    assert [tuple(chunk.images.shape) for chunk in chunks] == [(2, 3, 16, 16), (2, 3, 16, 16), (0, 3, 16, 16)]
    assert all(image.pixels is None for chunk in chunks for image in chunk.named)
    kept = {image.name: image.pixels for image in source if image.pixels is not None}
    expected = torch.stack([GREY(kept[name]) for name in ("3.png", "4.png")])
    assert_close(chunks[1].images, expected, rtol=0, atol=0)
    assert 0 <= expected.min() < expected.max() <= 1
    assert [len(chunk.named) for chunk in batches(source, GREY, 3)] == [3, 1]
    with pytest.raises(PrivlabError, match=r"positive.*0"):
        batches(source, GREY, 0)

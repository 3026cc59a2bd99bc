"""What is learnt from: images of all kinds of sources, broken ones among them, and how batches are changed."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Generator

import privlab
from privlab.base import PrivlabError
from privlab.experiments.training import reading
from privlab.experiments.training.examples import Augmentation, _shift
from privlab.experiments.training.reading import read_examples
from privlab.images import open_images, to_csv


def image(seed: int, side: int = 12) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def png(seed: int) -> bytes:
    file = io.BytesIO()
    image(seed).save(file, "PNG")
    return file.getvalue()


def parquet(path: Path, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(3):
            image(10 * label + i).save(tmp_path / "train" / name / f"{i}.png")
    return tmp_path


def test_a_folder_is_read_with_the_labels_of_its_classes(folder: Path) -> None:
    data = read_examples(open_images(folder, split="train"), (12, 12))
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.classes == 2
    assert torch.equal(data.images[4], torch.from_numpy(np.array(image(11))).permute(2, 0, 1))
    assert torch.equal(data.pixels(torch.tensor([4]))[0], data.images[4] / 255)


def test_a_broken_image_is_counted_and_named(folder: Path) -> None:
    (folder / "train" / "cat" / "1.png").write_bytes(b"no image")
    data = read_examples(open_images(folder, split="train"), (12, 12))
    assert len(data) == 5
    assert len(data.skipped) == 1
    assert "cat/1.png" in data.skipped[0]


def test_a_class_without_a_readable_image_is_refused(folder: Path) -> None:
    for path in (folder / "train" / "cat").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(PrivlabError, match="'cat'"):
        read_examples(open_images(folder, split="train"), (12, 12))


def test_images_without_labels_are_refused(tmp_path: Path) -> None:
    image(0).save(tmp_path / "a.png")
    with pytest.raises(PrivlabError, match=r"1.*1.*images"):
        read_examples(open_images(tmp_path), (12, 12))
    assert read_examples(open_images(tmp_path), (12, 12), labelled=False).labels.tolist() == [-1]


def test_nothing_to_read_is_refused_with_the_first_reason(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(PrivlabError, match="Empty"):
        read_examples(open_images(tmp_path), (12, 12), labelled=False)


def test_more_than_fits_is_refused_before_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_BYTES", 1000)
    with pytest.raises(PrivlabError, match=r"6.*12×12"):
        read_examples(open_images(folder, split="train"), (12, 12))


def test_other_sizes_are_resized_and_cut(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20), (10, 20, 30)).save(tmp_path / "a.png")
    data = read_examples(open_images(tmp_path), (8, 8), labelled=False)
    assert data.images[0].flatten(1).unique(dim=1).flatten().tolist() == [10, 20, 30]


@pytest.mark.parametrize("struct", [False, True])
def test_parquet_with_splits(tmp_path: Path, struct: bool) -> None:
    data = [png(i) for i in range(4)]
    rows: list[object] = [{"bytes": each, "path": None} for each in data] if struct else list(data)
    path = parquet(tmp_path / "a.parquet", image=rows, label=[0, 0, 1, 1], split=["train", "test", "train", "test"])
    train = read_examples(open_images(path, split="train"), (12, 12))
    assert train.labels.tolist() == [0, 1]
    assert torch.equal(train.images[1], torch.from_numpy(np.array(image(2))).permute(2, 0, 1))
    assert len(read_examples(open_images(path), (12, 12))) == 4


def test_the_first_of_a_sorted_parquet_are_of_all_classes(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", jpeg=[png(i) for i in range(6)], label=[0, 0, 0, 1, 1, 1])
    source = open_images(path, limit=4)
    assert [each.label for each in source] == [0, 1, 0, 1]
    assert [each.name for each in source] == ["a.parquet/0", "a.parquet/3", "a.parquet/1", "a.parquet/4"]


@pytest.mark.parametrize(
    ("columns", "split", "message"),
    [
        ({"pixels": [1]}, None, "has no column image, .* Found pixels"),
        ({"image": [b""]}, "train", "has no split 'train'. Found no column split"),
        ({"image": [b""], "split": ["test"]}, "train", "has no split 'train'. Found test"),
        ({"image": [3]}, None, "column image .* int64, not bytes"),
        ({"image": [b"", b""], "label": [0, -1]}, None, "row 1: a label must be a class index.* Found -1"),
        ({"image": [b""], "label": ["cat"]}, None, "row 0: .* Found 'cat'"),
        ({"image": [b""], "label": [True]}, None, "row 0: .* Found True"),
        ({"image": [b"", b""], "label": [2.0, 0.5]}, None, "row 1: .* Found 0.5"),
        ({"image": [b""], "label": [float("nan")]}, None, "row 0: .* Found nan"),
        ({"image": [b""], "label": [1e19]}, None, "row 0: .* Found 1e.19"),
        ({"image": [b""], "label": [[3, 3]]}, None, "row 0: .* different .* Found .3, 3."),
        ({"image": [b""], "label": [[0, 0.5]]}, None, "row 0: .* Found .0.0, 0.5"),
        ({"image": [b""], "label": [{"a": 1}]}, None, "row 0: .* Found {'a': 1}"),
    ],
)
def test_bad_parquet(tmp_path: Path, columns: dict[str, list[object]], split: str | None, message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        open_images(parquet(tmp_path / "a.parquet", **columns), split=split)


def test_lists_of_a_parquet_file_are_multi_label_targets_and_remain_so_in_a_manifest(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", image=[png(0), png(1), png(2)], label=[[3, 0], [], None])
    images = [*open_images(path)]
    assert [(each.label, each.targets, each.label_origin) for each in images] == [
        (None, (0, 3), "dataset"),
        (None, (), "dataset"),
        (None, None, "none"),
    ]
    (tmp_path / "m.csv").write_text(to_csv(images), encoding="utf-8")
    again = [*open_images(path, manifest=tmp_path / "m.csv")]
    assert [each.targets for each in again] == [(0, 3), (), None]
    with pytest.raises(PrivlabError, match=r"line 2.*3.*3 classes"):
        privlab.attack("vit_ti", path, manifest=tmp_path / "m.csv", weights="random", classes=3, progress=False)


def test_labels_of_a_parquet_file_may_be_empty_or_whole_floats(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", img=[png(0), png(1), png(2)], fine_label=[2.0, None, 0.0])
    found = [(each.label, each.label_origin) for each in open_images(path)]
    assert found == [(2, "dataset"), (None, "none"), (0, "dataset")]
    assert all(isinstance(label, int | None) for label, _ in found)


def test_labels_that_are_not_used_need_not_be_class_indices(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", image=[png(0), png(1)], label=["cat", "dog"])
    (tmp_path / "own.csv").write_text("file,label\n0,4\n1,2.0\n")
    assert [each.label for each in open_images(path, labels="predicted")] == [None, None]
    assert [each.label for each in open_images(path, labels=tmp_path / "own.csv")] == [4, 2]


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(PrivlabError, match="cannot be read as Parquet"):
        open_images(tmp_path / "a.parquet")


@given(seed=st.integers(0, 1000), most=st.integers(1, 5))
def test_shifts_are_whole_pixels_of_each_image_alone(seed: int, most: int) -> None:
    images = torch.rand(3, 2, 8, 8, generator=Generator().manual_seed(seed))
    moved = _shift(images, most, Generator().manual_seed(seed))
    top, left = torch.randint(2 * most + 1, (2, 3, 1), generator=Generator().manual_seed(seed))
    for image, out, t, s in zip(images, moved, top, left, strict=True):
        padded = torch.nn.functional.pad(image, (most,) * 4)
        assert torch.equal(out, padded[:, int(t) : int(t) + 8, int(s) : int(s) + 8])


def test_a_whole_crop_changes_nothing_and_a_smaller_one_stays_in_range() -> None:
    images = torch.rand(4, 3, 8, 8, generator=Generator().manual_seed(0))
    same = Augmentation(flip=False, shift=0)(images, Generator().manual_seed(1))
    assert torch.equal(same, images)
    small = Augmentation(flip=False, shift=0, zoom=0.3)(images, Generator().manual_seed(1))
    assert small.shape == images.shape
    assert 0 <= small.min() <= small.max() <= 1
    assert not torch.allclose(small, images, atol=0.05)


def test_all_of_it_at_once_keeps_shape_and_range() -> None:
    images = torch.rand(4, 3, 16, 16, generator=Generator().manual_seed(0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        changed = Augmentation(randaugment=9, erasing=1.0)(images, Generator().manual_seed(1))
    assert changed.shape == images.shape
    assert 0 <= changed.min() <= changed.max() <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shift": -1}, "shift .* at least 0. Found -1"),
        ({"zoom": 0.0}, r"zoom .* in \(0, 1\]. Found 0.0"),
        ({"randaugment": 31}, r"randaugment .* in \[0, 30\]"),
        ({"erasing": 2.0}, r"erasing .* in \[0, 1\]"),
    ],
)
def test_bad_augmentations(options: dict[str, float], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        Augmentation(**options)

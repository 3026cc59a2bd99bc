"""torchvision's and Hugging Face's datasets, by stand-ins: nothing is downloaded."""

import hashlib
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from privlab.base import PrivlabError
from privlab.images import NamedImage, open_images


def pixels(image: NamedImage) -> np.ndarray:
    assert image.problem is None
    assert image.pixels is not None
    assert image.pixels.mode == "RGB"
    return np.asarray(image.pixels)


# torchvision


def test_fake_data() -> None:
    source = open_images("torchvision:FakeData", limit=2)
    first, second = source
    assert (len(source), first.name, first.label_origin) == (2, "FakeData/0", "dataset")
    assert pixels(first).shape == (224, 224, 3)
    assert first.sha256 != second.sha256
    assert next(iter(source)).sha256 == first.sha256
    with pytest.raises(PrivlabError, match=r"FakeData.*'test'"):
        open_images("torchvision:FakeData", split="test")


def test_labels_file_for_a_dataset(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("file,label\nFakeData/1,5\n")
    first, second = open_images("torchvision:FakeData", limit=2, labels=path)
    assert (first.name, first.label, first.label_origin) == ("FakeData/0", None, "none")
    assert (second.name, second.label, second.label_origin) == ("FakeData/1", 5, "file")


def test_unknown_torchvision_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(PrivlabError, match=r"'CIFAR11'.*CIFAR10"):
        open_images("torchvision:CIFAR11")
    with pytest.raises(PrivlabError, match="Unknown torchvision dataset 'ImageFolder'"):
        open_images("torchvision:ImageFolder")
    with pytest.raises(PrivlabError, match="CocoDetection also needs annFile"):
        open_images("torchvision:CocoDetection")
    with pytest.raises(PrivlabError, match="EMNIST also needs split"):
        open_images("torchvision:EMNIST")


@pytest.mark.parametrize("name", ["CIFAR10", "ImageNet"])
def test_failed_download_tells_where_the_data_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def offline(self: object) -> None:
        raise OSError("no network\nat all")

    monkeypatch.setenv("PRIVLAB_DATA", str(tmp_path))
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", offline)
    with pytest.raises(PrivlabError, match=f"{name}, looked for in '{tmp_path}' .set PRIVLAB_DATA") as error:
        open_images(f"torchvision:{name}")
    assert "\n" not in str(error.value)


class Trained:
    """Stands for CIFAR10: data in a root, a train= argument, a download."""

    present = False
    classes = ("cat", "dog")

    def __init__(self, root: str, train: bool = True, download: bool = False) -> None:
        if not (self.present or download):
            raise RuntimeError("Dataset not found")
        self.train = train
        self.download = download
        self.root = root

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[object, int]:
        if index == 2:
            raise OSError("broken")
        seen = (100 * self.train, 100 * self.download, 0)
        return [Image.new("RGB", (8, 8), seen), Image.new("L", (8, 8)), None, torch.zeros(3)][index], 1 - 2 * (
            index == 1
        )


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("split", [None, "test", "train"])
def test_train_argument_and_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str | None, present: bool
) -> None:
    monkeypatch.setenv("PRIVLAB_DATA", str(tmp_path))
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Trained)
    monkeypatch.setattr(Trained, "present", present)
    source = open_images("torchvision:CIFAR10", split=split)
    first, unlabelled, broken, tensor = source
    assert first.name == f"CIFAR10/{split or 'test'}/0"
    assert (pixels(first) == [100 * (split == "train"), 100 * (not present), 0]).all()
    assert (first.label, first.label_origin, source.class_names) == (1, "dataset", ("cat", "dog"))
    assert (unlabelled.label, unlabelled.label_origin) == (None, "none")
    assert broken.problem == "Truncated or damaged: broken."
    assert tensor.problem == "An image is c × h × w. Found 3."
    with pytest.raises(PrivlabError, match=r"CIFAR10.*'val'"):
        open_images("torchvision:CIFAR10", split="val")


def test_split_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    class Split(torchvision.datasets.FakeData):
        def __init__(self, root: str, split: str = "train") -> None:
            assert root
            super().__init__(size=1, image_size=(3, 4 if split == "test" else 8, 8))

    monkeypatch.setattr(torchvision.datasets, "SVHN", Split)
    assert [image.name for image in open_images("torchvision:SVHN")] == ["SVHN/train/0"]
    (small,) = open_images("torchvision:SVHN", split="test")
    assert (small.name, small.problem) == ("SVHN/test/0", "8×4 pixels; each side must have at least 8.")


# Hugging Face


def test_hugging_face_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PrivlabError, match=r"'hf:food'.*'privlab\[datasets\]'"):
        open_images("hf:food")


class ImageType:
    """Stands for datasets.Image."""

    def __init__(self, decode: bool = True) -> None:
        self.decode = decode

    def decode_example(self, value: Mapping[str, Any]) -> Image.Image:
        """Open what the path names."""
        return Image.open(value["path"])


class ClassLabel:
    """Stands for datasets.ClassLabel."""

    names = ("cat", "dog")


class Stream:
    """Stands for datasets.IterableDataset."""

    def __init__(self, rows: list[Any], features: dict[str, Any], number: int | None = None) -> None:
        self.rows, self.hidden, self.features = rows, features, features if number else None
        splits = {"test": types.SimpleNamespace(num_examples=number)} if number else None
        self.info = types.SimpleNamespace(splits=splits)

    def _resolve_features(self) -> "Stream":
        self.features = self.hidden
        return self

    def cast_column(self, column: str, kind: ImageType) -> "Stream":
        """Ask for undecoded images."""
        assert self.hidden[column]
        assert not kind.decode
        return self

    def __iter__(self) -> Any:
        for row in self.rows:
            if isinstance(row, Exception):
                raise row
            yield row


def hub(monkeypatch: pytest.MonkeyPatch, **splits: Stream) -> None:
    def load_dataset(name: str, streaming: bool) -> dict[str, Stream]:
        assert streaming
        if name != "pets":
            raise ConnectionError("no\nnetwork")
        return splits

    module = types.SimpleNamespace(Image=ImageType, ClassLabel=ClassLabel, load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hugging_face_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    Image.effect_noise((20, 16), 50).save(path)
    rows = [
        {"photo": {"bytes": path.read_bytes(), "path": None}, "kind": 1},
        {"photo": {"bytes": None, "path": path}, "kind": -1},
        {"photo": {"bytes": b"", "path": None}, "kind": 0},
        {"photo": None, "kind": 0},
        {"photo": {"bytes": None, "path": tmp_path / "no.png"}, "kind": 0},
        OSError("timed out"),
    ]
    features = {"photo": ImageType(), "kind": ClassLabel()}
    hub(monkeypatch, train=Stream([], features), test=Stream(rows, features))
    source = open_images("hf:pets")
    assert (source.count, source.class_names) == (None, ("cat", "dog"))
    with pytest.raises(TypeError, match="pets/test"):
        len(source)
    first, second, empty, absent, missing = open_images("hf:pets", limit=5)
    assert (first.name, first.label, first.label_origin) == ("pets/test/0", 1, "dataset")
    assert first.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (pixels(first) == pixels(second)).all()
    assert (second.label, second.label_origin) == (None, "none")
    assert empty.problem == "Empty file: 0 bytes."
    assert absent.problem == "No image in this row."
    assert missing.problem is not None
    with pytest.raises(PrivlabError, match=r"'pets'.*5"):
        list(source)


def test_hugging_face_splits_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Stream([], {"image": ImageType(), "label": int}, number=5)
    hub(monkeypatch, train=plain, test=plain, text=Stream([], {"words": str}))
    assert len(open_images("hf:pets")) == 5
    assert len(open_images("hf:pets", limit=3)) == 3
    assert list(open_images("hf:pets", split="train")) == []
    with pytest.raises(PrivlabError, match=r"'pets'.*'tets'"):
        open_images("hf:pets", split="tets")
    with pytest.raises(PrivlabError, match="'pets'"):
        open_images("hf:pets", split="text")
    with pytest.raises(PrivlabError, match="'food'"):
        open_images("hf:food")

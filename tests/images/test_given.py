"""Images and labels that are given in Python, in any of their forms, and what is refused before anything runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import privlab
from privlab.base import PrivlabError
from privlab.images import open_images, to_csv
from privlab.images.given import data_of

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
QUICK: dict[str, Any] = {"settings": "a", "attacks": "patch-gradient", "metrics": "psnr", "progress": False}
X = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SOFT = torch.tensor([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.1, 0.2, 0.7]])

WANTED = [(1,) if 1 in row else tuple(row) for row in SOFT.double().tolist()]  # a one-hot row is a class


def targets(data: privlab.images.Data) -> list[Any]:
    return [image.label if image.targets is None else image.targets for image in data]


def generated(read: list[int], count: int = 4) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield batches of two images with labels, and note which were made."""
    for start in range(0, count, 2):
        read.append(start)
        yield X[start : start + 2], [start, start + 1]


def test_a_generator_is_read_once_and_no_further_than_is_asked_for() -> None:
    read: list[int] = []
    data = data_of(generated(read, 10**9))
    assert read == [0]
    assert [image.name for _, image in zip(range(4), data, strict=False)] == [f"image-{i}" for i in range(4)]
    assert targets(open_images(data, limit=3)) == [0, 1, 2]
    assert read == [0, 2]
    assert torch.equal(data[1].pixels, X[1])
    with pytest.raises(TypeError, match="length"):
        len(data)


def test_a_generator_gives_the_records_of_the_same_images_in_memory() -> None:
    read: list[int] = []
    found = privlab.attack("cifar_vit", generated(read), **QUICK).records
    wanted = privlab.attack("cifar_vit", X, [0, 1, 2, 3], **QUICK).records
    assert read == [0, 2]
    for column in ("image", "image_sha256", "label", "attack", "psnr"):
        assert found[column].tolist() == wanted[column].tolist()


@pytest.mark.parametrize("item", [X[0], X[0].numpy(), Image.new("RGB", (9, 9)), (X[0], 3), (X[0], torch.tensor(3))])
def test_a_generator_may_yield_images_one_by_one(item: Any) -> None:
    (image,) = data_of(iter([item]))
    assert image.problem is None
    assert image.label == (3 if isinstance(item, tuple) else None)


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        ([3, None, 0, 1], [3, None, 0, 1]),
        (np.array([3.0, 1.0, 0.0, 1.0]), [3, 1, 0, 1]),
        ([[0, 2], [1], [], [2, 0]], [(0, 2), (1,), (), (0, 2)]),
        (torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]]), [(0, 2), (1,), (), (0, 1, 2)]),
        (SOFT, WANTED),
        (SOFT.double().tolist(), WANTED),
    ],
)
def test_labels_of_every_kind(labels: Any, wanted: list[Any], tmp_path: Path) -> None:
    given = data_of(X, labels)
    assert targets(given) == wanted
    assert targets(data_of(TensorDataset(X, SOFT))) == targets(data_of(X, SOFT))
    for batches in (DataLoader(TensorDataset(X, SOFT), batch_size=2), iter([(X, SOFT)])):
        assert targets(data_of(batches)) == targets(data_of(X, SOFT))
    (tmp_path / "m.csv").write_text(to_csv(given))
    assert targets(open_images(data_of(X), manifest=tmp_path / "m.csv")) == wanted


def test_labels_beside_a_folder_are_in_the_order_of_its_images(tmp_path: Path) -> None:
    for name, colour in (("b", "blue"), ("a", "red")):
        Image.new("RGB", (9, 9), colour).save(tmp_path / f"{name}.png")
    data = data_of(tmp_path, [5, 7])
    assert [(image.name, image.label) for image in data] == [("a.png", 5), ("b.png", 7)]
    assert [image.label for image in data_of([tmp_path / "b.png"], [2])] == [2]
    assert targets(data_of(data, [1, 2])) == [1, 2]


def test_soft_labels_are_attacked() -> None:
    shares = torch.rand(2, 10, generator=torch.Generator().manual_seed(1)).softmax(1)
    run = privlab.attack("cifar_vit", X[:2], shares, **QUICK).records
    assert set(run.status) == {"ok"}
    assert run[run.attack == "patch-gradient"].psnr.min() > 60
    hard = privlab.attack("cifar_vit", X[:2], shares.argmax(1), **QUICK).records
    norms = [frame[frame.attack == "patch-gradient"].grad_norm.tolist() for frame in (run, hard)]
    assert norms[0] != norms[1]
    one_hot = torch.nn.functional.one_hot(shares.argmax(1), 10)
    assert privlab.attack("cifar_vit", X[:2], one_hot, **QUICK).records.psnr.tolist() == hard.psnr.tolist()


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (X, [1, 2], "labels must have one label for each of the 4 images. Found 2"),
        (X, [0, 1, 2, -1], "labels.*Found -1 for image 3"),
        (X, [0, float("nan"), 2, 1], "labels.*Found nan for image 1"),
        (X, [0, 1.5, 2, 1], "labels.*Found 1.5 for image 1"),
        (X, ["cat", 1, 2, 3], "labels.*Found 'cat' for image 0"),
        (X, SOFT + 0.1, "labels.*add up to 1.*image 0"),
        (X, SOFT * torch.nan, "labels.*nan.*image 0"),
        (X, [0, 1, 2, 10], r"labels, image 3: Label 10 is out of range: the victim has 10 classes"),
        (X, SOFT, "labels, image 0: Its soft label has 3 shares; the victim has 10 classes"),
        (iter([X]), [0, 1, 2, 3, 4], "ended after 4 images; labels were stated for 5"),
        (iter([(X, [1, 2])]), None, "label for each of the 4 images. Found 2"),
        (iter([3.5]), None, "Found float"),
        (iter([]), None, "At least one of images"),
        (X - 1, None, "images.*Of image 0: Found values outside"),
        (X * torch.nan, None, "images.*Of image 0: Found a value that is not finite"),
        (DataLoader(TensorDataset(X * 4 - 2, torch.arange(4))), None, "images.*Of image 0.*normalises by itself"),
        (TensorDataset(X * 255, torch.arange(4)), None, "images.*divide by 255"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(images: Any, labels: Any, message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        privlab.attack("cifar_vit", images, labels, **QUICK)


def test_a_grid_takes_a_generator_and_soft_labels() -> None:
    run = privlab.grid("cifar_vit", generated([]), seed=[0, 1], **QUICK)
    assert set(run.records.status) == {"ok"}
    assert set(run.records.label) == {0, 1, 2, 3}

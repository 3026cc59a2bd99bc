"""Images and labels that are given in Python, in any of their forms, and what is refused before anything runs."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from inspect import isfunction
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
        (X, SOFT, "labels, image 0: Its label has 3 numbers; the victim has 10 classes"),
        (iter([X]), [0, 1, 2, 3, 4], "ended after 4 images; labels were stated for 5"),
        (iter([X, X]), [0, 1, 2, 3], "labels were stated for 4 images, and more follow"),
        (iter([(X, [1, 2])]), None, "label for each of the 4 images. Found 2"),
        (iter([3.5]), None, "Found float"),
        (iter([]), None, "At least one of images"),
        (X - 1, None, "images.*Of image 0: Found values outside"),
        (X * torch.nan, None, "images.*Of image 0: Found a value that is not finite"),
        (
            DataLoader(TensorDataset(X * 4 - 2, torch.arange(4))),
            None,
            "images.*Of image 0.*normalises its images itself",
        ),
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


# Every source, through the interface, on a tiny ViT

SIDE = 16
SMALL = torch.randint(0, 256, (4, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(1)).byte()
CLASSES = [3, 0, 5, 1]
PAIRS = [*zip(SMALL, CLASSES, strict=True)]
PICTURES = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in SMALL]


class Pairs:
    """A data set of torchvision's kind: an image and its label at each place."""

    classes = tuple("abcdefg")

    def __len__(self) -> int:
        return len(PICTURES)

    def __getitem__(self, place: int) -> tuple[Image.Image, int]:
        return PICTURES[place], CLASSES[place]


class Rows(Pairs):
    """A data set of Hugging Face's kind: columns by name."""

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"img": PICTURES[place], "label": CLASSES[place]}


class Stream:
    """A stream of Hugging Face's kind: rows that can be iterated alone."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Rows()[place] for place in range(4))


def loaded(labels: Any) -> DataLoader:
    return DataLoader(TensorDataset(SMALL, torch.as_tensor(labels)), batch_size=3)


@pytest.fixture(scope="module")
def victim(tiny_vit: Any) -> privlab.Victim:
    found = privlab.victim(tiny_vit().float())
    return replace(found, preprocessing=replace(found.preprocessing, crop_pct=1.0))  # pictures keep their pixels


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Return files of the pictures in two folders, whose order is that of the pictures."""
    found = [tmp_path / "photos" / name for name in ("x/0.png", "x/1.png", "y/2.png", "y/3.png")]
    for path, picture in zip(found, PICTURES, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    return found


SOURCES: dict[str, Any] = {
    "tensor": lambda _: (SMALL / 255, CLASSES),
    "bytes": lambda _: (SMALL, torch.tensor(CLASSES)),
    "array": lambda _: (SMALL.numpy(), np.array(CLASSES)),
    "list of tensors": lambda _: ([*SMALL], CLASSES),
    "list of arrays": lambda _: ([image.numpy() for image in SMALL], CLASSES),
    "pictures": lambda _: (PICTURES, CLASSES),
    "paths": lambda paths: (paths, CLASSES),
    "names": lambda paths: ([str(path) for path in paths], CLASSES),
    "folder": lambda paths: (paths[0].parents[1], CLASSES),
    "open data": lambda paths: (open_images(paths[0].parents[1]), CLASSES),
    "data set": lambda _: (Pairs(), None),
    "rows": lambda _: (Rows(), None),
    "rows with other labels": lambda _: (Rows(), CLASSES),
    "stream of rows": lambda _: (Stream(), None),
    "loader": lambda _: (loaded(CLASSES), None),
    "loader of columns": lambda _: (DataLoader([{"pixel_values": x, "labels": y} for x, y in PAIRS]), None),
    "generator": lambda _: (((SMALL[i : i + 2], CLASSES[i : i + 2]) for i in (0, 2)), None),
    "generator with labels beside it": lambda _: ((SMALL[i : i + 2] for i in (0, 2)), CLASSES),
    "one-hot rows": lambda _: (SMALL, torch.nn.functional.one_hot(torch.tensor(CLASSES), 7)),
    "loader of one-hot rows": lambda _: (loaded(torch.nn.functional.one_hot(torch.tensor(CLASSES), 7)), None),
    "certain soft labels": lambda _: (iter([(SMALL, torch.eye(7)[CLASSES])]), None),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_observation(victim: privlab.Victim, paths: list[Path], name: str) -> None:
    wanted = privlab.observe(victim, SMALL / 255, CLASSES)
    found = privlab.observe(victim, *SOURCES[name](paths))
    assert all(torch.equal(found.gradients[key], value) for key, value in wanted.gradients.items())


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_is_attacked(victim: privlab.Victim, paths: list[Path], name: str) -> None:
    run = privlab.attack(victim, *SOURCES[name](paths), **QUICK).records
    rows = run[run.attack == "patch-gradient"]
    assert set(rows.status) == {"ok"}
    assert list(rows.drop_duplicates("image").label) == CLASSES
    assert rows.psnr.min() > 50


def test_a_list_of_classes_and_a_row_of_zeros_and_ones_are_one_target(victim: privlab.Victim) -> None:
    """A binary loss takes several classes of an image; a mean loss of one class refuses them in one line."""
    update = privlab.Update(privlab.Client(lr=0.1, steps=1, images=2, batch_size=2, loss="binary"))
    rows = torch.tensor([[1, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    wanted = privlab.observe(victim, SMALL[:2], [[0, 3], []], release=update)
    for images, labels in ((SMALL[:2], rows), (iter([(SMALL[:2], rows)]), None), (PICTURES[:2], [[0, 3], []])):
        found = privlab.observe(victim, images, labels, release=update)
        for key, value in wanted.gradients.items():  # the order in which the client takes them is drawn by their hashes
            torch.testing.assert_close(found.gradients[key], value)
    with pytest.raises(PrivlabError, match=r"image-0 .* list of classes, .*client\.loss=binary"):
        privlab.observe(victim, SMALL[:2], rows)


def test_soft_labels_give_the_mean_of_the_gradients_of_their_classes(victim: privlab.Victim) -> None:
    """The gradient of cross-entropy is linear in the label."""
    soft = torch.tensor([[0.25, 0.75, 0, 0, 0, 0, 0]])
    mixed = privlab.observe(victim, SMALL[:1], soft).gradients
    first, second = (privlab.observe(victim, SMALL[:1], [label]).gradients for label in (0, 1))
    for key, value in mixed.items():
        torch.testing.assert_close(value, first[key] / 4 + 3 * second[key] / 4)


BAD: dict[str, tuple[Any, Any, str]] = {
    "below 0": (SMALL / 255 - 0.5, CLASSES, r"\[0, 1\]"),
    "up to 255": (SMALL.float(), CLASSES, r"\[0, 1\].*255"),
    "below 0 in a generator": (lambda: iter([(SMALL / 255 - 0.5, CLASSES)]), None, r"\[0, 1\].*normalises"),
    "another number": (SMALL, CLASSES[:3], "one label for each of the 4 images. Found 3"),
    "another number of paths": (Pairs(), CLASSES[:3], "one label for each of the 4 images. Found 3"),
    "another number in a batch": (
        lambda: iter([(SMALL, CLASSES[:3])]),
        None,
        "one label for each of the 4 images. Found 3",
    ),
    "no tensor": (SMALL[:0], [], "at least one image|At least one of images"),
    "no picture": ([], None, "At least one of images"),
    "no batch": (lambda: iter([]), None, "At least one of images"),
    "an early end": (lambda: iter([SMALL]), [*CLASSES, 2], "ended after 4 images; labels were stated for 5"),
    "negative": (SMALL, np.array([[1.5, -0.5, 0, 0, 0, 0, 0]] * 4), "probabilities that add up to 1.*a row with -0.5"),
    "no sum of 1": (SMALL, [[0.5, 0.25, 0, 0, 0, 0, 0]] * 4, "probabilities that add up to 1.*a row with the sum 0.75"),
    "no sum of 1 in a loader": (loaded([[0.5, 0.25, 0, 0, 0, 0, 0]] * 4), None, "add up to 1.*the sum 0.75"),
    "no sum of 1 in a data set": (TensorDataset(SMALL, torch.full((4, 7), 0.3)), None, "add up to 1.*the sum 2.1"),
    "beyond the classes": (SMALL, [0, 1, 2, 7], "Label 7 is out of range: the victim has 7 classes"),
    "shares of other classes": (SMALL, [[0.5, 0.5]] * 4, "label has 2 numbers; the victim has 7 classes"),
    "a mapping": ({"train": Pairs()}, None, "images must be .*dict of train"),
    "a number": (3.5, None, "images must be .*Found float"),
}


@pytest.mark.parametrize("run", [privlab.observe, partial(privlab.attack, **QUICK)])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(victim: privlab.Victim, name: str, run: Any) -> None:
    images, labels, message = BAD[name]
    with pytest.raises(PrivlabError, match=message) as error:
        run(victim, images() if isfunction(images) else images, labels)  # an iterator can be read once
    assert "\n" not in str(error.value)

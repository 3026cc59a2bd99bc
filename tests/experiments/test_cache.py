"""Images that are kept in a file, mapped into memory: the same examples, read once, and never stale ones."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from privlab.base import PrivlabError
from privlab.experiments.training import reading
from privlab.experiments.training.examples import Examples
from privlab.experiments.training.reading import read_examples
from privlab.images import Data, NamedImage, open_images
from privlab.images.data import Spool

SIDE = (12, 12)


def paint(path: Path, seed: int) -> None:
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "all" / name).mkdir(parents=True)
        for i in range(3):
            paint(tmp_path / "all" / name / f"{i}.png", 10 * label + i)
    return tmp_path / "all"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def counted(source: Data, reads: list[str]) -> Data:
    """Return a source that notes which images were read."""

    def noted(image: NamedImage) -> NamedImage:
        reads.append(image.name)
        return image

    return source.transform(noted)


def assert_same(found: Examples, wanted: Examples) -> None:
    assert torch.equal(found.images, wanted.images)
    assert torch.equal(found.labels, wanted.labels)
    assert (found.classes, found.identity, found.skipped) == (wanted.classes, wanted.identity, wanted.skipped)


def test_the_examples_are_those_of_memory_and_are_read_once(folder: Path, cache: Path) -> None:
    (folder / "cat" / "1.png").write_bytes(b"no image")
    wanted, reads = read_examples(open_images(folder), SIDE), list[str]()
    for _ in range(2):
        found = read_examples(counted(open_images(folder), reads), SIDE, cache=cache)
        assert_same(found, wanted)
        assert torch.equal(found.pixels(torch.tensor([4, 0])), wanted.pixels(torch.tensor([4, 0])))
    assert sorted(reads) == sorted(open_images(folder).names or ())
    assert len(found) == 5


def test_more_than_fits_into_memory_is_kept_in_the_file(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = read_examples(open_images(folder), SIDE)
    monkeypatch.setattr(reading, "MOST_BYTES", 1000)
    with pytest.raises(PrivlabError, match="Give --cache FOLDER"):
        read_examples(open_images(folder), SIDE)
    assert_same(read_examples(open_images(folder), SIDE, cache=cache), wanted)


def test_other_images_of_the_same_names_are_read_anew(folder: Path, cache: Path) -> None:
    before = read_examples(open_images(folder), SIDE, cache=cache)
    paint(folder / "dog" / "1.png", 99)
    os.utime(folder / "dog" / "1.png", ns=(0, 0))
    after = read_examples(open_images(folder), SIDE, cache=cache)
    assert_same(after, read_examples(open_images(folder), SIDE))
    assert before.identity != after.identity
    assert len(read_examples(open_images(folder, limit=2), SIDE, cache=cache)) == 2
    assert read_examples(open_images(folder), (8, 8), cache=cache).images.shape == (6, 3, 8, 8)


def test_another_parquet_file_of_the_same_name_is_read_anew(tmp_path: Path, cache: Path, folder: Path) -> None:
    path, found = tmp_path / "a.parquet", []
    for i in range(2):
        pq.write_table(pa.table({"png": [(folder / "cat" / f"{i}.png").read_bytes()], "label": [0]}), path)
        os.utime(path, ns=(i, i))
        found.append(read_examples(open_images(path), SIDE, cache=cache))
    assert not torch.equal(found[0].images, found[1].images)


def stream_of(items: Spool) -> Data:
    return Data("a stream", items, "", range(len(items)))


def test_a_stream_of_unknown_length_is_kept_too(folder: Path, cache: Path) -> None:
    source = open_images(folder)
    stream = stream_of(Spool(lambda: iter(source)))
    for _ in range(2):
        assert_same(read_examples(stream, SIDE, cache=cache), read_examples(source, SIDE))


def test_what_was_interrupted_is_read_anew(folder: Path, cache: Path) -> None:
    source = open_images(folder)

    def broken() -> Iterator[NamedImage]:
        yield next(iter(source))
        raise KeyboardInterrupt

    stream = stream_of(Spool(broken))
    with pytest.raises(KeyboardInterrupt):
        read_examples(stream, SIDE, cache=cache)
    assert_same(read_examples(source, SIDE, cache=cache), read_examples(source, SIDE))


def test_several_at_once_read_once(folder: Path, cache: Path) -> None:
    reads: list[int] = []

    def read(_: int) -> Examples:
        return read_examples(counted(open_images(folder), reads), SIDE, cache=cache)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(read, range(3)))
    assert sorted(reads) == sorted(open_images(folder).names or ())
    assert all(torch.equal(each.images, found[0].images) for each in found)


def test_a_cut_file_is_refused(folder: Path, cache: Path) -> None:
    read_examples(open_images(folder), SIDE, cache=cache)
    (pixels,) = cache.glob("*.pixels")
    pixels.write_bytes(pixels.read_bytes()[:-1])
    with pytest.raises(PrivlabError, match=r"2591.*2592.*'.*json'"):
        read_examples(open_images(folder), SIDE, cache=cache)


def test_a_cache_that_cannot_be_used_is_one_line(folder: Path, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(PrivlabError, match="File"):
        read_examples(open_images(folder), SIDE, cache=cache)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: paint(folder / "a.png", 3), "have no label"),
        (lambda folder: [path.write_bytes(b"") for path in folder.rglob("*.png")], "no image can be read"),
        (lambda folder: [path.write_bytes(b"") for path in folder.glob("cat/*.png")], "The class 'cat' of"),
    ],
)
def test_what_is_refused_of_memory_is_refused_each_time(
    folder: Path, cache: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder)
    for _ in range(2):
        with pytest.raises(PrivlabError, match=message):
            read_examples(open_images(folder), SIDE, cache=cache)

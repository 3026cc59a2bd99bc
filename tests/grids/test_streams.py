"""Streams: each image is read once, and then has a place."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import privlab
from privlab.images import NamedImage, open_images
from privlab.images.data import Data, Spool

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
OPTIONS = {"weights": "random", "img_size": 32, "attacks": "april", "metrics": "psnr", "batch_size": 1}


def stream_of(items: Spool) -> Data:
    return Data("a stream", items, "", range(len(items)))


@pytest.mark.slow
def test_a_stream_is_read_once_to_plan_and_to_run(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, read = open_images(str(photos)), []

    def pictures() -> Iterator[NamedImage]:
        for image in source:
            read.append(image.name)
            yield image

    stream = stream_of(Spool(pictures))
    monkeypatch.setattr("privlab.images.open.datasets.hugging_face", lambda *_: stream)
    found = privlab.attack("vit_ti", images="hf:x", **OPTIONS).records
    assert read == [*source.names]
    assert list(found.psnr) == list(privlab.attack("vit_ti", images=photos, **OPTIONS).records.psnr)


def test_places_of_a_stream_are_found_in_any_order(photos: Path) -> None:
    opened, begun = open_images(str(photos)), []
    stream = stream_of(Spool(lambda: iter(begun.append(1) or opened)))
    names = [*opened.names]
    for places in ([1], [2, 3], [0, 2], [3], []):
        assert [stream[place].name for place in places] == [names[place] for place in places]
    with pytest.raises(IndexError):
        stream[len(names)]
    assert [image.name for image in stream] == names
    assert len(begun) == 1


def test_a_stream_that_broke_is_begun_again_where_it_broke() -> None:
    broken = [True]

    def numbers() -> Iterator[int]:
        yield from (0, 1)
        if broken:
            broken.clear()
            raise ConnectionError("the network")
        yield 2

    spool = Spool(numbers)
    with pytest.raises(ConnectionError):
        spool[2]
    assert [spool[place] for place in (2, 0, 1)] == [2, 0, 1]

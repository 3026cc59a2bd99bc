"""Streams: what has no places is read on from task to task."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import privlab
from privlab.base import PrivlabError
from privlab.grids.tasks import _Reader
from privlab.images import NamedImage, open_images

pytestmark = pytest.mark.filterwarnings("ignore::privlab.base.warnings.PrivlabWarning")
OPTIONS = {"weights": "random", "img_size": 32, "attacks": "april", "metrics": "psnr", "batch_size": 1}


@pytest.mark.slow
def test_a_stream_is_read_once_to_plan_and_once_to_run(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, read = open_images(str(photos)), []

    def pictures() -> Iterator[NamedImage]:
        for image in source:
            read.append(image.name)
            yield image

    stream = replace(source, count=None, names=None, read=pictures, at=None, files=None)
    monkeypatch.setattr("privlab.images.open.datasets.hugging_face", lambda *_: stream)
    found = privlab.attack("vit_ti", images="hf:x", **OPTIONS).records
    assert read == [*source.names] * 2
    assert list(found.psnr) == list(privlab.attack("vit_ti", images=photos, **OPTIONS).records.psnr)


def test_places_of_a_stream_are_found_in_any_order_of_tasks(photos: Path) -> None:
    opened, reader = open_images(str(photos)), _Reader()
    source = replace(opened, read=lambda: iter(opened), at=None)
    names = [*source.names]
    asked = ([1], [2, 3], [0, 2], [3], [])
    assert [[each.name for each in reader.pick(source, places)] for places in asked] == [
        [names[place] for place in places] for places in asked
    ]
    with pytest.raises(PrivlabError, match=r"9.*planned"):
        reader.pick(source, [9])
    assert [each.name for each in reader.pick(source, [1])] == names[1:2]

"""Copies of a photograph are known: resized, mirrored, recompressed, grey or cut a little. Others are not."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch import Tensor

from privlab.images import Others, Preprocessing, open_images, sample_file, thumbnails, twins

CUT = Preprocessing((64, 64), (0.5,) * 3, (0.5,) * 3, 1.0, "bicubic")
FILES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")


def recompressed(picture: Image.Image, quality: int) -> Image.Image:
    copy = io.BytesIO()
    picture.save(copy, "JPEG", quality=quality)
    return Image.open(copy).convert("RGB")


def cut(picture: Image.Image, left: float, top: float, right: float, bottom: float) -> Image.Image:
    w, h = picture.size
    return picture.crop((round(left * w), round(top * h), round((1 - right) * w), round((1 - bottom) * h)))


COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "mirrored": ImageOps.mirror,
    "recompressed": lambda picture: recompressed(picture, 30),
    "resized": lambda picture: picture.resize((64, 64)).resize(picture.size),
    "cut all around": lambda picture: cut(picture, 0.02, 0.02, 0.02, 0.02),
    "cut at a corner": lambda picture: cut(picture, 0.04, 0.04, 0, 0),
    "grey": lambda picture: picture.convert("L").convert("RGB"),
    "pale": lambda picture: picture.point(lambda value: 80 + value // 3),
    "all of it": lambda picture: recompressed(ImageOps.mirror(cut(picture.convert("L"), 0.02, 0.02, 0.02, 0.02)), 50),
}


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    """Return the middle squares of bundled photographs of different files."""
    found = []
    for image in open_images([sample_file(name) for name in FILES]):
        assert image.pixels is not None
        found.append(ImageOps.fit(image.pixels.convert("RGB"), (256, 256)))
    return found


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_known_and_is_no_copy_of_another(pictures: list[Image.Image], how: str) -> None:
    private = torch.stack([CUT(picture) for picture in pictures])
    public = torch.stack([CUT(COPIES[how](picture).convert("RGB")) for picture in pictures])
    assert torch.equal(twins(private, thumbnails(public)), torch.eye(len(private), dtype=torch.bool))
    assert torch.equal(twins(public, thumbnails(private)), torch.eye(len(private), dtype=torch.bool))


@given(seed=st.integers(0, 2**31), side=st.sampled_from([16, 32, 50]))
@settings(max_examples=10)
def test_noise_and_flat_colours_are_twins_of_themselves_alone(seed: int, side: int) -> None:
    noise = torch.rand(4, 3, side, side, generator=torch.Generator().manual_seed(seed))
    flat = torch.linspace(0, 1, 5)[:, None, None, None].expand(-1, 3, side, side)
    images = torch.cat([noise, flat])
    assert torch.equal(twins(images, thumbnails(images)), torch.eye(9, dtype=torch.bool))


def test_smooth_light_and_a_frame_do_not_make_twins() -> None:
    """Two patterns in the same white frame, with the same shade from left to right."""
    draw = torch.Generator().manual_seed(0)
    images = 0.3 + 0.2 * torch.rand(6, 3, 16, 16, generator=draw).repeat_interleave(2, 2).repeat_interleave(2, 3)
    images = images + torch.linspace(0, 0.3, 32)
    images[..., :4] = images[..., -4:] = 1
    assert torch.equal(twins(images, thumbnails(images)), torch.eye(6, dtype=torch.bool))


def test_grey_images_are_compared_with_coloured_ones(pictures: list[Image.Image]) -> None:
    coloured = torch.stack([CUT(picture) for picture in pictures])
    grey = coloured.mean(1, keepdim=True)
    assert torch.equal(twins(grey, thumbnails(coloured)), torch.eye(len(grey), dtype=torch.bool))


def test_public_photographs_are_told_apart_from_copies_of_private_ones(pictures: list[Image.Image]) -> None:
    public = {name: CUT(picture) for name, picture in zip("abcd", pictures, strict=True)}
    others, copy = Others(public), CUT(recompressed(ImageOps.mirror(pictures[1]), 40))[None]
    assert others.without(["?"], copy) == ["a", "c", "d"]
    assert others.copies(["?"], copy) == ["b"]
    assert others.copies(["b"], copy) == []  # the same file: nobody need be told
    assert others.beside("c", copy[0]) == ["a", "d"]
    assert Others({}).without(["?"], copy) == Others({}).copies(["?"], copy) == []


@pytest.mark.slow
def test_the_seven_photographs_of_tiny_imagenet_are_found_and_no_other(shared: Callable[[str], Path]) -> None:
    rows = pd.read_parquet(shared("data/tiny_imagenet_25k.parquet"), columns=["jpeg"]).jpeg
    public = torch.stack([_square(Image.open(io.BytesIO(row))) for row in rows])
    files = sorted(shared("data/imagenet_samples").glob("*.JPEG"))
    private = torch.stack([_square(Image.open(file)) for file in files])
    found = twins(private, thumbnails(public)).nonzero()
    assert [(i + 1, row) for i, row in found.tolist() if row < 20_000] == [
        (105, 2714),
        (236, 8370),
        (245, 8865),
        (422, 15889),
    ]
    assert [i + 1 for i, row in found.tolist() if row >= 20_000] == [39, 225, 361]


def _square(picture: Image.Image) -> Tensor:
    side = ImageOps.fit(picture.convert("RGB"), (32, 32), Image.Resampling.BOX)
    return torch.from_numpy(np.array(side)).permute(2, 0, 1) / 255

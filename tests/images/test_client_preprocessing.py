"""The usual preprocessings of an image, against PIL and torch themselves, and which of them a client used."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_tensor

from privlab.images import Preprocessing, nearest, open_images, usual

CUT = Preprocessing(size=(32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9, interpolation="bicubic")


@pytest.fixture(scope="module")
def image() -> Image.Image:
    """Return a photograph that is no square: its shorter side comes to 32, its longer to 49 pixels."""
    pixels = next(iter(open_images("samples", limit=1))).pixels
    assert pixels is not None
    return pixels.crop((10, 20, 207, 148))


def floats(x: Image.Image, size: tuple[int, int], *, antialias: bool) -> Tensor:
    return F.interpolate(to_tensor(x)[None], size, mode="bilinear", antialias=antialias).clamp(0, 1)[0]


TWINS: dict[str, Callable[[Image.Image], Tensor]] = {
    "squashed, bilinear in eight bits": lambda x: to_tensor(x.resize((32, 32), Image.Resampling.BILINEAR)),
    "squashed, lanczos in eight bits": lambda x: to_tensor(x.resize((32, 32), Image.Resampling.LANCZOS)),
    "resized and cropped (crop_pct 1), bicubic in eight bits": lambda x: to_tensor(
        x.resize((49, 32), Image.Resampling.BICUBIC).crop((8, 0, 40, 32))
    ),
    "resized and cropped (crop_pct 0.875), bicubic in eight bits": lambda x: to_tensor(
        x.resize((55, 36), Image.Resampling.BICUBIC).crop((12, 2, 44, 34))
    ),
    "its centre cut out and resized, bilinear in eight bits": lambda x: to_tensor(
        x.crop((34, 0, 162, 128)).resize((32, 32), Image.Resampling.BILINEAR)
    ),
    "squashed, bilinear in floats": lambda x: floats(x, (32, 32), antialias=True),
    "squashed, bilinear in floats without antialiasing": lambda x: floats(x, (32, 32), antialias=False),
}


@pytest.mark.parametrize("how", TWINS)
def test_each_way_is_what_it_says(image: Image.Image, how: str) -> None:
    found = {how: fed[0] for how, fed in usual(image, CUT)}
    torch.testing.assert_close(found[how], TWINS[how](image))
    torch.testing.assert_close(found[f"{how}, mirrored"], TWINS[how](image).flip(2))


def test_the_victim_s_own_way_is_among_them(image: Image.Image) -> None:
    found = {how: fed[0] for how, fed in usual(image, CUT)}
    assert torch.equal(found["resized and cropped (crop_pct 0.9), bicubic in eight bits"], CUT(image))
    assert len(found) == 70


@pytest.mark.slow
def test_what_was_fed_is_found(image: Image.Image) -> None:
    """Each of the ways, from its pixels, and within 47 dB from these with an error of 50 dB."""
    draw = torch.Generator().manual_seed(0)
    for how, fed in usual(image, CUT):
        found, _, tried = nearest(image, CUT, fed)
        assert (found, tried) == (how, 70)
        near = (fed + 10**-2.5 * torch.randn(fed.shape, generator=draw)).clamp(0, 1)
        again, closest, _ = nearest(image, CUT, near)
        assert (closest - fed).square().mean() < 2e-5
        assert again.endswith("mirrored") == how.endswith("mirrored")


def test_an_image_of_the_input_s_size_is_fed_as_it_is(tmp_path: Path, image: Image.Image) -> None:
    small = image.resize((32, 32))
    _, found, _ = nearest(small, CUT, to_tensor(small)[None])
    assert torch.equal(found[0], to_tensor(small))

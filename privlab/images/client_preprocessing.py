"""How a client preprocessed an image: the usual ways, and which of them comes nearest to what it fed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from jaxtyping import Float
from PIL import Image
from torch import Tensor

from privlab.images.open import Preprocessing

_CROPS = (0.875, 1.0)
"""The share of the shorter side that torchvision's evaluation transforms keep, and the share without a crop."""


def usual(pixels: Image.Image, cut: Preprocessing) -> Iterator[tuple[str, Float[Tensor, "1 c h w"]]]:
    """Yield the name of each usual preprocessing for an input of `cut.size`, and the image after it, also mirrored.

    The image is resized and cropped (with `cut.crop_pct`, 0.875 and 1), or its centre is cut out and resized, or it is
    squashed. Each of these is done in eight bits as PIL resizes (bilinear, bicubic, Lanczos), and in floats as torch
    does (bilinear and bicubic, with and without antialiasing).
    """
    for (shape, make), mirrored, (name, resized) in product(_shapes(pixels, cut), (False, True), _resizes()):
        image = make(resized)[None]
        yield f"{shape}, {name}{', mirrored' if mirrored else ''}", image.flip(3) if mirrored else image


def nearest(
    pixels: Image.Image, cut: Preprocessing, fed: Float[Tensor, "1 c h w"]
) -> tuple[str, Float[Tensor, "1 c h w"], int]:
    """Return the usual preprocessing that comes nearest to what a client fed, its image, and how many were tried.

    The distance is the mean squared difference of the pixels. This is for whoever has the image: it reads no gradient,
    and no attack reads it.

    Args:
        pixels: the image before any preprocessing.
        cut: the preprocessing of the victim: its size is that of the input, its crop is tried with the usual ones.
        fed: what the client fed, in [0, 1], or a reconstruction that gives the released gradient.
    """
    tried = [*usual(pixels, cut)]
    how, image = min(tried, key=lambda each: float((each[1].to(fed) - fed).square().mean()))
    return how, image, len(tried)


_Resize = Callable[[Image.Image, list[int]], Float[Tensor, "c h w"]]


def _resizes() -> Iterator[tuple[str, _Resize]]:
    """Yield the filters, each with its name."""
    from torchvision.transforms import InterpolationMode, Resize, ToTensor

    for name in ("bilinear", "bicubic", "lanczos"):
        resize = partial(Resize, interpolation=InterpolationMode(name))
        yield f"{name} in eight bits", lambda pixels, size, resize=resize: ToTensor()(resize(size)(pixels))
    for name, antialias in product(("bilinear", "bicubic"), (True, False)):
        resize = partial(Resize, interpolation=InterpolationMode(name), antialias=antialias)
        how = f"{name} in floats{'' if antialias else ' without antialiasing'}"
        yield how, lambda pixels, size, resize=resize: resize(size)(ToTensor()(pixels)).clamp(0, 1)


def _shapes(pixels: Image.Image, cut: Preprocessing) -> Iterator[tuple[str, Callable[[_Resize], Tensor]]]:
    """Yield the ways to reach the input's size, each with its name."""
    from torchvision.transforms import CenterCrop

    (height, width), size, pixels = cut.size, list(cut.size), cut.convert_colours(pixels)
    for kept in sorted({cut.crop_pct, *_CROPS}):
        sides = replace(cut, crop_pct=kept).resize_to(pixels.height, pixels.width)
        how = f"resized and cropped (crop_pct {kept:g})"
        yield how, lambda resized, sides=sides: CenterCrop(size)(resized(pixels, sides))
    scale = min(pixels.height / height, pixels.width / width)
    centre = CenterCrop([round(height * scale), round(width * scale)])(pixels)
    yield "its centre cut out and resized", lambda resized: resized(centre, size)
    yield "squashed", lambda resized: resized(pixels, size)

"""How a client preprocessed an image: the usual ways, and which of them comes nearest to what it fed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from jaxtyping import Float
from PIL import Image
from torch import Tensor

from privlab.images.open import Preprocessing

__all__ = ["Fed", "nearest", "usual"]

_CROPS = (0.875, 1.0)
"""What torchvision's evaluation transforms keep of the shorter side, and what training without a crop does."""


@dataclass(frozen=True, eq=False)
class Fed:
    """An image as a client may have fed it, and how it came about."""

    how: str
    image: Float[Tensor, "1 c h w"]


def usual(pixels: Image.Image, cut: Preprocessing) -> Iterator[Fed]:
    """Yield an image in the usual preprocessings for an input of `cut.size`, as it is and mirrored.

    Resized and cropped with `cut.crop_pct`, 0.875 or all of it, its centre cut out and resized, or squashed; in eight
    bits as PIL resizes (bilinear, bicubic, Lanczos), and in floats as torch does, with and without antialiasing.
    """
    for (shape, make), mirrored in product(_shapes(pixels, cut), (False, True)):
        for name, resized in _resizes():
            image = make(resized)[None]
            yield Fed(f"{shape}, {name}{', mirrored' if mirrored else ''}", image.flip(3) if mirrored else image)


def nearest(pixels: Image.Image, cut: Preprocessing, fed: Float[Tensor, "1 c h w"]) -> tuple[Fed, int]:
    """Return the usual preprocessing of an image with the least squared distance from what was fed, and of how many.

    This is for whoever has the image: it reads no gradient, and no attack reads it.
    """
    tried = [(float((each.image.to(fed) - fed).square().mean()), each) for each in usual(pixels, cut)]
    return min(tried, key=lambda one: one[0])[1], len(tried)


_Resize = Callable[[Image.Image, list[int]], Float[Tensor, "c h w"]]


def _resizes() -> Iterator[tuple[str, _Resize]]:
    """Yield the filters, each with its name."""
    from torchvision.transforms import InterpolationMode, Resize, ToTensor

    for name in ("bilinear", "bicubic", "lanczos"):
        mode = InterpolationMode(name)
        yield f"{name} in eight bits", lambda pixels, size, mode=mode: ToTensor()(Resize(size, mode)(pixels))
    for name, antialias in product(("bilinear", "bicubic"), (True, False)):
        mode = InterpolationMode(name)
        yield (
            f"{name} in floats{'' if antialias else ' without antialiasing'}",
            lambda pixels, size, mode=mode, antialias=antialias: Resize(size, mode, antialias=antialias)(
                ToTensor()(pixels)
            ).clamp(0, 1),
        )


def _shapes(pixels: Image.Image, cut: Preprocessing) -> Iterator[tuple[str, Callable[[_Resize], Tensor]]]:
    """Yield the ways of coming to the input's size, each with its name."""
    from torchvision.transforms import CenterCrop

    (height, width), size, pixels = cut.size, list(cut.size), cut.coloured(pixels)
    for kept in sorted({cut.crop_pct, *_CROPS}):
        sides = replace(cut, crop_pct=kept).resized(pixels)
        yield (
            f"resized and cropped (crop_pct {kept:g})",
            lambda resized, sides=sides: CenterCrop(size)(resized(pixels, sides)),
        )
    scale = min(pixels.height / height, pixels.width / width)
    centre = CenterCrop([round(height * scale), round(width * scale)])(pixels)
    yield "its centre cut out and resized", lambda resized: resized(centre, size)
    yield "squashed", lambda resized: resized(pixels, size)

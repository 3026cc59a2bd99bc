"""Whether two files show one photograph: resized, mirrored, recompressed, made grey, or cut a little differently."""

from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from privlab.base import full_precision

SAME_DETAILS = 0.85
"""Correlation of the details of two thumbnails from which they may be of one photograph.

Of 500 photographs of ImageNet and 25,000 of Tiny ImageNet, the seven that are in both have at least 0.91, and no other
two have more than 0.74."""

SAME_LAYOUT = 0.75
"""Correlation of the grey values at 8 × 8 pixels that two images of one photograph have at least."""

SAME_DISTANCE = 0.02
"""Root mean square of the difference at 8 × 8 pixels, of [0, 1], below which two images always count as one."""

CUT = 0.05
"""Share of a side that may be cut off: the centre and the corners of what is left are compared too."""

SIDE, ROUGH, FINE = 32, 8, 16
"""Sides of a thumbnail, and of the two smaller images that are compared."""

LOCAL = 0.05
"""Root mean square of details, in [0, 1], from which those of one region count as much as those of another."""

FAINT = 1 / 255
"""Root mean square of details below which they are rounding errors of a flat image."""

BLOCK = 4096
"""Number of public images that are compared at once."""


@dataclass(frozen=True, eq=False)
class Thumbnails:
    """What is compared of m images: colours, layout, and the details of the whole and of five windows."""

    colours: Float[Tensor, "m k"]
    layout: Float[Tensor, "m n"]
    details: Float[Tensor, "m w l"]


def thumbnails(images: Float[Tensor, "m c h w"]) -> Thumbnails:
    """Return the thumbnails of images.

    Colours and layout are the image at 8 × 8 pixels, in colours and in grey. Details are d/(r + `LOCAL`), where d are
    the grey values at 16 × 16 pixels without those at 8 × 8, interpolated, and r is the root mean square of d nearby:
    the frame of a picture then counts no more than what is in it. Layout and details have mean 0 and norm 1, so that
    neither brightness nor contrast counts.

    Args:
        images: in [0, 1], of any size.
    """
    squares = F.adaptive_avg_pool2d(images.float(), SIDE)
    grey = squares.mean(1, keepdim=True)
    colours = squares if squares.shape[1] == 3 else grey.expand(-1, 3, -1, -1)
    return Thumbnails(
        F.adaptive_avg_pool2d(colours, ROUGH).flatten(1),
        _unit(F.adaptive_avg_pool2d(grey, ROUGH)),
        torch.stack([_details(window) for window in _windows(grey)], 1),
    )


def twins(private: Float[Tensor, "b c h w"], public: Thumbnails) -> Bool[Tensor, "b m"]:
    """Mark, for each private image, the public images that show the same photograph, as it is or mirrored.

    Their layouts correlate by `SAME_LAYOUT` and their details by `SAME_DETAILS` or more, those of the whole of one with
    those of the whole of the other or of a window that lacks `CUT` of it; or the distance of their colours is below
    `SAME_DISTANCE`.

    Args:
        private: images in [0, 1], of any size.
        public: the thumbnails of m images.
    """
    found = torch.zeros(len(private), len(public.colours), dtype=torch.bool, device=private.device)
    for images in (private, private.flip(3)):
        own = thumbnails(images)
        for start in range(0, found.shape[1], BLOCK):
            rows = slice(start, start + BLOCK)
            parts = (part[rows].to(found.device) for part in (public.colours, public.layout, public.details))
            found[:, rows] |= _same(own, Thumbnails(*parts))
    return found


def _same(own: Thumbnails, other: Thumbnails) -> Bool[Tensor, "b m"]:
    b, m, w = len(own.colours), len(other.colours), own.details.shape[1]
    with full_precision():
        layout = own.layout @ other.layout.T
        in_windows = own.details[:, 0] @ other.details.flatten(0, 1).T  # own whole with each window of the others
        of_windows = own.details.flatten(0, 1) @ other.details[:, 0].T
    details = torch.maximum(in_windows.view(b, m, w).amax(2), of_windows.view(b, w, m).amax(1))
    alike = (layout >= SAME_LAYOUT) & (details >= SAME_DETAILS)
    return alike | (torch.cdist(own.colours, other.colours) < SAME_DISTANCE * own.colours.shape[1] ** 0.5)


def _windows(grey: Float[Tensor, "m 1 s s"]) -> list[Float[Tensor, "m 1 s s"]]:
    """Return the whole, its centre and its four corners, the last five without `CUT` of each side, as large again."""
    found, inner = [grey], 1 - CUT
    for x, y in ((0, 0), *product((-CUT, CUT), repeat=2)):
        affine = torch.tensor([[inner, 0, x], [0, inner, y]]).to(grey).expand(len(grey), -1, -1)
        grid = F.affine_grid(affine, list(grey.shape), align_corners=False)
        found.append(F.grid_sample(grey, grid, padding_mode="border", align_corners=False))
    return found


def _details(grey: Float[Tensor, "m 1 s s"]) -> Float[Tensor, "m l"]:
    fine = F.adaptive_avg_pool2d(grey, FINE)
    apart = fine - _larger(F.adaptive_avg_pool2d(fine, ROUGH))
    nearby = _larger(F.adaptive_avg_pool2d(apart.square(), ROUGH)).sqrt()
    faint = apart.square().mean((1, 2, 3)) < FAINT**2
    return torch.where(faint[:, None], 0, _unit(apart / (nearby + LOCAL)))


def _larger(rough: Float[Tensor, "m 1 r r"]) -> Float[Tensor, "m 1 f f"]:
    return F.interpolate(rough, size=(FINE, FINE), mode="bilinear", align_corners=False)


def _unit(images: Float[Tensor, "m 1 s s"]) -> Float[Tensor, "m n"]:
    apart = images.flatten(1) - images.mean((1, 2, 3))[:, None]
    return apart / apart.norm(dim=1, keepdim=True).clamp_min(FAINT)

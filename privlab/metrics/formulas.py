"""The formulas of the metrics on a pair of checked images; the pair keeps the terms that several metrics share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool2d

from privlab.base import PrivlabError
from privlab.metrics.window import RADIUS, gaussian

_C1, _C2 = 0.01**2, 0.03**2
_C_GMS = 170 / 255**2
_CHW = (1, 2, 3)


@dataclass(frozen=True, eq=False)
class Pair:
    """Checked images in float64, with the terms that several metrics share, computed once."""

    x: Float[Tensor, "b c h w"]
    y: Float[Tensor, "b c h w"]

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> "Pair":
        """Return the pair of two batches after checking them.

        Raises:
            PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].
        """
        check_shapes(x, y)
        for name, image in {"x": x, "y": y}.items():
            if not ((image >= 0) & (image <= 1)).all():  # written so that NaN fails too
                low, high = (bound.item() for bound in image.aminmax())
                raise PrivlabError(f"{name} must be in [0, 1]. Found values from {low:.4g} to {high:.4g}.")
        return cls(x.double(), y.double())

    @cached_property
    def mse(self) -> Float[Tensor, " b"]:
        """Return mean((x − y)²) per image."""
        return (self.x - self.y).square().mean(dim=_CHW)

    @cached_property
    def centred(self) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b c h w"]]:
        """Return x and y with the mean of each channel subtracted."""
        return _centre(self.x), _centre(self.y)

    @cached_property
    def fitted(self) -> Float[Tensor, "b c h w"]:
        """Return g x + o, with the gain and offset of each channel by least squares; constant where x is constant."""
        x, y = self.centred
        power = x.square().sum((2, 3), keepdim=True)
        gain = torch.where(power > 0, (x * y).sum((2, 3), keepdim=True) / power, 0)
        return gain * x + (self.y - y)

    @cached_property
    def ssim_map(self) -> Float[Tensor, "b c h w"]:
        """Return the structural similarity at each pixel, before averaging."""
        x, y = self.x, self.y
        μx, μy, squares, products = gaussian(torch.stack([x, y, x * x + y * y, x * y]))
        μμ, μxμy = μx * μx + μy * μy, μx * μy
        luminance = (2 * μxμy + _C1) / (μμ + _C1)
        return luminance * (2 * (products - μxμy) + _C2) / (squares - μμ + _C2)


def check_shapes(x: Tensor, y: Tensor) -> None:
    """Raise PrivlabError if two batches differ in shape."""
    if x.shape != y.shape:
        raise PrivlabError(f"x and y must be of one shape. Found {by(x)} and {by(y)}.")


def by(image: Tensor) -> str:
    """Return a shape in words: "1×3×32×32"."""
    return "×".join(map(str, image.shape))


def _mse(pair: Pair) -> Float[Tensor, " b"]:
    return pair.mse


def decibels(error: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return the PSNR of a mean squared error of pixels in [0, 1], in dB: −10 log₁₀ MSE."""
    return -10 * error.log10()


def _psnr(pair: Pair) -> Float[Tensor, " b"]:
    return decibels(pair.mse)


def _psnr_affine(pair: Pair) -> Float[Tensor, " b"]:
    error = torch.minimum((pair.fitted - pair.y).square().mean(dim=_CHW), pair.mse)  # no fit is worse but by rounding
    return decibels(error)


def _correlation(pair: Pair) -> Float[Tensor, " b"]:
    x, y = pair.centred
    xx, yy, xy = ((f * g).sum((2, 3)) for f, g in ((x, x), (y, y), (x, y)))
    both = (xx * yy).sqrt()
    return torch.where(both > 0, xy.abs() / both, (xx + yy == 0).to(xy)).clamp(max=1).mean(1)


def _gms_affine(pair: Pair) -> Float[Tensor, " b"]:
    h, w = pair.x.shape[-2:]
    if min(h, w) < 6:
        raise PrivlabError(f"gms_affine needs images of at least 6×6 pixels. Found {h}×{w}.")
    m, n = (_magnitude(image) for image in (pair.fitted, pair.y))
    return ((2 * m * n + _C_GMS) / (m * m + n * n + _C_GMS)).mean(dim=_CHW)


def _magnitude(image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c u v"]:
    """Return |∇| by Prewitt's operators on means of 2 × 2 pixels, at the pixels whose neighbours are all inside."""
    f = avg_pool2d(image, 2)
    rows, columns = (f.unfold(axis, 3, 1).mean(-1) for axis in (2, 3))  # means of three, across the difference
    return torch.hypot(columns[:, :, 2:] - columns[:, :, :-2], rows[..., 2:] - rows[..., :-2])


def _ssim(pair: Pair) -> Float[Tensor, " b"]:
    return pair.ssim_map.mean(dim=_CHW)


def _ssim_skimage(pair: Pair) -> Float[Tensor, " b"]:
    h, w = pair.x.shape[-2:]
    if min(h, w) <= 2 * RADIUS:
        raise PrivlabError(f"ssim_skimage needs images of at least 11×11 pixels. Found {h}×{w}.")
    inner = slice(RADIUS, -RADIUS)
    return pair.ssim_map[..., inner, inner].mean(dim=_CHW)


def _fft2d(pair: Pair) -> Float[Tensor, " b"]:
    x, y = pair.centred
    squares, both = _dot(x, x) + _dot(y, y), (_dot(x, x) * _dot(y, y)).sqrt()
    cosine = torch.where(both > 0, _dot(x, y) / both, squares == 0)
    return (1 - cosine).clamp(0, 2)  # rounding may overstep the bounds


def _fft2d_mjp(pair: Pair) -> Float[Tensor, " b"]:
    x, y = pair.x, pair.y
    x_turned, y_turned = _rotate(x), _rotate(y)
    norms = (_dot(x, x_turned) * _dot(y, y_turned)).sqrt()
    return (1 - _dot(x, y_turned) / norms).abs()


def _centre(image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    shifted = image - image[..., :1, :1]  # makes a constant channel exactly 0, whatever the rounding of its mean
    return shifted - shifted.mean(dim=(2, 3), keepdim=True)


def _rotate(image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Return g(−n mod (h, w)) for g(n)."""
    return image.flip((2, 3)).roll((1, 1), (2, 3))


def _dot(f: Float[Tensor, "b c h w"], g: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    return (f * g).sum(dim=_CHW)


FORMULAS: dict[str, Callable[[Pair], Tensor]] = {
    "mse": _mse,
    "psnr": _psnr,
    "ssim": _ssim,
    "ssim_skimage": _ssim_skimage,
    "fft2d": _fft2d,
    "fft2d_mjp": _fft2d_mjp,
    "psnr_affine": _psnr_affine,
    "correlation": _correlation,
    "gms_affine": _gms_affine,
}
"""Each metric without trained weights, one value per image; `privlab.metrics.registry` defines it."""

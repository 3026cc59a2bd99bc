"""Similarity of a reconstruction x to the reference y: one pure function per metric, one value per image.

Images are RGB or grey in [0, 1] at the victim's resolution. Results are float64 and never averaged over the batch.
Pixels outside [0, 1], NaN among them, are refused: such images are still normalised or were never clipped, and their
scores would flatter a defense. Each formula reads a pair of checked images, which keeps the terms that several share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps

import torch
from jaxtyping import Bool, Float
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


FORMULAS: dict[str, Callable[[Pair], Tensor]] = {}
"""The formula of each metric without trained weights, by name: one value per image."""


def _metric(formula: Callable[[Pair], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a metric as a function of reconstructions x and references y, with the docstring of its formula."""
    FORMULAS[formula.__name__] = formula

    @wraps(formula, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def metric(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
        return formula(Pair.of(x, y))

    del metric.__wrapped__  # its signature is that of x and y
    return metric


@_metric
def mse(pair: Pair) -> Float[Tensor, " b"]:
    """Return the mean squared error per image, over channels and pixels: mean((x − y)²).

    Range [0, 1], in squared units of pixels in [0, 1]; lower leaks.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].
    """
    return pair.mse


def decibels(error: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return the PSNR of a mean squared error of pixels in [0, 1], in dB: −10 log₁₀ MSE."""
    return -10 * error.log10()


@_metric
def psnr(pair: Pair) -> Float[Tensor, " b"]:
    """Return the peak signal-to-noise ratio per image, in dB: −10 log₁₀ MSE(x, y).

    Range [0, ∞]; higher leaks. Equal images give inf: no ε is added to the MSE.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].
    """
    return decibels(pair.mse)


def levels_wrong(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Return the number of values per image whose grey level in 8 bits is wrong: Σ [round(255 x) ≠ round(255 y)].

    Range [0, c h w]; 0 means that the image was reconstructed exactly.

    Args:
        x: reconstructions in [0, 1].
        y: references in [0, 1].

    Raises:
        PrivlabError: if the shapes do not fit or a pixel lies outside [0, 1].
    """
    pair = Pair.of(x, y)
    wrong = (255 * pair.x).round() != (255 * pair.y).round()
    return wrong.flatten(1).sum(1).to(pair.x)


def psnr_region(
    x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"], region: Bool[Tensor, "b h w"]
) -> Float[Tensor, " b"]:
    """Return the PSNR per image over the pixels of a region, in dB: −10 log₁₀ mean_region((x − y)²).

    Range [0, ∞]; higher leaks. An image whose region is empty gives nan.

    Args:
        x: reconstructions in [0, 1].
        y: references in [0, 1].
        region: marks the pixels that count; the mean runs over them and over all channels.

    Raises:
        PrivlabError: if the shapes do not fit or a pixel lies outside [0, 1].
    """
    pair = Pair.of(x, y)
    if region.shape != x[:, 0].shape:
        raise PrivlabError(f"region must be {by(x[:, 0])}, as the images are. Found {by(region)}.")
    error = (pair.x - pair.y).square().mean(dim=1) * region
    return decibels(error.sum(dim=(1, 2)) / region.sum(dim=(1, 2)))


@_metric
def psnr_affine(pair: Pair) -> Float[Tensor, " b"]:
    """Return the PSNR per image after the best gain g and offset o of each channel, in dB.

    It is −10 log₁₀ min_{g, o} mean((g x + o − y)²). The least-squares fit of a channel leaves the error
    var(y) (1 − ρ²), with ρ the correlation of its pixels. Range [0, ∞], never below `psnr`; higher leaks. It detects
    structure whose scale is lost, and a negative; a constant reconstruction has −10 log₁₀ var(y).

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: ours; the fit is least squares.
    """
    error = torch.minimum((pair.fitted - pair.y).square().mean(dim=_CHW), pair.mse)  # no fit is worse but by rounding
    return decibels(error)


@_metric
def correlation(pair: Pair) -> Float[Tensor, " b"]:
    """Return the unsigned correlation of the pixels per image, averaged over channels: mean_c |cov(x, y)| / (σ_x σ_y).

    Range [0, 1]; higher leaks. Gains, negative ones too, and offsets of channels do not change it. A constant channel
    has the correlation 0 with one that varies, and 1 with another constant one.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: Pearson's coefficient.
    """
    x, y = pair.centred
    xx, yy, xy = ((f * g).sum((2, 3)) for f, g in ((x, x), (y, y), (x, y)))
    both = (xx * yy).sqrt()
    return torch.where(both > 0, xy.abs() / both, (xx + yy == 0).to(xy)).clamp(max=1).mean(1)


@_metric
def gms_affine(pair: Pair) -> Float[Tensor, " b"]:
    """Return the similarity of gradient magnitudes per image, after the best gain and offset of each channel.

    It is mean (2 m n + C) / (m² + n² + C), where m and n are the magnitudes of Prewitt's gradients of each channel of
    g x + o, as in `psnr_affine`, and of y, both averaged over 2 × 2 pixels first; C = 170 / 255². Only pixels whose
    neighbours are all in the image count. Range (0, 1]; higher leaks.

    Raises:
        PrivlabError: if an image is smaller than 6 × 6, the shapes differ, or a pixel lies outside [0, 1].

    Source: Xue et al. 2014, Eq. 4, "Gradient magnitude similarity deviation", its mean; the fit is ours. [@xue2014gmsd]
    """
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


@_metric
def ssim(pair: Pair) -> Float[Tensor, " b"]:
    """Return the structural similarity per image in MJP's convention: the mean of the whole zero-padded map.

    (2 μx μy + C₁)(2 σxy + C₂) / ((μx² + μy² + C₁)(σx² + σy² + C₂)), with C₁ = 0.01², C₂ = 0.03² and moments
    under an 11 × 11 Gaussian window of σ = 1.5 (biased variances), per channel. Range [−1, 1]; higher leaks.
    Both images are padded with zeros, so that a border of 5 pixels is rated too similar: for images of 32
    pixels a side that is half of the map.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: Wang et al. 2004; the padding is that of pytorch-ssim, which MJP's tables use. [@wang2004ssim; @ren2023mjp]
    """
    return pair.ssim_map.mean(dim=_CHW)


@_metric
def ssim_skimage(pair: Pair) -> Float[Tensor, " b"]:
    """Return the structural similarity per image as scikit-image does: `ssim` without a border of 5 pixels.

    Equals `structural_similarity(gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
    data_range=1)`. Range [−1, 1]; higher leaks.

    Raises:
        PrivlabError: if an image is smaller than 11 × 11, the shapes differ, or a pixel lies outside [0, 1].

    Source: Wang et al. 2004, in its authors' setting. [@wang2004ssim]
    """
    h, w = pair.x.shape[-2:]
    if min(h, w) <= 2 * RADIUS:
        raise PrivlabError(f"ssim_skimage needs images of at least 11×11 pixels. Found {h}×{w}.")
    inner = slice(RADIUS, -RADIUS)
    return pair.ssim_map[..., inner, inner].mean(dim=_CHW)


@_metric
def fft2d(pair: Pair) -> Float[Tensor, " b"]:
    """Return the cosine distance of the 2-D spectra per image, each channel's DC set to 0: 1 − Re⟨F, G⟩ / (‖F‖ ‖G‖).

    By Parseval ⟨F, G⟩ = h w ⟨x, y⟩, and a spectrum without DC belongs to a channel without mean. So this is 1 minus
    the correlation of the pixels after each channel's mean is subtracted; it shows nothing that pixels do not. Range
    [0, 2], 1 for unrelated images; lower leaks. It is 0 if both images have constant channels only, and 1 if one of
    them has.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: what the script of MJP (Ren et al. 2023) means to compute; see `fft2d_mjp` for what it computes.
    [@ren2023mjp]
    """
    x, y = pair.centred
    squares, both = _dot(x, x) + _dot(y, y), (_dot(x, x) * _dot(y, y)).sqrt()
    cosine = torch.where(both > 0, _dot(x, y) / both, squares == 0)
    return (1 - cosine).clamp(0, 2)  # rounding may overstep the bounds


@_metric
def fft2d_mjp(pair: Pair) -> Float[Tensor, " b"]:
    """Return FFT2D as MJP's script computes it: |1 − Σ F G / √(Σ F F · Σ G G)|, without a complex conjugate.

    F, G are numpy's fft2 of x, y per channel; sums run over channels and frequencies. Without the conjugate,
    Σ F(k) G(k) = h w Σ x(n) y(−n mod (h, w)): x is compared with y turned by 180°. Pixels in [0, 1] make all
    three sums real and non-negative, so the root is real; but the Cauchy-Schwarz inequality does not bound the ratio.
    Range [0, ∞); lower leaks. Where Σ F F or Σ G G is 0 (a black image), it is undefined: nan or inf.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: the evaluation script of MJP (Ren et al. 2023), with the complex cosine distance of SciPy 1.0. [@ren2023mjp]
    """
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

"""How near a reconstruction x comes to the reference y: one pure function per metric, one value per image.

Images are RGB or grey in [0, 1] at the victim's resolution. Results are float64 and never averaged over the batch.
Pixels outside [0, 1], NaN among them, are refused: such images are still normalised or were never
clipped, and their scores would flatter a defense.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from privlab.errors import PrivlabError, unknown_name
from privlab.lpips_backbones import BACKBONES, LpipsUnavailable, find_backbone, load_features, read_features

__all__ = [
    "METRICS",
    "Learned",
    "Lpips",
    "LpipsUnavailable",
    "Metric",
    "fft2d",
    "fft2d_mjp",
    "load_lpips",
    "mse",
    "psnr",
    "psnr_region",
    "score",
    "ssim",
    "ssim_skimage",
]

_RADIUS, _SIGMA = 5, 1.5  # of the Gaussian window of SSIM, 11 × 11
_STRIP = 24  # rows of a strip of the banded matrix: short ones multiply fewer zeros, long ones run at full speed
_C1, _C2 = 0.01**2, 0.03**2
_CHW = (1, 2, 3)


def mse(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Mean squared error per image, over channels and pixels: mean((x − y)²).

    Range [0, 1], in squared units of pixels in [0, 1]; lower leaks.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].
    """
    return _mse(_pair(x, y))


def psnr(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Peak signal-to-noise ratio per image, in dB: −10 log₁₀ MSE(x, y).

    Range [0, ∞]; higher leaks. Equal images give inf, which no ε hides.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].
    """
    return _psnr(_pair(x, y))


def psnr_region(
    x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"], region: Bool[Tensor, "b h w"]
) -> Float[Tensor, " b"]:
    """PSNR per image over the pixels where `region` is True, in dB: −10 log₁₀ mean_region((x − y)²).

    Range [0, ∞]; higher leaks. An image whose region is empty gives nan.

    Raises:
        PrivlabError: if the shapes do not fit or a pixel lies outside [0, 1].
    """
    pair = _pair(x, y)
    if region.shape != x[:, 0].shape:
        raise PrivlabError(f"region must be {_by(x[:, 0])}, as the images are. Found {_by(region)}.")
    error = (pair.x - pair.y).square().mean(dim=1) * region
    return -10 * (error.sum(dim=(1, 2)) / region.sum(dim=(1, 2))).log10()


def ssim(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Structural similarity per image, in MJP's convention: the zero-padded map, averaged over all of it.

    (2 μx μy + C₁)(2 σxy + C₂) / ((μx² + μy² + C₁)(σx² + σy² + C₂)), with C₁ = 0.01², C₂ = 0.03² and moments
    under an 11 × 11 Gaussian window of σ = 1.5 (biased variances), per channel. Range [−1, 1]; higher leaks.
    Outside the image are zeros in both, so that a border of 5 pixels is rated too similar: for images of 32
    pixels a side that is half of the map.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: Wang et al. 2004; the padding is that of pytorch-ssim, which MJP's tables use.
    """
    return _ssim(_pair(x, y))


def ssim_skimage(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Structural similarity per image as scikit-image has it: the map of `ssim`, cropped by 5 pixels a side.

    Equals `structural_similarity(gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
    data_range=1)`. Range [−1, 1]; higher leaks.

    Raises:
        PrivlabError: if an image is smaller than 11 × 11, the shapes differ, or a pixel lies outside [0, 1].

    Source: Wang et al. 2004, in its authors' setting.
    """
    return _ssim_skimage(_pair(x, y))


def fft2d(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Cosine distance of the 2-D spectra per image: 1 − Re⟨F, G⟩ / (‖F‖ ‖G‖), each channel's DC set to zero.

    By Parseval ⟨F, G⟩ = h w ⟨x, y⟩, and no DC is no mean: it is 1 minus the correlation of the pixels, each
    channel less its mean, and says nothing that pixels do not. Range [0, 2], 1 for unrelated images; lower
    leaks. Where both have constant channels only, nothing is left that could differ: 0. Where one of them has, it
    has nothing in common with the other: 1.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: what the script of MJP (Ren et al. 2023) means to compute; see `fft2d_mjp` for what it computes.
    """
    return _fft2d(_pair(x, y))


def fft2d_mjp(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """FFT2D as MJP's script computes it: |1 − Σ F G / √(Σ F F · Σ G G)|, without a complex conjugate.

    F, G are numpy's fft2 of x, y per channel; sums run over channels and frequencies. Without the conjugate,
    Σ F(k) G(k) = h w Σ x(n) y(−n mod (h, w)): x is compared with y turned by 180°. Pixels in [0, 1] make all
    three sums real and non-negative, and so the root is real; but Cauchy and Schwarz do not bound the ratio.
    Range [0, ∞); lower leaks. Where Σ F F or Σ G G is 0 (a black image), it is undefined: nan or inf.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: the evaluation script of MJP (Ren et al. 2023), with the complex cosine distance of SciPy 1.0.
    """
    return _fft2d_mjp(_pair(x, y))


@dataclass(frozen=True, eq=False)
class Lpips:
    """LPIPS with one pretrained backbone, and what identifies that backbone; called as `lpips(x, y)`."""

    module: nn.Module
    net: str  # alex, vgg or squeeze
    sha256: str  # of the backbone's file
    file: str  # its name

    def __call__(self, x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
        """Learned perceptual distance per image: Σ_layers mean_hw Σ_c w_c (φ_c(x) − φ_c(y))².

        φ are the unit-normalised features of 2 x − 1, in [−1, 1], as the network was trained; they are
        computed in float32. Range [0, ∞); lower leaks.

        Raises:
            PrivlabError: if images are not RGB or grey, too small for the backbone, or a pixel lies outside [0, 1].

        Source: Zhang et al. 2018; the `lpips` package, version 0.1 of the linear layers.
        """
        return _lpips(_pair(x, y), self)


def load_lpips(net: str, weights: Path | None = None, device: torch.device | str = "cpu") -> Lpips:
    """Return LPIPS with the pretrained backbone "alex", "vgg" or "squeeze"; never with a random one.

    The backbone is the file `weights`, or is found in the folder `weights`; without it, in torchvision's
    cache or by torchvision's download. Torch's global random state stays as it is.

    Raises:
        LpipsUnavailable: if the backbone is in none of these places.
        PrivlabError: if there is no network of that name, or the file does not fit it.
    """
    path = find_backbone(net, weights)
    features, sha256 = read_features(path)
    module = _random_lpips(net)
    load_features(module.get_submodule("net"), features, path)
    return Lpips(module.requires_grad_(False).to(device), net, sha256, path.name)


@dataclass(frozen=True)
class Metric:
    """A row of `METRICS`: what a value means and how a table prints it."""

    name: str
    function: Callable[[Tensor, Tensor], Tensor] | None  # None: needs weights, see `load_lpips`, `load_embedding`
    direction: Literal["higher leaks", "lower leaks", "utility"]
    range: tuple[float, float]
    decimals: int
    source: str

    @property
    def arrow(self) -> str:
        """The direction that leaks, as tables print it; utility has none."""
        return {"higher leaks": "↑", "lower leaks": "↓", "utility": ""}[self.direction]


_MJP = "Ren et al. 2023 (MJP)"
_LPIPS = "Zhang et al. 2018 (LPIPS)"
METRICS: dict[str, Metric] = {
    "mse": Metric("mse", mse, "lower leaks", (0.0, 1.0), 4, "mean squared error"),
    "psnr": Metric("psnr", psnr, "higher leaks", (0.0, math.inf), 2, "−10 log₁₀ MSE, in dB"),
    "ssim": Metric("ssim", ssim, "higher leaks", (-1.0, 1.0), 4, f"Wang et al. 2004, zero padding: {_MJP}"),
    "ssim_skimage": Metric("ssim_skimage", ssim_skimage, "higher leaks", (-1.0, 1.0), 4, "Wang et al. 2004"),
    "fft2d": Metric("fft2d", fft2d, "lower leaks", (0.0, 2.0), 4, f"{_MJP}, conjugate and DC mended"),
    "fft2d_mjp": Metric("fft2d_mjp", fft2d_mjp, "lower leaks", (0.0, math.inf), 4, f"{_MJP}, as released"),
    "lpips_alex": Metric("lpips_alex", None, "lower leaks", (0.0, math.inf), 4, _LPIPS),
    "lpips_vgg": Metric("lpips_vgg", None, "lower leaks", (0.0, math.inf), 4, _LPIPS),
    "lpips_squeeze": Metric("lpips_squeeze", None, "lower leaks", (0.0, math.inf), 4, _LPIPS),
    "f_sim": Metric("f_sim", None, "higher leaks", (-1.0, 1.0), 4, "F-SIM: Xu et al. 2024, Table 6"),
}


Learned = Callable[[Tensor, Tensor], Tensor]
"""A metric with trained weights: (x, y) ↦ one value per image."""

_AT_ONCE = 2
"""Images that a CPU scores at a time: their maps stay in its cache, which halves the time of sixteen at once."""


@torch.no_grad()
def score(
    x: Float[Tensor, "b c h w"],
    y: Float[Tensor, "b c h w"],
    metrics: Sequence[str],
    learned: Mapping[str, Learned] = {},
) -> dict[str, Float[Tensor, " b"]]:
    """Return the wanted `metrics` by name, one value per image each, with what they share computed once.

    `learned` holds the metrics that need trained weights: {"lpips_alex": load_lpips("alex")}.

    Raises:
        PrivlabError: if a metric is unknown, lacks its backbone or refuses the images.
    """
    for name in metrics:
        _check_metric(name, learned)
    _check_shapes(x, y)
    at_once = max(len(x), 1) if x.is_cuda else _AT_ONCE
    pairs = (_pair(*images) for images in zip(x.split(at_once), y.split(at_once), strict=True))
    parts = [{name: _value(name, pair, learned) for name in metrics} for pair in pairs]
    return {name: torch.cat([part[name] for part in parts]) for name in metrics}


@dataclass(frozen=True, eq=False)
class _Pair:
    """Checked images in float64, with what several metrics are made of: their MSE, and the map of both SSIMs."""

    x: Float[Tensor, "b c h w"]
    y: Float[Tensor, "b c h w"]

    @cached_property
    def mse(self) -> Float[Tensor, " b"]:
        return (self.x - self.y).square().mean(dim=_CHW)

    @cached_property
    def ssim_map(self) -> Float[Tensor, "b c h w"]:
        x, y = self.x, self.y
        μx, μy, squares, products = _gaussian(torch.stack([x, y, x * x + y * y, x * y]))
        μμ, μxμy = μx * μx + μy * μy, μx * μy
        luminance = (2 * μxμy + _C1) / (μμ + _C1)
        return luminance * (2 * (products - μxμy) + _C2) / (squares - μμ + _C2)


def _pair(x: Tensor, y: Tensor) -> _Pair:
    _check_shapes(x, y)
    for name, image in {"x": x, "y": y}.items():
        if not ((image >= 0) & (image <= 1)).all():  # so written, NaN fails too
            low, high = (bound.item() for bound in image.aminmax())
            raise PrivlabError(f"{name} must be in [0, 1]. Found values from {low:.4g} to {high:.4g}.")
    return _Pair(x.double(), y.double())


def _check_shapes(x: Tensor, y: Tensor) -> None:
    if x.shape != y.shape:
        raise PrivlabError(f"x and y must be of one shape. Found {_by(x)} and {_by(y)}.")


def _by(image: Tensor) -> str:
    return "×".join(map(str, image.shape))


def _mse(pair: _Pair) -> Float[Tensor, " b"]:
    return pair.mse


def _psnr(pair: _Pair) -> Float[Tensor, " b"]:
    return -10 * pair.mse.log10()


def _ssim(pair: _Pair) -> Float[Tensor, " b"]:
    return pair.ssim_map.mean(dim=_CHW)


def _ssim_skimage(pair: _Pair) -> Float[Tensor, " b"]:
    h, w = pair.x.shape[-2:]
    if min(h, w) <= 2 * _RADIUS:
        raise PrivlabError(f"ssim_skimage needs images of at least 11×11 pixels. Found {h}×{w}.")
    inner = slice(_RADIUS, -_RADIUS)
    return pair.ssim_map[..., inner, inner].mean(dim=_CHW)


def _gaussian(images: Float[Tensor, "*n h w"]) -> Float[Tensor, "*n h w"]:
    """Filter by the window with zeros outside, by its banded matrices: that is faster than convolution here.

    A strip of a banded matrix meets few pixels; what lies beyond is multiplied by zero, and left out.
    """
    h, w = images.shape[-2:]
    planes = images.flatten(0, -3)
    down, across = (_toeplitz(n, images.dtype, images.device) for n in (h, w))
    strips = [down[own, near].expand(len(planes), -1, -1) @ planes[:, near] for own, near in _strips(h)]
    rows = torch.cat(strips, dim=1).flatten(0, 1)
    return torch.cat([rows[:, near] @ across[near, own] for own, near in _strips(w)], dim=1).view(images.shape)


def _strips(n: int) -> list[tuple[slice, slice]]:
    """Return strips of n rows, and the rows within the window's reach of each."""
    return [(slice(i, i + _STRIP), slice(max(0, i - _RADIUS), i + _STRIP + _RADIUS)) for i in range(0, n, _STRIP)]


@lru_cache(maxsize=8)
def _toeplitz(n: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "{n} {n}"]:
    i = torch.arange(n, dtype=dtype, device=device)
    window = sum(math.exp(-(k**2) / (2 * _SIGMA**2)) for k in range(-_RADIUS, _RADIUS + 1))
    offset = i[:, None] - i
    return torch.exp(-(offset**2) / (2 * _SIGMA**2)) * (offset.abs() <= _RADIUS) / window


def _fft2d(pair: _Pair) -> Float[Tensor, " b"]:
    x, y = _centred(pair.x), _centred(pair.y)
    squares, both = _dot(x, x) + _dot(y, y), (_dot(x, x) * _dot(y, y)).sqrt()
    cosine = torch.where(both > 0, _dot(x, y) / both, squares == 0)
    return (1 - cosine).clamp(0, 2)  # rounding oversteps the bounds


def _fft2d_mjp(pair: _Pair) -> Float[Tensor, " b"]:
    x, y = pair.x, pair.y
    x_turned, y_turned = _turned(x), _turned(y)
    norms = (_dot(x, x_turned) * _dot(y, y_turned)).sqrt()
    return (1 - _dot(x, y_turned) / norms).abs()


def _centred(image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    shifted = image - image[..., :1, :1]  # makes a constant channel 0, where its rounded mean might not
    return shifted - shifted.mean(dim=(2, 3), keepdim=True)


def _turned(image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Return g(−n mod (h, w)) for g(n)."""
    return image.flip((2, 3)).roll((1, 1), (2, 3))


def _dot(f: Float[Tensor, "b c h w"], g: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    return (f * g).sum(dim=_CHW)


def _lpips(pair: _Pair, lpips: Lpips) -> Float[Tensor, " b"]:
    _, c, h, w = pair.x.shape
    side = BACKBONES[lpips.net].min_side
    if c not in (1, 3) or min(h, w) < side:
        raise PrivlabError(f"lpips_{lpips.net} needs images of at least 3×{side}×{side}. Found {c}×{h}×{w}.")
    weight = next(lpips.module.parameters())
    x, y = ((2 * image - 1).to(weight).expand(-1, 3, -1, -1) for image in (pair.x, pair.y))
    return lpips.module(x, y).flatten().to(pair.x)


def _random_lpips(net: str) -> nn.Module:
    """Return LPIPS with its trained linear layers on a random trunk, for `load_features` to fill."""
    import lpips

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        warnings.simplefilter("ignore")  # the package calls torchvision with the deprecated `pretrained=`
        return lpips.LPIPS(net=net, pnet_rand=True, verbose=False)


_FORMULAS: dict[str, Callable[[_Pair], Tensor]] = {
    "mse": _mse,
    "psnr": _psnr,
    "ssim": _ssim,
    "ssim_skimage": _ssim_skimage,
    "fft2d": _fft2d,
    "fft2d_mjp": _fft2d_mjp,
}


def _check_metric(name: str, learned: Mapping[str, Learned]) -> None:
    if name not in METRICS:
        raise unknown_name("metric", name, METRICS)
    if name not in _FORMULAS and name not in learned:
        loader = "load_embedding('timm:NAME@FILE')" if name == "f_sim" else f"load_lpips('{name[6:]}')"
        found = ", ".join(learned) or "none"
        raise PrivlabError(f"{name} needs learned={{'{name}': {loader}}}. Found: {found}.")


def _value(name: str, pair: _Pair, learned: Mapping[str, Learned]) -> Float[Tensor, " b"]:
    return _FORMULAS[name](pair) if name in _FORMULAS else learned[name](pair.x, pair.y).to(pair.x)

"""Similarity of a reconstruction x to the reference y: one pure function per metric, one value per image.

Images are RGB or grey in [0, 1] at the victim's resolution. Results are float64 and never averaged over the batch.
Pixels outside [0, 1], NaN among them, are refused: such images are still normalised or were never
clipped, and their scores would flatter a defense.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from privlab.base import PrivlabError, check_name, installed_plugins, memory_ended, warn
from privlab.metrics.formulas import FORMULAS, Pair, by, check_shapes, decibels
from privlab.metrics.lpips_backbones import (
    LPIPS_BACKBONES,
    find_backbone,
    load_features,
    read_features,
)


def mse(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Return the mean squared error per image, over channels and pixels: mean((x − y)²).

    Range [0, 1], in squared units of pixels in [0, 1]; lower leaks.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].
    """
    return FORMULAS["mse"](Pair.of(x, y))


def psnr(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Return the peak signal-to-noise ratio per image, in dB: −10 log₁₀ MSE(x, y).

    Range [0, ∞]; higher leaks. Equal images give inf: no ε is added to the MSE.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].
    """
    return FORMULAS["psnr"](Pair.of(x, y))


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


def ssim(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Return the structural similarity per image in MJP's convention: the mean of the whole zero-padded map.

    (2 μx μy + C₁)(2 σxy + C₂) / ((μx² + μy² + C₁)(σx² + σy² + C₂)), with C₁ = 0.01², C₂ = 0.03² and moments
    under an 11 × 11 Gaussian window of σ = 1.5 (biased variances), per channel. Range [−1, 1]; higher leaks.
    Both images are padded with zeros, so that a border of 5 pixels is rated too similar: for images of 32
    pixels a side that is half of the map.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: Wang et al. 2004; the padding is that of pytorch-ssim, which MJP's tables use. [@wang2004ssim; @ren2023mjp]
    """
    return FORMULAS["ssim"](Pair.of(x, y))


def ssim_skimage(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Return the structural similarity per image as scikit-image does: `ssim` without a border of 5 pixels.

    Equals `structural_similarity(gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
    data_range=1)`. Range [−1, 1]; higher leaks.

    Raises:
        PrivlabError: if an image is smaller than 11 × 11, the shapes differ, or a pixel lies outside [0, 1].

    Source: Wang et al. 2004, in its authors' setting. [@wang2004ssim]
    """
    return FORMULAS["ssim_skimage"](Pair.of(x, y))


def fft2d(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Return the cosine distance of the 2-D spectra per image, each channel's DC set to 0: 1 − Re⟨F, G⟩ / (‖F‖ ‖G‖).

    By Parseval ⟨F, G⟩ = h w ⟨x, y⟩, and a spectrum without DC belongs to a channel without mean. So this is 1 minus
    the correlation of the pixels after each channel's mean is subtracted; it tells nothing that pixels do not. Range
    [0, 2], 1 for unrelated images; lower leaks. It is 0 if both images have constant channels only, and 1 if one of
    them has.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: what the script of MJP (Ren et al. 2023) means to compute; see `fft2d_mjp` for what it computes.
    [@ren2023mjp]
    """
    return FORMULAS["fft2d"](Pair.of(x, y))


def fft2d_mjp(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Return FFT2D as MJP's script computes it: |1 − Σ F G / √(Σ F F · Σ G G)|, without a complex conjugate.

    F, G are numpy's fft2 of x, y per channel; sums run over channels and frequencies. Without the conjugate,
    Σ F(k) G(k) = h w Σ x(n) y(−n mod (h, w)): x is compared with y turned by 180°. Pixels in [0, 1] make all
    three sums real and non-negative, so the root is real; but the Cauchy-Schwarz inequality does not bound the ratio.
    Range [0, ∞); lower leaks. Where Σ F F or Σ G G is 0 (a black image), it is undefined: nan or inf.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: the evaluation script of MJP (Ren et al. 2023), with the complex cosine distance of SciPy 1.0. [@ren2023mjp]
    """
    return FORMULAS["fft2d_mjp"](Pair.of(x, y))


def psnr_affine(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Return the PSNR per image after the best gain g and offset o of each channel, in dB.

    It is −10 log₁₀ min_{g, o} mean((g x + o − y)²). The least-squares fit of a channel leaves the error
    var(y) (1 − ρ²), with ρ the correlation of its pixels. Range [0, ∞], never below `psnr`; higher leaks. It detects
    structure whose scale is lost, and a negative; a constant reconstruction has −10 log₁₀ var(y).

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: ours; the fit is least squares.
    """
    return FORMULAS["psnr_affine"](Pair.of(x, y))


def correlation(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Return the unsigned correlation of the pixels per image, averaged over channels: mean_c |cov(x, y)| / (σ_x σ_y).

    Range [0, 1]; higher leaks. Gains, negative ones too, and offsets of channels do not change it. A constant channel
    has the correlation 0 with one that varies, and 1 with another constant one.

    Raises:
        PrivlabError: if x and y differ in shape or a pixel lies outside [0, 1].

    Source: Pearson's coefficient.
    """
    return FORMULAS["correlation"](Pair.of(x, y))


def gms_affine(x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
    """Return the similarity of gradient magnitudes per image, after the best gain and offset of each channel.

    It is mean (2 m n + C) / (m² + n² + C), where m and n are the magnitudes of Prewitt's gradients of each channel of
    g x + o, as in `psnr_affine`, and of y, both averaged over 2 × 2 pixels first; C = 170 / 255². Only pixels whose
    neighbours are all in the image count. Range (0, 1]; higher leaks.

    Raises:
        PrivlabError: if an image is smaller than 6 × 6, the shapes differ, or a pixel lies outside [0, 1].

    Source: Xue et al. 2014, Eq. 4, "Gradient magnitude similarity deviation", its mean; the fit is ours. [@xue2014gmsd]
    """
    return FORMULAS["gms_affine"](Pair.of(x, y))


@dataclass(frozen=True, eq=False)
class Lpips:
    """LPIPS with one pretrained backbone, and that backbone's file name and hash; called as `lpips(x, y)`."""

    module: nn.Module
    net: str  # alex, vgg or squeeze
    sha256: str  # hash of the backbone's file
    file: str  # name of the backbone's file

    def __call__(self, x: Float[Tensor, "b c h w"], y: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
        """Return the learned perceptual distance per image: Σ_layers mean_hw Σ_c w_c (φ_c(x) − φ_c(y))².

        φ are the unit-normalised features of 2 x − 1, in [−1, 1], as the network was trained; they are
        computed in float32. Range [0, ∞); lower leaks.

        Raises:
            PrivlabError: if images are not RGB or grey, are too small for the backbone, or have a pixel outside [0, 1].

        Source: Zhang et al. 2018; the `lpips` package, version 0.1 of the linear layers. [@zhang2018lpips]
        """
        return _lpips(Pair.of(x, y), self)


def load_lpips(net: str, weights: Path | None = None, device: torch.device | str = "cpu") -> Lpips:
    """Return LPIPS with a pretrained backbone, never with a random one; torch's global random state is not changed.

    Args:
        net: the backbone: "alex", "vgg" or "squeeze".
        weights: the backbone's file, or a folder that holds it; None looks into torchvision's cache, then downloads.
        device: where the metric computes.

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
    """What a value means, how it is computed and how a table prints it.

    A package adds its own by an entry point of the group `privlab.metrics`, named as the column of the records.

    Args:
        name: of the metric and of its column.
        function: (x, y) ↦ one value for each of b images, x and y being b × c × h × w in [0, 1]; None where trained
            weights are needed, see `load_lpips` and `load_embedding`.
        direction: whether a higher or a lower value is a worse leak; "utility" says nothing of leakage.
        range: the lowest and the highest value.
        decimals: that tables print.
        source: the formula in a clause, or the paper.
    """

    name: str
    function: Callable[[Tensor, Tensor], Tensor] | None
    direction: Literal["higher leaks", "lower leaks", "utility"]
    range: tuple[float, float]
    decimals: int
    source: str

    @property
    def arrow(self) -> str:
        """Return the direction that leaks as an arrow for tables; utility has none."""
        return {"higher leaks": "↑", "lower leaks": "↓", "utility": ""}[self.direction]


_MJP = "Ren et al. 2023 (MJP)"
_LPIPS = "Zhang et al. 2018 (LPIPS)"
_OWN: dict[str, Metric] = {
    "mse": Metric("mse", mse, "lower leaks", (0.0, 1.0), 4, "mean squared error"),
    "psnr": Metric("psnr", psnr, "higher leaks", (0.0, math.inf), 2, "−10 log₁₀ MSE, in dB"),
    "ssim": Metric("ssim", ssim, "higher leaks", (-1.0, 1.0), 4, f"Wang et al. 2004, zero padding: {_MJP}"),
    "ssim_skimage": Metric("ssim_skimage", ssim_skimage, "higher leaks", (-1.0, 1.0), 4, "Wang et al. 2004"),
    "fft2d": Metric("fft2d", fft2d, "lower leaks", (0.0, 2.0), 4, f"{_MJP}, conjugate and DC mended"),
    "fft2d_mjp": Metric("fft2d_mjp", fft2d_mjp, "lower leaks", (0.0, math.inf), 4, f"{_MJP}, as released"),
    "psnr_affine": Metric(
        "psnr_affine", psnr_affine, "higher leaks", (0.0, math.inf), 2, "PSNR after the best gain and offset, in dB"
    ),
    "correlation": Metric("correlation", correlation, "higher leaks", (0.0, 1.0), 4, "Pearson's, without its sign"),
    "gms_affine": Metric(
        "gms_affine", gms_affine, "higher leaks", (0.0, 1.0), 4, "Xue et al. 2014, after the best gain and offset"
    ),
    "lpips_alex": Metric("lpips_alex", None, "lower leaks", (0.0, math.inf), 4, _LPIPS),
    "lpips_vgg": Metric("lpips_vgg", None, "lower leaks", (0.0, math.inf), 4, _LPIPS),
    "lpips_squeeze": Metric("lpips_squeeze", None, "lower leaks", (0.0, math.inf), 4, _LPIPS),
    "f_sim": Metric("f_sim", None, "higher leaks", (-1.0, 1.0), 4, "F-SIM: Xu et al. 2024, Table 6"),
}


class _Metrics(Mapping[str, Metric]):
    """privlab's metrics, and those that entry points name, which are loaded when one of them is first looked up.

    Their packages import this module, so they cannot be loaded while it is imported.
    """

    def __init__(self) -> None:
        self._added: Mapping[str, Metric] | None = None
        self._broken: dict[str, str] = {}

    @property
    def added(self) -> Mapping[str, Metric]:
        """Return the metrics of other packages by name."""
        if self._added is None:
            self._added = {}  # what a package finds here while it is loaded
            self._added, self._broken = _of_other_packages()
        return self._added

    @property
    def broken(self) -> Mapping[str, str]:
        """Return what is wrong with each entry point that gives no metric, by its name."""
        return self._broken if self.added is not None else {}

    def __getitem__(self, name: str) -> Metric:
        if name in _OWN:
            return _OWN[name]
        if name in self.broken:
            raise PrivlabError(self.broken[name])
        return self.added[name]

    def __iter__(self) -> Iterator[str]:
        yield from _OWN
        yield from self.added

    def __len__(self) -> int:
        return len(_OWN) + len(self.added)


def _of_other_packages() -> tuple[dict[str, Metric], dict[str, str]]:
    """Return the metrics that entry points name, and what is wrong with those that give none, by name."""
    found: dict[str, Metric] = {}
    broken: dict[str, str] = {}
    for name, point in {point.name: point for point in installed_plugins("privlab.metrics")}.items():
        if name in _OWN:
            continue
        try:
            metric = point.load()
        except Exception as error:  # a package of others raises anything, and the other metrics do without it
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            broken[name] = f"Entry point '{name}' of privlab.metrics cannot be loaded from '{point.value}': {why}."
            continue
        if isinstance(metric, Metric) and metric.name == name and name.isidentifier():
            found[name] = metric
        else:
            what = f"a Metric whose name is '{name}', in letters, digits and underscores"
            broken[name] = f"Entry point '{name}' of privlab.metrics must be {what}."
    return found, broken


METRICS = _Metrics()
"""The metrics by name, those of other packages included, which `Metric` describes."""

DECIBELS = ("psnr", "psnr_affine")
"""The metrics in dB: they are infinite for exact reconstructions, or as large as rounding allows."""

STRUCTURE = ("psnr_affine", "correlation", "gms_affine")
"""The metrics that no gain or offset of a channel changes: they detect structure whose scale is lost."""

MIRRORED = {name: f"{name}_mirrored" for name in STRUCTURE}
"""The columns of the same metrics against the mirrored reference. A photograph is as likely as its mirror image, so a
reconstruction that knows nothing of the image scores the same on both: the excess over the mirrored score is a leak."""

Learned = Callable[[Tensor, Tensor], Tensor]
"""A metric with trained weights: (x, y) ↦ one value per image."""

_CPU_BATCH = 2
"""Images that a CPU scores at a time: their maps stay in its cache, which halves the time of sixteen at once."""


@torch.no_grad()
def score(
    x: Float[Tensor, "b c h w"],
    y: Float[Tensor, "b c h w"],
    metrics: Sequence[str],
    learned: Mapping[str, Learned] = {},
) -> dict[str, Float[Tensor, " b"]]:
    """Return metrics by name, one value per image each; terms that several metrics share are computed once.

    Args:
        x: reconstructions in [0, 1].
        y: references in [0, 1].
        metrics: names of `METRICS`.
        learned: the metrics that need trained weights, by name: {"lpips_alex": load_lpips("alex")}.

    Raises:
        PrivlabError: if a metric is unknown, lacks its trained weights or refuses the images.
    """
    for name in metrics:
        _check_metric(name, learned)
    check_shapes(x, y)
    at_once = max(len(x), 1) if x.is_cuda else _CPU_BATCH
    pairs = (Pair.of(*images) for images in zip(x.split(at_once), y.split(at_once), strict=True))
    parts = [{name: _value(name, pair, learned) for name in metrics} for pair in pairs]
    return {name: torch.cat([part[name] for part in parts]) for name in metrics}


def _lpips(pair: Pair, lpips: Lpips) -> Float[Tensor, " b"]:
    _, c, h, w = pair.x.shape
    side = LPIPS_BACKBONES[lpips.net].min_side
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


def _check_metric(name: str, learned: Mapping[str, Learned]) -> None:
    check_name("metric", name, METRICS)
    if METRICS[name].function is None and name not in learned:
        loader = "load_embedding('timm:NAME@FILE')" if name == "f_sim" else f"load_lpips('{name[6:]}')"
        found = ", ".join(learned) or "none"
        raise PrivlabError(f"{name} needs learned={{'{name}': {loader}}}. Found: {found}.")


def _value(name: str, pair: Pair, learned: Mapping[str, Learned]) -> Float[Tensor, " b"]:
    if name in FORMULAS:
        return FORMULAS[name](pair)
    own, metric = name not in METRICS.added, METRICS[name]
    try:
        values = (metric.function or learned[name])(pair.x, pair.y)
    except Exception as error:  # a package of others raises anything
        if own or isinstance(error, PrivlabError) or memory_ended(error) is not None:
            raise
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise PrivlabError(f"Metric '{name}', which another package defines, raised {why}.") from error
    if not own and not isinstance(values, Tensor):
        raise PrivlabError(f"Metric '{name}' must return a tensor. Found {type(values).__name__}.")
    if values.shape != pair.x.shape[:1]:
        wanted, found = tuple(pair.x.shape[:1]), tuple(values.shape)
        raise PrivlabError(f"Metric '{name}' must return one value per image, of shape {wanted}. Found shape {found}.")
    low, high = metric.range
    if not own and bool(((values < low) | (values > high)).any()):
        message = f"Metric '{name}' returned values outside its declared range, {low:g} to {high:g}."
        warn(message, 4)
    return values.to(pair.x)

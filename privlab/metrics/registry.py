"""The metrics by name, those of other packages included, and how all of them score a batch; LPIPS."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from privlab.base import PrivlabError, check_name, installed_plugins, memory_ended, one_line, warn
from privlab.metrics import formulas
from privlab.metrics.formulas import FORMULAS, Pair, check_shapes
from privlab.metrics.lpips_backbones import LPIPS_BACKBONES, find_backbone, load_features, read_features


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
        pair = Pair.of(x, y)
        _, c, h, w = pair.x.shape
        side = LPIPS_BACKBONES[self.net].min_side
        if c not in (1, 3) or min(h, w) < side:
            raise PrivlabError(f"lpips_{self.net} needs images of at least 3×{side}×{side}. Found {c}×{h}×{w}.")
        weight = next(self.module.parameters())
        shown = ((2 * image - 1).to(weight).expand(-1, 3, -1, -1) for image in (pair.x, pair.y))
        return self.module(*shown).flatten().to(pair.x)


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
_FITTED = "after the best gain and offset"
_ALL = (
    Metric("mse", formulas.mse, "lower leaks", (0.0, 1.0), 4, "mean squared error"),
    Metric("psnr", formulas.psnr, "higher leaks", (0.0, math.inf), 2, "−10 log₁₀ MSE, in dB"),
    Metric("ssim", formulas.ssim, "higher leaks", (-1.0, 1.0), 4, f"Wang et al. 2004, zero padding: {_MJP}"),
    Metric("ssim_skimage", formulas.ssim_skimage, "higher leaks", (-1.0, 1.0), 4, "Wang et al. 2004"),
    Metric("fft2d", formulas.fft2d, "lower leaks", (0.0, 2.0), 4, f"{_MJP}, conjugate and DC mended"),
    Metric("fft2d_mjp", formulas.fft2d_mjp, "lower leaks", (0.0, math.inf), 4, f"{_MJP}, as released"),
    Metric("psnr_affine", formulas.psnr_affine, "higher leaks", (0.0, math.inf), 2, f"PSNR {_FITTED}, in dB"),
    Metric("correlation", formulas.correlation, "higher leaks", (0.0, 1.0), 4, "Pearson's, without its sign"),
    Metric("gms_affine", formulas.gms_affine, "higher leaks", (0.0, 1.0), 4, f"Xue et al. 2014, {_FITTED}"),
    Metric("lpips_alex", None, "lower leaks", (0.0, math.inf), 4, _LPIPS),
    Metric("lpips_vgg", None, "lower leaks", (0.0, math.inf), 4, _LPIPS),
    Metric("lpips_squeeze", None, "lower leaks", (0.0, math.inf), 4, _LPIPS),
    Metric("f_sim", None, "higher leaks", (-1.0, 1.0), 4, "F-SIM: Xu et al. 2024, Table 6"),
)
_OWN = {metric.name: metric for metric in _ALL}


class _Metrics(Mapping[str, Metric]):
    """privlab's metrics, and those that entry points name, which are loaded when one of them is first looked up.

    Their packages import this module, so they cannot be loaded while it is imported.
    """

    def __init__(self) -> None:
        self._added: dict[str, Metric] | None = None
        self._broken: dict[str, str] = {}

    @property
    def added(self) -> Mapping[str, Metric]:
        """Return the metrics of other packages by name."""
        if self._added is None:
            self._added = {}  # what a package finds here while it is loaded
            points = {point.name: point for point in installed_plugins("privlab.metrics") if point.name not in _OWN}
            found = {name: _read(point) for name, point in points.items()}
            self._added = {name: metric for name, metric in found.items() if isinstance(metric, Metric)}
            self._broken = {name: wrong for name, wrong in found.items() if isinstance(wrong, str)}
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


def _read(point: EntryPoint) -> Metric | str:
    """Return the metric that an entry point names, or what is wrong with it."""
    said = f"Entry point '{point.name}' of privlab.metrics"
    try:
        metric = point.load()
    except Exception as error:  # a package of others raises anything, and the other metrics do without it
        return f"{said} cannot be loaded from '{point.value}': {one_line(error, kind=True)}."
    if isinstance(metric, Metric) and metric.name == point.name and point.name.isidentifier():
        return metric
    return f"{said} must be a Metric whose name is '{point.name}', in letters, digits and underscores."


METRICS = _Metrics()
"""The metrics by name, those of other packages included, which `Metric` describes."""

DECIBELS = ("psnr", "psnr_affine")
"""The metrics in dB: they are infinite for exact reconstructions, or as large as rounding allows."""

EXACT_DB = 100.0
"""PSNR in dB above which two values count as the same: they measure rounding, which depends on the batch's size."""

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
        raised = one_line(error, kind=True)
        raise PrivlabError(f"Metric '{name}', which another package defines, raised {raised}.") from error
    if not own and not isinstance(values, Tensor):
        raise PrivlabError(f"Metric '{name}' must return a tensor. Found {type(values).__name__}.")
    if values.shape != pair.x.shape[:1]:
        wanted, found = tuple(pair.x.shape[:1]), tuple(values.shape)
        raise PrivlabError(f"Metric '{name}' must return one value per image, of shape {wanted}. Found shape {found}.")
    low, high = metric.range
    if not own and bool(((values < low) | (values > high)).any()):
        message = f"Metric '{name}' returned values outside its declared range, {low:g} to {high:g}."
        warn(message)
    return values.to(pair.x)

"""Distances of a release from what is claimed of it: finite differences, variances, orders and forms."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from privlab.base import linear_sum_assignment
from privlab.patches import patchify, unpatchify
from privlab.threat import Feed
from privlab.victims import VictimModel

__all__ = [
    "STEP",
    "TOLERANCE",
    "apart",
    "colour_wheel",
    "entries_with_noise",
    "off_differences",
    "off_in_noise",
    "overstatement",
    "permutation_faults",
    "scale_of",
    "span_of",
    "understatement",
    "unlike",
    "worse_than_best",
]

STEP = 1e-6
"""Step of finite differences in float64; rounding and the third derivative leave an error of about 1e-8."""
TOLERANCE = 1e-6
"""The largest error of a directional derivative, relative to the norm of the gradient."""
_LEAST_DIVISOR = 1e-300
"""Is added to, or bounds, what is divided by, so that 0 / 0 is 0; it is far below the rounding of float64."""

_FEWEST = 50
"""Entries with noise below which the mean of their squares says nothing of its variance."""
_FEWEST_ROUNDED = 1000
"""Entries with a variance below which the errors of a rounding are not alike enough to have one."""

Tensors = Mapping[str, Tensor]


def off_differences(model: VictimModel, feed: Feed, labels: Int[Tensor, " b"], gradients: Tensors, seed: int) -> float:
    """Return the worst error of g·v against (ℓ(θ + hv) − ℓ(θ − hv)) / 2h, over parameters and images, relative to ‖g‖.

    Each parameter θ has a random direction v, and ℓ is the loss of the victim's own forward pass on what is fed.

    Args:
        model: the victim, in float64.
        feed: what the clients feed, one image each.
        labels: classes of the images.
        gradients: released gradients by parameter name, with the images in the first dimension.
        seed: seed of the directions.
    """
    found, slopes, norms, _ = _directional(model, feed, labels, gradients, {}, seed)
    return _worst((found - slopes).abs() / norms)


def off_in_noise(
    model: VictimModel, feed: Feed, labels: Int[Tensor, " b"], gradients: Tensors, variance: Tensors, seed: int
) -> float:
    """Return the error of `off_differences` in standard deviations of the declared noise.

    The gradient of each image may have a scale of its own, as clipping leaves it: the best one counts. An error of an
    eighth of the `TOLERANCE` counts as one standard deviation.

    Args:
        model: the victim, in float64.
        feed: what the clients feed, one image each.
        labels: classes of the images.
        gradients: released gradients by parameter name, with the images in the first dimension.
        variance: declared variance of each of their entries.
        seed: seed of the directions.
    """
    found, slopes, norms, σ = _directional(model, feed, labels, gradients, variance, seed)
    σ = (σ.square() + (TOLERANCE / 8 * norms).square()).sqrt()
    fitted = ((found * slopes / σ.square()).sum(0) / (slopes / σ).square().sum(0).clamp(min=_LEAST_DIVISOR)).clamp(
        min=0
    )
    return min(_worst((found - scale * slopes).abs() / σ) for scale in (fitted, torch.zeros_like(fitted)))


def _directional(
    model: VictimModel, feed: Feed, labels: Int[Tensor, " b"], gradients: Tensors, variance: Tensors, seed: int
) -> tuple[Float[Tensor, "p b"], Float[Tensor, "p b"], Float[Tensor, "p b"], Float[Tensor, "p b"]]:
    """Return, for each parameter and image, g·v, the difference quotient along v, ‖g‖, and the deviation of g·v."""
    model, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)

    def loss() -> Float[Tensor, " b"]:
        logits = model(feed.images, feed.masked_pe, feed.replacement)
        return F.cross_entropy(logits, labels, reduction="none")

    rows = []
    for name, g in gradients.items():
        θ = _parameter(model, name)
        v = torch.randn(θ.shape, generator=draw, dtype=θ.dtype)
        noise = variance[name] * v.square() if variance else torch.zeros_like(g)
        rows.append([(g * v).flatten(1).sum(1), _slope(θ, v, loss), g.flatten(1).norm(dim=1)])
        rows[-1].append(noise.flatten(1).sum(1).sqrt())
    found, slopes, norms, σ = (torch.stack(values) for values in zip(*rows, strict=True))
    return found, slopes, norms + 1e-3 * norms.square().mean(0).sqrt(), σ  # no norm is zero, even of a zero gradient


@torch.no_grad()
def _slope(θ: nn.Parameter, v: Tensor, loss: Callable[[], Tensor]) -> Float[Tensor, " b"]:
    """Return the central difference of the losses in the direction v of θ, whose value is restored."""
    before, values = θ.detach().clone(), []
    for sign in (1, -1):
        θ.copy_(before + sign * STEP * v)
        values.append(loss())
    θ.copy_(before)
    return (values[0] - values[1]) / (2 * STEP)


def _parameter(model: VictimModel, name: str) -> nn.Parameter:
    if name != "unk_embed":
        return model.vit.get_parameter(name)
    assert model.unk_embed is not None
    return model.unk_embed


def _worst(errors: Tensor) -> float:
    return float(errors.nan_to_num(math.inf).max())


def scale_of(true: Tensors, released: Tensors, variance: Tensors) -> Float[Tensor, " b"]:
    """Return c ≥ 0 of each image for which c · ∂ℓ/∂θ is nearest to the release, each entry weighted by 1 / variance.

    Args:
        true: the undefended gradients ∂ℓ/∂θ by parameter name, with the images in the first dimension.
        released: the gradients that the defense releases.
        variance: declared variance of each entry of the release.
    """
    least = _rounding(true)
    above, below = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for name, g in true.items():
        weight = 1 / (variance[name] + least)
        above = above + (weight * released[name] * g).flatten(1).sum(1)
        below = below + (weight * g.square()).flatten(1).sum(1)
    return (above / below.clamp(min=_LEAST_DIVISOR)).clamp(min=0)


def understatement(true: Tensors, error: Tensors, variance: Tensors, counts: Mapping[str, int]) -> float:
    """Return the worst factor by which the mean square of a parameter's error exceeds its declared variance.

    A mean of n squares has a relative standard deviation of √(2/n), of which six are allowed.

    Args:
        true: the undefended gradients by parameter name; they give the scale of rounding.
        error: released gradients less the true ones, which may be scaled for each image (`scale_of`).
        variance: declared variance of each entry of the release.
        counts: n of each parameter.
    """
    least = _rounding(true)
    return max(
        (float(e.square().mean()) + least) / (float(variance[name].mean()) + least) / _slack(counts[name])
        for name, e in error.items()
    )


def overstatement(
    true: Tensors, released: Tensors, error: Tensors, variance: Tensors, counts: Mapping[str, int], *, noise: bool
) -> float:
    """Return the factor by which the declared variance exceeds the mean square of the errors, of the worst parameter.

    For an entry that was released as zero, a variance v declares a bound, √(3v) (see `GradientDefense`), and all such
    entries of one parameter may lie far below it: so each counts as uniform up to the largest of all those that have
    its variance, in whichever parameter. Of noise on a share of the entries, a parameter in which fewer than 50 were
    sent tells nothing; of a rounding, whose law is only a model, one in which fewer than 1,000 have one.

    Args:
        true: the undefended gradients by parameter name; they give the scale of rounding.
        released: the gradients that the defense releases.
        error: released gradients less the true ones, which may be scaled for each image (`scale_of`).
        variance: declared variance of each entry of the release.
        counts: number of the entries of each parameter whose squares tell its variance.
        noise: whether the errors are noise, or those of a rounding.
    """
    least = _rounding(true)
    zeros = {name: (g == 0) & (variance[name] > 0) for name, g in released.items()}
    bounds, which = torch.cat([variance[name][zero] for name, zero in zeros.items()]).unique(return_inverse=True)
    missing = torch.cat([error[name][zero].square() for name, zero in zeros.items()])
    largest = missing.new_zeros(len(bounds)).scatter_reduce(0, which, missing, "amax")[which]
    uniform = missing.maximum(largest / 3).split([int(zero.sum()) for zero in zeros.values()])
    squares = {
        name: e.square().masked_scatter(zeros[name], known)
        for (name, e), known in zip(error.items(), uniform, strict=True)
    }
    factors = {
        name: (float(variance[name].mean()) + least) / (float(squares[name].mean()) + least) / _slack(counts[name])
        for name in error
    }
    if noise:
        few = {name for name, zero in zeros.items() if zero.any() and counts[name] < _FEWEST}
    else:
        few = {name for name in factors if int((variance[name] > 0).sum()) < _FEWEST_ROUNDED}
    return max((factor for name, factor in factors.items() if name not in few), default=0.0)


def _rounding(true: Tensors) -> float:
    """Return a variance well above that of rounding."""
    return 1e-18 * sum(float(g.square().mean()) for g in true.values()) + _LEAST_DIVISOR


def _slack(count: int) -> float:
    return 1 + 6 * math.sqrt(2 / max(count, 1))


def entries_with_noise(released: Tensors, variance: Tensors) -> dict[str, int]:
    """Return how many entries of each parameter hold noise: all but those released as zero with a declared variance.

    Args:
        released: the gradients that the defense releases.
        variance: declared variance of each entry of the release.
    """
    return {name: int(((g != 0) | (variance[name] == 0)).sum()) for name, g in released.items()}


def worse_than_best(
    fed: Float[Tensor, "b c h w"], source: Float[Tensor, "b c h w"], order: Int[Tensor, "b n"], patch: int
) -> float:
    """Return how much further the fed patches are from those that `order` names than from the best assignment.

    It is the difference of the sums of squared distances, over the expected sum for a random order, of the worst image.

    Args:
        fed: images as the defense feeds them.
        source: the same images before the defense.
        order: the declared order: slot i of the fed image holds patch order[i] of the source.
        patch: side of a patch, in pixels.
    """
    worst = 0.0
    for slots, patches, named in zip(patchify(fed, patch), patchify(source, patch), order, strict=True):
        costs = torch.cdist(slots, patches).square()
        best = costs[linear_sum_assignment(costs.numpy())].sum()
        random = torch.cdist(patches, patches).square().mean(1).sum()
        worst = max(worst, float((costs.gather(1, named[:, None]).sum() - best) / random.clamp(min=_LEAST_DIVISOR)))
    return worst


def colour_wheel(shape: tuple[int, int, int]) -> Float[Tensor, "c h w"]:
    """Return one period of colours across and down, a torus in RGB: low frequencies, and no two places alike."""
    down, across = (2 * math.pi * (torch.arange(n, dtype=torch.float64) + 0.5) / n for n in shape[1:])
    ring = 0.3 + 0.15 * down.cos()[:, None]
    blue = (0.15 * down.sin())[:, None].expand(shape[1:])
    return 0.5 + torch.stack([ring * across.cos(), ring * across.sin(), blue])


def span_of(model: VictimModel, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Return the images without what the patch projection W loses, with contrast reduced if they would leave [0, 1]."""
    W = model.vit.patch_embed.proj.weight.detach().flatten(1)
    X = patchify(model.normalise(images), model.patch)
    offset = unpatchify(X @ torch.linalg.pinv(W) @ W, model.image_shape) * model.std
    room = 0.9 * torch.minimum(model.mean, 1 - model.mean) / offset.abs().amax((2, 3), keepdim=True)
    return model.mean + offset * room.amin(1, keepdim=True).clamp(max=1)


def apart(a: Tensors, b: Tensors) -> float:
    """Return the largest difference of two releases, in each tensor relative to its largest entry."""
    if {name: value.shape for name, value in a.items()} != {name: value.shape for name, value in b.items()}:
        return math.inf
    pairs = [(value.detach().double(), b[name].detach().double()) for name, value in a.items()]
    return max(float((x - y).abs().max() / x.abs().max().clamp(min=_LEAST_DIVISOR)) for x, y in pairs if x.numel())


def unlike(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
    """Yield each way in which a value is not a finite tensor of this shape and type, in words.

    Args:
        name: name of the value, with which each text begins.
        value: what the defense returned; a missing value is None.
        shape: the expected shape.
        dtype: the expected type.
    """
    if not isinstance(value, Tensor):
        yield f"{name}: {type(value).__name__} instead of a tensor"
        return
    if tuple(value.shape) != tuple(shape):
        yield f"{name} of shape {tuple(value.shape)} instead of {tuple(shape)}"
    if value.dtype != dtype:
        yield f"{name} of {value.dtype} instead of {dtype}"
    if not value.isfinite().all():
        yield f"{name} with nan or inf"


def permutation_faults(name: str, orders: Int[Tensor, "b n"]) -> Iterator[str]:
    """Yield a text if an order is no permutation of 0 to n − 1."""
    if not torch.equal(orders.sort(1).values, torch.arange(orders.shape[1]).expand_as(orders)):
        yield f"{name} that leaves some out or repeats others"

"""In which order the values of all patches were permuted, from how they vary together in natural images."""

from itertools import permutations

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from privlab.base import linear_sum_assignment

__all__ = ["negative_values", "value_orders"]

DIMENSIONS = (2, 3, 4, 5, 6, 8)
"""Numbers of leading principal components in which the channels are sought: which hold colour differs."""

STARTS = 100
"""Random directions from which the channels are sought in each number of components."""

ANGLES = 16
"""Rotations of the two leading components, within a right angle, from which a layout is sought."""

WIDTHS = (0.3, 0.1, 0.03)
"""Widths, in squared distances of standardised values, of the similarities by which a layout is refined in turn."""

TURNINGS = 9
"""Times that a layout is turned to fit its assignment."""

ROUNDS = 30
"""The most assignments in each refinement; ten or so are needed."""

TINY = 1e-9
"""Relative variance below which a direction has none."""


def negative_values(patches: Float[Tensor, "m k"]) -> Tensor:
    """Mark the values that were turned into their negative, up to all of them: natural values rise and fall together.

    Args:
        patches: m patches of k values, permuted alike.
    """
    first = torch.linalg.eigh(_correlation(patches.mT.cov(correction=0)))[1][:, -1]
    return first < 0 if (first < 0).sum() * 2 <= len(first) else first >= 0


def value_orders(patches: Float[Tensor, "m k"], public: Float[Tensor, "k k"], channels: int) -> list[Int[Tensor, " k"]]:
    """Return orders that put permuted values back, one for each order of the channels, up to a symmetry of the square.

    Value `order[j]` of a permuted patch is value j of a patch that may be mirrored or turned. The channels are the
    groups of k / c values that a direction of the leading principal components tells apart best. In each, the
    correlations of neighbours give the layout: the two leading components are a square that is turned until
    it fits that of public patches best, and the assignment is then refined by similarities exp(−d² / width), with d²
    = 2 − 2 ρ. The best layout of the three is carried over to the other channels by their correlations with it.

    Args:
        patches: m patches of k = c · p² values, permuted alike, with natural signs.
        public: covariance of the values of public patches, not permuted, channel by channel.
        channels: c.
    """
    C, n = _correlation(patches.mT.cov(correction=0)), len(public) // channels
    like = torch.stack([_correlation(public[i : i + n, i : i + n]) for i in range(0, len(public), n)]).mean(0)
    best, found = -torch.inf, []
    for groups in _channels(C, channels):
        laid = [_layout(C[group][:, group], like) for group in groups]
        if (total := sum(fit for fit, _ in laid)) > best:
            first = max(range(channels), key=lambda i: laid[i][0])
            best, found = total, _carried(C, groups, first, groups[first][laid[first][1]])
    return [torch.cat(order) for order in permutations(found)]


def _correlation(S: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    std = S.diagonal().clamp_min(TINY * S.diagonal().max().clamp_min(torch.finfo(S.dtype).tiny)).sqrt()
    return S / std / std[:, None]


def _components(C: Float[Tensor, "k k"], count: int) -> Float[Tensor, "k q"]:
    """Return the leading components of values less their mean over the patch, with unit variance."""
    centred = C - C.mean(0) - C.mean(1, keepdim=True) + C.mean()
    return torch.linalg.eigh(centred)[1][:, -count:] * len(C) ** 0.5


def _channels(C: Float[Tensor, "k k"], channels: int) -> list[list[Int[Tensor, " n"]]]:
    """Return candidates for the channels: groups of equal size that one direction of the components tells apart.

    A direction is improved by turns with the groups of its thirds: it becomes the one of least variance within groups.
    """
    k = len(C)
    if channels == 1:
        return [[torch.arange(k, device=C.device)]]
    found, draw = [], Generator().manual_seed(0)
    for q in DIMENSIONS:
        Z, best, kept = _components(C, q), torch.inf, None
        for _ in range(STARTS):
            w = torch.randn(q, generator=draw, dtype=C.dtype).to(C)
            groups, ratio = (Z @ w).argsort().view(channels, -1), w
            for _ in range(ROUNDS):
                means = Z[groups].mean(1)
                within = Z.mT @ Z / k - means.mT @ means / channels + TINY * torch.eye(q).to(C)
                L = torch.linalg.cholesky(within)
                ratio, V = torch.linalg.eigh(_whitened(L, means.mT @ means / channels))
                w = torch.linalg.solve_triangular(L.mT, V[:, -1:], upper=True)[:, 0]
                before, groups = groups, (Z @ w).argsort().view(channels, -1)
                if torch.equal(before.sort(1).values, groups.sort(1).values):
                    break
            if -ratio[-1] < best:
                best, kept = -ratio[-1], groups
        found += [list(kept)] if kept is not None else []
    return found


def _whitened(L: Float[Tensor, "q q"], S: Float[Tensor, "q q"]) -> Float[Tensor, "q q"]:
    half = torch.linalg.solve_triangular(L, S, upper=False)
    return torch.linalg.solve_triangular(L, half.mT, upper=False)


def _layout(C: Float[Tensor, "n n"], like: Float[Tensor, "n n"]) -> tuple[float, Int[Tensor, " n"]]:
    """Return how well the values of one channel fit the public ones, in [−1, 1], and the value at each pixel."""
    Z, pixels = _components(C, 2), _components(like, 2)
    near, wanted = _similarities(C), _similarities(like)
    best = (-torch.inf, torch.arange(len(C), device=C.device))
    for step in range(ANGLES):
        angle = torch.tensor(step * torch.pi / 2 / ANGLES, dtype=C.dtype)
        Q = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2).to(C)
        order = _assign(-torch.cdist(pixels, Z @ Q).square())
        for _ in range(TURNINGS):
            U, _, V = torch.linalg.svd(Z[order].mT @ pixels)
            order = _assign(-torch.cdist(pixels, Z @ (U @ V)).square())
        for own, public in zip(near, wanted, strict=True):
            order = _refined(own, public, order)
        fit = float((near[-1][order][:, order] * wanted[-1]).sum() / near[-1].norm() / wanted[-1].norm())
        best = max(best, (fit, order), key=lambda each: each[0])
    return best


def _similarities(C: Float[Tensor, "n n"]) -> list[Float[Tensor, "n n"]]:
    return [((2 * C - 2).clamp_max(0) / width).exp() for width in WIDTHS]


def _refined(near: Float[Tensor, "n n"], wanted: Float[Tensor, "n n"], order: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Assign each value by its similarities with the others under the current order, until that is stable."""
    for _ in range(ROUNDS):
        before, order = order, _assign(wanted @ near[order])
        if torch.equal(before, order):
            break
    return order


def _carried(
    C: Float[Tensor, "k k"], groups: list[Int[Tensor, " n"]], first: int, laid: Int[Tensor, " n"]
) -> list[Int[Tensor, " n"]]:
    """Return the values of each channel by pixel: the values of another one vary as the pixel that they stand at."""
    own = _standard(C[laid][:, laid])
    return [
        laid if i == first else group[_assign(own @ _standard(C[group][:, laid]).mT)] for i, group in enumerate(groups)
    ]


def _standard(rows: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    return torch.nn.functional.normalize(rows - rows.mean(1, keepdim=True), dim=1)


def _assign(gain: Float[Tensor, "n n"]) -> Int[Tensor, " n"]:
    return torch.from_numpy(linear_sum_assignment(gain.cpu().numpy(), maximize=True)[1]).to(gain.device)

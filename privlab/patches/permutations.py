"""Row and column permutations of features as index tensors: place i receives the row or column `order[i]`.

With rows r and columns c, (P_R Z P_C)[i, j] = Z[r[i], c[j]]. No permutation matrix is ever built: a gather reads and
writes each value once, where P_R Z is a product of n × n by n × d (Permutation Equivariance, CVPR 2024, Eq. 2 and 5).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor


def permute_features(
    Z: Float[Tensor, "*b n d"], rows: Int[Tensor, "... n"] | None = None, columns: Int[Tensor, " d"] | None = None
) -> Float[Tensor, "*b n d"]:
    """Return P_R Z P_C, in one pass if both orders are given and one order of rows serves the batch.

    Args:
        Z: features; leading dimensions are those of a batch.
        rows: one order for all of a batch (n), or one for each image (b × n); None leaves rows in place.
        columns: one order for all rows; None leaves columns in place.

    Source: Eq. 2, 5 and 8.
    """
    if rows is not None and (columns is None or rows.ndim > 1 or Z.ndim == 2):  # whole rows: one order of all tokens
        n, d = Z.shape[-2:]
        first = torch.arange(0, Z[..., 0].numel(), n, device=Z.device)[:, None]
        Z = _Permuted.apply(Z.reshape(-1, d), (first + rows.reshape(-1, n)).flatten(), None).view(Z.shape)
        rows = None
    return Z if columns is None else _Permuted.apply(Z, rows, columns)


def restore_features(
    Z: Float[Tensor, "*b n d"], rows: Int[Tensor, "... n"] | None = None, columns: Int[Tensor, " d"] | None = None
) -> Float[Tensor, "*b n d"]:
    """Return P_R⁻¹ Z P_C⁻¹: the inverse of `permute_features` with the same orders.

    Args:
        Z: features; leading dimensions are those of a batch.
        rows: the order that the rows were permuted by, one for all of a batch (n) or one for each image (b × n); None
            leaves rows in place.
        columns: the order that the columns were permuted by; None leaves columns in place.
    """
    return permute_features(Z, None if rows is None else inverse(rows), None if columns is None else inverse(columns))


def inverse(order: Int[Tensor, "*b n"]) -> Int[Tensor, "*b n"]:
    """Return the inverse of each order along the last dimension."""
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order).contiguous()
    )


class _Permuted(torch.autograd.Function):
    """P_R Z P_C; its gradient is permuted back in one pass, whereas autograd accumulates the gradient of a gather."""

    @staticmethod
    def forward(Z: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        """Return the permuted features."""
        if columns is None:
            assert rows is not None
            return Z.index_select(-2, rows)
        if Z.device.type == "cpu" and Z.dtype in (torch.float32, torch.float64) and max(Z.shape[-2:]) < _EXACT_INDEX:
            return _sample(Z, rows, columns)
        return Z.gather(-1, columns.expand_as(Z)) if rows is None else Z[..., rows[:, None], columns]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
        """Keep the orders for the backward pass."""
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Return P_R⁻¹ G P_C⁻¹."""
        back = [None if order is None else inverse(order) for order in ctx.saved_tensors]
        return _Permuted.apply(gradients[0], *back), None, None


_EXACT_INDEX = 2**20
"""Below this size, an index that is computed in single precision rounds to itself."""


def _sample(Z: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
    """Return Z[..., rows[:, None], columns], exact to the last bit: features are sampled as pixels, at their centres.

    On a CPU torch does this with vector instructions in all threads: faster than its `gather`, `index_select` or an
    index (experiments/notes/speed.md). Up to 8 images, or tokens if rows stay in place, are sampled together as the
    channels of one image.
    """
    n, d = Z.shape[-2:] if rows is not None else (1, Z.shape[-1])
    count = Z.numel() // (n * d)
    together = math.gcd(count, max(1, min(8, count // torch.get_num_threads())))
    places = Z.new_empty(n, d, 2)  # (x, y) of each, in [−1, 1] across the outer edges
    places[..., 0] = (2 * columns + 1) / d - 1
    places[..., 1] = 0 if rows is None else ((2 * rows + 1) / n - 1)[:, None]
    pixels = Z.reshape(count // together, together, n, d)
    grid = places.expand(count // together, n, d, 2)
    return F.grid_sample(pixels, grid, mode="nearest", align_corners=False).view(Z.shape)


def draw_orders(n: int, draws: Sequence[Generator], *, fixed: int = 0) -> Int[Tensor, "b n"]:
    """Return one uniformly random order of n for each draw.

    Args:
        n: the number of rows or columns to permute.
        draws: generators on the CPU, one for each of the b orders.
        fixed: how many of the first places keep what they hold, such as the class and register tokens.
    """
    orders = [torch.cat([torch.arange(fixed), fixed + torch.randperm(n - fixed, generator=draw)]) for draw in draws]
    return torch.stack(orders)


def bits(*sizes: int) -> float:
    """Return log₂ Π n! over the `sizes` n: the size, in bits, of a key that permutes each of them freely."""
    return sum(math.lgamma(n + 1) for n in sizes) / math.log(2)

"""Row and column permutations of features, as index tensors: `order[i]` names what stands at place i.

With rows r and columns c, (P_R Z P_C)[i, j] = Z[r[i], c[j]]. No permutation matrix is ever built: a gather reads and
writes each value once, where P_R Z is a product of n × n by n × d (Permutation Equivariance, CVPR 2024, Eq. 2 and 5).
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

__all__ = ["bits", "draw_orders", "inverse", "permute_features", "restore_features"]


def permute_features(
    Z: Float[Tensor, "*b n d"], rows: Int[Tensor, "... n"] | None = None, columns: Int[Tensor, " d"] | None = None
) -> Float[Tensor, "*b n d"]:
    """Return P_R Z P_C, in one pass where both are given.

    `rows` is one order for all of a batch (n), or one for each image (b × n). Source: Eq. 2, 5 and 8.
    """
    if rows is not None and rows.ndim == 1 and columns is not None:
        return Z[..., rows[:, None], columns]
    if rows is not None:
        if rows.ndim == 1:
            Z = Z.index_select(-2, rows)
        elif columns is not None:
            return Z[torch.arange(len(Z), device=Z.device)[:, None, None], rows[..., None], columns]
        else:
            Z = Z[torch.arange(len(Z), device=Z.device)[:, None], rows]
    return Z if columns is None else Z.index_select(-1, columns)


def restore_features(
    Z: Float[Tensor, "*b n d"], rows: Int[Tensor, "... n"] | None = None, columns: Int[Tensor, " d"] | None = None
) -> Float[Tensor, "*b n d"]:
    """Return P_R⁻¹ Z P_C⁻¹: the inverse of `permute_features` with the same orders."""
    return permute_features(Z, None if rows is None else inverse(rows), None if columns is None else inverse(columns))


def inverse(order: Int[Tensor, "*b n"]) -> Int[Tensor, "*b n"]:
    """Return the inverse of each order along the last dimension."""
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order).contiguous()
    )


def draw_orders(n: int, draws: Sequence[Generator], *, fixed: int = 0) -> Int[Tensor, "b n"]:
    """Return one uniformly random order of n for each draw; the first `fixed` places keep what they hold."""
    orders = [torch.cat([torch.arange(fixed), fixed + torch.randperm(n - fixed, generator=draw)]) for draw in draws]
    return torch.stack(orders)


def bits(*sizes: int) -> float:
    """Return log₂ Π n!: the size, in bits, of a key that permutes each of `sizes` freely."""
    return sum(math.lgamma(n + 1) for n in sizes) / math.log(2)

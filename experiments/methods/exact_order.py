"""The best arrangement of a few pieces, found by trying all of them."""

from functools import lru_cache
from itertools import permutations
from math import factorial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from privlab.base import PrivlabError

MOST_SLOTS = 9
"""The most slots whose arrangements are all tried: 9! = 362,880 take some 30 ms."""


def arrange_exactly(
    costs: Float[Tensor, "2 n n"],
    grid: tuple[int, int],
    anchors: Bool[Tensor, " n"] | None = None,
    *,
    places: Float[Tensor, "n n"] | None = None,
) -> Int[Tensor, " n"]:
    """Return the order of the least total cost: slot s holds piece `order[s]`; the first one if several cost the same.

    Args:
        costs: as in `privlab.reassembly.solver.assemble`.
        grid: (h, w) with h · w = n ≤ `MOST_SLOTS`.
        anchors: marks each piece i that is known to belong in slot i.
        places: [s, j] is the cost of piece j in slot s by itself.

    Raises:
        PrivlabError: if the grid does not fit the costs or has more than `MOST_SLOTS` slots, or a cost is not finite.
    """
    (h, w), n = grid, costs.shape[-1]
    if h * w != n or n > MOST_SLOTS:
        raise PrivlabError(f"All arrangements of h · w = n ≤ {MOST_SLOTS} pieces are tried. Found {h} × {w} and {n}.")
    if not (costs.isfinite().all() and (places is None or places.isfinite().all())):
        raise PrivlabError("Costs of a jigsaw must be finite. Found nan or inf: are all pixels finite?")
    orders = _orders(n)
    if anchors is not None and anchors.any():
        fixed = anchors.nonzero()[:, 0].cpu().numpy()
        orders = orders[(orders[:, fixed] == fixed).all(1)]
    across, down = costs.detach().double().cpu().numpy()
    total = np.zeros(len(orders))
    for s in range(n):
        if s % w < w - 1:
            total += across[orders[:, s], orders[:, s + 1]]
        if s < n - w:
            total += down[orders[:, s], orders[:, s + w]]
        if places is not None:
            total += places[s].detach().double().cpu().numpy()[orders[:, s]]
    return torch.from_numpy(orders[total.argmin()].astype(np.int64)).to(costs.device)


@lru_cache(maxsize=1)
def _orders(n: int) -> Int[np.ndarray, "_ n"]:
    """Return all n! orders, in lexicographic order."""
    flat = np.fromiter((piece for order in permutations(range(n)) for piece in order), np.int8, n * factorial(n))
    return flat.reshape(-1, n)

"""Re-assembly of patches by their borders alone, without training, with anchors or without."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from privlab.base import PrivlabError, linear_sum_assignment
from privlab.reassembly.border_costs import GRAIN

DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0))
"""Right, left, down, up; direction d ^ 1 is the opposite of d."""

ROUNDS = 30
"""Rounds of re-growth: about a quarter of a second for 196 pieces without anchors."""

STAY = 0.8
"""Cost of a piece that leaves its slot if most pieces seem to have stayed, in units of the median cost of a best
neighbour; chosen on photographs."""

CHANCE_GROUP = 3
"""The largest group of neighbours that fit each other by chance after all patches of a photograph are shuffled."""

LEAST_CHANGE = 1e-6
"""Change of the total cost, in units of the costs, below which an exchange is rounding."""

Orders = Int[np.ndarray, " slots"]
"""The piece in each slot, −1 for an empty slot."""


def assemble(
    costs: Float[Tensor, "2 n n"],
    grid: tuple[int, int],
    anchors: Bool[Tensor, " k"] | None = None,
    *,
    standing: Bool[Tensor, " k"] | None = None,
    places: Float[Tensor, "n n"] | None = None,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Int[Tensor, " n"]:
    """Return the order of the least total cost that was found: slot s holds piece `order[s]`.

    Growth: the next piece to be placed is the one with the largest margin over its rivals, given the placed pieces.
    Descent: pieces in the slots of one colour of the chessboard do not touch, so their best arrangement given the
    others is an assignment. Swaps of any two pieces follow and, if no slot is known, the best cyclic shift.
    Rounds: of the pieces that are each other's best neighbours, one connected fragment without a random rectangle
    stays; the rest is grown again, and the cheaper arrangement is kept. With `places` and without anchors, the search
    also runs without `places`.
    Standing pieces: if some seem to be in their own slots, most pieces have probably stayed there. The search then has
    two starts, the arrangement as it is and the growth around these pieces, and goes on from the cheaper one. Each
    piece that leaves its slot costs `STAY`. All fragments stay in a round, except those of single pieces and what lies
    in a random rectangle.

    The order of equal pieces is left to chance.

    Args:
        costs: [0, i, j] is the cost of piece j to the right of piece i, [1, i, j] below it; costs of several images
            cut in the same way may be added up.
        grid: (h, w) with h · w = n.
        anchors: marks, of all n, each piece i that is known to belong in slot i.
        standing: marks, of all n, each piece i that seems to belong in slot i, as `standing_slots` does; it is read
            only if there are no anchors.
        places: [s, j] is the cost of piece j in slot s alone, such as −log of a predictor's probability.
        rounds: rounds of re-growth after the first.
        seed: seed of the random choices of these rounds.

    Raises:
        PrivlabError: if grid or anchors do not fit the costs, or a cost is not finite.

    Source: growth after Paikin and Tal, CVPR 2015; fragments after Pomeranz et al., CVPR 2011.
    """
    n = costs.shape[-1]
    if grid[0] * grid[1] != n or (anchors is not None and len(anchors) != n):
        count = "" if anchors is None else f" and {len(anchors)} anchors"
        raise PrivlabError(f"A grid of {grid[0]} × {grid[1]} needs as many pieces and anchors. Found {n}{count}.")
    if not (costs.isfinite().all() and (places is None or places.isfinite().all())):
        raise PrivlabError("Costs of a jigsaw must be finite. Found nan or inf: are all pixels finite?")
    fixed = np.zeros(n, bool) if anchors is None else anchors.cpu().numpy()
    if n - fixed.sum() < 2:
        return torch.arange(n, device=costs.device)
    four, draw = _four(costs), Generator().manual_seed(seed)
    board = _board(four, np.zeros((n, n)) if places is None else places.detach().double().cpu().numpy(), grid)
    if standing is not None and standing.any() and not fixed.any():
        return torch.from_numpy(_repair(board, standing.cpu().numpy(), rounds, draw)).to(costs.device)
    order = _search(board, board if board.own.any() or fixed.any() else _room(board), fixed, rounds, draw)
    if board.own.any() and not fixed.any():  # places may mislead: borders alone may find the frame
        bare = _board(four, np.zeros((n, n)), grid)
        free = _settle(board, _search(bare, _room(bare), fixed, rounds, draw), np.arange(n), shift=False)
        order = min(order, free, key=lambda found: _total(board, found))
    return torch.from_numpy(order).to(costs.device)


def standing_slots(costs: Float[Tensor, "2 n n"], grid: tuple[int, int]) -> Bool[Tensor, " n"]:
    """Mark the patches that are in their own slots as far as their borders show: the largest group that fits.

    Two neighbours fit if each is the other's best one in their direction. A group no larger than `CHANCE_GROUP` proves
    nothing: no patch is marked then.
    """
    n = costs.shape[-1]
    _, group = _fragments(_board(_four(costs), np.zeros((n, n)), grid), np.arange(n))
    size = np.bincount(group)
    return torch.from_numpy((group == size.argmax()) & (size.max() > CHANCE_GROUP)).to(costs.device)


def _four(costs: Float[Tensor, "2 n n"]) -> Float[np.ndarray, "4 n n"]:
    """Return the costs by `DIRECTIONS`."""
    across, down = costs.detach().double().cpu().numpy()
    return np.stack([across, across.T, down, down.T])


@dataclass(frozen=True, eq=False)
class _Board:
    """h × w slots: `beside[d, s]` is the slot in direction d of s, −1 beyond the rim.

    `costs[d, a, b]` is the cost of piece b in direction d of piece a, and `best[d, a]` the b for which it is least.
    `own[s, a]` is the cost of piece a in slot s whatever its neighbours.
    """

    shape: tuple[int, int]
    beside: Int[np.ndarray, "4 slots"]
    costs: Float[np.ndarray, "4 n n"]
    own: Float[np.ndarray, "slots n"]
    best: Int[np.ndarray, "4 n"]


def _board(costs: Float[np.ndarray, "4 n n"], own: Float[np.ndarray, "slots n"], shape: tuple[int, int]) -> _Board:
    h, w = shape
    framed = np.pad(np.arange(h * w).reshape(h, w), 1, constant_values=-1)
    beside = [framed[1 + y : 1 + y + h, 1 + x : 1 + x + w].ravel() for y, x in DIRECTIONS]
    return _Board(shape, np.stack(beside), costs, own, _others(costs).argmin(2))


def _room(board: _Board) -> _Board:
    """Return a larger board on which an image may grow to any side from any slot."""
    h, w = (2 * side - 1 for side in board.shape)
    return _board(board.costs, np.zeros((h * w, board.own.shape[1])), (h, w))


def _others(costs: Float[np.ndarray, "4 n n"]) -> Float[np.ndarray, "4 n n"]:
    """Return the costs with infinity for a piece next to itself."""
    return np.where(np.eye(costs.shape[1], dtype=bool), np.inf, costs)


def _total(board: _Board, order: Orders) -> float:
    rim = np.append(order, -1)[board.beside[::2]]
    pairs = sum(c[order[p >= 0], p[p >= 0]].sum() for c, p in zip(board.costs[::2], rim, strict=True))
    return float(pairs + board.own[np.arange(len(order)), order].sum())


def _slot_costs(board: _Board, order: Orders) -> Float[np.ndarray, "slots n"]:
    """Return the cost of every piece in every slot, given the pieces around the slot."""
    around = np.append(order, -1)[board.beside]
    cost = board.own.copy()
    for costs, piece in zip(board.costs, around, strict=True):
        cost[piece >= 0] += costs[:, piece[piece >= 0]].T
    return cost


def _grow(board: _Board, order: Orders, window: tuple[int, int]) -> Int[np.ndarray, " n"]:
    """Place the missing pieces, the surest first, so that all are within a window; return the window's content."""
    order, cost = order.copy(), _slot_costs(board, order)
    known = (np.append(order, -1)[board.beside] >= 0).sum(0)
    free = np.setdiff1d(np.arange(cost.shape[1]), order)
    rows, columns = np.divmod(np.arange(len(order)), board.shape[1])
    while True:
        inside = _within(rows, order >= 0, window[0]) & _within(columns, order >= 0, window[1])
        if not len(free):
            return order[inside]
        slots = np.flatnonzero(inside & (order < 0) & (known > 0))
        i, j = _surest(cost[np.ix_(slots, free)], known[slots, None])
        piece, order[slots[i]] = free[j], free[j]
        free = np.delete(free, j)
        for costs, slot in zip(board.costs, board.beside[:, slots[i]], strict=True):
            if slot >= 0:
                cost[slot] += costs[piece]
                known[slot] += 1


def _within(places: np.ndarray, taken: np.ndarray, size: int) -> np.ndarray:
    return (places > places[taken].max() - size) & (places < places[taken].min() + size)


def _surest(cost: np.ndarray, known: np.ndarray) -> tuple[int, int]:
    """Return the slot and the piece with the largest margin over other pieces and other slots."""
    mean = cost / known
    margin = (np.minimum(_rival(mean, 0), _rival(mean, 1)) - mean) * known
    return divmod(int(margin.argmax()), cost.shape[1])


def _rival(cost: np.ndarray, axis: int) -> np.ndarray:
    """Return, for each entry, the least of the other costs along an axis."""
    if cost.shape[axis] == 1:
        return np.full_like(cost, np.inf)
    first, second = np.split(np.partition(cost, 1, axis).take([0, 1], axis), 2, axis)
    return np.where(cost == first, second, first)


def _settle(board: _Board, order: Orders, movable: Int[np.ndarray, " k"], *, shift: bool) -> Orders:
    """Descend to an arrangement that no assignment within a colour, no swap and no shift improves."""
    before = np.inf
    while (total := _total(board, order)) < before - LEAST_CHANGE:
        before = total
        for colour in (0, 1):
            order = _assign(board, order, movable[np.add(*np.divmod(movable, board.shape[1])) % 2 == colour])
        order = _swap(board, order, movable)
        if shift:
            order = _shift(board, order)
    return order


def _assign(board: _Board, order: Orders, slots: Int[np.ndarray, " k"]) -> Orders:
    """Rearrange the pieces in slots that do not touch, at the least cost."""
    order = order.copy()
    order[slots] = order[slots][linear_sum_assignment(_slot_costs(board, order)[np.ix_(slots, order[slots])])[1]]
    return order


def _swap(board: _Board, order: Orders, movable: Int[np.ndarray, " k"]) -> Orders:
    """Swap the two pieces that reduce the cost most, until no swap reduces it."""
    order = order.copy()
    while True:
        cost = _slot_costs(board, order)[:, order]
        own = cost.diagonal()
        change = cost + cost.T - own - own[:, None] + _touching(board, order)
        change = change[np.ix_(movable, movable)]
        i, j = divmod(int(change.argmin()), len(movable))
        if change[i, j] > -LEAST_CHANGE:
            return order
        order[movable[[i, j]]] = order[movable[[j, i]]]


def _touching(board: _Board, order: Orders) -> Float[np.ndarray, "slots slots"]:
    """Return the part of a swap's change that is missed if the two slots touch: the pieces are neighbours then."""
    missed = np.zeros((len(order), len(order)))
    for costs, beside in zip(board.costs[::2], board.beside[::2], strict=True):
        a, b = np.flatnonzero(beside >= 0), beside[beside >= 0]
        x, y = order[a], order[b]
        missed[a, b] = missed[b, a] = costs[x, y] + costs[y, x] - costs[x, x] - costs[y, y]
    return missed


def _shift(board: _Board, order: Orders) -> Orders:
    """Return the cyclic shift that puts the rim where borders fit worst, for rows and columns separately."""
    square = order.reshape(board.shape)
    across = board.costs[0][square, np.roll(square, -1, 1)].sum(0)
    down = board.costs[2][square, np.roll(square, -1, 0)].sum(1)
    return np.roll(square, (-down.argmax() - 1, -across.argmax() - 1), (0, 1)).ravel()


def _search(board: _Board, ground: _Board, fixed: Bool[np.ndarray, " n"], rounds: int, draw: Generator) -> Orders:
    """Grow, descend and repeat, on a `ground` that leaves room on every side if no slot is known."""
    movable, shift = np.flatnonzero(~fixed), ground is not board
    start = np.where(fixed, np.arange(len(fixed)), -1) if fixed.any() else _first(board)
    order = _settle(board, _regrow(board, ground, start), movable, shift=shift)
    for _ in range(rounds):
        count, fragments = _fragments(board, order)
        if count == 1:
            break
        kept = fixed | _part(fragments, board.shape, draw)
        trial = _settle(board, _regrow(board, ground, np.where(kept, order, -1)), movable, shift=shift)
        order = min(order, trial, key=lambda found: _total(board, found))
    return order


def _repair(board: _Board, standing: Bool[np.ndarray, " n"], rounds: int, draw: Generator) -> Orders:
    """Descend from two starts, keep the cheaper one, and repeat: most pieces have probably stayed in their slots."""
    slots, n = np.arange(len(standing)), len(standing)
    unit = np.median(_others(board.costs).min(2))
    leaving = round(STAY * unit / GRAIN) * GRAIN * (1 - np.eye(n))  # sums with costs in grains stay exact
    near = _board(board.costs, board.own + leaving, board.shape)

    def descend(kept: Bool[np.ndarray, " n"], order: Orders) -> Orders:
        return _settle(near, _grow(near, np.where(kept, order, -1), near.shape), slots, shift=False)

    starts = descend(np.ones(n, bool), slots), descend(standing, slots)
    order = min(starts, key=lambda found: _total(near, found))
    for _ in range(rounds):
        count, fragments = _fragments(near, order)
        if count == 1:
            break
        trial = descend(_all_but_a_hole(fragments, near.shape, draw), order)
        order = min(order, trial, key=lambda found: _total(near, found))
    return order


def _first(board: _Board) -> Orders:
    """Place one piece: the surest one in its slot if pieces have places, else the one with the surest neighbour."""
    order = np.full(len(board.own), -1)
    slot, piece = _surest(board.own, np.ones((len(order), 1), int))
    if not board.own.any():
        best, second = np.partition(_others(board.costs), 1, 2)[..., :2].transpose(2, 0, 1)
        piece = int((second - best).max(0).argmax())
    order[slot] = piece
    return order


def _regrow(board: _Board, ground: _Board, order: Orders) -> Orders:
    """Grow the missing pieces around the placed ones, on the board itself or anywhere on a larger ground."""
    if ground is board:
        return _grow(board, order, board.shape)
    laid = np.full(len(ground.own), -1)
    rows, columns = np.divmod(np.flatnonzero(order >= 0), board.shape[1])
    laid[_centre(rows, ground.shape[0]) * ground.shape[1] + _centre(columns, ground.shape[1])] = order[order >= 0]
    return _grow(ground, laid, board.shape)


def _centre(places: Int[np.ndarray, " k"], size: int) -> Int[np.ndarray, " k"]:
    return places - places.min() + (size - 1 - np.ptp(places)) // 2


def _fragments(board: _Board, order: Orders) -> tuple[int, Int[np.ndarray, " n"]]:
    """Number the connected groups of slots whose pieces are each other's best neighbours."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = []
    for d in (0, 2):
        a, b = np.flatnonzero(board.beside[d] >= 0), board.beside[d][board.beside[d] >= 0]
        mutual = (board.best[d][order[a]] == order[b]) & (board.best[d + 1][order[b]] == order[a])
        edges.append(np.stack([a[mutual], b[mutual]]))
    a, b = np.concatenate(edges, 1)
    return connected_components(coo_array((np.ones(len(a)), (a, b)), (len(order),) * 2), directed=False)


def _part(fragments: Int[np.ndarray, " n"], shape: tuple[int, int], draw: Generator) -> Bool[np.ndarray, " n"]:
    """Return a fragment, drawn in proportion to its size, without a random rectangle of at most half the sides."""
    slot, *box = torch.rand(5, generator=draw, dtype=torch.float64).tolist()
    kept = fragments == fragments[int(slot * len(fragments))]
    cut = np.zeros(shape, bool)
    height, width = (1 + int(share * (side // 2)) for share, side in zip(box[:2], shape, strict=True))
    top, left = int(box[2] * (shape[0] - height + 1)), int(box[3] * (shape[1] - width + 1))
    cut[top : top + height, left : left + width] = True
    return kept & ~cut.ravel() if (kept & ~cut.ravel()).any() else kept


def _all_but_a_hole(
    fragments: Int[np.ndarray, " n"], shape: tuple[int, int], draw: Generator
) -> Bool[np.ndarray, " n"]:
    """Return all fragments of two or more pieces, without a random rectangle of about half the sides at most."""
    box = torch.rand(4, generator=draw, dtype=torch.float64).tolist()
    size = np.bincount(fragments)[fragments]
    hole = np.zeros(shape, bool)
    height, width = (min(2 + int(share * (side // 2)), side) for share, side in zip(box[:2], shape, strict=True))
    top, left = int(box[2] * (shape[0] - height + 1)), int(box[3] * (shape[1] - width + 1))
    hole[top : top + height, left : left + width] = True
    kept = (size > 1) & ~hole.ravel()
    return kept if kept.any() else size == size.max()

"""The jigsaw by borders: costs against a loop, arrangements that were planted, photographs put together again."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.images import Preprocessing, open_images
from privlab.patches import blockwise_mask, inverse, patchify, shuffle_within
from privlab.reassembly import FLOOR, ROUNDS, assemble, border_cost
from privlab.reassembly.border_costs import border_costs
from privlab.reassembly.solver import _board, _first, _settle, _slot_costs, _surest, _total, _touching

Photographs = Callable[[int, int], Tensor]


def solve_jigsaw(
    patches: Tensor, grid: tuple[int, int], anchors: Tensor | None = None, *, floor: float = FLOOR, rounds: int = ROUNDS
) -> Tensor:
    """Return the order that re-assembles an image from its patches by their border costs."""
    return assemble(border_costs(patches, floor=floor), grid, anchors, rounds=rounds)


def seeded(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def total(costs: Tensor, order: Tensor, grid: tuple[int, int]) -> float:
    """Return the cost of an arrangement, pair by pair."""
    (h, w), held = grid, order.tolist()
    across = sum(costs[0, held[r * w + c], held[r * w + c + 1]] for r in range(h) for c in range(w - 1))
    down = sum(costs[1, held[r * w + c], held[r * w + w + c]] for r in range(h - 1) for c in range(w))
    return float(across + down)


def naive_one_way(patch: Tensor, line: Tensor, floor: float) -> float:
    """Return −log-likelihood of the next line of pixels, pixel by pixel, in numpy's words."""
    P, x = patch.numpy(), line.numpy()
    c, p, _ = P.shape
    errors = [P[:, y, k] - (1.5 * P[:, y, k - 1] - 0.5 * P[:, y, k - 2]) for y in range(p) for k in (p - 2, p - 1)]
    C = sum(np.outer(e, e) for e in errors) / len(errors) + floor * np.eye(c)
    beyond = [x[:, y] - (1.5 * P[:, y, -1] - 0.5 * P[:, y, -2]) for y in range(p)]
    return sum((1 + c) / 2 * math.log(1 + e @ np.linalg.solve(C, e)) for e in beyond)


def test_border_costs_are_those_of_a_loop() -> None:
    patches = torch.rand(4, 3, 5, 5, generator=seeded(0), dtype=torch.float64)
    costs = border_costs(patches, floor=1e-3)
    for i, j in itertools.product(range(4), range(4)):
        for found, turned in zip(costs, (patches, patches.mT), strict=True):
            left, right = turned[i], turned[j]
            there = naive_one_way(left, right[..., 0], 1e-3)
            back = naive_one_way(right.flip(-1), left[..., -1], 1e-3)
            assert float(found[i, j]) == pytest.approx(there + back, rel=1e-10)


def test_border_costs_take_batches_and_sides_of_three() -> None:
    left, right = (torch.rand(2, n, 1, 3, 3, generator=seeded(n), dtype=torch.float64) for n in (4, 5))
    together = border_cost(left, right)
    assert together.shape == (2, 4, 5)
    assert_close(together[1], border_cost(left[1], right[1]))


def test_a_grey_patch_continues_itself_for_nothing_and_a_ramp_its_neighbour_best() -> None:
    grey = torch.full((1, 1, 4, 4), 0.3, dtype=torch.float64)
    assert_close(border_costs(grey), torch.zeros(2, 1, 1, dtype=torch.float64))
    ramp = torch.linspace(0, 1, 16, dtype=torch.float64).expand(1, 1, 4, 16)
    across = border_costs(patchify(ramp, 4).view(4, 1, 4, 4))[0]
    assert across.argmin(1)[:3].tolist() == [1, 2, 3]


def test_more_neighbours_are_found_with_the_variance_of_an_exact_pixel_than_with_others(
    photographs: Photographs,
) -> None:
    """Of seven photographs: a hundred times as much hides faint borders, a hundredth believes those of flat patches."""
    images, slots = photographs(7, 160).double(), torch.arange(100).view(10, 10)

    def found(floor: float) -> int:
        right = 0
        for patches in patchify(images, 16).unflatten(2, (3, 16, 16)):
            across, down = border_costs(patches, floor=floor) + torch.eye(100).where(torch.eye(100) == 0, torch.inf)
            right += int((across.argmin(1)[slots[:, :-1]] == slots[:, 1:]).sum())
            right += int((down.argmin(1)[slots[:-1]] == slots[1:]).sum())
        return right

    assert found(FLOOR) > found(100 * FLOOR)
    assert found(FLOOR) > found(FLOOR / 100)


@pytest.mark.slow
@given(seed=st.integers(0, 2**31), anchored=st.integers(0, 5), placed=st.booleans(), scale=st.sampled_from((1, 1e-3)))
@settings(max_examples=40)
def test_what_is_found_is_an_arrangement_that_no_swap_improves(
    seed: int, anchored: int, placed: bool, scale: float
) -> None:
    """Every piece once, anchors in their slots, and a local optimum of the total cost, however small the costs are."""
    grid, n = (3, 4), 12
    costs = scale * torch.randn(2, n, n, generator=seeded(seed), dtype=torch.float64)
    places = scale * torch.randn(n, n, generator=seeded(seed + 1), dtype=torch.float64) if placed else None
    anchors = torch.zeros(n, dtype=torch.bool)
    anchors[torch.randperm(n, generator=seeded(seed))[:anchored]] = True
    order = assemble(costs, grid, anchors, places=places, rounds=2)

    def cost(arrangement: Tensor) -> float:
        own = 0 if places is None else float(places[torch.arange(n), arrangement].sum())
        return total(costs, arrangement, grid) + own

    assert_close(order.sort().values, torch.arange(n))
    assert_close(order[anchors], torch.arange(n)[anchors])
    for a, b in itertools.combinations((~anchors).nonzero().flatten().tolist(), 2):
        swapped = order.clone()
        swapped[[a, b]] = order[[b, a]]
        assert cost(swapped) > cost(order) - 1e-5


@pytest.mark.parametrize("seed", range(5))
def test_no_cyclic_shift_improves_what_is_found(seed: int) -> None:
    grid = (3, 4)
    costs = torch.randn(2, 12, 12, generator=seeded(seed), dtype=torch.float64)
    order = assemble(costs, grid, rounds=0)
    for shift in itertools.product(range(3), range(4)):
        assert total(costs, order.view(grid).roll(shift, (0, 1)).flatten(), grid) > total(costs, order, grid) - 1e-5


def test_pieces_that_must_go_around_do() -> None:
    """Of three slots that do not touch, each has the next one's piece; no swap of two is an improvement."""
    own = np.where(np.eye(9, dtype=bool), 0.0, 10.0)
    own[[0, 2, 4], [0, 2, 4]], own[[0, 2, 4], [2, 4, 0]] = 1.0, 0.0
    board = _board(np.zeros((4, 9, 9)), own, (3, 3))
    assert _settle(board, np.arange(9), np.arange(9), shift=False).tolist() == [2, 1, 4, 3, 0, 5, 6, 7, 8]


def test_a_swap_changes_the_cost_as_it_says() -> None:
    """Also of slots that touch."""
    a, d = torch.randn(2, 6, 6, generator=seeded(0), dtype=torch.float64).numpy()
    board, order = _board(np.stack([a, a.T, d, d.T]), np.zeros((6, 6)), (2, 3)), np.array([3, 1, 4, 0, 5, 2])
    cost = _slot_costs(board, order)[:, order]
    change = cost + cost.T - cost.diagonal() - cost.diagonal()[:, None] + _touching(board, order)
    for i, j in itertools.combinations(range(6), 2):
        swapped = order.copy()
        swapped[[i, j]] = order[[j, i]]
        assert change[i, j] == pytest.approx(_total(board, swapped) - _total(board, order))


def test_the_first_piece_is_the_one_of_the_surest_neighbour() -> None:
    costs = np.ones((4, 6, 6))
    costs[0, 3, 5] = 0.2
    assert _first(_board(costs, np.zeros((6, 6)), (2, 3))).max() == 3


def test_the_surest_piece_is_that_of_the_largest_margin_by_borders() -> None:
    """Costs are compared by border, and a margin over two borders counts twice."""
    assert _surest(np.array([[0.0, 1.2], [2.0, 0.0]]), np.array([[1], [2]])) == (1, 1)
    assert _surest(np.array([[0.9, 5.0], [2.0, 20.0]]), np.array([[1], [4]])) == (1, 0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("anchored", [0, 3])
def test_a_planted_arrangement_is_found(seed: int, anchored: int) -> None:
    """True neighbours cost 0 to 0.2, others 0.1 to 1, so that not every piece looks best beside its own."""
    grid, n = (4, 5), 20
    truth = torch.randperm(n, generator=seeded(seed))
    costs = 0.1 + 0.9 * torch.rand(2, n, n, generator=seeded(seed), dtype=torch.float64)
    held = truth.view(grid)
    for direction, first, second in ((0, held[:, :-1], held[:, 1:]), (1, held[:-1], held[1:])):
        costs[direction, first, second] = 0.2 * torch.rand(first.shape, generator=seeded(seed), dtype=torch.float64)
    if anchored:  # anchors are pieces in the slot of their own number
        costs, truth = costs[:, truth][:, :, truth], torch.arange(n)
    assert_close(assemble(costs, grid, torch.arange(n) < anchored), truth)


def test_places_alone_decide_where_borders_say_nothing() -> None:
    truth = torch.randperm(12, generator=seeded(3))
    places = torch.ones(12, 12, dtype=torch.float64)
    places[torch.arange(12), truth] = 0
    assert_close(assemble(torch.zeros(2, 12, 12, dtype=torch.float64), (3, 4), places=places), truth)


def test_weak_places_settle_the_frame_that_borders_leave_open() -> None:
    """A torus looks the same wherever it is cut: only the places say where it begins."""
    grid, n = (4, 4), 16
    slots = torch.arange(n).view(grid)
    costs = torch.ones(2, n, n, dtype=torch.float64)
    costs[0, slots, slots.roll(-1, 1)] = costs[1, slots, slots.roll(-1, 0)] = 0
    truth = slots.roll((1, 2), (0, 1)).flatten()
    places = torch.full((n, n), 0.01, dtype=torch.float64)
    places[torch.arange(n), truth] = 0
    assert_close(assemble(costs, grid, places=places), truth)


@pytest.mark.parametrize("seed", range(3))
def test_places_that_mislead_do_not_keep_the_borders_from_the_least_cost(seed: int) -> None:
    """Each piece has a slot of its own, a wrong one, where it costs less: not as much less as its borders gain."""
    grid, n, draw = (4, 5), 20, seeded(seed)
    truth = torch.randperm(n, generator=draw)
    costs, held = 0.5 + 0.5 * torch.rand(2, n, n, generator=draw, dtype=torch.float64), truth.view(grid)
    costs[0, held[:, :-1], held[:, 1:]] = costs[1, held[:-1], held[1:]] = 0
    places = torch.zeros(n, n, dtype=torch.float64)
    places[torch.arange(n), torch.randperm(n, generator=draw)] = -0.5
    assert_close(assemble(costs, grid, places=places, rounds=5), truth)


def test_the_same_seed_finds_the_same() -> None:
    costs = torch.rand(2, 20, 20, generator=seeded(0))
    assert_close(assemble(costs, (4, 5), seed=3), assemble(costs, (4, 5), seed=3))


@pytest.mark.parametrize(("grid", "free"), [((1, 1), 1), ((1, 5), 5), ((5, 1), 5), ((2, 2), 1), ((2, 2), 0)])
def test_small_and_finished_puzzles(grid: tuple[int, int], free: int) -> None:
    n = grid[0] * grid[1]
    anchors = torch.arange(n) >= free
    order = solve_jigsaw(torch.rand(n, 3, 4, 4, generator=seeded(0)), grid, anchors, rounds=3)
    assert_close(order.sort().values, torch.arange(n))
    assert_close(order[anchors], torch.arange(n)[anchors])


def test_pieces_that_are_all_alike_are_still_arranged() -> None:
    order = solve_jigsaw(torch.full((9, 3, 4, 4), 0.5), (3, 3), rounds=2)
    assert_close(order.sort().values, torch.arange(9))


def masked(images: Tensor, gamma: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return patches shuffled under an MJP mask, the mask, and the order that puts them right, per image."""
    side = images.shape[-1] // 16
    cases = []
    for seed, patches in enumerate(patchify(images, 16)):
        mask = blockwise_mask((side, side), gamma, seeded(seed))
        order = shuffle_within(mask, seeded(seed))
        cases.append((patches[order].view(-1, 3, 16, 16), mask, inverse(order)))
    return cases


def test_bundled_photographs_come_back_from_mjp_masks(photographs: Photographs) -> None:
    placed = [
        float((solve_jigsaw(patches, (10, 10), ~mask) == truth)[mask].double().mean())
        for patches, mask, truth in masked(photographs(7, 160), 0.27)
    ]
    assert sum(placed) / len(placed) > 0.9


def test_bundled_photographs_come_back_without_anchors(photographs: Photographs) -> None:
    """Neighbours are found even where nothing says where the image begins."""
    right = []
    for patches, _, truth in masked(photographs(4, 160), 1.0):
        home = inverse(truth)[solve_jigsaw(patches, (10, 10))].view(10, 10)
        across = (home.diff(dim=1) == 1) & (home[:, :-1] % 10 < 9)
        right.append(float(torch.cat([across.flatten(), (home.diff(dim=0) == 10).flatten()]).double().mean()))
    assert sum(right) / len(right) > 0.85


def test_photographs_come_back_at_224_pixels(shared: Callable[[str], Path]) -> None:
    """SCIENCE's crude solver places 90.3 % of what MJP masks at γ = 0.27; this one misses equal patches alone."""
    cut = Preprocessing(size=(224, 224), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9, interpolation="bicubic")
    files = sorted(shared("data/imagenet_samples").glob("*.JPEG"))[::80]
    images = torch.stack([cut(image.pixels) for image in open_images(files) if image.pixels])
    placed, errors = [], []
    for (patches, mask, truth), whole in zip(masked(images, 0.27), patchify(images, 16), strict=True):
        order = solve_jigsaw(patches, (14, 14), ~mask)
        placed.append(float((order == truth)[mask].double().mean()))
        errors.append(float((patches[order].flatten(1) - whole).square().mean()))
    assert sum(placed) / len(placed) >= 0.95
    assert -10 * math.log10(max(errors) + 1e-9) > 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (2, 3)}, r"grid of 2 × 3 needs as many pieces and anchors\. Found 4\."),
        ({"anchors": torch.ones(3, dtype=torch.bool)}, r"Found 4 and 3 anchors"),
        ({"patches": torch.full((4, 3, 4, 4), math.nan)}, "finite pixels"),
        ({"patches": torch.rand(4, 3, 2, 2)}, "3 × 3 pixels or more. Found a side of 2"),
        ({"floor": 0.0}, r"positive variance\. Found 0\.0"),
    ],
)
def test_what_is_no_puzzle_is_refused(change: dict[str, object], message: str) -> None:
    options = {"patches": torch.rand(4, 3, 4, 4), "grid": (2, 2), "anchors": None} | change
    with pytest.raises(PrivlabError, match=message):
        solve_jigsaw(**options)

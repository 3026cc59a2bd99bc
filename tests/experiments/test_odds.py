"""Odds of borders, all arrangements tried, and the law of slots: against loops, and on images that are known."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.experiments.methods.border_odds import border_odds
from privlab.experiments.methods.exact_order import arrange_exactly
from privlab.experiments.methods.slot_law import describe_pieces, fit_slots
from privlab.reassembly import assemble
from privlab.reassembly.border_costs import border_costs


def seeded(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def drawn(n: int, seed: int = 0) -> Tensor:
    return torch.rand(2, n, n, generator=seeded(seed), dtype=torch.float64)


def test_odds_are_those_of_a_loop_and_an_empty_slot_costs_one_guess() -> None:
    costs, there, sharp = drawn(5), [0, 2, 3], 3.0
    present = torch.zeros(5, dtype=torch.bool)
    present[there] = True
    found = border_odds(costs, present, sharpness=sharp)
    for c, odds in zip(costs.tolist(), found.tolist(), strict=True):
        row = {i: sum(c[i][j] for j in there if j != i) / 2 for i in there}
        column = {j: sum(c[i][j] for i in there if i != j) / 2 for j in there}
        weight = {(i, j): math.exp(-sharp * c[i][j] / math.sqrt(row[i] * column[j])) for i in there for j in there}
        for i, j in itertools.permutations(there, 2):
            right = weight[i, j] / sum(weight[i, k] for k in there if k != i)
            left = weight[i, j] / sum(weight[k, j] for k in there if k != j)
            assert odds[i][j] == pytest.approx(-math.log(right) - math.log(left))
        assert [odds[i][1] for i in range(5)] == [math.log(2)] * 5
        assert [odds[4][j] for j in range(5)] == [math.log(2)] * 5


def test_odds_do_not_depend_on_the_scale_of_the_costs_nor_on_what_is_missing() -> None:
    """And pieces that fit each other for nothing leave no nan."""
    costs, present = drawn(6), torch.arange(6) != 4
    assert_close(border_odds(1000 * costs), border_odds(costs))
    other = costs.clone()
    other[:, 4], other[:, :, 4] = torch.nan, torch.nan
    assert_close(border_odds(other, present), border_odds(costs, present))
    assert border_odds(torch.zeros(2, 4, 4)).isfinite().all()


@pytest.mark.parametrize(("present", "sharpness", "found"), [((1, 0, 0), 8.0, "1"), ((1, 1, 1), 0.0, "0.0")])
def test_odds_refuse_what_has_no_neighbour(present: tuple[int, ...], sharpness: float, found: str) -> None:
    with pytest.raises(PrivlabError, match=rf"Found {found}"):
        border_odds(drawn(3), torch.tensor(present).bool(), sharpness=sharpness)


@pytest.mark.parametrize("anchored", [(), (0, 3)])
def test_all_arrangements_are_tried(anchored: tuple[int, ...]) -> None:
    grid, n = (2, 3), 6
    costs, places = drawn(n) - 0.5, drawn(n, 1)[0] - 0.5
    places[0, 0] = 9  # what is known to be there must stay, however much else costs less
    anchors = torch.zeros(n, dtype=torch.bool)
    anchors[list(anchored)] = True

    def total(order: tuple[int, ...]) -> float:
        own = sum(float(places[s, p]) for s, p in enumerate(order))
        across = sum(float(costs[0, order[s], order[s + 1]]) for s in (0, 1, 3, 4))
        return own + across + sum(float(costs[1, order[s], order[s + 3]]) for s in range(3))

    best = min((o for o in itertools.permutations(range(n)) if all(o[a] == a for a in anchored)), key=total)
    assert arrange_exactly(costs, grid, anchors, places=places).tolist() == list(best)


def test_no_search_beats_all_arrangements_of_nine() -> None:
    slots = torch.arange(9).view(3, 3)

    def total(costs: Tensor, order: Tensor) -> float:
        held = order[slots]
        return float(costs[0, held[:, :-1], held[:, 1:]].sum() + costs[1, held[:-1], held[1:]].sum())

    for seed in range(2):
        costs = drawn(9, seed)
        best = arrange_exactly(costs, (3, 3))
        assert best.sort().values.tolist() == list(range(9))
        assert total(costs, best) <= total(costs, assemble(costs, (3, 3))) + 1e-9


@pytest.mark.parametrize(
    ("costs", "grid", "message"),
    [
        (drawn(10), (2, 5), "Found 2 × 5 and 10"),
        (drawn(6), (2, 2), "Found 2 × 2 and 6"),
        (drawn(4) * torch.inf, (2, 2), "nan or inf"),
    ],
)
def test_arrangements_refuse_what_is_too_large_or_not_finite(
    costs: Tensor, grid: tuple[int, int], message: str
) -> None:
    with pytest.raises(PrivlabError, match=message):
        arrange_exactly(costs, grid)


def landscapes(b: int, seed: int) -> Tensor:
    """Return 3 × 3 pieces of images that are lighter towards the top and redder towards the right, with noise."""
    ramp = torch.linspace(1, 0, 24)
    image = torch.stack([ramp.flip(0).expand(24, 24), ramp[:, None].expand(24, 24), ramp[:, None].expand(24, 24)]) / 2
    images = image + 0.02 * torch.randn(b, 3, 24, 24, generator=seeded(seed)) + 0.2
    return images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def test_the_law_of_slots_finds_what_lies_at_the_top_and_learns_mirrored_images_too() -> None:
    puzzles, (pieces,) = landscapes(8, 0), landscapes(1, 1)
    law = fit_slots(puzzles)
    costs = law.costs(pieces)
    rows = costs.exp().reciprocal().view(3, 3, 9).sum(1)
    assert rows.argmax(0).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert_close((-costs).exp().sum(0), torch.ones(9))
    mirrored = puzzles.flip(4)[:, [2, 1, 0, 5, 4, 3, 8, 7, 6]]
    assert_close(fit_slots(mirrored).costs(pieces), costs, rtol=1e-3, atol=1e-3)


def test_the_law_of_slots_reads_present_pieces_alone() -> None:
    law, (pieces,) = fit_slots(landscapes(8, 0)), landscapes(1, 1)
    present = torch.arange(9) != 5
    other = pieces.clone()
    other[5] = 1
    assert_close(law.costs(other, present), law.costs(pieces, present))
    assert (law.costs(pieces, present)[:, 5] == 0).all()


def test_the_law_is_that_of_the_pooled_covariance_by_hand() -> None:
    puzzles = torch.rand(6, 4, 3, 8, 8, generator=seeded(3), dtype=torch.float64)
    mirrored = puzzles.flip(4)[:, [1, 0, 3, 2]]
    X = torch.stack([describe_pieces(p) for p in torch.cat([puzzles, mirrored])])
    mean, d = X.mean(0), X.shape[2]
    C = torch.zeros(d, d, dtype=X.dtype)
    for x in (X - mean).flatten(0, 1):
        C += torch.outer(x, x) / X[..., 0].numel()
    C += 0.1 * C.diagonal().mean() * torch.eye(d, dtype=X.dtype)
    law, piece = fit_slots(puzzles), X[0, 1]
    found = piece @ law.weight + law.bias
    whole = torch.stack([-(piece - m) @ torch.linalg.solve(C, piece - m) / 2 for m in mean])
    assert_close(found.log_softmax(0), whole.log_softmax(0))


@pytest.mark.parametrize(
    ("shape", "message"), [((0, 9, 3, 8, 8), "Found 0"), ((2, 6, 3, 8, 8), "Found 6"), ((2, 9, 3, 3, 3), "Found 3")]
)
def test_the_law_refuses_what_is_no_square_puzzle(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        fit_slots(torch.zeros(shape))


def test_flat_pieces_no_longer_outvote_the_others(photographs: Callable[[int, int], Tensor]) -> None:
    """Of photographs cut into nine with a gap, odds place at least as many pieces as costs do."""
    images, placed = photographs(6, 102), [0, 0]
    for image in images:
        starts = (2, 36, 70)
        pieces = torch.stack([image[:, y : y + 28, x : x + 28] for y in starts for x in starts])
        order = torch.randperm(9, generator=seeded(0))
        costs = border_costs(pieces[order])
        for i, each in enumerate((costs, border_odds(costs))):
            placed[i] += int((order[arrange_exactly(each, (3, 3))] == torch.arange(9)).sum())
    assert placed[1] >= placed[0]

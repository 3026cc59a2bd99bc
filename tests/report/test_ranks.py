"""Ranks among candidates against enumeration, and features and classes against exact answers."""

from collections.abc import Callable
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from privlab.base import PrivlabError
from privlab.metrics import load_lpips
from privlab.report.ranks import Ranks, class_agreement, cosines, low_pass, ranks_by, squeeze_embedding


def at_angles(*degrees: float) -> Tensor:
    """Return a feature in the plane for each angle: the nearest by cosine is the nearest by angle."""
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], 1)


def enumerated(better: int, tied: int, N: int, n: int) -> tuple[Fraction, Fraction]:
    """Return rank-1 rate and mean reciprocal rank over all sets of n − 1 others and all places among ties."""
    kinds = ["better"] * better + ["tied"] * tied + ["worse"] * (N - 1 - better - tied)
    chosen = [(others.count("better"), others.count("tied")) for others in combinations(kinds, n - 1)]
    first = sum((Fraction(b == 0, 1 + t) for b, t in chosen), Fraction(0))
    places = [Fraction(1, (1 + b + u) * (t + 1)) for b, t in chosen for u in range(t + 1)]
    reciprocal = sum(places, Fraction(0))
    return first / len(chosen), reciprocal / len(chosen)


def expected_ranks(ranks: Ranks) -> list[float]:
    """Return the expected rank under ties that are broken at random."""
    return (1 + ranks.better + ranks.tied / 2).tolist()


@pytest.mark.parametrize("n", [2, 3, 5, 7])
def test_rates_are_those_of_all_sets_of_candidates(n: int) -> None:
    N = 7
    pairs = [(better, tied) for better in range(N) for tied in range(N - better)]
    ranks = Ranks(*(torch.tensor(each) for each in zip(*pairs, strict=True)), identities=N)
    expected = torch.tensor([[float(x) for x in enumerated(*pair, N, n)] for pair in pairs], dtype=torch.float64)
    assert_close(torch.stack([ranks.rank_1(n), ranks.reciprocal(n)], 1), expected, rtol=0, atol=1e-12)


def test_an_image_itself_has_rank_1_and_permuted_images_have_known_ranks() -> None:
    candidates = at_angles(0, 10, 30, 60) * torch.tensor([[5.0], [1], [2], [9]])  # lengths say nothing
    own = torch.arange(4)
    assert expected_ranks(ranks_by(cosines(candidates, candidates), own)) == [1, 1, 1, 1]
    # seen from 60° the candidates are at 60, 50, 30 and 0 degrees; from 0° at 0, 10, 30 and 60
    swapped = ranks_by(cosines(candidates.flip(0), candidates), own)
    assert expected_ranks(swapped) == [
        4,
        2,
        3,
        4,
    ]  # seen from 30°, 10° is behind 30°; seen from 10°, 30° is behind 10° and 0°
    assert swapped.rank_1(4).tolist() == [0, 0, 0, 0]
    assert_close(swapped.reciprocal(4), torch.tensor([1 / 4, 1 / 2, 1 / 3, 1 / 4], dtype=torch.float64))


def test_one_colour_is_chance_at_every_n(photographs: Callable[[int, int], Tensor]) -> None:
    candidates = low_pass(photographs(6, 24))
    for level in (0.0, 0.3, 1 / 3):
        ranks = ranks_by(cosines(low_pass(torch.full((6, 3, 24, 24), level)), candidates), torch.arange(6))
        assert expected_ranks(ranks) == [3.5] * 6
        for n in range(2, 7):
            assert_close(ranks.rank_1(n), torch.full((6,), 1 / n, dtype=torch.float64), rtol=0, atol=1e-12)


def test_what_differs_by_rounding_is_tied() -> None:
    candidates = torch.cat([at_angles(0), at_angles(-1e-6), at_angles(0.001)])
    ranks = ranks_by(cosines(at_angles(5), candidates), torch.tensor([1]))
    assert (ranks.better.tolist(), ranks.tied.tolist()) == ([1], [1])


def test_a_person_is_found_by_other_pictures_than_the_private_one() -> None:
    candidates = at_angles(0, 20, 90, 5, 170)
    people = torch.tensor([7, 7, 3, 3, 9])  # 7's other picture is at 20°, 3's at 5°
    ranks = ranks_by(cosines(at_angles(0, 0, 90), candidates), torch.tensor([0, 3, 2]), people)
    assert ranks.identities == 3
    near = torch.tensor([[9.0, 1, 2, 2, 0]])  # by given similarities, which stay as they are
    given = ranks_by(near, torch.tensor([0]), people)
    assert (expected_ranks(given), near[0, 0].item()) == ([2], 9)
    # from 0°: 7 at 20 without its own, 3 at 5, 9 at 170; then 3 without 5: at 90, behind 7; from 90°: 3 at 85, 7 at 70
    assert expected_ranks(ranks) == [2, 2, 3]
    assert expected_ranks(ranks_by(cosines(at_angles(0), candidates), torch.tensor([0]))) == [1]


def test_the_low_pass_is_a_correlation_of_means() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, 16, 16, generator=draw).double()
    fields = x.view(2, 3, 8, 2, 8, 2).mean((3, 5))
    flat = (fields - fields.mean((2, 3), keepdim=True)).flatten(1)
    assert_close(low_pass(x), flat)
    assert_close(torch.cosine_similarity(low_pass(0.5 * x + 0.1), low_pass(x)), torch.ones(2).double())
    assert_close(low_pass(x, side=16), (x - x.mean((2, 3), keepdim=True)).flatten(1))
    assert low_pass(x * 1e-3).abs().max() == 0  # no grey level of 8 bits differs


def test_squeezenet_is_the_trunk_of_lpips(photographs: Callable[[int, int], Tensor]) -> None:
    images = photographs(2, 224).float()
    state = torch.get_rng_state()
    embedding = squeeze_embedding()
    assert torch.equal(torch.get_rng_state(), state)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    deepest = load_lpips("squeeze").module.get_submodule("net")((images - mean) / std)[-1]
    assert_close(embedding.embed(images), deepest.mean((2, 3)), rtol=1e-4, atol=1e-5)


def test_a_class_agrees_where_the_classifier_says_so() -> None:
    images = torch.zeros(3, 3, 4, 4)
    images[0, 0], images[1, 1], images[2, 2] = 1, 1, 1

    def reddest(x: Tensor) -> Tensor:
        assert x.shape[2:] in ((4, 4), (8, 8))
        return x.mean((2, 3))

    shown = images[[0, 0, 2]]
    assert class_agreement(reddest, shown, images, (4, 4)).tolist() == [1, 0, 1]
    assert class_agreement(reddest, shown, images, (8, 8)).tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ranks(torch.tensor([0]), torch.tensor([0]), 5).rank_1(6), r"n must be from 2 .* 5\. Found 6"),
        (lambda: Ranks(torch.tensor([0]), torch.tensor([0]), 5).reciprocal(1), r"Found 1"),
        (lambda: ranks_by(torch.ones(1, 1), torch.tensor([0])), r"among two or more\. Found 1"),
        (
            lambda: ranks_by(torch.ones(1, 3), torch.tensor([0]), torch.tensor([4, 5, 5])),
            r"a single picture",
        ),
        (
            lambda: class_agreement(lambda x: x, torch.zeros(1, 3, 4, 4), torch.zeros(1, 3, 8, 8), (4, 4)),
            r"one shape\. Found \(1, 3, 4, 4\) and \(1, 3, 8, 8\)",
        ),
    ],
)
def test_what_has_no_answer_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PrivlabError, match=message):
        make()

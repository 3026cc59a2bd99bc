"""Placement, neighbours and keys against counts by hand and naive loops."""

import itertools

import pytest
import torch

from privlab.metrics import (
    as_sent,
    assign_images,
    displaced_slots,
    in_best_order,
    key_recovered,
    match_images,
    neighbour_accuracy,
    placement_accuracy,
)
from privlab.patches import draw_orders, inverse, patchify
from privlab.threat import Reconstruction, Sent

B, PREFIX, GRID = 2, 1, (3, 4)
N = GRID[0] * GRID[1]
T = N + PREFIX
IMAGES = torch.rand(B, 3, 6, 8, generator=torch.Generator().manual_seed(0))


def permuted(seed: int = 0) -> Sent:
    draw = torch.Generator().manual_seed(seed)
    source = torch.randperm(B * T, generator=draw).view(B, T)
    return Sent(torch.zeros(B, T, 5), source, PREFIX)


def truth(sent: Sent) -> torch.Tensor:
    """Return the rows that belong into the patch slots."""
    where = inverse(sent.source.flatten())
    return where[torch.arange(B * T).view(B, T)[:, PREFIX:]]


def test_the_true_places_score_one_and_others_what_they_share() -> None:
    sent = permuted()
    rows = truth(sent)
    assert placement_accuracy(sent, Reconstruction(IMAGES, rows)).tolist() == [1, 1]
    assert neighbour_accuracy(sent, Reconstruction(IMAGES, rows), GRID).tolist() == [1, 1]
    swapped = rows.clone()
    swapped[0, [0, 11]] = rows[0, [11, 0]]
    assert placement_accuracy(sent, Reconstruction(IMAGES, swapped)).tolist() == [10 / 12, 1]
    assert neighbour_accuracy(sent, Reconstruction(IMAGES, swapped), GRID).tolist() == [
        13 / 17,
        1,
    ]  # two corners, four pairs


def test_a_shifted_image_keeps_its_neighbours() -> None:
    sent = permuted()
    shifted = truth(sent).view(B, *GRID).roll(1, 2).flatten(1)
    assert placement_accuracy(sent, Reconstruction(IMAGES, shifted)).tolist() == [0, 0]
    assert (
        neighbour_accuracy(sent, Reconstruction(IMAGES, shifted), GRID).tolist() == [14 / 17] * 2
    )  # 3 of 9 pairs across broke


@pytest.mark.parametrize("seed", range(5))
def test_neighbours_are_those_of_a_naive_loop(seed: int) -> None:
    sent, draw = permuted(seed), torch.Generator().manual_seed(seed + 50)
    rows = draw_orders(B * T, [draw])[0, : B * N].view(B, N)
    rows[0] = truth(sent)[0].roll(3)
    found = sent.source.flatten()[rows].view(B, *GRID)
    expected = []
    for image in found.tolist():
        good = 0
        for r, c in itertools.product(range(GRID[0]), range(GRID[1])):
            for right, down in ((1, 0), (0, 1)):
                if r + down < GRID[0] and c + right < GRID[1]:
                    first, second = (divmod(t, T) for t in (image[r][c], image[r + down][c + right]))
                    p, q = (divmod(t - PREFIX, GRID[1]) for t in (first[1], second[1]))
                    both = first[1] >= PREFIX and second[1] >= PREFIX
                    good += both and first[0] == second[0] and q == (p[0] + down, p[1] + right)
        expected.append(good / 17)
    assert neighbour_accuracy(sent, Reconstruction(IMAGES, rows), GRID).tolist() == pytest.approx(expected)


def test_the_best_order_across_images_undoes_every_misplacement() -> None:
    sent = permuted()
    wrong = truth(sent)[:, torch.randperm(N, generator=torch.Generator().manual_seed(1))].flip(0)
    patches = patchify(IMAGES, 2).flatten(0, 1)
    slots = {int(row): patch for row, patch in zip(truth(sent).flatten(), patches, strict=True)}
    shown = torch.stack([slots[int(row)] for row in wrong.flatten()]).view(B, N, -1)
    images = torch.zeros_like(IMAGES)
    for i, image in enumerate(shown):
        for s, patch in enumerate(image):
            r, c = divmod(s, GRID[1])
            images[i, :, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2] = patch.view(3, 2, 2)
    everywhere = displaced_slots(sent)
    assert everywhere.all()
    assert torch.equal(in_best_order(images, IMAGES, everywhere, 2, across=True), IMAGES)
    apart = in_best_order(images, IMAGES, everywhere, 2)  # each image has its own patches, as many as stand in it
    assert torch.equal(patchify(apart, 2).sort(1)[0], patchify(images, 2).sort(1)[0])
    assert not torch.equal(apart, IMAGES)


def test_rows_are_displaced_where_one_stands_for_another() -> None:
    plain = Sent.plain(torch.zeros(B, T, 5), PREFIX)
    assert not displaced_slots(plain).any()
    source = plain.source.clone()
    source[1, [-1, -2]] = source[1, [-2, -1]]
    assert displaced_slots(Sent(plain.features, source, PREFIX)).tolist() == [[False] * N, [True] * N]


def test_a_class_row_among_the_patches_is_no_placement() -> None:
    sent = Sent.plain(torch.zeros(B, T, 5), PREFIX)
    rows = torch.arange(B * T).view(B, T)[:, :N]  # the class row stands in the first slot, all others one to the left
    assert placement_accuracy(sent, Reconstruction(IMAGES, rows)).tolist() == [0, 0]


def test_no_claim_is_not_measured() -> None:
    sent = permuted()
    assert placement_accuracy(sent, Reconstruction(IMAGES)) is None
    assert neighbour_accuracy(sent, Reconstruction(IMAGES), GRID) is None
    assert key_recovered(sent, Reconstruction(IMAGES, columns=torch.arange(5))) is None


def test_the_key_is_compared_entry_by_entry() -> None:
    columns = torch.tensor([3, 1, 4, 0, 2])
    sent = Sent(torch.zeros(B, T, 5), permuted().source, PREFIX, columns)
    assert key_recovered(sent, Reconstruction(IMAGES)) is None
    assert key_recovered(sent, Reconstruction(IMAGES, columns=columns)) == 1
    assert key_recovered(sent, Reconstruction(IMAGES, columns=torch.tensor([3, 1, 0, 4, 2]))) == pytest.approx(0.6)


def test_what_was_sent_is_shown_in_its_order() -> None:
    plain = Sent.plain(torch.zeros(B, T, 5), PREFIX)
    assert torch.equal(as_sent(plain, IMAGES, 2), IMAGES)
    rolled = Sent(plain.features, plain.source.roll(1, 1), PREFIX)  # the class token comes into the first patch slot
    shown = patchify(as_sent(rolled, IMAGES, 2), 2)
    assert (shown[:, 0] == 0.5).all()
    assert torch.equal(shown[:, 1:], patchify(IMAGES, 2)[:, :-1])


def test_reconstructions_are_matched_to_images_only_where_rows_crossed_them() -> None:
    crossed, own = permuted(), Sent.plain(torch.zeros(B, T, 5), PREFIX)
    swapped = Reconstruction(IMAGES.flip(0), truth(crossed).flip(0))
    put_right = match_images(crossed, swapped, IMAGES)
    assert torch.equal(put_right.images, IMAGES)
    assert placement_accuracy(crossed, put_right).tolist() == [1, 1]
    assert match_images(own, swapped, IMAGES) is swapped


@pytest.mark.parametrize("assign", ["match", "gradient"])
def test_no_reconstruction_stands_for_two_images(assign: str) -> None:
    """One of two reconstructions is nearest to both images; the other one has to be scored as well."""
    fed = torch.stack([torch.full((3, 6, 8), 0.4), torch.full((3, 6, 8), 0.6)])
    found = torch.stack([torch.full((3, 6, 8), 0.5), torch.ones(3, 6, 8)])
    if assign == "gradient":
        placed = assign_images(Reconstruction(found), fed, 2).images
    else:
        crossed = Sent(torch.zeros(2, T, 5), torch.arange(2 * T).view(2, T).flip(0), PREFIX)
        placed = match_images(crossed, Reconstruction(found), fed).images
    assert torch.equal(placed, found)
    assert torch.equal(assign_images(Reconstruction(found.flip(0)), fed, 2).images, found)

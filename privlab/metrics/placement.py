"""Metrics of permuted features: how many rows were put in place, and how much of the key was recovered."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from privlab.base import linear_sum_assignment
from privlab.metrics.registry import Metric
from privlab.patches import patchify, unpatchify
from privlab.threat import Reconstruction, Sent

_XU = "Xu et al. 2024 (row permutation)"
PLACEMENT: dict[str, Metric] = {
    "placement_accuracy": Metric("placement_accuracy", None, "higher leaks", (0.0, 1.0), 4, f"share of slots, {_XU}"),
    "neighbour_accuracy": Metric("neighbour_accuracy", None, "higher leaks", (0.0, 1.0), 4, f"share of pairs, {_XU}"),
    "key_recovered": Metric("key_recovered", None, "higher leaks", (0.0, 1.0), 4, "share of the column key's entries"),
    "correct": Metric("correct", None, "utility", (0.0, 1.0), 4, "the client's prediction is the label"),
}
"""The metrics that records of released features hold besides the metrics of images."""

OF_WEIGHTS: dict[str, Metric] = {
    "patches_read": Metric("patches_read", None, "higher leaks", (0.0, 1.0), 4, "share of the patches that are read"),
}
"""The metric of the benchmark's track on weights that a server chose, which no run measures."""


def placement_accuracy(sent: Sent, reconstruction: Reconstruction) -> Float[Tensor, " b"] | None:
    """Return the share of each image's patch slots that got their own row, in [0, 1]; None if rows are not placed."""
    found = _held_tokens(sent, reconstruction)
    return None if found is None else (found == _slots(sent)).double().mean(1)


def neighbour_accuracy(sent: Sent, reconstruction: Reconstruction, grid: tuple[int, int]) -> Float[Tensor, " b"] | None:
    """Return the share of pairs of adjacent slots whose patches are adjacent in the same direction, in [0, 1].

    Pairs run across and down. A pair of neighbours counts wherever it stands, and from whichever image of the batch.

    Args:
        sent: what the client sent, with the true origin of each row.
        reconstruction: what the attack returned, with the row that it put into each patch slot; without rows the
            result is None.
        grid: (h, w), the patches in a column and in a row of an image.
    """
    found = _held_tokens(sent, reconstruction)
    if found is None:
        return None
    t = sent.source.shape[1]
    return _adjacent(found // t, found % t - sent.prefix, grid).double().mean(1)


def placed_share(held: Int[Tensor, "b n"], moved: Bool[Tensor, "b n"]) -> Float[Tensor, " b"]:
    """Return the share of the `moved` slots s with their own patch, `held[s]` = s, in [0, 1]; NaN if none was moved."""
    own = held == torch.arange(held.shape[1], device=held.device)
    return (own & moved).sum(1).double() / moved.sum(1)


def adjacent_share(held: Int[Tensor, "b n"], moved: Bool[Tensor, "b n"], grid: tuple[int, int]) -> Float[Tensor, " b"]:
    """Return the share of pairs of adjacent slots whose patches are adjacent in the same direction, in [0, 1].

    Pairs run across and down. Those with at least one moved slot count; the share is NaN for an image without any.

    Args:
        held: the patch that each slot holds, by the number of the slot that it comes from.
        moved: marks the slots that the defense shuffled.
        grid: (h, w), the patches in a column and in a row of an image, with h · w = n.
    """
    square = moved.unflatten(1, grid)
    across, down = square[:, :, 1:] | square[:, :, :-1], square[:, 1:] | square[:, :-1]
    pairs = torch.cat([across.flatten(1), down.flatten(1)], 1)
    return (_adjacent(torch.zeros_like(held), held, grid) & pairs).sum(1).double() / pairs.sum(1)


def key_recovered(sent: Sent, reconstruction: Reconstruction) -> float | None:
    """Return the share of the column key's entries that were recovered, in [0, 1]; None without a key or a guess."""
    if sent.columns is None or reconstruction.columns is None:
        return None
    return float((reconstruction.columns.to(sent.columns) == sent.columns).double().mean())


def in_best_order(
    images: Float[Tensor, "b c h w"],
    reference: Float[Tensor, "b c h w"],
    slots: Bool[Tensor, "b n"],
    patch: int,
    *,
    across: bool = False,
) -> Float[Tensor, "b c h w"]:
    """Return the images with some patches in the order of least squared error: a bound on any placement.

    Args:
        images: reconstructions.
        reference: the images that they are compared with.
        slots: marks the patches that are put in order; the others stay.
        patch: the side of a patch, in pixels.
        across: whether patches may go to any image of the batch, and not only stay within their own.
    """
    found, wanted = patchify(images, patch), patchify(reference, patch)
    b, n, _ = found.shape
    groups = slots.reshape(1, -1) if across else slots
    found, wanted = (patches.reshape(len(groups), -1, patches.shape[2]) for patches in (found, wanted))
    put = found.clone()
    for i, chosen in enumerate(row.nonzero()[:, 0] for row in groups):
        distance = torch.cdist(wanted[i, chosen].double(), found[i, chosen].double()).square()
        order = torch.as_tensor(linear_sum_assignment(distance.cpu())[1], device=chosen.device)
        put[i, chosen] = found[i, chosen[order]]
    return unpatchify(put.view(b, n, -1), (images.shape[1], images.shape[2], images.shape[3]))


def displaced_slots(sent: Sent) -> Bool[Tensor, "b n"]:
    """Mark all slots of each image with a patch slot whose row is not its own: the origin of its rows is unknown.

    An image in which only class and register tokens changed places is not marked.
    """
    b, t = sent.source.shape
    moved = sent.source != torch.arange(b * t, device=sent.source.device).view(b, t)
    return moved[:, sent.prefix :].any(1, keepdim=True).expand(b, t - sent.prefix)


def crosses(sent: Sent) -> bool:
    """Return whether any row was sent in the place of a row of another image."""
    b, t = sent.source.shape
    return bool((sent.source // t != torch.arange(b, device=sent.source.device)[:, None]).any())


def match_images(sent: Sent, reconstruction: Reconstruction, reference: Float[Tensor, "b c h w"]) -> Reconstruction:
    """Return the reconstructions in the order of the images that they are nearest to, if rows crossed images.

    The order of the images in a batch is not secret, and cannot be recovered: the evaluator assigns reconstructions to
    images by least squared error. If every row stayed with its image, the reconstructions stay in their order.

    Args:
        sent: what the client sent, with the true origin of each row.
        reconstruction: one reconstruction for each image, and the rows that it was made of if the attack names them.
        reference: the images of the client, in [0, 1], in their order.
    """
    if not crosses(sent):
        return reconstruction
    errors = torch.cdist(reference.flatten(1).double(), reconstruction.images.flatten(1).double())
    order = torch.from_numpy(linear_sum_assignment(errors.square().cpu().numpy())[1]).to(sent.source.device)
    return replace(
        reconstruction,
        images=reconstruction.images[order],
        rows=None if reconstruction.rows is None else reconstruction.rows[order],
    )


def assign_images(reconstruction: Reconstruction, fed: Float[Tensor, "b c h w"], patch: int) -> Reconstruction:
    """Return the reconstructions from one gradient of b images in the order of the fed images that they are nearest to.

    As in `match_images`, reconstructions are assigned to images by least squared error.

    Args:
        reconstruction: b reconstructions; patches that it marks as loose, in an order of the adversary's own, are
            first put where they fit an image best.
        fed: the b images that the gradient was computed from, in [0, 1].
        patch: the side of a patch, in pixels.
    """
    b = len(fed)
    found, wanted = reconstruction.images.repeat(b, 1, 1, 1), fed.repeat_interleave(b, 0)
    if reconstruction.loose is not None:
        found = in_best_order(found, wanted, reconstruction.loose.repeat(b, 1), patch)
    errors = (found - wanted).double().square().sum((1, 2, 3)).view(b, b)
    return Reconstruction.join([reconstruction.take(j) for j in linear_sum_assignment(errors.cpu())[1].tolist()])


def as_sent(sent: Sent, images: Float[Tensor, "b c h w"], patch: int) -> Float[Tensor, "b c h w"]:
    """Return the images with their patches in the order of the sent rows.

    Args:
        sent: what the client sent, with the true origin of each row; a class or register token in a patch's place is
            shown as a grey patch.
        images: the images that the client embedded, in [0, 1].
        patch: the side of a patch, in pixels.
    """
    t, places = sent.source.shape[1], sent.source[:, sent.prefix :]
    patches = patchify(images, patch)
    image, place = places // t, places % t - sent.prefix
    shown = torch.where((place >= 0)[..., None], patches[image, place.clamp(min=0)], 0.5)
    return unpatchify(shown, (images.shape[1], images.shape[2], images.shape[3]))


def _held_tokens(sent: Sent, reconstruction: Reconstruction) -> Int[Tensor, "b n"] | None:
    """Return which token of the batch each slot of the reconstruction holds."""
    return None if reconstruction.rows is None else sent.source.flatten()[reconstruction.rows]


def _slots(sent: Sent) -> Int[Tensor, "b n"]:
    """Return the tokens that belong in the patch slots."""
    b, t = sent.source.shape
    return torch.arange(b * t, device=sent.source.device).view(b, t)[:, sent.prefix :]


def _adjacent(image: Int[Tensor, "b n"], place: Int[Tensor, "b n"], grid: tuple[int, int]) -> Bool[Tensor, "b _"]:
    """Return which pairs of slots, across and then down, hold patches of one image adjacent in the same direction.

    A slot holds the patch at `place` of its image, or no patch if `place` is below zero.
    """
    image, place = image.unflatten(1, grid), place.unflatten(1, grid)
    row, column, patch = place.div(grid[1], rounding_mode="floor"), place % grid[1], place >= 0
    across = _same(image, patch, 2) & (row.diff(dim=2) == 0) & (column.diff(dim=2) == 1)
    down = _same(image, patch, 1) & (row.diff(dim=1) == 1) & (column.diff(dim=1) == 0)
    return torch.cat([across.flatten(1), down.flatten(1)], 1)


def _same(image: Int[Tensor, "b r c"], patch: Bool[Tensor, "b r c"], dim: int) -> Bool[Tensor, "b _ _"]:
    """Mark the pairs of neighbours along `dim` that hold patches of one image."""
    n = image.shape[dim]
    first, second = patch.narrow(dim, 0, n - 1), patch.narrow(dim, 1, n - 1)
    return (image.diff(dim=dim) == 0) & first & second

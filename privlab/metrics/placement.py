"""How well rows were put in place and keys recovered: the metrics of permuted features."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from privlab.metrics.registry import Metric
from privlab.patches import patchify, unpatchify
from privlab.threat import Sent, Stolen

__all__ = [
    "PLACEMENT",
    "adjacent_share",
    "as_sent",
    "assigned",
    "crosses",
    "displaced",
    "in_best_order",
    "key_recovered",
    "matched",
    "neighbour_accuracy",
    "placed_share",
    "placement_accuracy",
]

_XU = "Xu et al. 2024 (row permutation)"
PLACEMENT: dict[str, Metric] = {
    "placement_accuracy": Metric("placement_accuracy", None, "higher leaks", (0.0, 1.0), 4, f"share of slots, {_XU}"),
    "neighbour_accuracy": Metric("neighbour_accuracy", None, "higher leaks", (0.0, 1.0), 4, f"share of pairs, {_XU}"),
    "key_recovered": Metric("key_recovered", None, "higher leaks", (0.0, 1.0), 4, "share of the column key's entries"),
    "correct": Metric("correct", None, "utility", (0.0, 1.0), 4, "the client's prediction is the label"),
}
"""What the records of released features hold besides the metrics of images."""


def placement_accuracy(sent: Sent, stolen: Stolen) -> Float[Tensor, " b"] | None:
    """Share of an image's patch slots that got their own row, in [0, 1]; None where rows are not placed."""
    found = _found(sent, stolen)
    return None if found is None else (found == _slots(sent)).double().mean(1)


def neighbour_accuracy(sent: Sent, stolen: Stolen, grid: tuple[int, int]) -> Float[Tensor, " b"] | None:
    """Share of the pairs of adjacent slots, across and down, that hold patches adjacent in just that way, in [0, 1].

    A patch's own neighbours count wherever the pair stands, and of whichever image of the batch it is.
    """
    found = _found(sent, stolen)
    if found is None:
        return None
    t = sent.source.shape[1]
    return _adjacent(found // t, found % t - sent.prefix, grid).double().mean(1)


def placed_share(held: Int[Tensor, "b n"], moved: Bool[Tensor, "b n"]) -> Float[Tensor, " b"]:
    """Share of the `moved` slots s that hold their own patch, `held[s]` = s, in [0, 1]; NaN where none was moved."""
    own = held == torch.arange(held.shape[1], device=held.device)
    return (own & moved).sum(1).double() / moved.sum(1)


def adjacent_share(held: Int[Tensor, "b n"], moved: Bool[Tensor, "b n"], grid: tuple[int, int]) -> Float[Tensor, " b"]:
    """Share of the pairs of adjacent slots, one of them `moved` or both, that hold patches adjacent in just that way.

    In [0, 1]; NaN where none was moved.
    """
    square = moved.unflatten(1, grid)
    across, down = square[:, :, 1:] | square[:, :, :-1], square[:, 1:] | square[:, :-1]
    pairs = torch.cat([across.flatten(1), down.flatten(1)], 1)
    return (_adjacent(torch.zeros_like(held), held, grid) & pairs).sum(1).double() / pairs.sum(1)


def key_recovered(sent: Sent, stolen: Stolen) -> float | None:
    """Share of the entries of the column key that were recovered, in [0, 1]; None without a key or a guess."""
    if sent.columns is None or stolen.columns is None:
        return None
    return float((stolen.columns.to(sent.columns) == sent.columns).double().mean())


def in_best_order(
    images: Float[Tensor, "b c h w"],
    reference: Float[Tensor, "b c h w"],
    slots: Bool[Tensor, "b n"],
    patch: int,
    *,
    across: bool = False,
) -> Float[Tensor, "b c h w"]:
    """Return the images with the patches of these slots in the order of least squared error: a bound on any placement.

    Each image keeps its own patches; `across` the images they may go to any of them.
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


def displaced(sent: Sent) -> Bool[Tensor, "b n"]:
    """Mark all slots of each image of which a row was sent in the place of another one: which row is one's own is open.

    Class and register tokens that changed their places among themselves displace no patch.
    """
    b, t = sent.source.shape
    moved = sent.source != torch.arange(b * t, device=sent.source.device).view(b, t)
    return moved[:, sent.prefix :].any(1, keepdim=True).expand(b, t - sent.prefix)


def crosses(sent: Sent) -> bool:
    """Return whether a row was sent among those of another image."""
    b, t = sent.source.shape
    return bool((sent.source // t != torch.arange(b, device=sent.source.device)[:, None]).any())


def matched(sent: Sent, stolen: Stolen, reference: Float[Tensor, "b c h w"]) -> Stolen:
    """Return the reconstructions in the order of the images that they are nearest to, where rows crossed images.

    Which image of a batch is the first is no secret worth hiding, and not to be found: the evaluator assigns
    reconstructions to images by least squared error. Where every row stayed with its image, nothing is moved.
    """
    if not crosses(sent):
        return stolen
    errors = torch.cdist(reference.flatten(1).double(), stolen.images.flatten(1).double())
    order = torch.from_numpy(linear_sum_assignment(errors.square().cpu().numpy())[1]).to(sent.source.device)
    return replace(stolen, images=stolen.images[order], rows=None if stolen.rows is None else stolen.rows[order])


def assigned(stolen: Stolen, fed: Float[Tensor, "b c h w"], patch: int) -> Stolen:
    """Return what came of one gradient of b images in the order of the fed images that it is nearest to.

    As in `matched`, reconstructions are assigned to images by least squared error; patches in an order of the
    adversary's own are first put where they fit that image best.
    """
    b = len(fed)
    found, wanted = stolen.images.repeat(b, 1, 1, 1), fed.repeat_interleave(b, 0)
    if stolen.loose is not None:
        found = in_best_order(found, wanted, stolen.loose.repeat(b, 1), patch)
    errors = (found - wanted).double().square().sum((1, 2, 3)).view(b, b)
    return Stolen.joined([stolen.take(j) for j in linear_sum_assignment(errors.cpu())[1].tolist()])


def as_sent(sent: Sent, images: Float[Tensor, "b c h w"], patch: int) -> Float[Tensor, "b c h w"]:
    """Return what was fed with its patches in the order of the sent rows; a class or register token is a grey patch."""
    t, places = sent.source.shape[1], sent.source[:, sent.prefix :]
    patches = patchify(images, patch)
    image, place = places // t, places % t - sent.prefix
    shown = torch.where((place >= 0)[..., None], patches[image, place.clamp(min=0)], 0.5)
    return unpatchify(shown, (images.shape[1], images.shape[2], images.shape[3]))


def _found(sent: Sent, stolen: Stolen) -> Int[Tensor, "b n"] | None:
    """Return which token of the batch each slot of the reconstruction holds."""
    return None if stolen.rows is None else sent.source.flatten()[stolen.rows]


def _slots(sent: Sent) -> Int[Tensor, "b n"]:
    """Return the tokens that belong into the patch slots."""
    b, t = sent.source.shape
    return torch.arange(b * t, device=sent.source.device).view(b, t)[:, sent.prefix :]


def _adjacent(image: Int[Tensor, "b n"], place: Int[Tensor, "b n"], grid: tuple[int, int]) -> Bool[Tensor, "b _"]:
    """Return which pairs of slots, across and then down, hold patches of one image adjacent in just that way.

    A slot holds the patch at `place` in an image; below zero it holds none.
    """
    image, place = image.unflatten(1, grid), place.unflatten(1, grid)
    row, column, patch = place.div(grid[1], rounding_mode="floor"), place % grid[1], place >= 0
    across = _same(image, patch, 2) & (row.diff(dim=2) == 0) & (column.diff(dim=2) == 1)
    down = _same(image, patch, 1) & (row.diff(dim=1) == 1) & (column.diff(dim=1) == 0)
    return torch.cat([across.flatten(1), down.flatten(1)], 1)


def _same(image: Int[Tensor, "b r c"], patch: Bool[Tensor, "b r c"], dim: int) -> Bool[Tensor, "b _ _"]:
    """Return where two neighbours along `dim` hold patches of one image."""
    n = image.shape[dim]
    first, second = patch.narrow(dim, 0, n - 1), patch.narrow(dim, 1, n - 1)
    return (image.diff(dim=dim) == 0) & first & second

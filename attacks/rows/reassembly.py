"""What the attacks on released features share: images from rows, put in their slots by embeddings or by borders.

Known are the released rows of a batch; sought are the images, so the slot of each row has to be found too.

- `by_embeddings`: place rows by their position embeddings, subtract these and invert. Rows that were mixed among images
  are then grouped into images by their borders (`_groups`).
- `by_borders`: rows without position embeddings are inverted first, and the patches put together by their borders.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from privlab.attacks.rows.placement import effects, known_tokens, least_cost, patch_law, place_rows, row_costs, undone
from privlab.attacks.solvers import invert_rows
from privlab.base import PrivlabError, linear_sum_assignment
from privlab.patches import patchify
from privlab.reassembly import FLOOR, ROUNDS, PositionPredictor, assemble, border_cost
from privlab.reassembly.border_costs import border_costs
from privlab.threat import Capability, FeatureObservation, Reconstruction
from privlab.victims import VictimModel

ERROR_IMAGES = 8  # number of public images on which the error of the linear inversion is measured
MOST_SWEEPS = 20  # the most sweeps over the grid when patches are grouped


def reassemble(seen: FeatureObservation, columns: Int[Tensor, " d"] | None = None) -> Reconstruction:
    """Return the images of rows whose columns are known, by position embeddings if granted, else by borders."""
    return (by_embeddings if Capability.POSITION_EMBEDDINGS in seen.grants else by_borders)(seen, columns)


def by_embeddings(seen: FeatureObservation, columns: Int[Tensor, " d"] | None = None) -> Reconstruction:
    """Place every row in the slot whose position embedding makes it likeliest, and invert it without that embedding.

    Rows that were mixed among images are then grouped by their borders; which group is which image of the batch is not
    known, unless rows have stayed with their image.
    """
    model, features = seen.model, undone(seen, columns)
    pe = known_tokens(model)[1]
    # rows: b × N numbers of rows over the batch. Without e_s, each is W x + β + ε, which `invert` turns into a patch.
    rows = place(seen, features, pe)
    patches, floor = invert(model, features.flatten(0, 1)[rows] - pe, seen.public, effects(seen).noise_std)
    # Each slot has b patches in any order; `group` says which of them is image i's.
    if effects(seen).rows == "mixed":
        group = _groups(pixels(model, patches), rows // features.shape[1], model.grid, floor)
        rows, patches = rows.gather(0, group), patches.gather(0, group[..., None].expand_as(patches))
    return Reconstruction(model.to_images(patches), rows, columns)


def by_borders(
    seen: FeatureObservation,
    columns: Int[Tensor, " d"] | None = None,
    *,
    rounds: int = ROUNDS,
    predictor: PositionPredictor | None = None,
) -> Reconstruction:
    """Invert rows that carry no position embedding, and place them by their borders.

    Images that share one order are put together as one, with their costs added up.

    Args:
        seen: the observation.
        columns: the recovered column key, as in `Sent`; without it the columns are taken for unmoved.
        rounds: rounds of `privlab.reassembly.solver.assemble`, at least 0.
        predictor: a position predictor for this grid and patch, on the model's device, whose −log p(slot | patch) is
            added to the border costs.

    Raises:
        PrivlabError: if rows were mixed among images.
    """
    model, kind = seen.model, effects(seen).rows
    if kind == "mixed":
        raise PrivlabError(
            "Rows mixed among images are not put together by their borders alone. Use pe-assignment, on features with "
            "position embeddings."
        )
    features = undone(seen, columns)
    # With e_s = 0 the costs find the prefix tokens only; the order of the patches is arbitrary.
    rows = place(seen, features, torch.zeros_like(known_tokens(model)[1]))
    patches, floor = invert(model, features.flatten(0, 1)[rows], seen.public, effects(seen).noise_std)
    if kind != "kept":
        shown, places = pixels(model, patches), None
        if predictor is not None:  # −log p(slot | patch), where no patch is known to stand in its own slot
            known = torch.zeros(shown.shape[:2], dtype=torch.bool, device=shown.device)
            with torch.no_grad():
                places = -predictor.scores(shown.clamp(0, 1), known).mT
        # One order for all images: their border costs and slot costs add up, and one puzzle is solved.
        if kind == "shared":
            costs, places = [summed_costs(shown, floor)], None if places is None else places.sum(0, keepdim=True)
        else:
            costs = [border_costs(image, floor=floor) for image in shown]
        orders = [
            assemble(cost, model.grid, places=None if places is None else places[i], rounds=rounds)
            for i, cost in enumerate(costs)
        ]
        # order[i, s] is the patch of image i that belongs in slot s; rows and patches follow it.
        order = torch.stack(orders).expand(len(shown), -1)
        rows, patches = rows.gather(1, order), patches.gather(1, order[..., None].expand_as(patches))
    return Reconstruction(model.to_images(patches), rows, columns)


def place(seen: FeatureObservation, features: Float[Tensor, "b t d"], pe: Float[Tensor, "n d"]) -> Int[Tensor, "b n"]:
    """Return the row of the batch for each patch slot, by the likelihood of its position embedding (`row_costs`).

    The rows of class and register tokens are left out. If embeddings are equal, such as zeros, the order of the
    patches' rows is arbitrary.

    Args:
        seen: the observation, whose defenses say how rows may be moved, and whose public images give their law.
        features: the rows of each image, with their columns in the model's order.
        pe: position embeddings of the patch slots, zeros to ignore them.
    """
    prefix, noise = known_tokens(seen.model)[0], effects(seen).noise_std
    costs = row_costs(features, prefix, pe, patch_law(seen.model, seen.public, noise), noise)
    return place_rows(costs, effects(seen).rows)[:, len(prefix) :]


def pixels(model: VictimModel, patches: Float[Tensor, "b n k"]) -> Float[Tensor, "b n c p p"]:
    """Return normalised patches as pixels, not clipped, in single precision, which is enough for borders."""
    side = (model.image_shape[0], model.patch, model.patch)
    return (patches.unflatten(2, side) * model.std + model.mean).float()


def summed_costs(patches: Float[Tensor, "b n c p p"], floor: float) -> Float[Tensor, "2 n n"]:
    """Return the border costs of images that share one order, added up."""
    total = border_costs(patches[0], floor=floor)
    for of_image in patches[1:]:
        total += border_costs(of_image, floor=floor)
    return total


def invert(
    model: VictimModel, rows: Float[Tensor, "b n d"], public: Float[Tensor, "m c h w"], noise: float
) -> tuple[Float[Tensor, "b n k"], float]:
    """Return normalised patches, and the variance of their pixels' error in [0, 1], as measured on public images.

    Args:
        model: the victim, whose W and β embed the patches.
        rows: W x + β + ε of each patch, without its position embedding.
        public: images in [0, 1] for the prior of the patches; the first `ERROR_IMAGES` also measure the error.
        noise: standard deviation of ε, white, in the units of the rows, ≥ 0.
    """
    # The error of the inversion is measured on public patches that are embedded and made noisy in the same way.
    few = model.normalise(public[:ERROR_IMAGES].to(model.mean))
    own = model.vit.patch_embed.proj(few).flatten(2).mT.detach().to(rows)
    own = own + noise * torch.randn(own.shape, generator=Generator().manual_seed(0)).to(rows)
    found, check = invert_rows(model, torch.cat([rows, own]), public, noise=noise).split([len(rows), len(own)])
    error = pixels(model, check) - pixels(model, patchify(few, model.patch).to(check))
    return found, max(FLOOR, float(error.square().mean()))


def _groups(
    patches: Float[Tensor, "b n c p p"], came: Int[Tensor, "b n"], grid: tuple[int, int], floor: float
) -> Int[Tensor, "b n"]:
    """Return which of the b patches of each slot belongs to which image, so that neighbours continue each other.

    Each slot takes the assignment of least cost given the slots around it; this is repeated over the grid until nothing
    changes. Image i is the group that has the most rows of those that were sent with image i (`came`).
    """
    b, n = came.shape
    # held[s, i] is the patch of slot s in group i, −1 as long as it is not chosen. Slot 0 defines the groups.
    links = _links(patches, grid, floor)
    held = np.full((n, b), -1)
    held[0] = np.arange(b)
    for sweep in range(MOST_SWEEPS):
        before = held.copy()
        for slot in range(sweep == 0, n):
            # Row i of these b × b costs compares the neighbour's patch of group i with all b patches of this slot.
            around = [cost[held[other]] for other, cost in links[slot] if held[other, 0] >= 0]
            held[slot] = linear_sum_assignment(sum(around))[1] if around else held[slot]
        if (held == before).all():
            break
    # votes[g, i]: how many rows of group g were sent with image i. An assignment gives each image one group.
    groups = torch.from_numpy(held.T).to(came.device)
    votes = torch.nn.functional.one_hot(came.gather(0, groups), b).sum(1)
    return groups[least_cost(-votes.T)[1]]


def _links(
    patches: Float[Tensor, "b n c p p"], grid: tuple[int, int], floor: float
) -> list[list[tuple[int, Float[np.ndarray, "b b"]]]]:
    """Return the neighbours of each slot, with the border costs between their patches and its own."""
    slots, by_slot = torch.arange(grid[0] * grid[1]).view(grid), patches.transpose(0, 1)
    links: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(len(by_slot))]
    # Pairs across compare right and left borders. Transposed patches turn pairs down into pairs across.
    for first, second, turned in ((slots[:, :-1], slots[:, 1:], by_slot), (slots[:-1], slots[1:], by_slot.mT)):
        first, second = first.flatten(), second.flatten()
        costs = border_cost(turned[first], turned[second], floor=floor).cpu().numpy()
        for a, b, cost in zip(first.tolist(), second.tolist(), costs, strict=True):
            # A slot's costs have the neighbour's patches as rows and this slot's as columns.
            links[a].append((b, cost.T))
            links[b].append((a, cost))
    return links

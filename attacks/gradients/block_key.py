"""`block-key`: the key of encrypted images, from the statistics of their blocks, and the images."""

# Known are gradients of images that were all encrypted with one key, the model, and public photographs. The key orders
# the k = c p² values in a block, turns some of them into their negative, and orders the blocks. Sought are the images.
# 1. `patch-gradient` gives the encrypted images, b × N × k.
# 2. `_negative_values` and `_value_orders` undo the key within a block by the correlations of values over all blocks.
# 3. `assemble` puts the blocks together by their borders, added up over the images.
# 4. Turns, mirror images, negatives and orders of the channels remain: `_likelihood` chooses by the model's classes.

from dataclasses import dataclass
from itertools import permutations, product
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from privlab.attacks.gradients.patch_gradient import PatchGradient
from privlab.attacks.rows import least_cost
from privlab.attacks.solvers import patch_statistics
from privlab.base import AtLeast0, Checked, PrivlabError
from privlab.images import photographs
from privlab.patches import patchify, unpatchify
from privlab.reassembly import ROUNDS, assemble
from privlab.reassembly.border_costs import border_costs
from privlab.threat import Capability, Observation, Reconstruction
from privlab.victims import VictimModel

_BIAS = "head.bias"

NEIGHBOURS = 0.9  # the correlation of neighbouring pixels that stands in for public photographs where none is left


@dataclass(frozen=True)
class BlockKey(Checked):
    """Recover the encrypted images x̃ from their gradients, the order of the values in a block, and that of the blocks.

    Idea: The gradient gives back the encrypted images, and all of them have one key. Values of neighbouring pixels vary
    together in every photograph, so that their correlations show which values were neighbours. The blocks are then put
    together by their borders, and the labels that the model then predicts show which way is up.

    Steps: encrypted images: patch-gradient → order of values by correlations → blocks by borders, turn by labels

    Algorithm:

    1. `patch-gradient` gives x̃ of each release, whatever the model makes of it.
    2. All blocks of all images have their values in one order. Values of one channel and of neighbouring pixels vary
       together, in the blocks as in public photographs: `_value_orders` finds the order, up to a turn or a mirror
       image of every block, and up to the names of the channels.
    3. Blocks have one order in all images, and their borders, added up over the images, put them together.
    4. An image of blocks that are all turned is a turned image. Of the 8 turns and mirror images and the 6 orders of
       the channels, the one is taken in which the public model predicts most of the labels that the gradient of the
       head's bias shows, and of several the likeliest; without it, the one in which the model is surest of its classes.
       Labels that the model predicts badly do not distinguish photographs from their mirror images: that bit is then
       left to whoever looks at them (`mirror`).

    The images of one call share the key; step 2 needs a number of them. Where no public photograph is left to learn
    from, pixels at a distance r are taken to have the correlation 0.9^r.

    Exact if: `patch-gradient` would be: this gives the encrypted images. The key has no guarantee: from 20 photographs
    of 100 blocks it was exact except for one bit, and from 50 photographs of 64 blocks it was exact (predicted labels).

    Fails if: few images share a key: with five or ten photographs under one key it has 20 to 22 dB, and with one it
    finds nothing. It refuses a gradient of several images, because its equations then mix the images.

    Cost: 2 s an image (20 photographs together, ViT-Ti, 160 pixels, one shared core).

    Studies: published

    Args:
        rounds: rounds of `privlab.reassembly.solver.assemble`, at least 0.
        mirror: whether to return the mirror images of what is taken in step 4.

    Source: [@kiya2023blockwise; @paikin2015jigsaw]
    """

    name: ClassVar[str] = "block-key"
    paper: ClassVar[str] = "ours, against block-wise encryption (Kiya et al. 2023)"
    order: ClassVar[int] = 80
    knows: ClassVar[frozenset[str]] = frozenset({"block-scrambling"})
    undefended: ClassVar[str] = "patch-gradient"
    requires: ClassVar[frozenset[Capability]] = PatchGradient.requires | {
        Capability.KNOWS_DEFENSE,
        Capability.KNOWS_WEIGHTS,
        Capability.PERMUTED_VALUES,
    }
    parameters: ClassVar[tuple[str, ...]] = PatchGradient.parameters
    if_released: ClassVar[tuple[str, ...]] = (_BIAS,)
    places: ClassVar[bool] = True
    one_key: ClassVar[bool] = True

    rounds: AtLeast0 = ROUNDS
    mirror: bool = False

    def beyond(self, seen: Observation) -> str | None:
        """Return the condition N < D with its numbers if it does not hold."""
        return PatchGradient().beyond(seen)

    @torch.no_grad()
    def __call__(self, seen: Observation) -> Reconstruction:
        """Reconstruct the images that the clients encrypted.

        Raises:
            PrivlabError: if the grid of patches is not square.
        """
        model, (c, h, w), p = seen.model, seen.model.image_shape, seen.model.patch
        if h != w:
            raise PrivlabError(f"block-key turns images, which must be square. Found {h} × {w} pixels.")
        # Step 1: the closed form does not depend on what the model makes of the encrypted images.
        X = patchify(PatchGradient()(seen), p).double()
        # Step 2: values that were turned into 1 − x are turned back. Which half it was is
        # not certain, and step 4 decides.
        flipped = _negative_values(X.flatten(0, 1))
        X = torch.where(flipped, 1 - X, X)
        # There is one order for each permutation of the channels (6 of RGB), with the same
        # layout of the pixels in all of them.
        orders = _value_orders(X.flatten(0, 1), _public_covariance(seen), c)
        # Step 3: border costs do not depend on the order of the channels, so that the first order serves for all.
        costs = [border_costs(each.unflatten(1, (c, p, p)).float()) for each in X[..., orders[0]]]
        blocks = assemble(torch.stack(costs).sum(0), model.grid, rounds=self.rounds)
        # Step 4: every order of the channels, each turn and mirror image, and the
        # negative if some values were negative.
        shown = [unpatchify(X[:, blocks][..., order], (c, h, w)).to(model.mean) for order in orders]
        signs = (False, True) if flipped.any() else (False,)
        guesses = (
            _turned(1 - images if negative else images, *turn)
            for images, negative, turn in product(shown, signs, TURNS)
        )
        labels = seen.gradients[_BIAS].argmin(1) if _BIAS in seen.gradients else None  # the only entry below 0
        # The first number counts, which is the share of the labels predicted. Of equal
        # ones, the mean log-probability decides.
        found = max(guesses, key=lambda images: _likelihood(model, images, labels))
        found = found.flip(3) if self.mirror else found
        return Reconstruction(found, loose=torch.ones(X.shape[:2], dtype=torch.bool, device=X.device))


TURNS = tuple(product((False, True), repeat=3))
"""The symmetries of a square: whether it is transposed, mirrored, and put upside down."""


def _turned(images: Float[Tensor, "b c h w"], transpose: bool, mirror: bool, down: bool) -> Float[Tensor, "b c h w"]:
    sides = [side for side, turn in ((3, mirror), (2, down)) if turn]
    return (images.mT if transpose else images).flip(sides)


def _public_covariance(seen: Observation) -> Float[Tensor, "k k"]:
    """Return the covariance of the values of public patches: of photographs, or of a field if none is left."""
    model, (c, h, w), p = seen.model, seen.model.image_shape, seen.model.patch
    if seen.photographs != ():
        return patch_statistics(model, photographs((h, w), seen.photographs, c).to(model.mean))[1]
    # Pixels at a distance r have the correlation 0.9^r in one channel, and none across channels.
    places = torch.cartesian_prod(torch.arange(p), torch.arange(p)).to(model.mean).double()
    return torch.block_diag(*[NEIGHBOURS ** torch.cdist(places, places)] * c)


def _likelihood(
    model: VictimModel, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"] | None = None
) -> tuple[float, float]:
    """Return the share of the labels that the model predicts, and the mean logarithm of their probability.

    Without labels, the second is that of the model's own predictions.
    """
    found = model(images).log_softmax(1)
    if labels is None:
        return 1.0, float(found.amax(1).mean())
    return float((found.argmax(1) == labels).double().mean()), float(found.gather(1, labels[:, None]).mean())


DIMENSIONS = (2, 3, 4, 5, 6, 8)
"""Numbers of leading principal components in which the channels are sought: which hold colour differs."""

STARTS = 100  # random directions from which the channels are sought in each number of components
ANGLES = 16  # rotations of the two leading components, within a right angle, from which a layout is sought

WIDTHS = (0.3, 0.1, 0.03)
"""Widths, in squared distances of standardised values, of the similarities by which a layout is refined in turn."""

TURNINGS = 9  # times that a layout is turned to fit its assignment

_ROUNDS = 30
"""The most assignments in each refinement; ten or so are needed."""

TINY = 1e-9  # relative variance below which a direction has none


def _negative_values(patches: Float[Tensor, "m k"]) -> Tensor:
    """Mark the values that were turned into their negative, or all others: natural values rise and fall together."""
    # Natural values rise and fall together, so that the leading eigenvector of their correlations has one sign. Those
    # of the rarer sign are taken for the negative ones.
    first = torch.linalg.eigh(_correlation(patches.mT.cov(correction=0)))[1][:, -1]
    return first < 0 if (first < 0).sum() * 2 <= len(first) else first >= 0


def _value_orders(
    patches: Float[Tensor, "m k"], public: Float[Tensor, "k k"], channels: int
) -> list[Int[Tensor, " k"]]:
    """Return orders that put permuted values back, one for each order of the channels, up to a symmetry of the square.

    Value `order[j]` of a permuted patch is value j of a patch that may be mirrored or turned. The channels are the
    groups of k / c values that are best separated along one direction of the leading principal components. In each, the
    correlations of neighbours give the layout: the two leading components are a square that is turned until
    it fits that of public patches best, and the assignment is then refined by similarities exp(−d² / width), with d²
    = 2 − 2 ρ. The best layout of the three is carried over to the other channels by their correlations with it.
    """
    # C is k × k over all encrypted blocks. `like` is n × n, the mean of the public correlations within each channel.
    C, n = _correlation(patches.mT.cov(correction=0)), len(public) // channels
    like = torch.stack([_correlation(public[i : i + n, i : i + n]) for i in range(0, len(public), n)]).mean(0)
    best, found = -torch.inf, []
    # Each candidate cuts the values into channels. Each channel is laid out, and the
    # cut with the best sum of fits stays.
    for groups in _channels(C, channels):
        laid = [_layout(C[group][:, group], like) for group in groups]
        if (total := sum(fit for fit, _ in laid)) > best:
            # The channel with the best layout is the model for the others: their values
            # vary with those at the same pixel.
            first = max(range(channels), key=lambda i: laid[i][0])
            best, found = total, _carried(C, groups, first, groups[first][laid[first][1]])
    return [torch.cat(order) for order in permutations(found)]


def _correlation(S: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    std = S.diagonal().clamp_min(TINY * S.diagonal().max().clamp_min(torch.finfo(S.dtype).tiny)).sqrt()
    return S / std / std[:, None]


def _components(C: Float[Tensor, "k k"], count: int) -> Float[Tensor, "k q"]:
    """Return the leading components of values less their mean over the patch, with unit variance."""
    # Without the mean over a patch, its brightness, the leading components are the slowest waves across and down.
    centred = C - C.mean(0) - C.mean(1, keepdim=True) + C.mean()
    # The eigenvectors have length one. Multiplied by the root of their number of entries, they have mean square one.
    return torch.linalg.eigh(centred)[1][:, -count:] * len(C) ** 0.5


def _channels(C: Float[Tensor, "k k"], channels: int) -> list[list[Int[Tensor, " n"]]]:
    """Return candidates for the channels: equal groups that are separated along one direction of the components.

    Two steps alternate: cut the values into equal groups along it, and take the direction of least variance in groups.
    """
    k = len(C)
    if channels == 1:
        return [[torch.arange(k, device=C.device)]]
    found, draw = [], Generator().manual_seed(0)
    for q in DIMENSIONS:
        # Value i is the point Z_i in q components. Two groups that differ along some direction w are two channels.
        Z, best, kept = _components(C, q), torch.inf, None
        for _ in range(STARTS):
            # From a random direction, values are cut into equal groups by their order along it.
            w = torch.randn(q, generator=draw, dtype=C.dtype).to(C)
            groups, ratio = (Z @ w).argsort().view(channels, -1), w
            for _ in range(_ROUNDS):
                # Within the groups the covariance is that of all less that of the means,
                # since ZᵀZ / k = I and the mean is 0.
                means = Z[groups].mean(1)
                within = Z.mT @ Z / k - means.mT @ means / channels + TINY * torch.eye(q).to(C)
                # The direction w of the largest variance between groups relative to that within:
                # a generalised eigenproblem, by the Cholesky factor of `within`.
                L = torch.linalg.cholesky(within)
                half = torch.linalg.solve_triangular(L, means.mT @ means / channels, upper=False)
                ratio, V = torch.linalg.eigh(torch.linalg.solve_triangular(L, half.mT, upper=False))
                w = torch.linalg.solve_triangular(L.mT, V[:, -1:], upper=True)[:, 0]
                # The values are cut again along the new direction, until the groups stay the same as sets.
                before, groups = groups, (Z @ w).argsort().view(channels, -1)
                if torch.equal(before.sort(1).values, groups.sort(1).values):
                    break
            # Of all starts the cut with the largest ratio counts.
            if -ratio[-1] < best:
                best, kept = -ratio[-1], groups
        found += [list(kept)] if kept is not None else []
    return found


def _layout(C: Float[Tensor, "n n"], like: Float[Tensor, "n n"]) -> tuple[float, Int[Tensor, " n"]]:
    """Return how well the values of one channel fit the public ones, in [−1, 1], and the value at each pixel.

    The fit is the correlation of the similarities of two different values each: those of a value with itself are 1 in
    every layout, and would hide the others.
    """
    # The two leading components are the coordinates of values, and of public pixels, in a
    # square, up to a turn or mirroring.
    Z, pixels = _components(C, 2), _components(like, 2)
    near, wanted = _similarities(C), _similarities(like)
    best = (-torch.inf, torch.arange(len(C), device=C.device))
    pairs = ~torch.eye(len(C), dtype=torch.bool, device=C.device)
    for step in range(ANGLES):
        # The components of a square have equal eigenvalues, so that any rotation of
        # them is possible: several are tried.
        angle = torch.tensor(step * torch.pi / 2 / ANGLES, dtype=C.dtype)
        Q = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2).to(C)
        # order[j] is the value that is put at pixel j, for the least total squared distance.
        order = least_cost(torch.cdist(pixels, Z @ Q).square())[1]
        for _ in range(TURNINGS):
            # Procrustes: the orthogonal matrix that turns the assigned values nearest to
            # their pixels, then assignment again.
            U, _, V = torch.linalg.svd(Z[order].mT @ pixels)
            order = least_cost(torch.cdist(pixels, Z @ (U @ V)).square())[1]
        # Then similarities with all other values, not the two components alone, decide:
        # wide ones first, narrow ones last.
        for own, public in zip(near, wanted, strict=True):
            order = _refined(own, public, order)
        # The fit is the correlation of similarities over all pairs of pixels, without those of a pixel with itself.
        both = torch.stack([near[0][order][:, order][pairs], wanted[0][pairs]])
        fit = float(both.corrcoef()[0, 1].nan_to_num(0))
        best = max(best, (fit, order), key=lambda each: each[0])
    return best


def _similarities(C: Float[Tensor, "n n"]) -> list[Float[Tensor, "n n"]]:
    return [((2 * C - 2).clamp_max(0) / width).exp() for width in WIDTHS]


def _refined(near: Float[Tensor, "n n"], wanted: Float[Tensor, "n n"], order: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Assign each value by its similarities with the others under the current order, until that is stable."""
    for _ in range(_ROUNDS):
        # A value fits pixel j if its similarities with the values at all pixels are those that pixel j should have.
        before, order = order, least_cost(-(wanted @ near[order]))[1]
        if torch.equal(before, order):
            break
    return order


def _carried(
    C: Float[Tensor, "k k"], groups: list[Int[Tensor, " n"]], first: int, laid: Int[Tensor, " n"]
) -> list[Int[Tensor, " n"]]:
    """Return the values of each channel by pixel: the values of another one vary as the pixel at their place."""
    # Row j holds how the value at pixel j of the first channel varies with all pixels of it. A value of another
    # channel at pixel j varies with them in the same way.
    own = _standard(C[laid][:, laid])
    return [
        laid if i == first else group[least_cost(-(own @ _standard(C[group][:, laid]).mT))[1]]
        for i, group in enumerate(groups)
    ]


def _standard(rows: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    return torch.nn.functional.normalize(rows - rows.mean(1, keepdim=True), dim=1)

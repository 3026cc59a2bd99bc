"""`block-key`: the key of encrypted images, from the statistics of their blocks, and the images."""

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.gradients.patch_gradient import PatchGradient
from privlab.attacks.solvers import negative_values, patch_statistics, value_orders
from privlab.base import PrivlabError, check_range
from privlab.images.photographs import photographs
from privlab.patches import patchify, unpatchify
from privlab.reassembly import ROUNDS, assemble
from privlab.reassembly.border_costs import border_costs
from privlab.threat import Capability, Observation, Reconstruction
from privlab.victims import VictimModel

__all__ = ["BlockKey"]

_BIAS = "head.bias"

NEIGHBOURS = 0.9
"""The correlation of neighbouring pixels that stands in for public photographs where none is left."""


@dataclass(frozen=True)
class BlockKey:
    """Recover the encrypted images x̃ from their gradients, the order of the values in a block, and that of the blocks.

    1. `patch-gradient` gives x̃ of each release, whatever the model makes of it.
    2. All blocks of all images have their values in one order. Values of one channel and of neighbouring pixels vary
       together, in the blocks as in public photographs: `value_orders` finds the order, up to a turn or a mirror
       image of every block, and up to the names of the channels.
    3. Blocks stand in one order in all images, and their borders, added up over the images, put them together.
    4. An image of blocks that are all turned is a turned image. Of the 8 turns and mirror images and the 6 orders of
       the channels, the one is taken in which the public model predicts most of the labels that the gradient of the
       head's bias shows, and of several the likeliest; without it, the one in which the model is surest of its classes.
       Labels that the model predicts badly do not tell photographs from their mirror images: that bit is then left to
       whoever looks at them (`mirror`).

    The images of one call share the key; step 2 needs a number of them. Where no public photograph is left to learn
    from, pixels at a distance r are taken to have the correlation 0.9^r.

    Args:
        rounds: rounds of `privlab.reassembly.solver.assemble`, at least 0.
        mirror: whether to return the mirror images of what is taken in step 4.
    """

    name: ClassVar[str] = "block-key"
    paper: ClassVar[str] = "ours, against block-wise encryption (Kiya et al. 2023)"
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

    rounds: int = ROUNDS
    mirror: bool = False

    def __post_init__(self) -> None:
        """Raise PrivlabError if `rounds` is negative."""
        check_range(self.rounds >= 0, "rounds of block-key", "at least 0", self.rounds)

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
        X = patchify(PatchGradient()(seen), p).double()
        flipped = negative_values(X.flatten(0, 1))
        X = torch.where(flipped, 1 - X, X)
        orders = value_orders(X.flatten(0, 1), _public_covariance(seen), c)
        costs = [border_costs(each.unflatten(1, (c, p, p)).float()) for each in X[..., orders[0]]]
        blocks = assemble(torch.stack(costs).sum(0), model.grid, rounds=self.rounds)
        shown = [unpatchify(X[:, blocks][..., order], (c, h, w)).to(model.mean) for order in orders]
        signs = (False, True) if flipped.any() else (False,)
        guesses = (
            _turned(1 - images if negative else images, *turn)
            for images, negative, turn in product(shown, signs, TURNS)
        )
        labels = seen.gradients[_BIAS].argmin(1) if _BIAS in seen.gradients else None  # the only entry below 0
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

"""Whether a reconstruction is proven to be the private image, and by what."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.base import full_precision
from privlab.release import is_explained
from privlab.release.explained import FAR, residual, residual_of_head, soft_targets, tells_images
from privlab.release.grey_levels import on_grey_levels
from privlab.threat import Capability, Observation


@dataclass(frozen=True)
class Certificate:
    """What is proven of the reconstructions of one attack.

    `residual` is that of the release which they give together; None where it cannot be checked. `proof` is "update" or
    "gradient" where they give what was released, "grey levels" where all of them lie on those of stored images, and
    None where nothing is proven, which says nothing about privacy. `target` are the numeric targets with which the
    proven image gives the update, if the loss is the stated one; of some only the side is known.
    """

    residual: float | None
    proof: str | None
    target: tuple[str, ...] | None = None

    @property
    def explained(self) -> bool | None:
        """Return whether there is a proof; None where none could be had."""
        return True if self.proof is not None else None if self.residual is None else False


def what_released(seen: Observation) -> str:
    """Return what is audited: a "gradient" or an "update"."""
    return "gradient" if seen.client is None else "update"


def certify(
    seen: Observation,
    images: Float[Tensor, "r c h w"],
    target: int | Float[Tensor, "1 y"] | None = None,
    *,
    checked: bool = True,
    of_levels: bool = False,
) -> Certificate:
    """Return what proves that images are the private ones: all images of a release are checked together.

    Args:
        seen: what was released.
        images: the reconstructions of one attack.
        target: the label of one image, or its fitted target; if it explains nothing, and where it is None, the
            gradients at the logits that the head shows are tried, which need no loss, and in several steps the targets.
        checked: whether what was released is a gradient or an update, by which images can be checked.
        of_levels: whether the attack itself looks for grey levels, so that these prove nothing.
    """
    left = _residual(seen, images, target) if checked else None
    if left is not None and is_explained(left, seen.client):
        return Certificate(left, what_released(seen), _numeric_target(seen, images))
    exact = not of_levels and bool(on_grey_levels(images, seen.public).all())
    return Certificate(left, "grey levels" if exact else None)


def _residual(
    seen: Observation, images: Float[Tensor, "r c h w"], target: int | Float[Tensor, "1 y"] | None
) -> float | None:
    """Return the residual with the target that explains most; None where images cannot be checked."""
    B = seen.images_per_release
    if Capability.KNOWS_WEIGHTS not in seen.grants or len(images) != B or not tells_images(seen):
        return None
    images = images.to(seen.model.mean)
    left = math.inf if target is None or B > 1 else residual(seen, images, target)
    if not is_explained(left, seen.client) and (of_head := residual_of_head(seen, images)) is not None:
        left = min(left, of_head)
    return None if left == math.inf and (target is None or B > 1) else left


def _numeric_target(seen: Observation, images: Float[Tensor, "r c h w"]) -> tuple[str, ...] | None:
    """Return the numeric target of one image by the stated loss, a text for each output; None for other losses."""
    if seen.client is None or not seen.client.is_numeric or len(images) > 1:
        return None
    images = images.to(seen.model.mean)
    if (targets := soft_targets(seen, images)) is None:
        return None
    with torch.no_grad(), full_precision():
        outputs = seen.model(images)[0].tolist()
    return tuple(
        f"{y:.4g}" if abs(y - z) < FAR / 2 else f"{'above' if y > z else 'below'} {z:.4g}"
        for y, z in zip(targets[0].tolist(), outputs, strict=True)
    )

"""Whether a reconstruction lies on the grey levels of a stored image, which a wrong one does not do by chance."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

LEVELS_OFF = 0.01
"""The largest root mean square distance from the nearest grey level, in levels, that is taken for exact."""

LEVELS_OFF_IN_BLOCK = 0.05
"""The same for each block of 8 × 8 pixels; where a block is wrong, its distance is near 12^-½ = 0.29."""

_BLOCK = 8
_FEWEST = 48  # number of values that a block must have between black and white to be looked at
_CHANCE = 1e-9  # the probability, for one image whose values have nothing to do with grey levels, of passing by chance

_UNIT_BALL = 4.1327  # (2πe)^½: the ball of radius r·m^½ in m dimensions has a volume of at most (4.13 r)^m


class GreyLevels(NamedTuple):
    """How near images are to grey levels: rms distances of all values and of the worst block, and the levels met."""

    rms: Float[Tensor, " r"]
    worst_block: Float[Tensor, " r"]
    met: Int[Tensor, " r"]


def grey_level_error(images: Float[Tensor, "r c h w"]) -> GreyLevels:
    """Return the rms distance of the values from the nearest grey level k/255, in levels, and the number of levels met.

    Images are reconstructions in [0, 1], not rounded. Values that were cut to black or white are on a level whatever
    they were, so they do not count. An image without any other value has a distance of 0.5, the largest there is.
    """
    values = images.double() * 255
    inside = (values > 0.5) & (values < 254.5)
    squares = torch.where(inside, values - values.round(), 0.0).square()
    counts = inside.flatten(1).sum(1)
    rms = (squares.flatten(1).sum(1) / counts.clamp_min(1)).sqrt()
    in_blocks, of_blocks = (_block_sums(each) for each in (squares, inside.double()))
    blocks = torch.where(of_blocks >= _FEWEST, in_blocks / of_blocks.clamp_min(1), 0.0).flatten(1).amax(1).sqrt()
    met = torch.zeros(len(values), 256, dtype=torch.bool, device=images.device)
    met.scatter_(1, torch.where(inside, values.round(), 0.0).long().flatten(1), True)
    return GreyLevels(torch.where(counts > 0, rms, 0.5), blocks, met[:, 1:255].sum(1))


def on_grey_levels(
    images: Float[Tensor, "r c h w"], known: Float[Tensor, "m c h w"] | None = None
) -> Bool[Tensor, " r"]:
    """Return which reconstructions lie so near to grey levels that chance does not explain it.

    Let m be the number of levels that an image meets. If its values had nothing to do with grey levels, the distances
    of m different values would be independent and uniform in [−½, ½], and the probability of an rms distance of at
    most r is at most the volume of a ball, (2πe)^(m/2) r^m. The image passes if this is at most 10⁻⁹, r ≤ 0.01, and
    each block of 8 × 8 pixels has a distance of at most 0.05, so that an image of which a part is wrong does not pass.

    It says that the pixels are those of a stored image, up to whole levels: an exact image passes too if it is
    brighter by three levels, and of exact images with a random common offset 2 % do. Images that were mixed, augmented
    or resized in floating point have no grey levels, and do not pass.

    Two kinds of image lie on grey levels for another reason, and never pass: those that the attack itself rounded,
    whose values are k/255 to the last bit, and images that the adversary already had (`known`).
    """
    error = grey_level_error(images)
    unlikely = error.met * (_UNIT_BALL * error.rms.clamp_min(1e-12)).log() <= math.log(_CHANCE)
    on = (error.rms <= LEVELS_OFF) & (error.worst_block <= LEVELS_OFF_IN_BLOCK) & unlikely & ~_rounded(images)
    if known is None or not len(known):
        return on
    for i in on.nonzero()[:, 0].tolist():
        nearest = (known.to(images) - images[i]).square().mean((1, 2, 3)).min().sqrt() * 255
        on[i] = bool(nearest > 1)
    return on


def _block_sums(values: Float[Tensor, "r c h w"]) -> Float[Tensor, "r y x"]:
    """Return the sums over blocks of 8 × 8 pixels and all channels; those at the far edges may be smaller."""
    padding = (0, -values.shape[3] % _BLOCK, 0, -values.shape[2] % _BLOCK)
    return F.avg_pool2d(F.pad(values.sum(1, keepdim=True), padding), _BLOCK)[:, 0] * _BLOCK**2


def _rounded(images: Float[Tensor, "r c h w"]) -> Bool[Tensor, " r"]:
    """Return which images hold k/255 to the last bit in every value: a solve does not end there, but rounding does."""
    levels = (images.double() * 255).round()
    own = (levels / 255).to(images.dtype)
    other = levels.to(images.dtype) / 255
    return ((images == own) | (images == other)).flatten(1).all(1)

"""The layout of `token-bins`: the channels of a token, and the neurons and bins of each place."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks.dishonest.layout import nearest_angle, patch_transform, points_on_sphere
from privlab.victims import VictimModel

_SCALES = (0.058, 0.057, 0.032, 0.03, 0.029, 0.021, 0.021, 0.155, 0.016, 0.04, 0.019, 0.018)
"""The mean size of the coefficients 1, 2, … of a patch in the order of `patch_transform`, by the largest value.

It is that of the photographs that come along; bins of them are quantiles of Laplace distributions. Coefficient 0, the
brightness, is taken as uniform.
"""

_FEWEST_BINS = 4
"""The least bins of a coefficient behind the brightness; where there are few neurons, fewer coefficients are used."""

_BRIGHTNESS = 0.4
"""The share of the bins that the brightness has."""

_UNKNOWN = 0.35
"""The share of the neurons that see the tokens with E_unk, where there is one."""

_SHARPNESS = 4000.0
"""The pre-activations that the narrowest bin spans. GELU is 0 or the identity except for about 10 of them."""

RESERVED = 5
"""Channels of a token that hold no pixels: a constant, a zero, and the point of its slot on a sphere."""

_FORWARD = 1e-14, 1e-18
"""The weight of the MLPs' output without E_unk, and with it: narrower bins have larger outputs."""


class Bins(NamedTuple):
    """Of the m neurons of a place the coefficient that each measures, and the ends of its bin.

    The first bin of each coefficient begins below, and the last one ends above all values.
    """

    coefficient: Int[Tensor, " m"]
    low: Float[Tensor, " m"]
    high: Float[Tensor, " m"]

    def less_next(self, above: Float[Tensor, "*t m"]) -> Float[Tensor, "*t m"]:
        """Return what is in each bin, of what is above its lower end: what each neuron has more than the next."""
        return above - torch.where(self.high.isinf(), 0.0, above.roll(-1, -1))


@dataclass(frozen=True, eq=False)
class Plan:
    """The layout of channels and neurons for a model, from its architecture and normalisation alone."""

    model: VictimModel

    @cached_property
    def whole(self) -> Float[Tensor, "k k"]:
        """Return the whole transform of a patch."""
        return patch_transform(self.model.image_shape[0], self.model.patch)

    @property
    def transform(self) -> Float[Tensor, "d k"]:
        """Return T, the rows of the transform for which there are channels, D − 5 at most."""
        return self.whole[: self.model.vit.embed_dim - RESERVED]

    @property
    def slots(self) -> int:
        """Return N."""
        return self.model.vit.patch_embed.num_patches

    @property
    def places(self) -> int:
        """Return N, or N + 1 with E_unk, which all tokens without a slot share as their place."""
        return self.slots + (self.model.unk_embed is not None)

    @cached_property
    def largest(self) -> float:
        """Return R, the largest value of a coefficient: that of the mean of a white patch, whose values are 1."""
        return math.sqrt(self.transform.shape[1])

    @property
    def constant(self) -> float:
        """Return C, the value of the constant channel and the radius of the sphere of slots."""
        return self.largest / 4

    @cached_property
    def points(self) -> Float[Tensor, "n 3"]:
        """Return a point of the unit sphere for each place."""
        return points_on_sphere(self.places)

    @cached_property
    def known(self) -> Float[Tensor, "n 5"]:
        """Return the values of the reserved channels in each place."""
        places = self.constant * self.points
        return torch.cat([places.new_tensor([self.constant, 0.0]).expand(len(places), 2), places], 1)

    @property
    def forward(self) -> float:
        """Return the weight of the MLPs' output. It reaches the gradient only: every block sees the same tokens."""
        return _FORWARD[self.places > self.slots]

    @property
    def eps(self) -> float:
        """Return ε of LayerNorm."""
        first: Any = self.model.vit.blocks[0]
        return first.norm2.eps

    @cached_property
    def bins(self) -> list[Bins]:
        """Return the bins of each place."""
        count, N = sum(widths(self.model)), self.slots
        unknown = int(_UNKNOWN * count) if self.places > N else 0
        return [self._cut((count - unknown) // N)] * N + ([self._cut(unknown)] if unknown else [])

    def _cut(self, m: int) -> Bins:
        """Return m bins. Those of a coefficient are equally likely."""
        others = int((1 - _BRIGHTNESS) * m)
        used = _SCALES[: min(others // _FEWEST_BINS, len(self.transform) - 1)]
        counts = [others // len(used)] * len(used) if used else []
        columns: list[tuple[Tensor, Tensor, Tensor]] = []
        for index, count in enumerate([m - sum(counts), *counts]):
            p = torch.arange(1, count, dtype=torch.float64) / count
            inner = (2 * p - 1) * self.largest
            if index > 0:  # quantiles of a Laplace distribution
                from_half = p - 0.5
                size = -(1 - 2 * from_half.abs()).log()
                inner = _SCALES[index - 1] * self.largest * from_half.sign() * size
            ends = torch.cat([inner.new_tensor([-1.25 * self.largest]), inner, inner.new_tensor([math.inf])])
            columns.append((torch.full((count,), index), ends[:-1], ends[1:]))
        return Bins(*(torch.cat(parts) for parts in zip(*columns, strict=True)))

    @cached_property
    def gate(self) -> float:
        """Return the factor G of the points, by which a token of any other place is below all edges."""
        return 2.5 * self.largest / nearest_angle(self.points)

    def _slope(self, bins: Bins) -> float:
        """Return the factor α of the pre-activations of a place."""
        inner = (bins.high - bins.low)[(bins.low > -self.largest) & bins.high.isfinite()]
        narrowest = float(inner.min()) if len(inner) else self.largest
        deviation = math.sqrt((self.transform.shape[1] + 2 * self.constant**2) / self.model.vit.embed_dim)
        return _SHARPNESS * deviation / narrowest

    @cached_property
    def neurons(self) -> list[Float[Tensor, "m d"]]:
        """Return the weights of the neurons of each place.

        Neuron (n, i) computes α (q − τ_i − G (1 − cos Δ)) / σ for coefficient q of a token at the angle Δ from place n.
        Its weights add up to 0, since LayerNorm takes the mean from all channels; channel 1, which is 0, has the rest.
        """
        made: list[Tensor] = []
        for point, bins in zip(self.points, self.bins, strict=True):
            m = len(bins.low)
            weights = torch.zeros(m, self.model.vit.embed_dim, dtype=torch.float64)
            weights[:, 0] = -(bins.low + self.gate) / self.constant
            weights[:, 2:RESERVED] = point * (self.gate / self.constant)
            weights[torch.arange(m), RESERVED + bins.coefficient] += 1
            weights[:, 1] = -weights.sum(1)
            made.append(self._slope(bins) * weights)
        return made

    @cached_property
    def readout(self) -> Float[Tensor, " d"]:
        """Return v: the last attention takes the mean over the tokens u of v·u, from which the loss follows."""
        v = torch.zeros(self.model.vit.embed_dim, dtype=torch.float64)
        v[0] = 1
        v[RESERVED] = 0.5  # of brightness, so that no two images have the same loss
        return v


def widths(model: VictimModel) -> list[int]:
    """Return the neurons of the MLP of each block but the last, which sees the class token alone."""
    return [model.vit.get_parameter(f"blocks.{i}.mlp.fc1.weight").shape[0] for i in range(len(model.vit.blocks) - 1)]

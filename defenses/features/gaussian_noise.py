"""`gaussian-noise`: noise on the features before they are sent."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from privlab.base import check_range
from privlab.threat import Draws, Effects, Sent

__all__ = ["GaussianNoise"]


@dataclass(frozen=True)
class GaussianNoise:
    """Send Z + ε, ε ~ N(0, std²) in every entry, with one generator per image.

    Args:
        std: the standard deviation in the units of the features, at least 0. The source prints no number for Table 6.

    Source: "GN" in Table 6 of Permutation Equivariance (CVPR 2024), after Jeong et al. (AISafety 2022).
    """

    name: ClassVar[str] = "gaussian-noise"
    paper: ClassVar[str] = "Jeong et al. (2022); GN in Permutation Equivariance (2024), Table 6"

    std: float = 0.5

    def __post_init__(self) -> None:
        """Raise PrivlabError if `std` is negative or not finite."""
        check_range(0 <= self.std < math.inf, "std of gaussian-noise", "at least 0 and finite", self.std)

    @property
    def acts_as(self) -> Effects:
        """Return the standard deviation of the noise as an effect."""
        return Effects(noise_std=self.std)

    def send(self, sent: Sent, draws: Draws) -> Sent:
        """Return the features with added noise."""
        noise = torch.stack([torch.randn(sent.features.shape[1:], generator=draw) for draw in draws.images])
        return replace(sent, features=sent.features + self.std * noise.to(sent.features))

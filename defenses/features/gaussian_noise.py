"""`gaussian-noise`: noise on the features before they are sent."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from privlab.base import Checked, NotNegative
from privlab.threat import Draws, Effects, Sent


@dataclass(frozen=True)
class GaussianNoise(Checked):
    """Send Z + ε, ε ~ N(0, std²) in every entry, with one generator per image.

    Idea: The client adds independent noise to every entry of the features that it sends. The adversary knows the
    strength of the noise, and not its draw. The better it knows how images look, the more noise it can remove.

    Steps: features Z → add ε ~ N(0, std²)

    Fails if: the adversary knows how images look, or sees one image several times: it then averages the noise.

    Cost: It changes the outputs, and so the accuracy (`correct` in the records of released features).

    Studies: permutation

    Args:
        std: the standard deviation in the units of the features, at least 0. The source prints no number for Table 6.

    Source: "GN" in Table 6 of Permutation Equivariance (CVPR 2024), after Jeong et al. (AISafety 2022).
    [@jeong2022frequency; @xu2024permutation]
    """

    name: ClassVar[str] = "gaussian-noise"
    paper: ClassVar[str] = "Jeong et al. (2022); GN in Permutation Equivariance (2024), Table 6"
    order: ClassVar[int] = 80

    std: NotNegative = 0.5

    @property
    def acts_as(self) -> Effects:
        """Return the standard deviation of the noise as an effect."""
        return Effects(noise_std=self.std)

    def send(self, sent: Sent, draws: Draws) -> Sent:
        """Return the features with added noise."""
        noise = torch.stack([torch.randn(sent.features.shape[1:], generator=draw) for draw in draws.images])
        return replace(sent, features=sent.features + self.std * noise.to(sent.features))

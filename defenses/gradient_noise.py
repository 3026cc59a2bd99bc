"""`gradient-noise`: the gradient clipped, and Gaussian noise on it, with the differential privacy that this buys."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.errors import PrivlabError
from privlab.threat import Effects

__all__ = ["DELTA", "GradientNoise"]

DELTA = 1e-5
"""The δ for which ε is stated."""


@dataclass(frozen=True)
class GradientNoise:
    """Release g · min(1, C/‖g‖) + ε, ε ~ N(0, (multiplier · C)²), with ‖g‖ over all released parameters of an image.

    Args:
        clip: C, above 0.
        multiplier: σ of the noise in units of C, at least 0.

    Source: DP-SGD (Abadi et al., CCS 2016), Algorithm 1, with a lot of one image and no averaging.
    """

    name: ClassVar[str] = "gradient-noise"
    paper: ClassVar[str] = "DP-SGD (Abadi et al. 2016), Alg. 1"

    acts_as: ClassVar[Effects] = Effects(gradients="noisy")

    clip: float = 1.0
    multiplier: float = 1.0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            PrivlabError: if a number is out of range.
        """
        if not 0 < self.clip < math.inf:
            raise PrivlabError(f"clip of gradient-noise must be above 0 and finite. Found {self.clip}.")
        if not 0 <= self.multiplier < math.inf:
            raise PrivlabError(f"multiplier of gradient-noise must be at least 0 and finite. Found {self.multiplier}.")

    def release(
        self, gradients: Mapping[str, Float[Tensor, "b ..."]], draws: Sequence[Generator]
    ) -> dict[str, Float[Tensor, "b ..."]]:
        """Return the clipped gradients with noise; an image draws for its parameters in the order of their names."""
        norm = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        scale = (self.clip / norm).clamp(max=1)  # a gradient of zero stays zero
        std, released = self.multiplier * self.clip, {}
        for name in sorted(gradients):
            g = gradients[name]
            noise = torch.stack([torch.randn(g.shape[1:], generator=draw) for draw in draws]).to(g)
            released[name] = g * scale.view(-1, *[1] * (g.ndim - 1)) + std * noise
        return released

    def variance(self, released: Mapping[str, Float[Tensor, "b ..."]]) -> dict[str, Float[Tensor, "b ..."]]:
        """Return the variance of the noise."""
        return {name: torch.full_like(g, (self.multiplier * self.clip) ** 2) for name, g in released.items()}

    def epsilon(self, delta: float = DELTA, *, replaced: bool = False) -> float:
        """Return ε such that one release is (ε, δ)-differentially private, by Opacus's RDP accountant.

        One image makes the gradient, so nothing is sampled (rate 1), and the noise is multiplier times what the
        image can add (‖·‖ ≤ C): this is ε for an image's presence. Where a client always sends, and which image it has
        is to be hidden, one is `replaced` by another and the gradient moves by up to 2C: half the multiplier counts.
        Further releases of the same image add up.

        Raises:
            PrivlabError: if Opacus is not installed.
        """
        σ = self.multiplier / (2 if replaced else 1)
        if σ == 0:
            return math.inf
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what it imports
                from opacus.accountants import RDPAccountant  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise PrivlabError("no accountant: pip install 'privlab[privacy]'") from None
        accountant = RDPAccountant()
        accountant.step(noise_multiplier=σ, sample_rate=1.0)
        best = 1 + σ * math.sqrt(2 * math.log(1 / delta))  # the order that minimises α / 2σ² + log(1/δ) / (α − 1)
        orders = [1 + (best - 1) * 2 ** (k / 16) for k in range(-32, 33)]
        return float(accountant.get_epsilon(delta, alphas=orders))

    def remark(self) -> str:
        """Return what one release buys, in one clause; or why that is not known here."""
        try:
            present, which = self.epsilon(), self.epsilon(replaced=True)
        except PrivlabError as error:
            return f"ε n/a: {error}"
        what = f"ε ≤ {present:.4g} for an image's presence, {which:.4g} for which image it is"
        return f"one release, δ = {DELTA:g}: {what}"

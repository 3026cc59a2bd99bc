"""`gradient-noise`: a clipped gradient with Gaussian noise, and the differential privacy that this gives."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from privlab.base import AtLeast1, Checked, NotNegative, Positive, PrivlabError
from privlab.threat import Effects, Gradients, Guarantee

DELTA = 1e-5  # the δ for which ε is stated


@dataclass(frozen=True)
class GradientNoise(Checked):
    """Release g · min(1, C/‖g‖) + ε, ε ~ N(0, (multiplier · C)²), with ‖g‖ over all released parameters of an image.

    Idea: The client scales its gradient down to a largest norm, and adds Gaussian noise to every entry. This is the
    step of DP-SGD for one image. How much it hides depends on the ratio of the noise to the norm, and on the number of
    releases.

    Steps: gradient g → clip to norm C → add N(0, (σ C)²)

    Algorithm: The same gradient may be released K times, each time with fresh noise. The mean of K such releases is a
    sufficient statistic: it holds all that they reveal. So the mean is passed on.

    Fails if: the multiplier is small: it then hides little, and its ε says so. That closed forms fail at a large one is
    no evidence of privacy: the guarantee is (ε, δ).

    Cost: It changes what the server trains with, and may slow training down.

    Studies: gradients

    Args:
        clip: C, the largest norm of an image's gradient, above 0.
        multiplier: σ of the noise of one release in units of C, at least 0.
        releases: K, the number of releases of the same gradient, at least 1.

    Source: DP-SGD (Abadi et al., CCS 2016), Algorithm 1, with a lot of one image and no averaging. [@abadi2016dpsgd]
    """

    name: ClassVar[str] = "gradient-noise"
    paper: ClassVar[str] = "DP-SGD (Abadi et al. 2016), Alg. 1"
    order: ClassVar[int] = 120

    acts_as: ClassVar[Effects] = Effects(gradients="noisy")

    clip: Positive = 1.0
    multiplier: NotNegative = 1.0
    releases: AtLeast1 = 1

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Gradients:
        """Return the clipped gradients with noise, or the mean of several such releases.

        An image's generator draws for the parameters in the order of their names. The mean of K normal variables is
        drawn as one, of the deviation σ C / √K.
        """
        std, released, clipped = self.multiplier * self.clip / math.sqrt(self.releases), {}, self.expected(gradients)
        for name in sorted(gradients):
            g = clipped[name]
            noise = torch.stack([torch.randn(g.shape[1:], generator=draw) for draw in draws])
            released[name] = g + std * noise.to(g)
        return released

    def expected(self, gradients: Gradients) -> Gradients:
        """Return the mean of the releases of these gradients: g · min(1, C/‖g‖)."""
        norm = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        scale = (self.clip / norm).clamp(max=1)  # a gradient of zero stays zero
        return {name: g * scale.view(-1, *[1] * (g.ndim - 1)) for name, g in gradients.items()}

    def variance(self, released: Gradients) -> Gradients:
        """Return the variance of the noise, (multiplier · C)² / K, that of the mean of K releases."""
        variance = (self.multiplier * self.clip) ** 2 / self.releases
        return {name: torch.full_like(g, variance) for name, g in released.items()}

    def epsilon(self, delta: float = DELTA, *, replaced: bool = False) -> float:
        """Return ε such that all releases together are (ε, δ)-differentially private, by Opacus's RDP accountant.

        One image makes the gradient, so nothing is sampled (rate 1), and the noise is the multiplier times the most
        that the image can add (‖·‖ ≤ C): this is ε for an image's presence. If a client always sends, and the secret is
        which image it has, one image is `replaced` by another and the gradient moves by up to 2C: half the multiplier
        counts. The K releases are K steps of the accountant, each of which may depend on the outcomes of those before.

        Raises:
            PrivlabError: if Opacus is not installed.
        """
        σ = self.multiplier / (2 if replaced else 1)
        if σ == 0:
            return math.inf
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the warnings of its imports
                from opacus.accountants import RDPAccountant  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise PrivlabError("no accountant: pip install 'privlab[privacy]'") from None
        accountant = RDPAccountant()
        for _ in range(self.releases):
            accountant.step(noise_multiplier=σ, sample_rate=1.0)
        # the order that minimises K α / 2σ² + log(1/δ) / (α − 1)
        best = 1 + σ * math.sqrt(2 * math.log(1 / delta) / self.releases)
        orders = [1 + (best - 1) * 2 ** (k / 16) for k in range(-32, 33)]
        return float(accountant.get_epsilon(delta, alphas=orders))

    def guarantee(self) -> Guarantee:
        """Return the (ε, δ)-differential privacy of all releases together, for which image it is.

        Raises:
            PrivlabError: if Opacus is not installed.
        """
        by = f"multiplier = {self.multiplier:g} with releases = {self.releases}"
        return Guarantee(self.epsilon(replaced=True), DELTA, by)

    def remark(self) -> str:
        """Return the ε that the noise of all releases gives, in one clause, or why it is not known here."""
        try:
            present, which = self.epsilon(), self.epsilon(replaced=True)
        except PrivlabError as error:
            return f"ε n/a: {error}"
        what = f"ε ≤ {present:.4g} for an image's presence, {which:.4g} for which image it is"
        count = "one release" if self.releases == 1 else f"{self.releases} releases of the same gradient"
        return f"{count}, δ = {DELTA:g}: {what}"

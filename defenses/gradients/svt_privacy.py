"""`svt-privacy`: NVFlare's filter that sends a random tenth of the entries, clipped and with noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import AtLeast1, Checked, NotNegative, Positive, PositiveShare, PrivlabError
from privlab.threat import Effects, Gradients

_MOST_TESTS = 1000  # the most times that entries are tested; with NVFlare's defaults once or twice is enough


@dataclass(frozen=True)
class SvtPrivacy(Checked):
    """Accept entries by a noisy test of their magnitude, draw some of them, and release these with Laplace noise.

    Idea: The client chooses entries of its update by a noisy test of their magnitude. It sends these with Laplace
    noise, and zeros for all others. With the defaults the noise is far larger than what it hides.

    Steps: update d → noisy test of |d| → add Laplace noise

    Algorithm: Of n entries, m = ⌈fraction · n⌉ are to be sent. With d = clip(entry, ±γ), an entry is accepted where |d|
    + Laplace(2γ m / ε₂) ≥ τ + Laplace(γ / ε₁), the threshold being drawn once; the test is repeated for the rest until
    m are accepted. Then m of the accepted are drawn, and sent as d + Laplace(2γ / noise); all others are 0. With the
    defaults the noise of the test is far larger than γ, so that entries are accepted by chance, and that of what is
    sent is 20 γ.

    NVFlare divides by the steps T of the round first, if the client states them, and multiplies by them last. Up to
    2.7 it clipped after the noise instead, so that what is sent is ±γ almost everywhere.

    Fails if: `noise` is large: the noise of what is sent depends on `noise` and `gamma` alone, and a large `noise`
    makes it small.

    Cost: It changes what the server trains with, and may slow training down.

    Studies: filters

    Args:
        fraction: the share of the entries that is to be sent, in (0, 1].
        epsilon: ε, the budget of the test, > 0: ε₁ = ε / (1 + (2m)^(2/3)) for the threshold and ε₂ = ε − ε₁.
        noise: NVFlare's `noise_var`, by which the noise of what is sent is 2γ / noise; > 0.
        gamma: γ, the largest magnitude of an entry per step, in the units of what is released; > 0.
        tau: τ, the threshold before its noise, ≥ 0.
        replace: whether entries are drawn with replacement: then fewer than m are sent.
        steps: T, as the client states it (`NUM_STEPS_CURRENT_ROUND`), at least 1; 1 where it does not.

    Source: NVFlare 2.9 (Apache-2.0), nvflare/app_common/filters/svt_privacy.py, with its defaults; after the sparse
    vector technique (Lyu et al., VLDB 2017). [@lyu2017svt; @roth2022nvflare]
    """

    name: ClassVar[str] = "svt-privacy"
    paper: ClassVar[str] = "NVFlare's SVTPrivacy; after Lyu et al. (VLDB 2017)"
    order: ClassVar[int] = 180

    acts_as: ClassVar[Effects] = Effects(gradients="noisy")

    fraction: PositiveShare = 0.1
    epsilon: Positive = 0.1
    noise: Positive = 0.1
    gamma: Positive = 1e-5
    tau: NotNegative = 1e-6
    replace: bool = True
    steps: AtLeast1 = 1

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Gradients:
        """Return the filtered gradients or updates; an image's generator draws for all parameters at once."""
        names = sorted(gradients)
        flat = torch.cat([gradients[name].flatten(1) for name in names], 1) / self.steps
        sent = torch.stack([self._of_one(d, draw) for d, draw in zip(flat, draws, strict=True)]) * self.steps
        parts = sent.split([gradients[name][0].numel() for name in names], 1)
        return {name: part.view_as(gradients[name]) for name, part in zip(names, parts, strict=True)}

    def _of_one(self, d: Float[Tensor, " n"], draw: Generator) -> Float[Tensor, " n"]:
        """Return what is sent of one image's entries per step."""
        γ, n, m = self.gamma, len(d), math.ceil(self.fraction * len(d))
        ratio = (2 * m) ** (2 / 3)
        ε1 = self.epsilon / (1 + ratio)
        threshold = self.tau + γ / ε1 * float(_laplace(1, draw))
        clipped = d.clamp(-γ, γ)
        accepted = torch.zeros(n, dtype=torch.bool, device=d.device)
        for _ in range(_MOST_TESTS):
            accepted |= clipped.abs() + 2 * γ * m / (ε1 * ratio) * _laplace(n, draw).to(d) >= threshold
            if int(accepted.sum()) >= m:
                break
        else:
            raise PrivlabError(
                f"{self.name} accepts fewer than {m} of {n} entries, however often it tests them (NVFlare would not "
                f"end): take a larger gamma, or a smaller tau, fraction or epsilon. Found {self}."
            )
        rows = accepted.nonzero()[:, 0].cpu()
        if self.replace:
            drawn = rows[torch.randint(len(rows), (m,), generator=draw)]
        else:
            drawn = rows[torch.randperm(len(rows), generator=draw)[:m]]
        noisy = clipped[drawn] + 2 * γ / self.noise * _laplace(m, draw).to(d)
        return torch.zeros_like(d).index_put((drawn,), noisy)  # an entry drawn more than once keeps one noise

    def variance(self, released: Gradients) -> Gradients:
        """Return γ² T² for an entry that was not sent, and for one that was the variance 8 (γ T / noise)² more.

        How large an entry was before it was clipped or left out is not known: γ T stands for it.
        """
        γ = self.gamma * self.steps
        noise = 2 * (2 * γ / self.noise) ** 2
        return {name: γ**2 + noise * (g != 0).to(g) for name, g in released.items()}


def _laplace(n: int, draw: Generator) -> Float[Tensor, " n"]:
    """Return draws of the Laplace distribution of scale 1: the difference of two of the exponential one."""
    one, two = torch.empty(2, n, dtype=torch.float64).exponential_(generator=draw)
    return one - two

"""`adaptive-clipping`: clipping by the norm whose bound follows a quantile of the clients' norms, by noisy bits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from privlab.base import AtLeast0, Checked, NotNegative, Positive, Share
from privlab.threat import Effects, Gradients


@dataclass(frozen=True)
class AdaptiveClipping(Checked):
    """Release u · min(1, C_t/‖u‖), ‖u‖ over all released parameters, with the bound C_t after t earlier rounds.

    Idea: The client scales its update down to a bound on the norm, and says in one bit whether it had to. The server
    moves the bound by the noisy mean of the bits, towards a quantile of the norms. The ratios of all entries stay.

    Steps: update u → scale to norm ≤ C → C follows a quantile

    Algorithm: After each round every client sends one bit b_i, and the server takes C ← C · exp(−η (b̄ + ε − q)), with
    b̄ the mean of the bits and ε ~ N(0, std²). In the paper b_i = 1 where ‖u_i‖ ≤ C, so that C goes to the q-quantile
    of the norms. Flower's bit is 1 where the update was clipped: then C goes away from that quantile, up or down.

    The earlier rounds are simulated with clients whose updates all have the norm of this one. The server, which draws
    ε, knows C_t; an adversary who does not has one unknown factor.

    Fails if: the adversary reads the ratios of the entries: it hides the norm of an update, and nothing else of one
    client, because one factor is on all entries. The noise that a server adds to the sum of the clients comes after the
    server has seen them.

    Cost: It changes what the server trains with, and may slow training down.

    Studies: filters

    Args:
        bound: C_0, the first bound, in the units of what is released; > 0.
        quantile: q, the share of the updates that is to be within the bound, in [0, 1].
        lr: η, the rate of the geometric update; > 0.
        std: deviation of the noise of the mean bit; ≥ 0. Flower's noise has n/20 for the count of n clients.
        rounds: t, the rounds before this one; ≥ 0.
        bit: what a bit of 1 says: "within" the bound (the paper), or "clipped" (Flower).

    Source: Andrew et al. (NeurIPS 2021), Algorithm 1; Flower 1 (Apache-2.0), flwr/server/strategy/
    dp_adaptive_clipping.py and flwr/clientapp/mod/centraldp_mods.py, with its defaults. [@andrew2021clipping]
    """

    name: ClassVar[str] = "adaptive-clipping"
    paper: ClassVar[str] = "Andrew et al. (2021), Alg. 1; Flower's adaptive clipping"
    order: ClassVar[int] = 210

    bound: Positive = 0.1
    quantile: Share = 0.5
    lr: Positive = 0.2
    std: NotNegative = 0.05
    rounds: AtLeast0 = 0
    bit: Annotated[str, ("within", "clipped")] = "within"

    @property
    def acts_as(self) -> Effects:
        """Return that the values change; their factor is drawn where there were rounds before."""
        return Effects(gradients="noisy" if self.rounds and self.std else "rounded")

    def next_bound(self, bound: float, mean_bit: float, noise: float = 0.0) -> float:
        """Return C · exp(−η (b̄ + ε − q)).

        Args:
            bound: C.
            mean_bit: b̄, the mean of the clients' bits, in [0, 1].
            noise: ε.
        """
        return bound * math.exp(-self.lr * (mean_bit + noise - self.quantile))

    def release(self, gradients: Gradients, draws: Sequence[Generator]) -> Gradients:
        """Return the clipped gradients or updates; an image's generator draws the noise of the earlier rounds."""
        norms = _norms(gradients)
        bounds = [self._bound(norm, draw) for norm, draw in zip(norms.tolist(), draws, strict=True)]
        return _clipped(gradients, norms, bounds)

    def expected(self, gradients: Gradients) -> Gradients:
        """Return the releases of these gradients without noise of the bits."""
        norms = _norms(gradients)
        return _clipped(gradients, norms, [self._bound(norm, None) for norm in norms.tolist()])

    def variance(self, released: Gradients) -> Gradients:
        """Return 0: one factor on all entries changes none of their ratios."""
        return {name: torch.zeros_like(g) for name, g in released.items()}

    def _bound(self, norm: float, draw: Generator | None) -> float:
        """Return C_t of clients of one norm; without a generator, that of rounds without noise."""
        bound = self.bound
        for _ in range(self.rounds):
            noise = 0.0 if draw is None else self.std * float(torch.randn((), generator=draw, dtype=torch.float64))
            bound = self.next_bound(bound, float((norm <= bound) == (self.bit == "within")), noise)
        return bound


def _norms(gradients: Gradients) -> Float[Tensor, " b"]:
    return torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)


def _clipped(gradients: Gradients, norms: Float[Tensor, " b"], bounds: Sequence[float]) -> Gradients:
    scale = (norms.new_tensor(bounds) / norms).clamp(max=1)  # a gradient of zero stays zero
    return {name: g * scale.view(-1, *[1] * (g.ndim - 1)) for name, g in gradients.items()}

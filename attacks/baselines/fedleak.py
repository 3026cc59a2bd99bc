"""`fedleak`: gradient matching on the largest entries of each layer, at points where the objective is flat."""

# Known are the model, and a gradient or the update of a round of SGD. Sought are the images.
# 1. A round's update, divided by the sum of its rates, is taken for the mean of its gradients at θ_0.
# 2. Only the largest entries of each layer are compared (`largest`), as in `gradient-matching`.
# 3. `Flat` adds the norm of the slope to the objective, so that the search prefers flat regions.

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from privlab.attacks.baselines.rounds import labels_of_round, mean_gradient
from privlab.attacks.gradients.gradient_matching import START_NAMES, GradientMatching, Match
from privlab.attacks.solvers import Evaluate
from privlab.base import NotNegative, PositiveShare
from privlab.release import each_release
from privlab.threat import Observation


@dataclass(frozen=True)
class FedLeak(GradientMatching):
    """Minimise 1 − cos(∇ℓ(x), G) over the largest entries of each layer of G, plus a multiple of the norm of its slope.

    Idea: The update of a round is taken for a gradient. The attack looks for images whose gradient has the direction of
    the update in its largest entries alone. It prefers points around which the distance hardly changes.

    Steps: mean gradient of the round → match the largest entries → penalise the slope

    Algorithm: G is a gradient, or the update of a round of SGD, taken for the mean of its gradients at the server's
    weights. The gradient of ‖∇f‖ is H n, where f is the objective, H its Hessian and n = ∇f / ‖∇f‖. A finite
    difference of ∇f along n approximates H n, so each evaluation computes two gradients of f (`Flat`). The search is
    that of `gradient-matching`.

    Exact if: no condition is known: it is a search without a guarantee.

    Fails if: the client took several steps: the update is then no gradient at the server's weights, so that even the
    true image has a distance. It knows no filter.

    Studies: baselines

    Args:
        objective: as in `gradient-matching`, without "likelihood".
        share: share of the entries of each layer that are compared, those of largest magnitude; in (0, 1].
        flat: weight of the slope's norm, per root of the number of pixels; ≥ 0.

    Source: Fan et al. (USENIX Security 2025), partial gradient matching and gradient regularisation. Only the abstract
    and a summary of the paper could be read, so that the choice of entries, the difference and all weights are ours.
    [@fan2025fedleak]
    """

    name: ClassVar[str] = "fedleak"
    paper: ClassVar[str] = "FedLeak (Fan et al., USENIX Security 2025)"
    order: ClassVar[int] = 240
    short: ClassVar[Mapping[str, Any]] = {"steps": 1}
    named_only: ClassVar[bool] = True
    updates_of: ClassVar[tuple[str, ...]] = ("sgd",)

    objective: Annotated[str, ("cosine", "l2")] = "cosine"
    tv: NotNegative = 0.01
    start: Annotated[str, START_NAMES] = "noise"
    share: PositiveShare = 0.3
    flat: NotNegative = 0.01

    def _match(self, seen: Observation) -> Match:
        """Return the comparison with the largest entries of the mean gradient."""
        client = seen.client
        if client is None:
            match = Match.of(seen, self.objective, self.tv)
        else:
            releases = each_release(seen)
            # Labels come from the head's update, as `labels_of_round` reads it for all images of the round.
            labels = torch.tensor([labels_of_round(seen.model, of, client) for of in releases]).flatten()
            mean = [mean_gradient(seen.model, of, client) for of in releases]
            gradients = {name: torch.stack([of[name] for of in mean]) for name in seen.gradients}
            labels = labels.to(seen.model.mean.device)
            match = Match.of(replace(seen, gradients=gradients, client=None), self.objective, self.tv, labels)
        # The target is restricted to the entries compared, and its norm is one again. The candidates' gradients
        # are restricted to the same entries by `Match`.
        compared = {name: largest(G, self.share) for name, G in match.target.items()}
        target = {name: G * compared[name] for name, G in match.target.items()}
        norm = torch.stack([G.flatten(1).norm(dim=1) for G in target.values()]).norm(dim=0)
        target = {name: G / norm.view(-1, *[1] * (G.ndim - 1)) for name, G in target.items()}
        return replace(match, compared=compared, target=target, norm=match.norm * norm)

    def _objective(self, match: Match) -> Evaluate:
        """Return the comparison, or the comparison plus its slope's norm."""
        return Flat(match, self.flat) if self.flat else match


def largest(G: Float[Tensor, "r ..."], share: float) -> Bool[Tensor, "r ..."]:
    """Return the entries of each release that are among the share of largest magnitude, in (0, 1], at least one.

    Entries that are zero are never among them.
    """
    # Entries of the magnitude of the last one counted are all taken, so that equal ones are treated the same.
    flat = G.flatten(1).abs()
    count = max(1, round(share * flat.shape[1]))
    least = flat.topk(count, dim=1).values[:, -1:]
    return ((flat >= least) & (flat > 0)).view(G.shape)


@dataclass(frozen=True, eq=False)
class Flat:
    """The objective D plus `weight` ‖∇D‖ / √q: q is the number of coordinates.

    Its slope is ∇D + weight (∇D(x + ε n) − ∇D(x)) / (ε √q), with n = ∇D / ‖∇D‖.
    """

    objective: Evaluate
    weight: float
    share: float = 1e-3

    def __call__(
        self, points: Float[Tensor, "s q"], numbers: Int[Tensor, " s"]
    ) -> tuple[Float[Tensor, " s"], Float[Tensor, "s q"]]:
        """Return value and slope; ε is `share` times the root mean square of a point, times √q."""
        # The gradient of ‖∇D‖ is H n with n = ∇D / ‖∇D‖. A difference of slopes along n, over ε, approximates it.
        value, slope = self.objective(points, numbers)
        size = slope.norm(dim=1, keepdim=True)
        root = slope.shape[1] ** 0.5
        ε = self.share * points.norm(dim=1, keepdim=True).clamp_min(torch.finfo(points.dtype).tiny ** 0.5)
        _, ahead = self.objective(points + ε * slope / size.clamp_min(torch.finfo(size.dtype).tiny), numbers)
        return value + self.weight * size[:, 0] / root, slope + self.weight / root * (ahead - slope) / ε

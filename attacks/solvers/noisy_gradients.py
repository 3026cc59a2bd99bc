"""Released gradients that are noisy, lack entries or are rounded: those of the embedding, and how likely all are.

Known are released gradients with errors, and what the defenses say of these errors; sought is how well a proposed
gradient explains them. `NoisyGradients` does so for the embedding's two, `Likelihood` for those of all layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from privlab.attacks.solvers.linear import RTOL
from privlab.threat import Observation, Stack, defense_declarations

_GUESSED = 0.999  # the least bound of a guess, relative to the greatest entry that was released of a parameter
_LEAST_VARIANCE_RATIO = 1e-4  # the least error variance of one of the two gradients, relative to that of the other


@dataclass(frozen=True, eq=False)
class NoisyGradients:
    """Ã = A + E₁ and G̃ = Aᵀ X + E₂, with the variances of the entries of E₁ (`pe`) and E₂ (`weight`).

    An entry is missing if it was released as zero but may be another number, of absolute value up to `edge`; `edge` is
    zero for all other entries.
    """

    A: Float[Tensor, "b n d"]
    G: Float[Tensor, "b d k"]
    noise_pe: Float[Tensor, "b 1 1"]
    noise_weight: Float[Tensor, "b 1 1"]
    edge_pe: Float[Tensor, "b n d"]
    edge_weight: Float[Tensor, "b d k"]

    @classmethod
    def of(cls, seen: Observation) -> "NoisyGradients":
        """Return the release of an observation; the variances of several defenses add up."""
        names = ("pos_embed", "patch_embed.proj.weight")
        released = {name: seen.gradients[name] for name in names}
        # The defenses state the variance of each entry's error; class and register tokens are left out of A.
        variances = Stack(tuple(seen.defense)).variance(released)
        (A, vA), (G, vG) = ((released[name].double(), variances[name].double()) for name in names)
        A, vA = (t.squeeze(1)[:, -seen.model.vit.patch_embed.num_patches :] for t in (A, vA))
        G, vG = G.flatten(2), vG.flatten(2)
        # One variance for each gradient of a release, and not less than float32's rounding
        # of G, or than 10⁻⁴ of the larger one.
        noise_pe, noise_weight = vA.mean((1, 2), keepdim=True), vG.mean((1, 2), keepdim=True)
        rounding = G.square().mean((1, 2), keepdim=True) * RTOL**2
        least = torch.maximum(_LEAST_VARIANCE_RATIO * torch.maximum(noise_pe, noise_weight), rounding)
        least = least.clamp_min(torch.finfo(torch.float64).tiny)
        # A zero may be a missing entry. If it is uniform on ±edge, its variance is
        # edge² / 3, so edge = √(3 · variance).
        edges = (torch.where(t == 0, (3 * v).sqrt(), 0) for t, v in ((A, vA), (G, vG)))
        return cls(A, G, noise_pe.maximum(least), noise_weight.maximum(least), *edges)

    @property
    def silent_slots(self) -> Bool[Tensor, "b n"]:
        """Return the slots whose row of Ã is zero, or no larger than its noise: under MJP, those that are masked.

        The mean square of D entries of noise is above Var E₁ · (1 + 4 √(2/D)) in one of ten thousand rows.
        """
        heard = (self.A != 0).to(self.A).mean(2)  # the share of entries with noise; missing ones have none
        least = self.noise_pe[..., 0] * heard * (1 + 4 * (2 / self.A.shape[2]) ** 0.5)
        return (self.A == 0).all(2) | ((self.A.square().mean(2) <= least) & (self.edge_pe == 0).all(2))

    @property
    def ratio(self) -> Float[Tensor, "b 1 1"]:
        """Return ρ = Var E₁ / Var E₂."""
        return self.noise_pe / self.noise_weight

    def complete(self, X: Float[Tensor, "b n k"]) -> "NoisyGradients":
        """Return the release with its missing entries computed from A and X, clipped to their known bounds."""
        # A comes first, from the released values and X; then G = Aᵀ X. Entries that were released keep their values.
        A = posterior(self.A, self.G, X, self.ratio)
        missing_A, missing_G = self.edge_pe > 0, self.edge_weight > 0
        return replace(
            self,
            A=torch.where(missing_A, A.clamp(-self.edge_pe, self.edge_pe), self.A),
            G=torch.where(missing_G, (A.mT @ X).clamp(-self.edge_weight, self.edge_weight), self.G),
        )


def posterior(
    A: Float[Tensor, "b n d"], G: Float[Tensor, "b d k"], X: Float[Tensor, "b n k"], ratio: Float[Tensor, "b 1 1"]
) -> Float[Tensor, "b n d"]:
    """Return the A that explains Ã and G̃ best, given X: the minimiser of ‖Ã − A‖² + ρ ‖G̃ − Aᵀ X‖².

    Args:
        A: Ã, the released ∂ℓ/∂E_pos of the patch slots.
        G: G̃, the released ∂ℓ/∂W of the patch embedding, D × K for each image.
        X: normalised patches.
        ratio: ρ = Var E₁ / Var E₂, the ratio of the error variances of the two gradients, > 0.
    """
    # The derivative by A is zero where (I + ρ X Xᵀ) A = Ã + ρ X G̃ᵀ: N × N equations for all D columns.
    eye = torch.eye(X.shape[1], dtype=X.dtype, device=X.device)
    return torch.linalg.solve(eye + ratio * X @ X.mT, A + ratio * X @ G.mT)


Gradients = Mapping[str, Float[Tensor, "s ..."]]


@dataclass(frozen=True, eq=False)
class Likelihood:
    """Released gradients of all layers, with the `variance` of the error of each entry, for each of r releases.

    An entry that was released as zero, and may be another number, lies within ±`edge`. Where `edge` is negative, the
    entry has the sign of what was released and is at least as large; where it is zero, it is what was released, but for
    its error. The functions in `expected` apply what a defense does on average, such as clipping.
    """

    released: Mapping[str, Float[Tensor, "r ..."]]
    variance: Mapping[str, Float[Tensor, "r ..."]]
    edge: Mapping[str, Float[Tensor, "r ..."]]
    expected: tuple[Callable[[Gradients], Gradients], ...] = ()

    @classmethod
    def of(cls, seen: Observation, released: Mapping[str, Float[Tensor, "r ..."]]) -> "Likelihood":
        """Return the likelihood of these gradients by what is known of their errors; those of several defenses add up.

        No error is less than that of rounding, which is relative to the root mean square over all parameters.
        """
        stack = Stack(tuple(seen.defense))
        variance = stack.variance(released)
        # As in `NoisyGradients`: an entry that is uniform on ±edge has the variance edge² / 3.
        edge = {name: torch.where(g == 0, (3 * variance[name]).sqrt(), 0) for name, g in released.items()}
        # A bound as wide as the greatest entry that was released of a parameter is a guess, and entries that are
        # missing at random may be beyond it: they are not bounded.
        for name, g in released.items():
            greatest = g.flatten(1).abs().amax(1).view(-1, *[1] * (g.ndim - 1))
            guessed = (greatest > 0) & (edge[name] >= _GUESSED * greatest)
            edge[name] = edge[name].masked_fill(guessed, torch.inf)
        sizes = torch.stack([g.flatten(1).square().sum(1) for g in released.values()]).sum(0)
        count = sum(g[0].numel() for g in released.values())
        least = RTOL**2 * sizes / count
        least = least.clamp_min(torch.finfo(least.dtype).tiny)
        floors = {name: least.view(-1, *[1] * (g.ndim - 1)) for name, g in released.items()}
        # The uncertainty of a missing entry is its interval. Beyond the interval only rounding counts as an error.
        variance = {name: torch.where(edge[name] > 0, 0, v).maximum(floors[name]) for name, v in variance.items()}
        expected = (defense_declarations(part).expected for part in stack.on_gradients)
        return cls(released, variance, edge, tuple(each for each in expected if each is not None))

    @property
    def signs(self) -> bool:
        """Return whether of each entry its sign alone was released."""
        return all(bool((g == g.sign()).all()) for g in self.released.values())

    def take(self, rows: Int[Tensor, " s"]) -> "Likelihood":
        """Return that of some of the releases."""
        parts = (self.released, self.variance, self.edge)
        released, variance, edge = ({name: each[rows] for name, each in part.items()} for part in parts)
        return Likelihood(released, variance, edge, self.expected)

    def __call__(self, g: Gradients, release: Int[Tensor, " s"]) -> Float[Tensor, " s"]:
        """Return −log p(released | g) less a constant: Σ r² / 2v, with r the distance of an entry to its interval."""
        # What the defenses do to a gradient on average, such as clipping, is done to the proposed one as well.
        for expected in self.expected:
            g = expected(g)
        total = []
        for name, each in g.items():
            off = distance(each, self.released[name][release], self.edge[name][release])
            total.append((off.square() / self.variance[name][release]).flatten(1).sum(1))
        return torch.stack(total).sum(0) / 2


def distance(made: Float[Tensor, "..."], released: Float[Tensor, "..."], edge: Float[Tensor, "..."]) -> Tensor:
    """Return how far entries of a gradient are from what was released of them, or from the interval that they lie in.

    Args:
        made: the entries.
        released: what was released of each.
        edge: as in `Likelihood`: > 0 for an interval about zero, < 0 for a lower bound of the magnitude, 0 for neither.
    """
    sign = released.sign()
    short = sign * (sign * made - released.abs()).clamp_max(0)
    return torch.where(edge > 0, made - made.clamp(-edge, edge), torch.where(edge < 0, short, made - released))

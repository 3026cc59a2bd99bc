"""`gradient-likelihood`: the likeliest image behind a noisy gradient of all layers."""

from dataclasses import dataclass
from typing import ClassVar

from privlab.attacks.gradients.gradient_matching import GradientMatching
from privlab.threat import Capability

__all__ = ["GradientLikelihood"]


@dataclass(frozen=True)
class GradientLikelihood(GradientMatching):
    """Minimise −log p(G | x) + tv · Σ_p √(ε² + δ_pᵀ Γ⁻¹ δ_p), over the gradients of all layers (see `Likelihood`).

    p uses what is known of the defense: how it clips, the variance of its noise, and the bounds of the entries that it
    left out. All else, with the search and its start, is as in `gradient-matching`.

    Args:
        objective: as in `gradient-matching`; "likelihood" is what distinguishes this attack.
        optimiser: as in `gradient-matching`.
        steps: as in `gradient-matching`.
        lr: as in `gradient-matching`.
        tv: weight of the image prior; at 1 it is that of `patch-gradient-adaptive`, and the search maximises the
            posterior.
        restarts: as in `gradient-matching`.
        start: as in `gradient-matching`; "auto" is `patch-gradient-adaptive`.
        seed: as in `gradient-matching`.
    """

    name: ClassVar[str] = "gradient-likelihood"
    paper: ClassVar[str] = "ours: maximum a posteriori over all layers, against gradient defenses"
    requires: ClassVar[frozenset[Capability]] = GradientMatching.requires | {
        Capability.KNOWS_DEFENSE,
        Capability.GRADIENT_DEFENSE,
    }
    knows: ClassVar[frozenset[str]] = GradientMatching.knows | {"gradient-noise", "gradient-quantisation"}

    objective: str = "likelihood"
    tv: float = 1.0

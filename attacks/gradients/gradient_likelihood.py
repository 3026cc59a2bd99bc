"""`gradient-likelihood`: the likeliest image behind a noisy gradient of all layers."""

from dataclasses import dataclass
from typing import ClassVar

from privlab.attacks.gradients.gradient_matching import GradientMatching
from privlab.threat import Capability

__all__ = ["GradientLikelihood"]


@dataclass(frozen=True)
class GradientLikelihood(GradientMatching):
    """Minimise −log p(G | x) + tv · Σ_p √(ε² + δ_pᵀ Γ⁻¹ δ_p), over the gradients of all layers (see `Likelihood`).

    p is what is known of the defense: how it clips, the size of its noise, and within which bounds the entries are that
    it left out. The rest, the search and its start, is `gradient-matching`.

    Args:
        objective: as of `gradient-matching`; "likelihood" is what sets this attack apart.
        optimiser: as there.
        steps: as there.
        lr: as there.
        tv: weight of the image prior; at 1 it is that of `patch-gradient-adaptive`, and the search one for the greatest
            posterior.
        restarts: as of `gradient-matching`.
        start: as there; "auto" is `patch-gradient-adaptive`.
        seed: as there.
    """

    name: ClassVar[str] = "gradient-likelihood"
    paper: ClassVar[str] = "ours: maximum a posteriori over all layers, against gradient defenses"
    requires: ClassVar[frozenset[Capability]] = GradientMatching.requires | {
        Capability.KNOWS_DEFENSE,
        Capability.GRADIENT_DEFENSE,
    }
    knows: ClassVar[frozenset[str]] = GradientMatching.knows | {"gradient-noise", "gradient-quantisation"}

    objective: str = "likelihood"
    lr: float = 0.02
    tv: float = 1.0

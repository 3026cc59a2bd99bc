"""`gradient-likelihood`: the likeliest image behind a noisy gradient of all layers."""

# The search of `gradient-matching` with another objective: −log p(G | x) by what is known of a defense's errors
# (`Likelihood`), plus an image prior. Everything but the default options is inherited; `Match._value` has the formula.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from privlab.attacks.gradients.gradient_matching import OBJECTIVES, GradientMatching
from privlab.base import NotNegative
from privlab.threat import Capability


@dataclass(frozen=True)
class GradientLikelihood(GradientMatching):
    """Minimise −log p(G | x) + tv · Σ_p √(ε² + δ_pᵀ Γ⁻¹ δ_p), over the gradients of all layers (see `Likelihood`).

    Idea: The attack knows how the defense of a gradient clips, what noise it adds and which entries it drops. So it can
    say how likely the released gradient is for any image. It searches for the image under which the gradients of all
    layers are likeliest, with a prior on images.

    Steps: guess an image → likelihood of the release → climb to the likeliest image

    Algorithm: p uses what is known of the defense: how it clips, the variance of its noise, and the bounds of the
    entries that it left out. All else, with the search and its start, is as in `gradient-matching`.

    Exact if: no condition is known: it is a search without a guarantee.

    Fails if: the search stops far from the most likely image, as a rule. It was measured on a few images only.

    Cost: Minutes an image.

    Studies: gradients

    Args:
        objective: as in `gradient-matching`; "likelihood" is what distinguishes this attack.
        tv: weight of the image prior; at 1 it is that of `patch-gradient-adaptive`, which maximises the posterior.
        start: as in `gradient-matching`; "auto" is `patch-gradient-adaptive`.
    """

    name: ClassVar[str] = "gradient-likelihood"
    paper: ClassVar[str] = "ours: maximum a posteriori over all layers, against gradient defenses"
    order: ClassVar[int] = 160
    short: ClassVar[Mapping[str, Any]] = {"steps": 1, "restarts": 1, "start": "patch-gradient"}
    requires: ClassVar[frozenset[Capability]] = GradientMatching.requires | {
        Capability.KNOWS_DEFENSE,
        Capability.GRADIENT_DEFENSE,
    }
    knows: ClassVar[frozenset[str]] = GradientMatching.knows | {"gradient-noise", "gradient-quantisation"}

    objective: Annotated[str, OBJECTIVES] = "likelihood"
    tv: NotNegative = 1.0

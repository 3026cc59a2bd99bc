"""Attacks: one file, one attack; each turns an observation into images, or into a key."""

from privlab.attacks.features.border_jigsaw import BorderJigsaw
from privlab.attacks.features.class_token_key import ClassTokenKey
from privlab.attacks.features.column_statistics import ColumnStatistics
from privlab.attacks.features.feature_inversion import FeatureOptimisation, LeastSquares
from privlab.attacks.features.learned_inversion import InversionConv, InversionMae, InversionSet, InversionToken
from privlab.attacks.features.pe_assignment import PEAssignment
from privlab.attacks.features.row_alignment import RowAlignment
from privlab.attacks.gradients.april import April
from privlab.attacks.gradients.breaching_attacks import BREACHING
from privlab.attacks.gradients.gradient_likelihood import GradientLikelihood
from privlab.attacks.gradients.gradient_matching import GradientMatching
from privlab.attacks.gradients.mjp_full import MjpFull
from privlab.attacks.gradients.mjp_subspace import MjpSubspace
from privlab.attacks.gradients.patch_gradient import PatchGradient
from privlab.attacks.gradients.patch_gradient_adaptive import PatchGradientAdaptive
from privlab.attacks.gradients.patch_gradient_prior import PatchGradientPrior
from privlab.attacks.gradients.token_separation import TokenSeparation
from privlab.attacks.weights.weight_matching import WeightMatching
from privlab.base import with_plugins
from privlab.threat import AttackClass

__all__ = [
    "ATTACKS",
    "April",
    "BorderJigsaw",
    "ClassTokenKey",
    "ColumnStatistics",
    "FeatureOptimisation",
    "GradientLikelihood",
    "GradientMatching",
    "InversionConv",
    "InversionMae",
    "InversionSet",
    "InversionToken",
    "LeastSquares",
    "MjpFull",
    "MjpSubspace",
    "PEAssignment",
    "PatchGradient",
    "PatchGradientAdaptive",
    "PatchGradientPrior",
    "RowAlignment",
    "TokenSeparation",
    "WeightMatching",
    "attacks",
]

ATTACKS: dict[str, AttackClass] = {
    "patch-gradient": PatchGradient,
    "april": April,
    "patch-gradient-prior": PatchGradientPrior,
    "patch-gradient-adaptive": PatchGradientAdaptive,
    "mjp-subspace": MjpSubspace,
    "mjp-full": MjpFull,
    "token-separation": TokenSeparation,
    "gradient-likelihood": GradientLikelihood,
    "gradient-matching": GradientMatching,
    "class-token-key": ClassTokenKey,
    "pe-assignment": PEAssignment,
    "border-jigsaw": BorderJigsaw,
    "row-alignment": RowAlignment,
    "column-statistics": ColumnStatistics,
    "least-squares": LeastSquares,
    "feature-optimisation": FeatureOptimisation,
    "inversion-conv": InversionConv,
    "inversion-mae": InversionMae,
    "inversion-set": InversionSet,
    "inversion-token": InversionToken,
    **BREACHING,
}
"""Attacks on gradients, then on features; those that run by default run in order, cheapest first, as measured."""


def attacks() -> dict[str, AttackClass]:
    """Return every installed attack by name, those of other packages included (`privlab.attacks`)."""
    return with_plugins(ATTACKS, "privlab.attacks")

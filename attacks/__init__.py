"""Attacks: one file, one attack; each turns an observation into images, or into a key."""

from privlab.attacks.april import April
from privlab.attacks.border_jigsaw import BorderJigsaw
from privlab.attacks.breaching_attacks import BREACHING
from privlab.attacks.class_token_key import ClassTokenKey
from privlab.attacks.column_statistics import ColumnStatistics
from privlab.attacks.feature_inversion import FeatureOptimisation, LeastSquares
from privlab.attacks.inversion import InversionConv, InversionMae, InversionSet, InversionToken
from privlab.attacks.mjp_full import MjpFull
from privlab.attacks.mjp_subspace import MjpSubspace
from privlab.attacks.patch_gradient import PatchGradient
from privlab.attacks.patch_gradient_adaptive import PatchGradientAdaptive
from privlab.attacks.pe_assignment import PEAssignment
from privlab.attacks.row_alignment import RowAlignment
from privlab.attacks.weight_matching import WeightMatching
from privlab.registry import with_plugins
from privlab.threat import AttackClass

__all__ = [
    "ATTACKS",
    "April",
    "BorderJigsaw",
    "ClassTokenKey",
    "ColumnStatistics",
    "FeatureOptimisation",
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
    "RowAlignment",
    "WeightMatching",
    "attacks",
]

ATTACKS: dict[str, AttackClass] = {
    "april": April,
    "patch-gradient": PatchGradient,
    "patch-gradient-adaptive": PatchGradientAdaptive,
    "mjp-subspace": MjpSubspace,
    "mjp-full": MjpFull,
    "least-squares": LeastSquares,
    "feature-optimisation": FeatureOptimisation,
    "inversion-mae": InversionMae,
    "inversion-conv": InversionConv,
    "inversion-set": InversionSet,
    "inversion-token": InversionToken,
    "pe-assignment": PEAssignment,
    "class-token-key": ClassTokenKey,
    "column-statistics": ColumnStatistics,
    "row-alignment": RowAlignment,
    "border-jigsaw": BorderJigsaw,
    **BREACHING,
}


def attacks() -> dict[str, AttackClass]:
    """Return every installed attack by name, those of other packages included (`privlab.attacks`)."""
    return with_plugins(ATTACKS, "privlab.attacks")

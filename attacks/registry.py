"""The attacks by name. A name costs no import: an attack is imported when it is looked up."""

from typing import TYPE_CHECKING

from privlab.base import Registry, with_plugins

if TYPE_CHECKING:
    from privlab.threat import AttackClass

__all__ = ["ATTACKS", "attacks"]

_OF_BREACHING = (
    *("invertinggradients", "seethroughgradients", "deepleakage", "modern", "legacy", "wei", "tag", "beyondinfering"),
    *("clsattack", "april_analytic", "multiscale_ghiasi", "analytic", "imprint", "rgap"),
)

ATTACKS: Registry["AttackClass"] = Registry.of_places(
    {
        "patch-gradient": "privlab.attacks.gradients.patch_gradient:PatchGradient",
        "patch-update": "privlab.attacks.gradients.patch_update:PatchUpdate",
        "adam-update": "privlab.attacks.gradients.adam_update:AdamUpdate",
        "april": "privlab.attacks.gradients.april:April",
        "patch-gradient-prior": "privlab.attacks.gradients.patch_gradient_prior:PatchGradientPrior",
        "patch-gradient-adaptive": "privlab.attacks.gradients.patch_gradient_adaptive:PatchGradientAdaptive",
        "mjp-subspace": "privlab.attacks.gradients.mjp_subspace:MjpSubspace",
        "block-key": "privlab.attacks.gradients.block_key:BlockKey",
        "mjp-full": "privlab.attacks.gradients.mjp_full:MjpFull",
        "token-separation": "privlab.attacks.gradients.token_separation:TokenSeparation",
        "adapter-separation": "privlab.attacks.updates.adapter_separation:AdapterSeparation",
        "qkv-span": "privlab.attacks.updates.qkv_span:QkvSpan",
        "round-unrolling": "privlab.attacks.updates.round_unrolling:RoundUnrolling",
        "client-unrolling": "privlab.attacks.updates.client_unrolling:ClientUnrolling",
        "qkv-completion": "privlab.attacks.published.qkv_completion:QkvCompletion",
        "gradient-likelihood": "privlab.attacks.gradients.gradient_likelihood:GradientLikelihood",
        "staged-likelihood": "privlab.attacks.published.staged_likelihood:StagedLikelihood",
        "orthogonal-matching": "privlab.attacks.published.orthogonal_matching:OrthogonalMatching",
        "learning-to-invert": "privlab.attacks.published.learning_to_invert:LearningToInvert",
        "gradient-matching": "privlab.attacks.gradients.gradient_matching:GradientMatching",
        "head-inversion": "privlab.attacks.gradients.head_inversion:HeadInversion",
        "cocktail-party": "privlab.attacks.baselines.cocktail_party:CocktailParty",
        "spear": "privlab.attacks.baselines.spear:Spear",
        "fedleak": "privlab.attacks.baselines.fedleak:FedLeak",
        "fedavg-matching": "privlab.attacks.baselines.fedavg_matching:FedavgMatching",
        "class-token-key": "privlab.attacks.features.class_token_key:ClassTokenKey",
        "pe-assignment": "privlab.attacks.features.pe_assignment:PEAssignment",
        "border-jigsaw": "privlab.attacks.features.border_jigsaw:BorderJigsaw",
        "row-alignment": "privlab.attacks.features.row_alignment:RowAlignment",
        "column-statistics": "privlab.attacks.features.column_statistics:ColumnStatistics",
        "least-squares": "privlab.attacks.features.feature_inversion:LeastSquares",
        "deconvolution": "privlab.attacks.features.deconvolution:Deconvolution",
        "cutmix-completion": "privlab.attacks.features.cutmix_completion:CutMixCompletion",
        "map-inversion": "privlab.attacks.features.map_inversion:MapInversion",
        "map-unet": "privlab.attacks.features.map_unet:MapUNet",
        "feature-optimisation": "privlab.attacks.features.feature_inversion:FeatureOptimisation",
        "depth-optimisation": "privlab.attacks.features.depth_optimisation:DepthOptimisation",
        "inversion-conv": "privlab.attacks.features.learned_inversion:InversionConv",
        "inversion-mae": "privlab.attacks.features.learned_inversion:InversionMae",
        "inversion-set": "privlab.attacks.features.learned_inversion:InversionSet",
        "inversion-token": "privlab.attacks.features.learned_inversion:InversionToken",
        **dict.fromkeys(
            (f"breaching:{name}" for name in _OF_BREACHING), "privlab.attacks.gradients.breaching_attacks:BREACHING"
        ),
    }
)
"""Attacks on gradients, then on features; those that run by default run in order, cheapest first, as measured."""


def attacks() -> "Registry[AttackClass]":
    """Return every installed attack by name, those of other packages included (`privlab.attacks`)."""
    return with_plugins(ATTACKS, "privlab.attacks")

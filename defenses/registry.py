"""The defenses by name. A name costs no import: a defense is imported when it is looked up."""

from typing import TYPE_CHECKING

from privlab.base import Registry, with_plugins

if TYPE_CHECKING:
    from privlab.threat import DefenseClass

__all__ = ["DEFENSES", "defenses"]

DEFENSES: Registry["DefenseClass"] = Registry.of_places(
    {
        "none": "privlab.defenses.images.undefended:Undefended",
        "jigsaw": "privlab.defenses.images.jigsaw:Jigsaw",
        "mjp": "privlab.defenses.images.mjp:Mjp",
        "low-pass": "privlab.defenses.images.low_pass:LowPass",
        "blur": "privlab.defenses.images.blur:Blur",
        "cutmix": "privlab.defenses.images.cutmix:CutMix",
        "block-scrambling": "privlab.defenses.images.block_scrambling:BlockScrambling",
        "gaussian-noise": "privlab.defenses.features.gaussian_noise:GaussianNoise",
        "row-permutation": "privlab.defenses.features.row_permutation:RowPermutation",
        "column-permutation": "privlab.defenses.features.column_permutation:ColumnPermutation",
        "batch-shuffle": "privlab.defenses.features.batch_shuffle:BatchShuffle",
        "gradient-noise": "privlab.defenses.gradients.gradient_noise:GradientNoise",
        "gradient-pruning": "privlab.defenses.gradients.gradient_pruning:GradientPruning",
        "gradient-quantisation": "privlab.defenses.gradients.gradient_quantisation:GradientQuantisation",
        "gradient-sign": "privlab.defenses.gradients.gradient_sign:GradientSign",
        "binary-weights": "privlab.defenses.gradients.binary_weights:BinaryWeights",
        "percentile-privacy": "privlab.defenses.gradients.percentile_privacy:PercentilePrivacy",
        "svt-privacy": "privlab.defenses.gradients.svt_privacy:SvtPrivacy",
        "censor": "privlab.defenses.gradients.censor:Censor",
        "encrypted-embedding": "privlab.defenses.gradients.encrypted_embedding:EncryptedEmbedding",
        "adaptive-clipping": "privlab.defenses.gradients.adaptive_clipping:AdaptiveClipping",
        "exclude-vars": "privlab.defenses.gradients.exclude_vars:ExcludeVars",
    }
)
"""The defenses of this package by name: those of images, of features and of gradients."""


def defenses() -> "Registry[DefenseClass]":
    """Return every installed defense by name, those of other packages included (`privlab.defenses`)."""
    return with_plugins(DEFENSES, "privlab.defenses")

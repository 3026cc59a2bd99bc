"""Defenses, one per file: on images before the embedding, or on the features or gradients that are released."""

from privlab.base import with_plugins
from privlab.defenses.features.batch_shuffle import BatchShuffle
from privlab.defenses.features.column_permutation import ColumnPermutation
from privlab.defenses.features.gaussian_noise import GaussianNoise
from privlab.defenses.features.row_permutation import RowPermutation
from privlab.defenses.gradients.gradient_noise import GradientNoise
from privlab.defenses.gradients.gradient_pruning import GradientPruning
from privlab.defenses.gradients.gradient_quantisation import GradientQuantisation
from privlab.defenses.gradients.gradient_sign import GradientSign
from privlab.defenses.images.blur import Blur
from privlab.defenses.images.cutmix import CutMix
from privlab.defenses.images.jigsaw import Jigsaw
from privlab.defenses.images.low_pass import LowPass
from privlab.defenses.images.mjp import Mjp
from privlab.defenses.images.undefended import Undefended
from privlab.threat import DefenseClass

__all__ = [
    "DEFENSES",
    "BatchShuffle",
    "Blur",
    "ColumnPermutation",
    "CutMix",
    "GaussianNoise",
    "GradientNoise",
    "GradientPruning",
    "GradientQuantisation",
    "GradientSign",
    "Jigsaw",
    "LowPass",
    "Mjp",
    "RowPermutation",
    "Undefended",
    "defenses",
]

DEFENSES: dict[str, DefenseClass] = {
    "none": Undefended,
    "jigsaw": Jigsaw,
    "mjp": Mjp,
    "low-pass": LowPass,
    "blur": Blur,
    "cutmix": CutMix,
    "gaussian-noise": GaussianNoise,
    "row-permutation": RowPermutation,
    "column-permutation": ColumnPermutation,
    "batch-shuffle": BatchShuffle,
    "gradient-noise": GradientNoise,
    "gradient-pruning": GradientPruning,
    "gradient-quantisation": GradientQuantisation,
    "gradient-sign": GradientSign,
}


def defenses() -> dict[str, DefenseClass]:
    """Return every installed defense by name, those of other packages included (`privlab.defenses`)."""
    return with_plugins(DEFENSES, "privlab.defenses")

"""Defenses: one file, one defense; on images before the embedding, or on features before they are sent."""

from privlab.defenses.batch_shuffle import BatchShuffle
from privlab.defenses.blur import Blur
from privlab.defenses.column_permutation import ColumnPermutation
from privlab.defenses.cutmix import CutMix
from privlab.defenses.gaussian_noise import GaussianNoise
from privlab.defenses.jigsaw import Jigsaw
from privlab.defenses.low_pass import LowPass
from privlab.defenses.mjp import Mjp
from privlab.defenses.row_permutation import RowPermutation
from privlab.defenses.undefended import Undefended
from privlab.registry import with_plugins
from privlab.threat import DefenseClass

__all__ = [
    "DEFENSES",
    "BatchShuffle",
    "Blur",
    "ColumnPermutation",
    "CutMix",
    "GaussianNoise",
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
}


def defenses() -> dict[str, DefenseClass]:
    """Return every installed defense by name, those of other packages included (`privlab.defenses`)."""
    return with_plugins(DEFENSES, "privlab.defenses")

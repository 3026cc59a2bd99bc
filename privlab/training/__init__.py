"""The one training loop, its checkpoints and its log."""

from privlab.images import Augmentation, Examples, read_examples
from privlab.training.checkpoint import Checkpoints
from privlab.training.loop import listening, tell, train
from privlab.training.plan import Compute, Listener, Paced, Plan, Recipe, TrainingProgress

__all__ = [
    "Augmentation",
    "Checkpoints",
    "Compute",
    "Examples",
    "Listener",
    "Paced",
    "Plan",
    "Recipe",
    "TrainingProgress",
    "listening",
    "read_examples",
    "tell",
    "train",
]

"""The one training loop, its checkpoints and its log."""

from privlab.images import Augmentation, Examples, read_examples
from privlab.training.checkpoint import Checkpoints
from privlab.training.loop import listening, tell, train
from privlab.training.plan import Compute, Listener, Paced, Plan, Progress, Recipe

__all__ = [
    "Augmentation",
    "Checkpoints",
    "Compute",
    "Examples",
    "Listener",
    "Paced",
    "Plan",
    "Progress",
    "Recipe",
    "listening",
    "read_examples",
    "tell",
    "train",
]

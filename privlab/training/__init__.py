"""The one training loop, its checkpoints and its log."""

from privlab.training.checkpoint import Checkpoints
from privlab.training.examples import Augmentation, Examples
from privlab.training.loop import listening, tell, train
from privlab.training.plan import Compute, Listener, Paced, Plan, Progress, Recipe
from privlab.training.reading import read_examples

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

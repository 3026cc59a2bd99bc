"""The one training loop, its checkpoints and its log."""

from privlab.training.checkpoint import Checkpoints
from privlab.training.loop import listening, tell, train
from privlab.training.plan import Compute, Listener, Paced, Plan, Recipe, TrainingProgress

__all__ = [
    "Checkpoints",
    "Compute",
    "Listener",
    "Paced",
    "Plan",
    "Recipe",
    "TrainingProgress",
    "listening",
    "tell",
    "train",
]

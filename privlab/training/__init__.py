"""The one training loop, its checkpoints and its log."""

from privlab.training.checkpoint import Checkpoints, write_atomically
from privlab.training.loop import listening, tell, train
from privlab.training.plan import Compute, Listener, Plan, Progress, Recipe

__all__ = [
    "Checkpoints",
    "Compute",
    "Listener",
    "Plan",
    "Progress",
    "Recipe",
    "listening",
    "tell",
    "train",
    "write_atomically",
]

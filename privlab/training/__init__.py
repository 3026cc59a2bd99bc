"""The loop that trains the networks of attacks, tensors that are kept in the cache, and reports of progress."""

from privlab.training.kept import keep, kept
from privlab.training.loop import listening, tell, train
from privlab.training.plan import Listener, Plan, Recipe, TrainingProgress

__all__ = ["Listener", "Plan", "Recipe", "TrainingProgress", "keep", "kept", "listening", "tell", "train"]

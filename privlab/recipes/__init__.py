"""What victims and position predictors are trained to do: one objective, one file."""

from privlab.recipes.classify import Classify
from privlab.recipes.dal import DALS, Dal
from privlab.recipes.lesson import Lesson, Objective
from privlab.recipes.mjp import TrainMjp

__all__ = ["DALS", "OBJECTIVES", "Classify", "Dal", "Lesson", "Objective", "TrainMjp"]

OBJECTIVES: dict[str, type[Objective]] = {kind.name: kind for kind in (Classify, TrainMjp)}
"""The objectives by name."""

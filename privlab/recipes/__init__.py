"""What victims and position predictors are trained to do: one objective, one file."""

from privlab.recipes.classify import Classify
from privlab.recipes.dal import DALS, Dal
from privlab.recipes.droppos import TrainDropPos
from privlab.recipes.finetune import Finetune
from privlab.recipes.lesson import Lesson, Objective
from privlab.recipes.mjp import TrainMjp
from privlab.recipes.mp3 import TrainMp3
from privlab.recipes.probe import Probe

__all__ = [
    "DALS",
    "OBJECTIVES",
    "Classify",
    "Dal",
    "Finetune",
    "Lesson",
    "Objective",
    "Probe",
    "TrainDropPos",
    "TrainMjp",
    "TrainMp3",
]

OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind for kind in (Classify, TrainMjp, TrainMp3, TrainDropPos, Finetune, Probe)
}
"""The objectives by name."""

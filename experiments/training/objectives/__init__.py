"""Training objectives of victims and of position predictors, one in each file."""

from privlab.experiments.training.objectives.base import Objective, ObjectiveRecipe
from privlab.experiments.training.objectives.classify import Classify
from privlab.experiments.training.objectives.dal import DALS, Dal
from privlab.experiments.training.objectives.droppos import TrainDropPos
from privlab.experiments.training.objectives.finetune import Finetune
from privlab.experiments.training.objectives.mjp import TrainMjp
from privlab.experiments.training.objectives.mp3 import TrainMp3
from privlab.experiments.training.objectives.probe import Probe

__all__ = [
    "DALS",
    "OBJECTIVES",
    "Classify",
    "Dal",
    "Finetune",
    "Objective",
    "ObjectiveRecipe",
    "Probe",
    "TrainDropPos",
    "TrainMjp",
    "TrainMp3",
]

OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind for kind in (Classify, TrainMjp, TrainMp3, TrainDropPos, Finetune, Probe)
}
"""The objectives by name."""

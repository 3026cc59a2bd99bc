"""`finetune`: classification from pre-trained weights."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from privlab.base import check_range
from privlab.experiments.training.classifiers import Classifier
from privlab.experiments.training.objectives.base import set_drop_path
from privlab.experiments.training.objectives.classify import Classify


@dataclass(frozen=True)
class Finetune(Classify):
    """`classify`, with stochastic depth; the plan's `layer_decay` lets layers near the pixels learn more slowly.

    Args:
        drop_path: rate of the last block, in [0, 1); it grows linearly over the blocks.

    Source: MP3 (Zhai et al. 2022), Sections 3.3 and 4.2; DropPos (Wang et al. 2023), Supplement A.1.
    """

    name: ClassVar[str] = "finetune"
    paper: ClassVar[str] = "MP3 (Zhai et al. 2022), Section 3.3; DropPos (Wang et al. 2023), Supplement A.1"

    drop_path: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        check_range(0 <= self.drop_path < 1, "drop_path", "in [0, 1)", self.drop_path)

    def module(self, model: Classifier) -> nn.Module:
        """Return the victim alone, with its drop-path rates set."""
        set_drop_path(model, self.drop_path)
        return model

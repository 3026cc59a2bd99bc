"""The parts of a training: a recipe, a plan that shapes its result, and reports of progress."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Generator, Tensor, nn

from privlab.base import check_range


@runtime_checkable
class Recipe(Protocol):
    """A model, its examples and its loss."""

    @property
    def model(self) -> nn.Module:
        """Return what is trained."""
        ...

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def batch(self, rows: Tensor, draw: Generator) -> Any:  # noqa: ANN401
        """Return the examples of these numbers: a tensor, or a tuple, list or dict of tensors."""
        ...

    def loss(self, model: nn.Module, batch: Any, draw: Generator) -> Tensor:  # noqa: ANN401
        """Return the mean loss of a batch.

        Args:
            model: `self.model`, or what wraps it.
            batch: what `batch` returned, on the device of the model.
            draw: the step's generator, the one that `batch` got.
        """
        ...


@dataclass(frozen=True)
class Plan:
    """How a recipe is trained: everything that shapes the result.

    Args:
        steps: the number of steps of the optimiser, which is AdamW.
        batch_size: the number of examples of a step.
        learning_rate: the largest rate, at least 0; a cosine decay to zero follows on the warm-up.
        weight_decay: at least 0; biases and norms have none.
        warmup: the number of steps of linear warm-up.
        seed: seed of the order of the examples, and of every draw.
    """

    steps: int
    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    warmup: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError for numbers out of range."""
        for name in ("steps", "batch_size"):
            check_range((value := getattr(self, name)) >= 1, f"{name} of a training", "at least 1", value)
        for name in ("learning_rate", "weight_decay", "warmup"):
            value = getattr(self, name)
            check_range(0 <= value < math.inf, f"{name} of a training", "at least 0 and finite", value)


@dataclass(frozen=True)
class TrainingProgress:
    """Where a training stands; `loss` is the mean since the last report, `seconds` are those of this process."""

    step: int
    steps: int
    epoch: float
    loss: float
    learning_rate: float
    seconds: float
    seconds_left: float


Listener = Callable[[TrainingProgress], None]
"""A function that is called with each report of a training."""

"""The parts of a long training: a plan that shapes its result, and where it is computed."""

import math
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

from privlab.base import check_range
from privlab.training import Recipe


@runtime_checkable
class NamedRecipe(Recipe, Protocol):
    """A recipe whose checkpoints are continued only with one of the same `identity`."""

    @property
    def identity(self) -> str:
        """Return the name of data and objective."""
        ...


@runtime_checkable
class Paced(Protocol):
    """A recipe that changes as the training goes on."""

    def at(self, share: float) -> Recipe:
        """Return the recipe as it is when a share of the steps, in [0, 1), is done."""
        ...


@dataclass(frozen=True)
class Plan:
    """How a recipe is trained: everything that shapes the result.

    Args:
        steps: the number of steps of the optimiser.
        batch_size: the number of examples of a step.
        accumulate: the number of parts into which a step's examples are cut, one forward and backward pass each.
        optimiser: one of timm's.
        learning_rate: the largest rate of the schedule, that of the head; at least 0.
        weight_decay: the optimiser's weight decay, at least 0; biases and norms have none.
        layer_decay: the rate of a layer over that of the next one, in (0, 1], from the head down to the embedding.
        schedule: one of timm's, over the steps: "cosine", "constant" …
        warmup: the number of steps of linear warm-up.
        clip: largest norm of a step's gradient; 0 leaves it as it is.
        ema: decay of the moving average of the weights, which is then the result; 0 for none.
        precision: one of Fabric's: "32-true", "bf16-mixed", "16-mixed" …
        seed: seed of the order of the examples, and of every draw.
    """

    steps: int
    batch_size: int = 32
    accumulate: int = 1
    optimiser: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    layer_decay: float = 1.0
    schedule: str = "cosine"
    warmup: int = 0
    clip: float = 1.0
    ema: float = 0.0
    precision: str = "32-true"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError for numbers out of range."""
        for name in ("steps", "batch_size", "accumulate"):
            check_range((value := getattr(self, name)) >= 1, f"{name} of a training", "at least 1", value)
        check_range(0 <= self.ema < 1, "ema of a training", "in [0, 1)", self.ema)
        check_range(0 < self.layer_decay <= 1, "layer_decay of a training", "in (0, 1]", self.layer_decay)
        for name in ("learning_rate", "weight_decay", "warmup", "clip"):
            value = getattr(self, name)
            check_range(0 <= value < math.inf, f"{name} of a training", "at least 0 and finite", value)

    def identity(self) -> dict[str, str]:
        """Return by name what a run and its continuation share; a later option counts only where it is used."""
        named = {name: str(value) for name, value in asdict(self).items()}
        if self.layer_decay == 1:
            del named["layer_decay"]
        return named


@dataclass(frozen=True)
class Compute:
    """Settings that change speed and safety, not the result: the device, and how often losses are read, weights saved.

    After the steps of `keep`, the weights are written to `kept/` too, and stay there.
    """

    device: str = "cpu"
    log_every: int = 20
    save_every: int = 500
    keep: tuple[int, ...] = ()

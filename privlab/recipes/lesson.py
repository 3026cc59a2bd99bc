"""A lesson: a network, what it learns from, and the objective; what `privlab.training.train` trains."""

import copy
import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from privlab.model import VictimModel
from privlab.training.examples import Augmentation, Examples
from privlab.weights import hash_of

__all__ = ["Lesson", "Objective"]


@runtime_checkable
class Objective(Protocol):
    """A frozen dataclass of hyper-parameters: what is learnt; `labelled` says whether it needs labels."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]
    labelled: ClassVar[bool]

    def module(self, model: VictimModel) -> nn.Module:
        """Return what is trained: the model, with what is trained beside it and left behind."""
        ...

    def batch(
        self, images: Float[Tensor, "b c h w"], labels: Int[Tensor, " b"], model: VictimModel, draw: Generator
    ) -> tuple[Tensor, ...]:
        """Return what a step computes on, of augmented pictures."""
        ...

    def loss(self, module: nn.Module, batch: tuple[Tensor, ...]) -> Float[Tensor, ""]:
        """Return the mean loss of a batch."""
        ...


@runtime_checkable
class PacedObjective(Protocol):
    """An objective whose hyper-parameters change over the training."""

    def at(self, share: float) -> Objective:
        """Return the objective as it is when a share of the steps, in [0, 1), is done."""
        ...


@dataclass(frozen=True, eq=False)
class Lesson:
    """The recipe of an objective: `victim` is trained in place.

    Which run another continues is told by data, objective, augmentation and the weights at the start.
    """

    victim: VictimModel
    data: Examples
    objective: Objective
    augmentation: Augmentation
    model: nn.Module = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        """Set beside the victim what is trained with it, from one seed."""
        parts = (hash_of(self.victim.state_dict()), self.data.identity, repr(self.objective), repr(self.augmentation))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            module = self.objective.module(self.victim)
        for part in module.modules():  # on a CPU, the fused kernel's backward pass takes most of a step
            if hasattr(part, "fused_attn"):
                setattr(part, "fused_attn", self.victim.mean.is_cuda)  # noqa: B010  # timm's modules are typed loosely
        object.__setattr__(self, "model", module.requires_grad_(True))
        object.__setattr__(self, "identity", hashlib.sha256("\n".join(parts).encode()).hexdigest())

    def __len__(self) -> int:
        return len(self.data)

    def at(self, share: float) -> "Lesson":
        """Return this lesson, its objective as it is when a share of the steps is done."""
        if not isinstance(self.objective, PacedObjective):
            return self
        now = copy.copy(self)
        object.__setattr__(now, "objective", self.objective.at(share))
        return now

    def batch(self, rows: Tensor, draw: Generator) -> tuple[Tensor, ...]:
        """Return the examples of these rows, as the objective takes them."""
        images = self.augmentation(self.data.pixels(rows), draw)
        return self.objective.batch(images, self.data.labels[rows], self.victim, draw)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...], draw: Generator) -> Tensor:
        """Return the objective's loss."""
        return self.objective.loss(model, batch)

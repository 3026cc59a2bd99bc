"""A recipe is what `training.loop.train` trains: a network, what it learns from, and the objective."""

import copy
import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from timm.layers import DropPath
from torch import Generator, Tensor, nn

from privlab.experiments.training.classifiers import Classifier
from privlab.experiments.training.examples import Augmentation, Examples
from privlab.victims import VictimModel, hash_of


@runtime_checkable
class Objective(Protocol):
    """A frozen dataclass of hyper-parameters; `model` is a VictimModel, and for some objectives any `Classifier`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    paper: ClassVar[str]

    @property
    def labelled(self) -> bool:
        """Return whether it needs labels."""
        ...

    def module(self, model: Any) -> nn.Module:  # noqa: ANN401
        """Return the network that is trained: the model, and what is trained beside it but not kept."""
        ...

    def batch(
        self,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        model: Any,  # noqa: ANN401
        draw: Generator,
    ) -> tuple[Tensor, ...]:
        """Return the tensors that the loss of one step is computed of.

        Args:
            images: the augmented images of the step, in [0, 1].
            labels: the class index of each image; −1 where there is none.
            model: the victim that is trained.
            draw: the generator of the step's random draws.
        """
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
class ObjectiveRecipe:
    """The recipe of an objective: `victim` is trained in place.

    A run continues another where data, objective, augmentation and the weights at the start are the same.
    """

    victim: Classifier
    data: Examples
    objective: Objective
    augmentation: Augmentation
    model: nn.Module = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        """Make what is trained beside the victim, drawn from one seed."""
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

    def at(self, share: float) -> "ObjectiveRecipe":
        """Return this recipe with the objective as it is when a share of the steps is done."""
        if not isinstance(self.objective, PacedObjective):
            return self
        now = copy.copy(self)
        object.__setattr__(now, "objective", self.objective.at(share))
        return now

    def batch(self, rows: Tensor, draw: Generator) -> tuple[Tensor, ...]:
        """Return the examples of these rows as the objective's `batch` makes them, after augmentation."""
        images = self.augmentation(self.data.pixels(rows), draw)
        return self.objective.batch(images, self.data.labels[rows], self.victim, draw)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...], draw: Generator) -> Tensor:
        """Return the objective's mean loss of a batch.

        Args:
            model: the network, in the plan's precision.
            batch: what `batch` returned, on the device of the network.
            draw: not used: an objective draws in its `batch`.
        """
        return self.objective.loss(model, batch)


def set_drop_path(model: Classifier, most: float) -> None:
    """Let blocks be skipped in training at a rate that grows linearly from zero in the first to `most` in the last."""
    blocks = model.vit.blocks if isinstance(model, VictimModel) else model.net.blocks
    depth = len(blocks)
    for i, block in enumerate(blocks):
        rate = most * i / max(depth - 1, 1)
        block.drop_path1, block.drop_path2 = DropPath(rate), DropPath(rate)  # pyright: ignore[reportAttributeAccessIssue]

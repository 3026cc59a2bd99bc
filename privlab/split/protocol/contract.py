"""The terms of a session: sizes, precision, optimiser; both sides check what they receive against them."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from privlab.base import PrivlabError, check_name, check_range

DTYPES = {"float32": torch.float32, "float64": torch.float64}
OPTIMIZERS = ("adamw", "sgd")

SESSION_ID = re.compile(r"[0-9a-f]{64}")

_LIMITS = {"width": 2**14, "max_tokens": 2**16, "max_batch": 2**16}
"""The largest value of each size that a server accepts."""


class Refusal(PrivlabError):
    """A request or reply that the other side of a session refuses; `status` is the name of a gRPC status code."""

    session: str | None = None

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Contract:
    """The terms of a session, set by the client.

    Args:
        model: timm's name of the architecture; the server must hold the same.
        width: d, the width of a token.
        max_tokens: the largest t, the tokens of an image, class and register tokens included.
        max_batch: the largest b, the images of a batch.
        dtype: "float32" or "float64", the precision of T and of every tensor that is sent.
        optimizer: "adamw", or "sgd" with momentum; the server uses it for T, the client for F₁ and F₂.
        lr: the learning rate, above 0.
        momentum: the momentum of "sgd", in [0, 1).
        weight_decay: at least 0; decoupled in "adamw".
        own_weights: whether the client brings T's initial weights, as with a column permutation (Eq. 6).
        cut_layer: ℓ, the number of blocks that the client holds, at least 0; the server holds those behind them.

    Raises:
        PrivlabError: if a value is out of its range.
    """

    model: str
    width: int
    max_tokens: int
    max_batch: int
    dtype: str = "float32"
    optimizer: str = "adamw"
    lr: float = 1e-4
    momentum: float = 0.9
    weight_decay: float = 0.0
    own_weights: bool = False
    cut_layer: int = 0

    def __post_init__(self) -> None:
        for name, most in _LIMITS.items():
            check_range(1 <= (value := getattr(self, name)) <= most, name, f"in [1, {most}]", value)
        check_range(self.cut_layer >= 0, "cut_layer", "at least 0", self.cut_layer)
        check_name("dtype", self.dtype, DTYPES)
        check_name("optimizer", self.optimizer, OPTIMIZERS)
        check_range(0 < self.lr < math.inf, "lr", "above 0 and finite", self.lr)
        check_range(0 <= self.momentum < 1, "momentum", "in [0, 1)", self.momentum)
        check_range(0 <= self.weight_decay < math.inf, "weight_decay", "at least 0 and finite", self.weight_decay)

    @classmethod
    def of(cls, values: object) -> "Contract":
        """Return the contract whose fields a message or a mapping holds.

        Raises:
            Refusal: if a value is out of its range, or missing.
        """
        try:
            if isinstance(values, Mapping):
                return cls(**values)
            return cls(**{f.name: getattr(values, f.name) for f in fields(cls)})
        except (PrivlabError, TypeError) as error:
            raise Refusal("INVALID_ARGUMENT", f"The contract does not hold: {error}") from None

    @property
    def version(self) -> int:
        """Return the least version of the protocol that knows these terms: one of version 1 overlooks a cut layer."""
        return 2 if self.cut_layer else 1

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the precision as torch's dtype."""
        return DTYPES[self.dtype]

    @property
    def message_bytes(self) -> int:
        """Return the size of the largest batch of features, in bytes."""
        return self.max_batch * self.max_tokens * self.width * self.torch_dtype.itemsize

    def session_bytes(self, parameters: int, depth: int) -> int:
        """Return an estimate of the memory that a training session takes on the server, in bytes.

        It counts T's weights, their gradients and the optimiser's averages, about 24 tensors of the size of the
        features that each block keeps for its backward pass, and eight messages in transit.
        """
        averages = 2 if self.optimizer == "adamw" else 1
        return parameters * (2 + averages) * self.torch_dtype.itemsize + self.message_bytes * (24 * depth + 8)

    def checkpoint_bytes(self, parameters: int) -> int:
        """Return the size of a checkpoint on the server: weights, averages, and the last step's four messages."""
        averages = 2 if self.optimizer == "adamw" else 1
        return parameters * (1 + averages) * self.torch_dtype.itemsize + 4 * self.message_bytes

    def optimizer_of(self, parameters: Iterable[Tensor]) -> Optimizer:
        """Return a fresh optimiser of the parameters."""
        if self.optimizer == "sgd":
            return SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        return AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)

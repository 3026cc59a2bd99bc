"""Checks of the weights of a round by a client, before it trains: privlab's own audit, and published ones."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from privlab.base import check_name, check_range, full_precision
from privlab.runs.sent_weights import MOST_READABLE, Statistic, audit_of_round, layer_gradients
from privlab.victims import VictimModel


class WeightCheck(Protocol):
    """A check of the weights that a server sent: it sees what a client has, and returns how suspicious they are."""

    name: ClassVar[str]
    paper: ClassVar[str]

    def suspicion(
        self,
        model: VictimModel,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        last: Mapping[str, Tensor] | None,
    ) -> float:
        """Return a number that is above 1 if the client refuses to train, and higher the more suspicious weights are.

        Args:
            model: the model with the weights that the server sent.
            images: the client's own images in [0, 1].
            labels: their classes.
            last: the weights of the last round by timm's names; None in a first round.
        """
        ...


@dataclass(frozen=True)
class AuditCheck:
    """The audit of privlab, of two images and then of eight, or one of its two parts alone."""

    name: ClassVar[str] = "weights-audit"
    paper: ClassVar[str] = "privlab's audit of a server's weights"
    part: str = "all"

    def __post_init__(self) -> None:
        check_name("part", self.part, ("all", "patches", "statistics"))

    def suspicion(
        self,
        model: VictimModel,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        last: Mapping[str, Tensor] | None,
    ) -> float:
        """Return the largest number that the audit finds, by its limit.

        Args:
            model: as in `WeightCheck`, like the other arguments.
            images: the client's.
            labels: not used, as the audit has its own.
            last: the weights of the last round; None in a first round.
        """
        found = audit_of_round(model, images, last)
        patches = max(each.most / each.patches for each in found.layers) / MOST_READABLE
        statistics = max(_by_limit(each) for each in found.statistics)
        return {"all": max(patches, statistics), "patches": patches, "statistics": statistics}[self.part]


def _by_limit(found: Statistic) -> float:
    """Return how far a statistic is in its range, or beyond it: above 1 where it is not usual."""
    if not math.isfinite(found.value):
        return math.inf
    below = found.low / max(found.value, 1e-300)  # 0 where there is no lower end
    return max(below, found.value / found.high)


@dataclass(frozen=True)
class SignalToNoise:
    """D-SNR: the largest gradient of one example in a layer, by the sum of the others; the largest of all layers.

    The paper has examples, whose gradients in a layer are summed over places. Since a ViT's rows show tokens, "tokens"
    compares those of all images instead.
    """

    name: ClassVar[str] = "d-snr"
    paper: ClassVar[str] = "D-SNR (Garov et al., ICLR 2024)"
    of: str = "examples"
    limit: float = 1.0

    def __post_init__(self) -> None:
        check_name("of", self.of, ("examples", "tokens"))
        check_range(self.limit > 0, "limit", "above 0", self.limit)

    def suspicion(
        self,
        model: VictimModel,
        images: Float[Tensor, "b c h w"],
        labels: Int[Tensor, " b"],
        last: Mapping[str, Tensor] | None,
    ) -> float:
        """Return D-SNR by its limit.

        Args:
            model: as in `WeightCheck`, like the other arguments.
            images: the client's.
            labels: their classes.
            last: not used.
        """
        ratios = [0.0]

        def visit(_: str, δ: Tensor, inputs: Tensor) -> None:
            δ, x = (each.reshape(len(images), -1, each.shape[-1]) for each in (δ, inputs))  # b × t × …
            if self.of == "tokens":
                norms = (δ.norm(dim=2) * x.norm(dim=2)).flatten()
            else:  # ‖Σ_t δ_t x_tᵀ‖² = Σ_ts (δ_t·δ_s)(x_t·x_s)
                norms = ((δ @ δ.mT) * (x @ x.mT)).sum((1, 2)).clamp(min=0).sqrt()
            largest = norms.max()
            others = norms.sum() - largest
            if largest > 0:
                ratios.append(float(largest / others) if others > 0 else math.inf)

        with full_precision():
            layer_gradients(model, images, labels, visit)
        return max(ratios) / self.limit

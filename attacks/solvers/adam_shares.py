"""What Adam's share of a full step tells of a gradient: the sign of each entry, and the magnitude of small ones."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from privlab.threat import Client

__all__ = ["Shown", "largest_step", "shown_by_adam"]

_CERTAIN = 3.0
"""Standard deviations of rounding by which a share must differ from a full one for its magnitude to be known."""


class Shown(NamedTuple):
    """What is shown of a gradient: where `known`, its `value` up to a `deviation`; else its sign, and its `least` size.

    An entry that is not known has its least magnitude as its value.
    """

    value: Float[Tensor, "r c"]
    deviation: Float[Tensor, "r c"]
    least: Float[Tensor, "r c"]
    known: Bool[Tensor, "r c"]


def shown_by_adam(share: Float[Tensor, "r c"], deviation: Float[Tensor, "r c"], eps: float) -> Shown:
    """Return what u = g / (|g| + ε) tells of g: |g| = ε |u| / (1 − |u|), and sgn g = sgn u.

    An error σ in u is one of ε σ / (1 − |u|)² in |g|. Where u is within three σ of a full step, |g| has no upper bound.

    Args:
        share: u, signed, with errors.
        deviation: σ, their standard deviations, > 0.
        eps: ε, in units of the gradient.
    """
    size = share.abs()
    known = 1 - size > _CERTAIN * deviation
    least = (size.clamp_max(1) - _CERTAIN * deviation).clamp_min(0)
    least = eps * least / (1 - least)
    missing = (1 - size).where(known, torch.ones_like(size))
    return Shown(
        share.sign() * torch.where(known, eps * size / missing, least), eps * deviation / missing**2, least, known
    )


def largest_step(client: Client) -> float:
    """Return the most that a fresh state of Adam moves a weight in a round, but for decay: Σ_t η_t √(Σ_i a_ti² / b_ti).

    a_ti and b_ti are the shares of step i's gradient in the first moment of step t and of its square in the second, so
    that this is Cauchy and Schwarz's bound of |m_t| / √v_t. It is η for one step.

    Source: Adam (Kingma and Ba, ICLR 2015), Algorithm 1; AdamW moves alike.
    """
    most = 0.0
    for t, rate in enumerate(client.rates, 1):
        first, second = (
            [(1 - beta) * beta ** (t - i) / (1 - beta**t) for i in range(1, t + 1)]
            for beta in (client.beta1, client.beta2)
        )
        most += rate * math.sqrt(sum(a * a / b for a, b in zip(first, second, strict=True) if a))
    return most

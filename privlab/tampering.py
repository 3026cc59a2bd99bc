"""What happens to weights after they were released: noise, pruning, quantisation; for curves of recovered keys."""

from collections.abc import Mapping

import torch
from torch import Generator, Tensor

from privlab.base.errors import PrivlabError

__all__ = ["add_noise", "prune", "quantise"]


def add_noise(state: Mapping[str, Tensor], ratio: float, draw: Generator) -> dict[str, Tensor]:
    """Return W + ratio · std(W) · ε for every tensor, ε ~ N(0, 1).

    Raises:
        PrivlabError: if `ratio` is negative.
    """
    if ratio < 0:
        raise PrivlabError(f"The ratio of noise to weights must be 0 or more. Found {ratio}.")
    return {
        name: W + ratio * W.std(correction=0) * torch.randn(W.shape, generator=draw, dtype=W.dtype)
        for name, W in state.items()
    }


def prune(state: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return the weights with the smallest `share` of each tensor's magnitudes set to zero.

    Raises:
        PrivlabError: if `share` is outside of [0, 1].
    """
    if not 0 <= share <= 1:
        raise PrivlabError(f"The share of pruned weights must be in [0, 1]. Found {share}.")
    return {name: _pruned(W, round(share * W.numel())) for name, W in state.items()}


def _pruned(W: Tensor, zeros: int) -> Tensor:
    flat = W.flatten().clone()
    flat[flat.abs().argsort()[:zeros]] = 0
    return flat.view_as(W)


def quantise(state: Mapping[str, Tensor], levels: int = 127) -> dict[str, Tensor]:
    """Return weights rounded to integers in ±`levels` (int8), one scale per tensor, and back: s · round(W / s).

    Raises:
        PrivlabError: if there is not one level.
    """
    if levels < 1:
        raise PrivlabError(f"Quantisation needs one level or more. Found {levels}.")
    scales = {name: (W.abs().max() / levels).clamp_min(torch.finfo(W.dtype).tiny) for name, W in state.items()}
    return {name: (W / scales[name]).round() * scales[name] for name, W in state.items()}

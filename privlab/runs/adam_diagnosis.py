"""Whether rate and decay of Adam or AdamW can be those of an update, as a fresh state moves a weight only so far."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from privlab.attacks.solvers import RTOL, largest_step, least_step
from privlab.base import PrivlabError
from privlab.release import rounding_deviation
from privlab.runs.client_fit import at_rate, decay_that_takes, share_of_weights, weights_before
from privlab.runs.update_diagnosis import TWO_MODELS
from privlab.threat import Client, Observation

_ROUNDS = 8  # times that a rate is corrected: decay depends on it too
_MARGIN = 6.0  # standard deviations of rounding by which a weight may move further
_FEWEST = 10
"""Weights that must have moved too far, all along their own signs, for a decay of some parameters to be named."""

_FULL = 0.99  # the share of η from which a move of one step counts as a full one, whose excess over η is decay's
_ONE_VALUE = 1.02  # the ratio of the bounds of a rate below which one value is told
_MOST_SPREAD, _LEAST_MEDIAN = 2.0, 0.4
"""The updates of Adam and AdamW have sizes of entries whose medians, over the middle four fifths of the parameters, are
within the first factor, and at least the second share of the largest entry of half of the parameters.

Of ViT-Ti the two were 1.02 and 0.96 after one step of AdamW, 1.3 and 0.68 after five; 16 and 0.055 after one step of
SGD; 1.2 and 0.2 of Gaussian noise.
"""


def looks_like_adam(seen: Observation) -> float | None:
    """Return the learning rate at which Adam or AdamW makes such an update; None if it does not look like theirs.

    From a fresh state a step moves a weight by about η, whatever its gradient, so that the T steps stated move most
    weights by about the largest move, T η, in all parameters. What SGD moves differs by orders of magnitude.
    """
    sizes = [u[u != 0].abs() for u in seen.gradients.values() if u.any()]
    if not sizes or seen.client is None:
        return None
    medians = torch.stack([size.median() for size in sizes]).double()
    most = torch.stack([size.max() for size in sizes]).double()
    low, high = medians.quantile(medians.new_tensor([0.1, 0.9])).tolist()
    if high > _MOST_SPREAD * low or float((medians / most).median()) < _LEAST_MEDIAN:
        return None
    return float(most.median()) / seen.client.total_steps


def check_adam(seen: Observation, label: int | None, source: str) -> None:
    """Refuse a learning rate or a decay at which a fresh state of Adam or AdamW cannot make this update.

    Whatever the gradients, a weight moves by η Σ_t r_t at most (`largest_step`), besides what AdamW's decay takes,
    1 − c times the weight. If some moved further, a decay is looked for at which none did; else the rate is too low, or
    the state was carried.

    Of one image under cross-entropy, ∂ℓ/∂b = p − y is negative at the label in each step, and positive elsewhere. So
    the label's bias moves by M_y ≥ η Σ_t q_t (1 − ρ) (`least_step`), with ρ = M_y / Σ_{c ≠ y} M_c. Where gradients are
    as small as ε, moves add up as gradients do, to ρ = 1: if g_y ≤ κ ε in all steps, Σ_c M_c ≤ (1 + κ) M_y, so that the
    label's gradient is above (1 / ρ − 1) ε in one of them. That makes it a bound for one step. For several it is one if
    the same holds in each.

    Args:
        seen: the update of a client without filters; if it trains by SGD nothing is said.
        label: the class that the update of one image shows; None if it is not known, of several images, or filtered.
        source: names of the files, for the error.

    Raises:
        PrivlabError: with the rate or the decay that fits.
    """
    client = seen.client
    if client is None or client.optimiser == "sgd":
        return
    moves = _Moves(seen, client)
    most, lost = largest_step(client), 1 - client.kept_share if client.is_linear else 0.0
    far = moves.furthest(lost)
    if far > most and client.optimiser == "adamw" and (decay := moves.decay(lost, most)) is not None:
        raise PrivlabError(
            f"{source} does not match client.weight_decay={client.weight_decay:g}: weights moved by {far:.3g}, in "
            f"proportion to their size, where a fresh state of adamw moves them by {most:.3g} beside decay: {decay}."
        )
    low, (high, of_label) = moves.least_rate(most), moves.greatest_rate(label)
    if low <= client.lr <= high:
        return
    one = client.total_steps == 1
    steps = f"{client.total_steps} step{'' if one else 's'} from a fresh state of {client.optimiser} move{'s' * one} it"
    if far > most:
        share = share_of_weights(seen)
        if share >= TWO_MODELS and TWO_MODELS * low >= client.lr:
            raise PrivlabError(
                f"{source} look like weights of two models, not of one before and after a round: their difference is "
                f"{share:.0%} of the weights, and one moved by {far:.3g}, where a fresh state of {client.optimiser} "
                f"moves it by {most:.3g} at most. Give the weights that this client began with."
            )
        why = f"a weight moved by {far:.3g}, and {steps} by {most:.3g} at most"
    else:
        why = f"the label's bias moved by {of_label:.3g}, and {steps} by {of_label * client.lr / high:.3g} at least"
    raise PrivlabError(f"{source} does not match client.lr={client.lr:g}: {why}. {_that_fits(low, high)}.")


def _that_fits(low: float, high: float) -> str:
    """Return which rates fit, and what else may be wrong."""
    if high < low:
        return "No rate fits: the optimiser, its steps or its state are others than stated, or there is noise"
    fits = f"client.lr={low:.3g} fits" if high < _ONE_VALUE * low else f"client.lr from {low:.3g} to {high:.3g} fits"
    fits = f"client.lr must be at least {low:.3g}" if high == math.inf else fits
    return f"{fits}, or the state was carried from other rounds, or the steps or the optimiser are others than stated"


@dataclass(frozen=True, eq=False)
class _Moves:
    """How far the weights moved in the update of a client."""

    seen: Observation
    client: Client

    def furthest(self, lost: float) -> float:
        """Return the largest distance that a weight moved beyond decay, less what rounding may have added."""
        return max(float(((u - lost * θ).abs() - margin).max()) for u, θ, margin in self._each())

    def decay(self, lost: float, most: float) -> str | None:
        """Return the decay with which no weight moved further than `most`; None where decay does not explain it.

        |u − l θ| ≤ most bounds l on both sides by each weight. If no l holds for all, but those that moved too far all
        did so along their own sign, or all against it, decay is that of some parameters, as where biases have none.
        """
        low, high, full, square = 0.0, math.inf, 0.0, 0.0
        over, along, against = 0, 0, 0
        for u, θ, margin in self._each():
            room, size, toward = most + margin, θ.abs(), u * θ.sign()
            if bool((u.abs() > room)[θ == 0].any()):
                return None
            low = max(low, float(((toward - room) / size).max()))
            high = min(high, float(((toward + room) / size).min()))
            M = u - lost * θ
            too_far = M.abs() > room
            over += int(too_far.sum())
            along += int((too_far & (M * θ > 0)).sum())
            against += int((too_far & (M * θ < 0)).sum())
            at = u.abs() > _FULL * most
            full += float(((u.abs() - most) * u.sign() * θ)[at].sum())
            square += float(θ.square()[at].sum())
        if 0 < low <= high and self.client.total_steps == 1 and square:
            decay = decay_that_takes(self.client, min(max(full / square, low), high))
            return f"it is that of client.weight_decay={decay:.2g}"
        if low <= high:
            least, greatest = (decay_that_takes(self.client, share) for share in (low, high))
            return f"client.weight_decay must be from {least:.2g} to {greatest:.2g}"
        if over >= _FEWEST and over in (along, against):
            return f"client.weight_decay is {'larger' if along else 'smaller'}, of some of the parameters"
        return None

    def least_rate(self, most: float) -> float:
        """Return the least rate at which no weight moved too far, given the stated decay at that rate."""
        rate = self.client.lr
        for _ in range(_ROUNDS):
            rate = max(self.furthest(self._lost(rate)) / most, RTOL) * self.client.lr
        return rate

    def greatest_rate(self, label: int | None) -> tuple[float, float]:
        """Return the greatest rate at which the label's bias moved far enough, and how far; infinite if none is."""
        client, rate, of_label = self.client, self.client.lr, math.inf
        bounded = label is not None and client.loss == "cross-entropy" and not client.label_smoothing
        if not bounded or not client.is_linear or "head.bias" not in self.seen.gradients:
            return math.inf, math.inf
        (u, θ, margin), least = self._of_parameter("head.bias"), least_step(client)
        for _ in range(_ROUNDS):
            M = u - self._lost(rate) * θ
            of_label, others = float(margin[label] - M[label]), M[torch.arange(len(M)) != label]
            if others.numel() < 2 or not float(others.sum()) > of_label > 0 or not least > 0:
                return math.inf, math.inf
            rate = of_label / (least * (1 - of_label / float(others.sum()))) * client.lr
        return rate, of_label

    def _lost(self, rate: float) -> float:
        """Return the share of the weights that the stated decay takes at a rate."""
        return 1 - at_rate(self.client, rate).kept_share if self.client.is_linear else 0.0

    def _each(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield u = −(θ_T − θ_0), θ_0 and what rounding may add to |u|, of each parameter, in float64."""
        return (self._of_parameter(name) for name in self.seen.gradients)

    def _of_parameter(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        u, θ = self.seen.gradients[name][0], weights_before(self.seen, name)
        # AdamW stores the decayed weight, and then the moved one.
        rounded = (2**0.5 if self.client.optimiser == "adamw" else 1.0) * rounding_deviation(θ, u, self.client)
        halved = self.client.sent_as in ("bf16", "fp16")  # what int8 adds is in `rounded`
        relative = 8 * RTOL + (torch.finfo(torch.bfloat16).eps if halved else 0.0)
        return u.double(), θ.double(), _MARGIN * rounded + relative * u.double().abs()

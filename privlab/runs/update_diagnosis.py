"""Whether the stated settings of a client explain its update, and which ones would: no private image is needed."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from privlab.attacks import PatchUpdate
from privlab.attacks.solvers import fit_decay, slot_gradients, slot_rows
from privlab.base import PrivlabError, PrivlabWarning, collect_warnings, full_precision
from privlab.release import EXPLAINED_RESIDUAL, undecayed, update_on, without_decay
from privlab.release.residual import residual
from privlab.threat import Client, Observation

__all__ = ["TWO_MODELS", "at_rate", "check_settings", "decay_that_takes", "share_of_weights"]

_ROUNDS = 8
"""Times that a learning rate or a decay is corrected: later steps depend on it in other ways than the first one."""

TWO_MODELS = 0.1
"""The least share of the weights' norm by which two models differ, and the most of that which a stated round moves.

Fine-tuning moved the victims of the package by 0.3 to 0.4 of it, other trainings by 0.9 and more. A round of 5 steps of
SGD at a rate of 0.01 moved them by 0.02, one of 20 at 0.1 with momentum by 0.32, which its own settings explain.
"""


def check_settings(seen: Observation, label: int, source: str, *, fitted: bool = False) -> Client | None:
    """Refuse a learning rate or a weight decay that does not explain the update of one image where another one does.

    The image is solved for with its decay fitted, which needs neither of the two. The client is run again on it.

    Args:
        seen: the update of a client of one image that trains by SGD, with N < D; of any other nothing is said.
        label: the class that the update tells.
        source: names of the files, for the error.
        fitted: whether the decay is not known and another one is taken, not refused.

    Returns:
        The client: with the decay that explains the update if it is `fitted` and the stated one does not.

    Raises:
        PrivlabError: with the settings that explain the update.

    Warns:
        PrivlabWarning: if nothing that was tried explains it, or another decay is taken.
    """
    client, names = seen.client, {"pos_embed", "patch_embed.proj.weight", "head.bias"}
    if client is None or client.optimiser != "sgd" or not names <= seen.gradients.keys() or client.dropout:
        return client
    if PatchUpdate().beyond(seen) is not None:
        return client
    with full_precision(), collect_warnings([]):  # what weakens the attack is said where it runs
        image = PatchUpdate(decay="fitted")(seen)
        if client.drop_path or residual(seen, image, label) < EXPLAINED_RESIDUAL:
            return client
        lost, round_moves = _lost(seen), math.inf
        for other in _others(seen, client, image, label, lost):
            if residual(replace(seen, client=other), image, label) < EXPLAINED_RESIDUAL:
                break
        else:
            other, round_moves = None, share_of_weights(seen, update_on(seen.model, client, image, label))
    if other is None:
        _warn(_unexplained(source, share_of_weights(seen), round_moves))
        return client
    changed = [name for name in ("lr", "weight_decay") if getattr(other, name) != getattr(client, name)]
    found = ", ".join(f"client.{name}={getattr(client, name):g}" for name in changed)
    right = " and ".join(f"client.{name}={getattr(other, name):.3g}" for name in changed)
    if not (fitted and changed == ["weight_decay"]):
        raise PrivlabError(f"{source} does not match {found}: its size is that of {right}.")
    _warn(f"{source}: {right} is fitted to the update, and taken in place of {found}.")
    return other


def share_of_weights(seen: Observation, update: Mapping[str, Tensor] | None = None) -> float:
    """Return the norm of an update, or of the first one that is observed, in norms of the weights before it.

    Args:
        seen: the update of a client.
        update: another one of the same parameters, or more.
    """
    moved = {name: u[0] for name, u in seen.gradients.items()} if update is None else update
    size, whole = (
        sum(float(part.double().square().sum()) for part in parts)
        for parts in ([moved[name] for name in seen.gradients], [_weights(seen, name) for name in seen.gradients])
    )
    return math.sqrt(size / whole) if whole else math.inf


def _weights(seen: Observation, name: str) -> Tensor:
    """Return the weights before of a parameter, or E_unk."""
    unknown = seen.model.unk_embed
    return (unknown if name == "unk_embed" and unknown is not None else seen.model.vit.get_parameter(name)).detach()


def _unexplained(source: str, share: float, of_round: float) -> str:
    """Return what is said of an update that nothing explains, by its norm and a round's, in norms of the weights."""
    if share >= TWO_MODELS and share * TWO_MODELS >= of_round:
        return (
            f"{source} look like weights of two models, not of one before and after a round: their difference is "
            f"{share:.0%} of the weights, where a round with these settings moves {of_round:.1%}, and no image "
            "explains it. Give the weights that this client began with: low scores say nothing here."
        )
    return (
        f"{source}: no image explains it with these settings, whatever the learning rate and the decay. Another "
        "optimiser, other steps, momentum, number of images, normalisation or loss than stated, weights of two models, "
        "noise, rounding, or a defense: low scores say nothing here."
    )


def _warn(message: str) -> None:
    warnings.warn(message, PrivlabWarning, stacklevel=3)


def _others(seen: Observation, client: Client, image: Tensor, label: int, lost: float) -> list[Client]:
    """Return clients with another learning rate, another decay, or both, the likeliest first."""
    found: list[Client] = []
    both = client
    for _ in range(2):  # each of the two is found by the other
        if (rate := _rate(seen, both, image, label, lost)) is None:
            return found
        both = at_rate(both, rate)
        found.append(replace(both, weight_decay=client.weight_decay))
        both = replace(both, weight_decay=decay_that_takes(both, lost))
    return [found[0], replace(client, weight_decay=decay_that_takes(client, lost)), both]


def at_rate(client: Client, rate: float) -> Client:
    """Return the client with another learning rate, and the same schedule from there.

    Args:
        client: the public settings.
        rate: the learning rate of its first step, > 0.
    """
    return replace(client, lr=rate, lr_min=min(rate, client.lr_min * rate / client.lr))


def decay_that_takes(client: Client, lost: float) -> float:
    """Return the weight decay at which the client loses this share of its weights; 0 where they grew.

    Args:
        client: the public settings, but for the decay.
        lost: 1 − c.
    """
    found = 1e-6
    for _ in range(_ROUNDS):  # 1 − c is nearly linear in λ
        found *= max(lost, 0.0) / (1 - replace(client, weight_decay=found).kept_share) if found else 0.0
    return found


def _rate(seen: Observation, client: Client, image: Tensor, label: int, lost: float) -> float | None:
    """Return the learning rate at which the client moves the weights as far as the update does; None if there is none.

    The rate is multiplied by ⟨Û, U⟩ / ⟨Û, Û⟩, with U what the gradients moved and Û what they move at that rate, until
    that is 1. It is 1 at once where all gradients are those of the first step.
    """
    held = without_decay(seen.model, {name: u[0] for name, u in seen.gradients.items()}, lost)
    rate = client.lr
    for _ in range(_ROUNDS):
        own = at_rate(client, rate)
        made = undecayed(seen.model, update_on(seen.model, own, image, label), own)
        both = sum(float((made[name] * held[name]).sum()) for name in held)
        size = sum(float(made[name].square().sum()) for name in held)
        if not size > 0 or not 0 < both / size < float("inf"):
            return None
        rate *= both / size
    return rate


def _lost(seen: Observation) -> float:
    """Return the share of the weights that decay took, as it is fitted."""
    E = slot_rows(seen.model, seen.model.vit.get_parameter("pos_embed").detach().double())
    update = {name: u[0] for name, u in seen.gradients.items()}
    return fit_decay(seen.model, update, slot_gradients(seen)[0].double(), E)

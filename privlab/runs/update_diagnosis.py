"""Whether the stated settings of a client explain its update, and which ones would: no private image is needed."""

import warnings
from dataclasses import replace

from torch import Tensor

from privlab.attacks import PatchUpdate
from privlab.attacks.solvers import fit_decay, slot_gradients, slot_rows
from privlab.base import PrivlabError, PrivlabWarning, collect_warnings, full_precision
from privlab.release import EXPLAINED_RESIDUAL, undecayed, update_on, without_decay
from privlab.release.residual import residual
from privlab.threat import Client, Observation

__all__ = ["check_settings"]

_ROUNDS = 8
"""Times that a learning rate or a decay is corrected: later steps depend on it in other ways than the first one."""


def check_settings(seen: Observation, label: int, source: str) -> None:
    """Refuse a learning rate or a weight decay that does not explain the update of one image where another one does.

    The image is solved for with its decay fitted, which needs neither of the two. The client is run again on it.

    Args:
        seen: the update of a client of one image that trains by SGD, with N < D; of any other nothing is said.
        label: the class that the update tells.
        source: names of the files, for the error.

    Raises:
        PrivlabError: with the settings that explain the update.

    Warns:
        PrivlabWarning: if nothing that was tried explains it.
    """
    client, names = seen.client, {"pos_embed", "patch_embed.proj.weight", "head.bias"}
    if client is None or client.optimiser != "sgd" or not names <= seen.gradients.keys() or client.dropout:
        return
    if PatchUpdate().beyond(seen) is not None:
        return
    with full_precision(), collect_warnings([]):  # what weakens the attack is said where it runs
        image = PatchUpdate(decay="fitted")(seen)
        if client.drop_path or residual(seen, image, label) < EXPLAINED_RESIDUAL:
            return
        lost = _lost(seen)
        for other in _others(seen, client, image, label, lost):
            if residual(replace(seen, client=other), image, label) < EXPLAINED_RESIDUAL:
                changed = [name for name in ("lr", "weight_decay") if getattr(other, name) != getattr(client, name)]
                found = ", ".join(f"client.{name}={getattr(client, name):g}" for name in changed)
                right = " and ".join(f"client.{name}={getattr(other, name):.3g}" for name in changed)
                raise PrivlabError(f"{source} does not match {found}: its size is that of {right}.")
    warnings.warn(
        f"{source}: no image explains it with these settings, whatever the learning rate and the decay. Other steps, "
        "momentum, number of images or loss than stated, noise, rounding, or a defense: low scores say nothing here.",
        PrivlabWarning,
        stacklevel=3,
    )


def _others(seen: Observation, client: Client, image: Tensor, label: int, lost: float) -> list[Client]:
    """Return clients with another learning rate, another decay, or both, the likeliest first."""
    found: list[Client] = []
    both = client
    for _ in range(2):  # each of the two is found by the other
        if (rate := _rate(seen, both, image, label, lost)) is None:
            return found
        both = _at_rate(both, rate)
        found.append(replace(both, weight_decay=client.weight_decay))
        both = replace(both, weight_decay=_decay(both, lost))
    return [found[0], replace(client, weight_decay=_decay(client, lost)), both]


def _at_rate(client: Client, rate: float) -> Client:
    """Return the client with another learning rate, and the same schedule from there."""
    return replace(client, lr=rate, lr_min=client.lr_min * rate / client.lr)


def _decay(client: Client, lost: float) -> float:
    """Return the weight decay at which the client loses this share of its weights; 0 where they grew."""
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
        own = _at_rate(client, rate)
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

"""Whether the stated settings of a client explain its update, and which ones would: no private image is needed."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from privlab.attacks import PatchUpdate
from privlab.attacks.solvers import fit_decay, slot_gradients, slot_rows
from privlab.base import PrivlabError, PrivlabWarning, collect_warnings, full_precision
from privlab.release import EXPLAINED_RESIDUAL, undecayed, update_on, without_decay
from privlab.release.residual import residual
from privlab.runs.fed_pixels import fed_pixels, residual_of_pixels
from privlab.threat import Client, Observation
from privlab.victims.named import NORMALISATIONS, of_channels

__all__ = ["TWO_MODELS", "at_rate", "check_settings", "decay_that_takes", "share_of_weights"]

_MOMENTUM = 0.9
"""The momentum that is tried where another one is stated: that of nearly all who use any."""

_MOST_STEPS = 20
"""The most steps that are tried where others are stated."""

_BEYOND = 0.01
"""How far a pixel may be from black and white, by rounding, for a normalisation to fit."""

_ROUNDS = 8
"""Times that a learning rate or a decay is corrected: later steps depend on it in other ways than the first one."""

TWO_MODELS = 0.1
"""The least share of the weights' norm by which two models differ, and the most of that which a stated round moves.

Fine-tuning moved the victims of the package by 0.3 to 0.4 of it, other trainings by 0.9 and more. A round of 5 steps of
SGD at a rate of 0.01 moved them by 0.02, one of 20 at 0.1 with momentum by 0.32, which its own settings explain.
"""


def check_settings(seen: Observation, label: int, source: str, *, fitted: bool = False) -> Client | None:
    """Refuse settings that do not explain the update of one image where others do.

    The image is solved for with its decay fitted, which needs no setting but that SGD was used. The client is run again
    on it with the stated settings, and if they do not explain the update with others: another learning rate or decay or
    both, another normalisation, another momentum, another number of steps.

    Args:
        seen: the update of a client of one image, with N < D; if it has dropout nothing is said.
        label: the class that the update tells.
        source: names of the files, for the error.
        fitted: whether the decay is not known and another one is taken, not refused.

    Returns:
        The client: with the decay that explains the update if it is `fitted` and the stated one does not.

    Raises:
        PrivlabError: with the settings that explain the update.

    Warns:
        PrivlabWarning: if nothing that was tried explains it, or another decay is taken. Of Adam and AdamW nothing is
            tried but SGD, and nothing is said if that does not explain it.
    """
    client, names = seen.client, {"pos_embed", "patch_embed.proj.weight", "head.bias"}
    if client is None or not names <= seen.gradients.keys() or client.dropout:
        return client
    if client.optimiser != "sgd":
        _check_sgd(replace(seen, client=replace(client, optimiser="sgd", weight_decay=0.0)), client, label, source)
        return client
    if PatchUpdate().beyond(seen) is not None:
        return client
    with full_precision(), collect_warnings([]):  # what weakens the attack is said where it runs
        image = PatchUpdate(decay="fitted")(seen)
        if client.drop_path or residual(seen, image, label) < EXPLAINED_RESIDUAL:
            return client
        lost = _lost(seen)
        other = _first(seen, _others(seen, client, image, label, lost), image, label)
        if other is None:
            _check_normalisation(seen, lost, label, source)
            other = _first(seen, _rounds_like(client), image, label)
        round_moves = math.inf if other else share_of_weights(seen, update_on(seen.model, client, image, label))
    if other is None:
        _warn(_unexplained(source, share_of_weights(seen), round_moves))
        return client
    changed = [name for name in ("lr", "weight_decay", "momentum") if getattr(other, name) != getattr(client, name)]
    found, right = (
        [f"client.{name}={getattr(of, name):{digits}}" for name in changed]
        + [f"client.steps={of.total_steps}"] * (other.total_steps != client.total_steps)
        for of, digits in ((client, "g"), (other, ".3g"))
    )
    if not (fitted and changed == ["weight_decay"]):
        more = " Other steps or another momentum than stated would change its size too." * ("lr" in changed)
        raise PrivlabError(
            f"{source} does not match {', '.join(found)}: its size is that of {' and '.join(right)}.{more}"
        )
    _warn(f"{source}: {right[0]} is fitted to the update, and taken in place of {found[0]}.")
    return other


def _first(seen: Observation, clients: Iterable[Client], image: Tensor, label: int) -> Client | None:
    """Return the first client whose round on the image gives the update; None if none does."""
    explains = (each for each in clients if residual(replace(seen, client=each), image, label) < EXPLAINED_RESIDUAL)
    return next(explains, None)


def _check_sgd(seen: Observation, stated: Client, label: int, source: str) -> None:
    """Refuse Adam and AdamW where SGD explains the update: at the stated rate, another one, or with momentum."""
    client = seen.client
    assert client is not None
    if PatchUpdate().beyond(seen) is not None or client.drop_path:
        return
    with full_precision(), collect_warnings([]):
        image, lost = PatchUpdate(decay="fitted")(seen), _lost(seen)
        tried = (client, *_others(seen, client, image, label, lost), replace(client, momentum=_MOMENTUM))
        found = _first(seen, tried, image, label)
    if found is not None:
        settings = [f"client.{name}={getattr(found, name):.3g}" for name in ("lr", "momentum", "weight_decay")]
        raise PrivlabError(
            f"{source} does not match client.optimiser={stated.optimiser}: it is the update that SGD makes of one "
            f"image, with {', '.join(settings)}. State client.optimiser=sgd."
        )


def _check_normalisation(seen: Observation, lost: float, label: int, source: str) -> None:
    """Refuse the stated normalisation where the model was fed pixels that it makes of no image."""
    pixels = fed_pixels(seen, lost)
    if not residual_of_pixels(seen, pixels, label) < EXPLAINED_RESIDUAL:
        return
    named = []
    for name, parts in NORMALISATIONS.items():
        mean, std = (pixels.new_tensor(of_channels(values, pixels.shape[1])).view(-1, 1, 1) for values in parts)
        image = pixels * std + mean
        if image.min() >= -_BEYOND and image.max() <= 1 + _BEYOND:
            named.append(name)
    stated = "/".join(
        ",".join(f"{value:.3g}" for value in of.flatten().tolist()) for of in (seen.model.mean, seen.model.std)
    )
    right = f"Give --normalisation {' or '.join(named)}" if named else "Give the client's by --normalisation MEAN/STD"
    raise PrivlabError(
        f"{source} does not match images that are normalised by {stated}: the model was fed pixels from "
        f"{float(pixels.min()):.3g} to {float(pixels.max()):.3g}, which explain it. {right}."
    )


def _rounds_like(client: Client) -> Iterator[Client]:
    """Yield clients with another momentum, then those with other steps, the nearest to the stated ones first."""
    if not (client.nesterov or client.dampening):
        yield from (replace(client, momentum=each) for each in (0.0, _MOMENTUM) if each != client.momentum)
    for steps in sorted(range(1, _MOST_STEPS + 1), key=lambda steps: abs(steps - client.total_steps)):
        if steps != client.total_steps:
            yield replace(client, steps=steps, epochs=None)


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

"""What an audit is given: the gradient of a training step, or the weights before and after a client's round."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from privlab.attacks import PatchUpdate
from privlab.base import PrivlabWarning, configure
from privlab.evaluation import Specification, defense_of
from privlab.release import (
    GradientFile,
    Told,
    as_gradients,
    check_fit,
    check_head,
    observation,
    read_gradient_file,
    told_labels,
    update_in,
)
from privlab.release.update_files import check_order, label_of_update, read_update, update_observation
from privlab.runs.adam_diagnosis import check_adam
from privlab.runs.update_diagnosis import check_settings
from privlab.threat import Capability, Observation
from privlab.victims import Victim, own_layout, victim

__all__ = ["GIVE_WEIGHTS", "Files", "Given", "other_weights", "read_given"]

GIVE_WEIGHTS = "Give the client's --weights, saved before the optimiser's step."

Files = Path | tuple[Path, Path]
"""A file of gradients, or the weights before and after."""


@dataclass(frozen=True, eq=False)
class Given:
    """What is audited: the specification, the victim, what was released, and what the adversary sees of it.

    `told` are the labels that the head gives away. `changed` says that a file does not hold a plain gradient.
    """

    spec: Specification
    base: Victim
    released: GradientFile
    seen: Observation
    told: Told | None
    changed: bool = False

    @property
    def labels(self) -> tuple[int, ...] | None:
        """Return the labels by which reconstructions are checked: those beyond doubt, or of an update the likeliest.

        A wrong label explains no update.
        """
        if self.told is not None and (self.told.all_certain or self.seen.client is not None):
            return self.told.labels
        return None


def read_given(files: Files, spec: Specification, device: torch.device) -> Given:
    """Read and check what is audited.

    Args:
        files: the file of gradients, or the weights before and after where `spec` names a client.
        spec: the victim, and the client or the defense.
        device: where the victim is put.

    Raises:
        PrivlabError: for a file that cannot be read, does not fit the victim, or contradicts itself or the client.

    Warns:
        PrivlabWarning: for what weakens the audit.
    """
    return _of_update(*files, spec, device) if isinstance(files, tuple) else _of_gradients(files, spec, device)


def _of_update(before: Path, after: Path, spec: Specification, device: torch.device) -> Given:
    client = spec.local_training
    assert client is not None
    block = "stock" if spec.block == "auto" else spec.block
    images = (str(before), str(after))
    filtered = spec.parts not in (("auto",), ("none",))  # of other defenses, updates are refused
    settings = ("c",) if filtered else ("a",)
    spec = replace(spec, settings=settings, block=block, release="update", images=images, weights=images[0])
    base = _victim(spec, device)
    weights = [name for name, tensor in own_layout(base.model).items() if tensor.is_floating_point()]
    released = read_update(before, after, client.released_images, weights)
    filters = defense_of(spec, base, settings[0]).on_gradients
    released, seen = update_observation(released, base.model, client, filters)
    check_order(seen, released.source)
    label = label_of_update(seen) if client.released_images == 1 else None
    if label is None and client.released_images == 1 and client.has_labels and "head.bias" in released.gradients:
        _warn(
            f"{released.source} have equal biases of the head, so that the update tells no label and no reconstruction "
            "can be checked. Weights of two models look like this, or a head that did not train."
        )
    if label is not None:
        if not filters:  # what a filter took of an update, no other settings explain
            fitted = configure(PatchUpdate, spec.options).decay == "fitted"
            found = check_settings(seen, label, released.source, fitted=fitted)
            if found is not None and found != client:
                seen = replace(seen, client=found)
                spec = replace(spec, options=(*spec.options, f"client.weight_decay={found.weight_decay!r}"))
            check_adam(seen, label, released.source)
        return Given(spec, base, released, seen, Told((label,), (label,)))
    if not filters:
        check_adam(seen, None, released.source)
    told = None if filters or client.gradient_factor is None else _told(base, as_gradients(seen))
    return Given(spec, base, released, seen, told)


def _of_gradients(file: Path, spec: Specification, device: torch.device) -> Given:
    block = "stock" if spec.block == "auto" else spec.block
    spec = replace(spec, settings=("c",), block=block, release="gradients", images=(str(file),))
    released = read_gradient_file(file)
    base = _victim(spec, device)
    check_fit(released, base.model)
    if spec.defense == "auto" and not base.has_mjp:
        spec = replace(spec, defense="none")
    defense = defense_of(spec, base, "c")
    knows = _knows_weights(released, base)
    update = update_in(released.gradients, base.model if knows else None, released.batch_size, released.source)
    if update is not None:
        _warn(update)
    plain = update is None and check_head(released) and not released.is_zero
    seen = observation(released, base.model, defense=defense.parts, knows_weights=knows)
    return Given(spec, base, released, seen, _told(base, seen) if plain else None, changed=update is not None)


def _victim(spec: Specification, device: torch.device) -> Victim:
    """Return the one victim of an audit, which is the client's model."""
    names = ("weights", "block", "img_size", "seed", "classes", "normalisation")
    return victim(spec.models[0], **{name: getattr(spec, name) for name in names}).to(device)


def _knows_weights(released: GradientFile, base: Victim) -> bool:
    """Return whether the victim's weights are those of the client at that step, as far as the file says.

    Warns:
        PrivlabWarning: if they are not, or the file does not say.
    """
    if released.weights_sha256 is None:
        _warn(
            f"{released.source} states no weights_sha256: {base.weights.origin} are taken for the client's, on trust."
        )
    elif released.weights_sha256 != base.weights.sha256:
        _warn(
            f"{other_weights(released, base)}: attacks that need the weights are left out, and no reconstruction can "
            f"be checked. {GIVE_WEIGHTS}"
        )
        return False
    return True


def other_weights(released: GradientFile, base: Victim) -> str:
    """Return the words that say that the client's weights and the victim's have different hashes."""
    assert released.weights_sha256 is not None
    return (
        f"{released.source} was taken at other weights (SHA-256 {released.weights_sha256[:12]}) than "
        f"{base.weights.origin} ({base.weights.sha256[:12]})"
    )


def _told(base: Victim, seen: Observation) -> Told | None:
    """Return the labels that the head's gradient gives away; that of its weight is read only if weights are known."""
    held = {name: g[0] for name, g in seen.gradients.items()}
    if Capability.KNOWS_WEIGHTS not in seen.grants:
        held.pop("head.weight", None)
    return told_labels(base.model.vit.head, held, seen.images_per_release)


def _warn(message: str) -> None:
    warnings.warn(message, PrivlabWarning, stacklevel=3)

"""What an audit is audited: the gradient of a training step, or the weights before and after a client's round."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from privlab.attacks import TokenSeparation
from privlab.base import PrivlabError, option_text, warn
from privlab.defenses import Undefended
from privlab.evaluation import Automatic, Case, defense_of
from privlab.grids.specify import released_by
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
from privlab.release.labels import check_order, label_of_update, labels_of_update
from privlab.release.noise_estimate import noise_of_update
from privlab.release.update_files import update_between, update_observation
from privlab.runs.adam_diagnosis import check_adam, looks_like_adam
from privlab.runs.audit_certificate import what_released
from privlab.runs.audits import audited_victim
from privlab.runs.client_fit import Fitted, share_of_weights
from privlab.runs.update_diagnosis import TWO_MODELS, UpdateDiagnosis, label_of_image
from privlab.threat import Capability, Client, Observation
from privlab.victims import Victim, own_layout, read_state

GIVE_WEIGHTS = "Give the client's --weights, saved before the optimiser's step."

_OF_ADAPTERS = ("client.rank", "client.prompts")

Files = Path | tuple[Path, Path]
"""A file of gradients, or the weights before and after."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Audited:
    """One gradient or update that was read from disk: the file, what the adversary sees of it, and what that shows.

    `told` are the labels that the head reveals. `changed` says that a file does not hold a plain gradient. `fitted`
    are the settings that explain an update, where they are not the stated ones: `spec` and `seen` go on by them, and
    by `fitted_target` in place of a label. `unexplained` is what is to be said if no attack explains the update either.
    """

    spec: Case
    base: Victim
    file: GradientFile
    seen: Observation
    told: Told | None = None
    changed: bool = False
    fitted: Mapping[str, Any] = field(default_factory=dict)
    fitted_target: int | Tensor | None = None
    unexplained: str | None = None

    @property
    def source(self) -> str:
        """Return the name of the file, or of the two files of weights."""
        return self.file.source

    @property
    def what(self) -> str:
        """Return what was released: a "gradient" or an "update"."""
        return what_released(self.seen)

    @property
    def client(self) -> Client:
        """Return the settings of the client whose update is audited."""
        assert self.seen.client is not None
        return self.seen.client

    @property
    def labels(self) -> tuple[int, ...] | None:
        """Return the labels by which reconstructions are checked: those beyond doubt, or of an update the likeliest.

        A wrong label explains no update.
        """
        if self.told is not None and (self.told.all_certain or self.seen.client is not None):
            return self.told.labels
        return None

    @property
    def target(self) -> int | Tensor | None:
        """Return the label of one image that is beyond doubt or likeliest, or what is fitted in place of it."""
        if self.fitted_target is not None:
            return self.fitted_target
        return self.labels[0] if self.labels is not None and len(self.labels) == 1 else None


def read_audited(files: Files, spec: Case, device: torch.device, own: nn.Module | Victim | None = None) -> Audited:
    """Read and check what is audited.

    Args:
        files: the file of gradients, or the weights before and after where `spec` names a client.
        spec: the victim, and the client or the defense.
        device: where the victim is put.
        own: the client's model, or a victim, in place of the one that `spec` names.

    Raises:
        PrivlabError: for a file that cannot be read, does not fit the victim, or contradicts itself or the client.

    Warns:
        PrivlabWarning: for what weakens the audit.
    """
    block = "stock" if spec.victim.block == "auto" else spec.victim.block  # a client trains one model
    spec = replace(spec, victim=replace(spec.victim, block=block))
    return (
        _of_update(*files, spec, device, own) if isinstance(files, tuple) else _of_gradients(files, spec, device, own)
    )


def _of_update(before: Path, after: Path, spec: Case, device: torch.device, own: nn.Module | Victim | None) -> Audited:
    audited = _read_update(before, after, spec, device, own)
    seen, source, client = audited.seen, audited.source, audited.client
    noise = None if seen.defense else noise_of_update(seen)
    noisy = noise is not None and noise.is_large
    if noise is not None and noisy:
        warn(
            f"{source}: the update looks like noise: entries that cancel in any training do not, and "
            f"{min(noise.share, 1.0):.0%} of its squared size is noise of a standard deviation of "
            f"{noise.deviation:.2g}, in weights. Labels are stated only where they are beyond it, and no "
            "reconstruction can be proven: low scores say that noise was added."
        )
    else:
        check_order(seen, source)
    if not isinstance(client.loss, str) and client.total_steps > 1:
        warn(
            f"{source}: after {client.total_steps} steps of client.loss={client.loss_name}, a function, no certificate "
            "by the update holds, since nothing shows its targets, on which each step depends. After one step one does."
        )
    found = labels_of_update(seen)
    audited = replace(audited, told=found if found.labels else None)
    alone = client.released_images == 1 and not seen.defense
    label = label_of_update(seen) if alone and not noisy else None
    diagnosis = None if label is None else UpdateDiagnosis(seen, label, source)
    fitted = None if diagnosis is None else diagnosis.fitted()
    if label is not None and fitted is not None:
        return _explained(audited, fitted, label)
    if diagnosis is not None and not diagnosis.of_any_loss:
        several = _as_batch(audited, found)
        if several is not None:
            return _of_update(before, after, several, device, audited.base)
    if client.optimiser == "sgd" and not seen.defense and (rate := looks_like_adam(seen)) is not None:
        warn(
            f"{source}: most weights moved equally far, as Adam or AdamW moves them: client.optimiser=sgd may be "
            f"wrong. Try --client adamw --set client.lr={rate:.1g}, or --client adam."
        )
    if found.remark is not None:
        models = ""
        if not noisy and not found.labels and (share := share_of_weights(seen)) >= TWO_MODELS:
            models = (
                f" The update is {share:.0%} of the weights. Weights of two models look like this, or noise of another "
                "size in each layer: give the weights that this client began with."
            )
        warn(f"{source}: {found.remark}{models}")
    return audited if noisy else _unexplained(audited, found, diagnosis)


def _read_update(
    before: Path, after: Path, spec: Case, device: torch.device, own: nn.Module | Victim | None
) -> Audited:
    """Read the weights before and after; the client trains what moved."""
    spec = _fed_whole(spec)
    filtered = spec.defense_name not in ("auto", "none")  # of other defenses, updates are refused
    files = (str(before), str(after))
    victim, data = replace(spec.victim, weights=files[0]), replace(spec.data, images=files)
    words = replace(spec.words, release="update")
    spec = replace(spec, settings=("c" if filtered else "a",), victim=victim, data=data, words=words)
    base = audited_victim(spec, device, own)
    client = spec.client
    assert client is not None
    weights = [name for name, tensor in own_layout(base.model).items() if tensor.is_floating_point()]
    began = read_state(before)
    released = update_between(began, read_state(after, began), client.released_images, files, weights)
    filters = defense_of(spec, base, spec.settings[0]).on_gradients
    released, seen = update_observation(released, base.model, client, filters)
    if seen.client is not None and seen.client != client:  # a file of the model's own weights has no adapters
        options = (each for each in spec.adversary.options if each.partition("=")[0].strip() not in _OF_ADAPTERS)
        sent = (f"client.sends={seen.client.sends}", f"client.sent_as={seen.client.sent_as}")
        sent = sent if seen.client.sent_as != client.sent_as else ()
        spec = released_by(spec, seen.client, [*options, f"client.trains={seen.client.trains}", *sent])
    return Audited(spec=spec, base=base, file=released, seen=seen)


def _explained(audited: Audited, fitted: Fitted, label: int) -> Audited:
    """Return an update with the settings that explain it in place of those that were stated."""
    settings = fitted.settings(audited.client)
    options = [f"client.{name}={option_text(value)}" for name, value in settings.items() if name != "label"]
    told = audited.told
    if told is None and "label" not in settings:  # else the fitted shares are said, which may be none
        told = Told((label,), (label,))
    return replace(
        audited,
        spec=released_by(audited.spec, fitted.client, [*audited.spec.adversary.options, *options]),
        seen=replace(audited.seen, client=fitted.client),
        told=told,
        fitted=settings,
        fitted_target=fitted.target,
    )


def _as_batch(audited: Audited, found: Told) -> Case | None:
    """Return the case of one step on as many images as labels are shown, if attacks may separate such a batch.

    No attack may be named, since one for single images would be refused.

    Warns:
        PrivlabWarning: that this number of images is taken.
    """
    client, images = audited.client, len(found.labels)
    one_step = client.total_steps == 1 and client.optimiser == "sgd" and client.is_of_class
    if images < 2 or not one_step or audited.spec.adversary.attacks is not None:
        return None
    batch = replace(client, images=images, batch_size=images)
    if TokenSeparation().beyond(replace(audited.seen, client=batch)) is not None:
        return None
    warn(
        f"{audited.source}: one step on one image does not explain it, and the biases of {images} classes rise in the "
        f"head. client.images={images} and client.batch_size={images} are taken: state the numbers if there are more, "
        "or client.loss=binary if the loss is one for each class."
    )
    options = (f"client.images={images}", f"client.batch_size={images}")
    return released_by(audited.spec, batch, [*audited.spec.adversary.options, *options])


def _unexplained(audited: Audited, found: Told, diagnosis: UpdateDiagnosis | None) -> Audited:
    """Return an update that no settings explain, with what else its labels show, and say what contradicts them."""
    seen, source, client, spec = audited.seen, audited.source, audited.client, audited.spec
    if audited.told is None and client.has_labels and found.remark is None:
        label = label_of_image(seen) if client.released_images == 1 and not seen.defense else None
        if label is not None:
            return replace(audited, told=Told((label,), (label,), "the reconstruction, which explains it"))
        warn(
            f"{source} have equal biases of the head, so that the update tells no label and no reconstruction can be "
            "checked. A head that does not train looks like this, or weights of two models."
        )
    if diagnosis is not None and diagnosis.of_any_loss:
        warn(
            f"{source}: an image explains the update, whatever its loss is, and no target of client.loss="
            f"{client.loss_name} does: the loss or its weights are other ones, so no label is stated."
        )
        return replace(audited, told=None)
    if audited.told is None:
        diagnosis = None
    if diagnosis is not None:
        other = diagnosis.normalisation()
        if other is not None and other != spec.victim.normalisation:
            assert isinstance(spec.data.images, tuple)  # the two files
            before, after = map(Path, spec.data.images)
            spec = replace(spec, victim=replace(spec.victim, normalisation=other))
            return _of_update(before, after, spec, seen.model.mean.device, audited.base)
        audited = replace(audited, unexplained=diagnosis.why_unexplained())
    if not seen.defense:
        try:
            check_adam(seen, None if diagnosis is None else diagnosis.label, source)
        except PrivlabError as reason:
            warn(f"{reason} The attacks run all the same: that they fail is no evidence of privacy.")
    counted = client.loss == "cross-entropy" and client.class_weights is None  # −h_c ≤ n_c of other losses is not known
    one_by_one = client.released_labels == 1 or not counted or len(found.labels) > client.released_labels
    if one_by_one or seen.defense or client.gradient_factor is None:
        return audited
    return replace(audited, told=_told(audited.base, as_gradients(seen)))


def _fed_whole(spec: Case) -> Case:
    """Return the client with batches so large that its steps feed all its images, as in one step on four images.

    Warns:
        PrivlabWarning: if another size of batches is taken than the stated one.
    """
    client = spec.client
    if client is None or client.epochs is not None:
        return spec
    batches = client.total_steps * client.accumulation
    if client.images <= batches * client.batch_size:
        return spec
    batch = math.ceil(client.images / batches)
    warn(
        f"Steps of client.batch_size={client.batch_size} feed {batches * client.batch_size} of client.images="
        f"{client.images}: client.batch_size={batch} is taken."
    )
    return released_by(spec, replace(client, batch_size=batch), [*spec.adversary.options, f"client.batch_size={batch}"])


def _of_gradients(file: Path, spec: Case, device: torch.device, own: nn.Module | Victim | None) -> Audited:
    released = read_gradient_file(file)
    words = replace(spec.words, release="gradients")
    spec = replace(spec, settings=("c",), data=replace(spec.data, images=(str(file),)), words=words)
    base = audited_victim(spec, device, own)
    check_fit(released, base.model)
    if isinstance(spec.defense, Automatic) and not base.has_mjp:
        spec = replace(spec, defense=(Undefended(),), words=replace(spec.words, defense="none"))
    defense = defense_of(spec, base, "c")
    knows = _knows_weights(released, base)
    update = update_in(released.gradients, base.model if knows else None, released.batch_size, released.source)
    if update is not None:
        warn(update)
    plain = update is None and check_head(released) and not released.is_zero
    seen = observation(released, base.model, defense=defense.parts, knows_weights=knows)
    told = _told(base, seen) if plain else None
    return Audited(spec=spec, base=base, file=released, seen=seen, told=told, changed=update is not None)


def _knows_weights(released: GradientFile, base: Victim) -> bool:
    """Return whether the victim's weights are those of the client at that step, as far as the file says.

    Warns:
        PrivlabWarning: if they are not, or the file does not say.
    """
    if released.weights_sha256 is None:
        warn(f"{released.source} states no weights_sha256: {base.weights.origin} are taken for the client's, on trust.")
    elif released.weights_sha256 != base.weights.sha256:
        warn(
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
    """Return the labels that the head's gradient reveals; that of its weight is read only if weights are known."""
    held = {name: g[0] for name, g in seen.gradients.items()}
    if Capability.KNOWS_WEIGHTS not in seen.grants:
        held.pop("head.weight", None)
    return told_labels(base.model.vit.head, held, seen.images_per_release)

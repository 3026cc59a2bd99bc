"""Audits: what a real client released, or a server sent, as files, state dicts or models."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from privlab import runs
from privlab.api.steps import Part, given_batch
from privlab.api.whole_run import kept_run, run_directory
from privlab.base import PrivlabError, pick_device, warn
from privlab.grids import specify
from privlab.release import recorded_cut_layer
from privlab.release.capture import capture_update
from privlab.report.run import Run
from privlab.runs.sent_weights import MOST_IMAGES, WeightsAudit, audit_of_round, audit_sent_weights
from privlab.threat import Client
from privlab.victims import Victim, read_state, save, victim
from privlab.victims.layouts import choose, from_any_layout

Weights: TypeAlias = str | Path | nn.Module | Mapping[str, Any]


def audit_update(
    before: Weights,
    after: Weights,
    *,
    model: str | nn.Module | Victim,
    client: Client | str = "sgd",
    attacks: Part | Sequence[Part] | None = None,
    reference: str | Path | None = None,
    out: str | Path | None = None,
    **options: Any,  # noqa: ANN401
) -> Run:
    """Attack the update of a client's round, and return the run; `leaks` and `verdict` say what was found.

    Args:
        before: the weights that the client began with: a file, a state dict, a checkpoint that holds one, or a model.
        after: the weights that it sent.
        model: the client's model: a name, a `Victim`, or a ViT of timm, transformers or torchvision, whose own weights
            are replaced by `before`.
        client: how the client trained; what is not stated is fitted to the update where that can be.
        attacks: the attacks; by default all that can run.
        reference: the file of the private image, by which reconstructions are scored; or a volume or a folder, whose
            images are matched with the reconstructions.
        out: the directory of the run; None keeps it as long as the result is used.
        options: normalisation, defense, device, overwrite, metrics, seed.

    Raises:
        PrivlabError: for weights that do not fit the model, or a client that cannot have trained them.
    """
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(before, str | Path) and isinstance(after, str | Path):
            files = (Path(before), Path(after))
        elif isinstance(before, str | Path) or isinstance(after, str | Path):
            raise PrivlabError("before and after must both be files, or both be state dicts or models.")
        else:
            if not (isinstance(before, nn.Module) and isinstance(after, nn.Module)):  # of one library, in one layout
                before, after = (each.state_dict() if isinstance(each, nn.Module) else each for each in (before, after))
            files = capture_update(_weights(before, "before"), _weights(after, "after"), folder)
        work = partial(runs.audit_gradients, files, own=_own(model), reference=_file(reference))
        return _audit(work, model, "a", attacks, out, options | {"client": client})


def audit_gradients(
    file: str | Path,
    *,
    model: str | nn.Module | Victim,
    attacks: Part | Sequence[Part] | None = None,
    reference: str | Path | None = None,
    out: str | Path | None = None,
    **options: Any,  # noqa: ANN401
) -> Run:
    """Attack the gradient of a training step that `privlab.capture` saved, and return the run.

    Args:
        file: what `privlab.capture` wrote.
        model: the client's model: a name with `weights`, or a `Victim` or a ViT of timm, transformers or torchvision,
            whose weights are those of the step.
        attacks: as in `audit_update`.
        reference: as in `audit_update`.
        out: as in `audit_update`.
        options: weights, normalisation, defense, device, overwrite, metrics, seed.

    Raises:
        PrivlabError: for a file that cannot be read or does not fit the model.
    """
    work = partial(runs.audit_gradients, Path(file), own=_own(model), reference=_file(reference))
    return _audit(work, model, "c", attacks, out, options | {"release": "gradients"})


def audit_features(
    folder: str | Path,
    *,
    model: str,
    attacks: Part | Sequence[Part] | None = None,
    limit: int | None = None,
    out: str | Path | None = None,
    **options: Any,  # noqa: ANN401
) -> Run:
    """Attack the features that a server of split learning recorded, and return the run; no image is known.

    Args:
        folder: what `privlab split serve --record` wrote.
        model: the name of the public base of the client.
        attacks: as in `audit_update`.
        limit: the most batches of each session and kind; None for all.
        out: as in `audit_update`.
        options: weights, img_size, defense, public, device, overwrite, seed.

    Raises:
        PrivlabError: if there is no recording, or it does not fit the model.
    """
    cut = {"release": "features", "cut_layer": recorded_cut_layer(Path(folder)), "images": folder}
    return _audit(partial(runs.audit_features, Path(folder), limit=limit), model, "c", attacks, out, options | cut)


def audit_weights(
    weights: Weights,
    *,
    model: str | nn.Module | Victim,
    last: Weights | None = None,
    images: Any = "samples",  # noqa: ANN401
    limit: int | None = None,
    pretrained: bool = False,
    device: str = "auto",
    **options: Any,  # noqa: ANN401
) -> WeightsAudit:
    """Audit the weights that a server sent, before a client trains on them: did somebody train this model?

    Args:
        weights: what the server sent, as in `audit_update`.
        model: the federation's model, as in `audit_update`.
        last: the weights of the last round, with which they are compared; None if they are not known.
        images: images of the client, as in `attack`; their gradient is computed and tested, and does not leave.
        limit: how many images are used; None for two or more, which have 128 patches, and for eight if they show any.
        pretrained: whether the model was trained before, as one behind adapters is; gradients must then depend more on
            the image.
        device: "auto", "cpu", "cuda" or "cuda:N".
        options: img_size, classes, normalisation, as `privlab.victim` takes them.

    Raises:
        PrivlabError: for weights that cannot be read, do not fit the model or are not finite.

    Warns:
        PrivlabWarning: for weights in half precision, which are audited in the model's own.

    Example:
        >>> import privlab
        >>> vit = privlab.victim("cifar_vit").model.vit
        >>> privlab.audit_weights(vit, model="cifar_vit", limit=2).suspicious
        False
    """
    place = pick_device(device)
    own = _with_weights(weights, model, options).to(place)
    before = None if last is None else dict(_with_weights(last, model, options).model.vit.named_parameters())
    batch = given_batch(own, images, limit=MOST_IMAGES if limit is None else limit)
    if batch.failed:
        raise PrivlabError(f"{batch.failed[0].name} cannot be used. {batch.failed[0].problem}")
    if limit is None:
        return audit_of_round(own.model, batch.images, before, pretrained)
    return audit_sent_weights(own.model, batch.images, before, pretrained)


def _with_weights(weights: Weights, model: str | nn.Module | Victim, options: Mapping[str, Any]) -> Victim:
    """Return a victim with weights that are given, in its own number format."""
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(weights, str | Path):
            path, state = Path(weights), read_state(Path(weights))
        else:
            state = weights.state_dict() if isinstance(weights, nn.Module) else choose(weights, "weights")[0]
            path = Path(folder, "weights.safetensors")
            save(state, path)
        if half := {str(tensor.dtype) for tensor in state.values()} & {"torch.float16", "torch.bfloat16"}:
            warn(f"{path.name} has weights of {min(half)}; they are audited in the model's own number format.")
        if isinstance(model, str):
            return victim(model, weights=path, **options)
        made = model if isinstance(model, Victim) else victim(model, **options)
        return made.with_weights(path)


def _weights(given: nn.Module | Mapping[str, Any], name: str) -> nn.Module | Mapping[str, Tensor]:
    """Return a model, or the weights that a state dict or a checkpoint holds."""
    return given if isinstance(given, nn.Module) else from_any_layout(choose(given, name)[0])


def _file(reference: str | Path | None) -> Path | None:
    if reference is None:
        return None
    if isinstance(reference, str | Path):
        return Path(reference)
    raise PrivlabError(f"reference is the file of the private image. Found {type(reference).__name__}: save it as PNG.")


def _own(model: str | nn.Module | Victim) -> nn.Module | Victim | None:
    return None if isinstance(model, str) else model


def _audit(
    work: Callable[..., Run],
    model: str | nn.Module | Victim,
    setting: str,
    attacks: Part | Sequence[Part] | None,
    out: str | Path | None,
    options: dict[str, Any],
) -> Run:
    how = {name: options.pop(name) for name in ("device", "overwrite") if name in options}
    spec = specify(model if isinstance(model, str) else "own", setting, attack=attacks, **options)
    with run_directory(out) as path:
        work(spec=spec, out=path, **how)
    return kept_run(path, out)

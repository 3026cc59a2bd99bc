"""The gradient of a training step of your own, in a file that `privlab audit gradients` reads.

    from privlab import capture

    loss.backward()
    capture(model, "update.safetensors", batch_size=len(images), reduction="mean")

Format, version 1: a safetensors file with ∂ℓ/∂θ of each parameter θ that has a gradient, by its name in the model's
`state_dict` (MJP's E_unk is `unk_embed`), and the metadata, all of them strings,

    format            "privlab-gradients"
    version           "1"
    batch_size        images that the loss was taken over
    reduction         "mean" or "sum", of the loss over these images
    without_gradient  names of the parameters that have no gradient, frozen or not used, as a JSON list
    model             what the client calls its model; optional
    weights_sha256    `privlab.victims.weights.hash_of` the weights at which the gradient was taken; optional

`capture_update` saves the weights before and after a client's round instead, which `privlab audit update` reads:

    before = copy.deepcopy(model.state_dict())  # what the server sent
    train(model)
    before, after = capture_update(before, model, "round-7")  # round-7/before.safetensors and after.safetensors

Importing this brings torch and safetensors, and nothing else that is heavy.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from privlab.base import PrivlabError, check_name, check_range, first, write_whole

FORMAT, VERSION = "privlab-gradients", "1"
REDUCTIONS = ("mean", "sum")

Weights = nn.Module | Mapping[str, Tensor]
"""A model, or the state dict of one, bare or as a wrapper of torch names its tensors."""


def capture(
    model: nn.Module,
    path: str | Path,
    *,
    batch_size: int,
    reduction: str = "mean",
    name: str | None = None,
    hash_weights: bool = True,
) -> None:
    """Save the gradients that `loss.backward()` left in `model`; call it before the optimiser's step.

    Gradients are saved as they are: unscale those of a GradScaler first (`scaler.unscale_(optimizer)`). Those of a ViT
    of another library have timm's names in the file; of queries, keys and values that do not all have one, there is
    none in it.

    Args:
        model: the ViT, bare or wrapped by DistributedDataParallel, `torch.compile` or a module of yours; it is left as
            it is.
        path: path of the safetensors file; an existing file is replaced.
        batch_size: the number of images whose losses are in the gradient, over all processes and accumulated steps.
        reduction: "mean" or "sum", of the loss over these images.
        name: name of the model, for the reader of the file.
        hash_weights: whether the file states a hash of the weights (a third of a second for a ViT-B).

    Raises:
        PrivlabError: if there is no gradient, a number or name is out of range, the audit would refuse the file, as one
            of adapters, of NaN, or of another batch size than stated, or it cannot be written.
    """
    from privlab.release.gradient_file import GradientFile, check_finite, contradiction, partial_training
    from privlab.victims import from_any_layout, hash_of, timm_gradients

    check_range(batch_size >= 1, "batch_size", "a positive number", batch_size)
    check_name("reduction", reduction, REDUCTIONS)
    parameters = dict(model.named_parameters())
    gradients = {key: parameter.grad for key, parameter in parameters.items() if parameter.grad is not None}
    if not gradients:
        raise PrivlabError("No parameter has a gradient: call capture after loss.backward(), before zero_grad().")
    if (part := partial_training(gradients)) is not None:
        raise PrivlabError(f"The model {part}")
    if not (gradients := timm_gradients(gradients, parameters)):
        raise PrivlabError(
            "The gradients must be of whole parameters as timm has them. Found those of some of the queries, keys and "
            "values alone: train all three, or record the update with privlab.capture_update."
        )
    released = GradientFile("The model", gradients, batch_size, reduction)
    check_finite(released)
    if (wrong := contradiction(released)) is not None:
        raise PrivlabError(wrong)
    metadata = {"format": FORMAT, "version": VERSION, "batch_size": str(batch_size), "reduction": reduction}
    metadata["without_gradient"] = json.dumps(sorted(from_any_layout(parameters).keys() - gradients.keys()))
    if name is not None:
        metadata["model"] = name
    if hash_weights:
        metadata["weights_sha256"] = hash_of(from_any_layout(model.state_dict()))
    _write(gradients, Path(path), metadata)


def capture_update(
    before: nn.Module | Mapping[str, Tensor], after: nn.Module | Mapping[str, Tensor], folder: str | Path
) -> tuple[Path, Path]:
    """Save the weights before and after a client's local training, and return the paths of the two files.

    Args:
        before: the server's weights, a model or a state dict. That of the trained model itself must be a copy,
            `copy.deepcopy(model.state_dict())`, since training changes it in place.
        after: the weights after the training, a model or a state dict, bare or wrapped as `capture` takes it. Adapters
            of peft's models are merged into the weights.
        folder: path of the folder for `before.safetensors` and `after.safetensors`; existing ones are replaced. The
            configuration of a model of transformers is written there too.

    Raises:
        PrivlabError: if the two have other names or shapes, hold the same weights, NaN or infinity, or cannot be
            written.
    """
    return _write_update(_trained(before, after), Path(folder), _config_of(after))


def capture_next(before: Weights, after: Weights, folders: Iterable[Path]) -> tuple[Path, Path]:
    """Save an update as `capture_update` does, in the first of some folders that does not exist yet.

    An earlier record is never replaced, also if several processes record at once.

    Args:
        before: the weights before the training.
        after: the weights after it.
        folders: the folders in question, without end.

    Raises:
        PrivlabError: as `capture_update` does.
    """
    states = _trained(before, after)
    for folder in folders:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise PrivlabError(f"The folder '{folder}' cannot be made: {error.strerror or error}.") from error
        return _write_update(states, folder, _config_of(after))
    raise AssertionError("there are folders without end")


def numbered(folder: Path) -> Iterator[Path]:
    """Yield a folder's path, and then the path with "-2", "-3" and so on at its end."""
    yield folder
    yield from (folder.with_name(f"{folder.name}-{number}") for number in count(2))


def check_trained(before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: tuple[str, str]) -> None:
    """Check that two states belong to one model, finite, and not the same.

    Args:
        before: the weights before the training, by name.
        after: the weights after it.
        names: the names of the two for errors, such as their paths.

    Raises:
        PrivlabError: if they are not.
    """
    from privlab.victims import misfits

    if found := misfits(after, before):
        raise PrivlabError(f"'{names[0]}' and '{names[1]}' must be weights of one model. In the second, {found}.")
    if not any(bool((after[key].double() - value.double()).any()) for key, value in before.items()):
        raise PrivlabError(
            f"Nothing was trained: '{names[0]}' and '{names[1]}' hold the same weights. In Python, model.state_dict() "
            "is no copy: take copy.deepcopy(model.state_dict()) before the training."
        )
    for name, state in zip(names, (before, after), strict=True):
        if broken := [key for key, tensor in state.items() if not tensor.isfinite().all()]:
            why = "the client diverged, and such an update shows nothing" if state is after else "take others"
            raise PrivlabError(f"The weights '{name}' must be finite. Found NaN or infinity in {first(broken)}: {why}.")


def _trained(before: Weights, after: Weights) -> list[dict[str, Tensor]]:
    """Return two checked states by the model's own names, with the adapters of peft merged."""
    from privlab.victims import bare_name, merged_state

    model = next((weights for weights in (after, before) if isinstance(weights, nn.Module)), None)
    states = [weights.state_dict() if isinstance(weights, nn.Module) else weights for weights in (before, after)]
    states = [{bare_name(key): value for key, value in merged_state(state, model).items()} for state in states]
    check_trained(*states, ("before", "after"))
    return states


def _config_of(model: Weights) -> str | None:
    """Return the configuration of a model of transformers, as its library writes it; None for others."""
    config: Any = getattr(model, "config", None)
    return config.to_json_string() if hasattr(config, "to_json_string") else None


def _write_update(states: Iterable[Mapping[str, Tensor]], folder: Path, config: str | None) -> tuple[Path, Path]:
    paths = folder / "before.safetensors", folder / "after.safetensors"
    for state, path in zip(states, paths, strict=True):
        _write(state, path)
    if config is not None:
        write_whole(folder / "config.json", lambda draft: draft.write_text(config, encoding="utf-8"), durable=False)
    return paths


def _write(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all."""
    held = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    try:
        write_whole(path, lambda draft: save_file(held, draft, metadata), durable=False, place="file")
    except SafetensorError as error:
        raise PrivlabError(f"'{path}' cannot be written: {error}.") from error

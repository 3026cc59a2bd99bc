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
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from privlab.base import PrivlabError, check_range, first, write_whole

FORMAT, VERSION = "privlab-gradients", "1"
REDUCTIONS = ("mean", "sum")

_WRAPPERS = re.compile(
    r"^(module\.|_orig_mod\.|vit\.)+"
)  # of DistributedDataParallel, torch.compile, privlab's victims


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

    Gradients are saved as they are: unscale those of a GradScaler first (`scaler.unscale_(optimizer)`).

    Args:
        model: the ViT itself, bare or wrapped by DistributedDataParallel or `torch.compile`; it is left as it is.
        path: path of the safetensors file; an existing file is replaced.
        batch_size: the number of images whose losses are in the gradient, over all processes and accumulated steps.
        reduction: "mean" or "sum", of the loss over these images.
        name: name of the model, for the reader of the file.
        hash_weights: whether the file states a hash of the weights (a third of a second for a ViT-B).

    Raises:
        PrivlabError: if there is no gradient, a number or name is out of range, or the file cannot be written.
    """
    check_range(batch_size >= 1, "batch_size", "a positive number", batch_size)
    if reduction not in REDUCTIONS:
        raise PrivlabError(f"reduction must be {' or '.join(REDUCTIONS)}. Found '{reduction}'.")
    parameters = {_WRAPPERS.sub("", key): parameter for key, parameter in model.named_parameters()}
    gradients = {
        key: parameter.grad.detach().cpu().contiguous()
        for key, parameter in parameters.items()
        if parameter.grad is not None
    }
    if not gradients:
        raise PrivlabError("No parameter has a gradient: call capture after loss.backward(), before zero_grad().")
    metadata = {"format": FORMAT, "version": VERSION, "batch_size": str(batch_size), "reduction": reduction}
    metadata["without_gradient"] = json.dumps(sorted(parameters.keys() - gradients.keys()))
    if name is not None:
        metadata["model"] = name
    if hash_weights:
        metadata["weights_sha256"] = _hash(model)
    _write(gradients, Path(path), "gradients", metadata)


def capture_update(
    before: nn.Module | Mapping[str, Tensor], after: nn.Module | Mapping[str, Tensor], folder: str | Path
) -> tuple[Path, Path]:
    """Save the weights before and after a client's local training, and return the paths of the two files.

    Args:
        before: the server's weights, a model or a state dict. That of the trained model itself must be a copy,
            `copy.deepcopy(model.state_dict())`, since training changes it in place.
        after: the weights after the training, a model or a state dict, bare or wrapped as `capture` takes it.
        folder: path of the folder for `before.safetensors` and `after.safetensors`; existing ones are replaced.

    Raises:
        PrivlabError: if the two have other names or shapes, hold the same weights, or cannot be written.
    """
    return _write_update(before, after, lambda: _made(Path(folder), exist_ok=True))


def capture_next(
    before: nn.Module | Mapping[str, Tensor], after: nn.Module | Mapping[str, Tensor], folders: Iterable[Path]
) -> tuple[Path, Path]:
    """Save an update as `capture_update` does, in the first of some folders that does not exist yet.

    An earlier record is never replaced, also if several processes record at once.

    Args:
        before: the weights before the training.
        after: the weights after it.
        folders: the folders in question, without end.

    Raises:
        PrivlabError: as `capture_update` does.
    """

    def unused() -> Path:
        for folder in folders:
            with suppress(FileExistsError):
                return _made(folder, exist_ok=False)
        raise AssertionError("there are folders without end")

    return _write_update(before, after, unused)


def numbered(folder: Path) -> Iterator[Path]:
    """Yield a folder's path, and then the path with "-2", "-3" and so on at its end."""
    yield folder
    yield from (folder.with_name(f"{folder.name}-{number}") for number in count(2))


def _made(folder: Path, *, exist_ok: bool) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        if not exist_ok:
            raise
        raise PrivlabError(f"The folder '{folder}' cannot be made: there is a file of that name.") from None
    except OSError as error:
        raise PrivlabError(f"The folder '{folder}' cannot be made: {error.strerror or error}.") from error
    return folder


def _write_update(
    before: nn.Module | Mapping[str, Tensor], after: nn.Module | Mapping[str, Tensor], make: Callable[[], Path]
) -> tuple[Path, Path]:
    """Check the weights, make the folder, and write the two files."""
    states = [
        {_WRAPPERS.sub("", key): value.detach().cpu().clone().contiguous() for key, value in state.items()}
        for state in (each.state_dict() if isinstance(each, nn.Module) else each for each in (before, after))
    ]
    shapes = [{key: tuple(value.shape) for key, value in state.items()} for state in states]
    if other := sorted({key for key, _ in {*shapes[0].items()} ^ {*shapes[1].items()}}):
        raise PrivlabError(
            f"Before and after must be weights of one model. Found other names or shapes: {first(other)}."
        )
    if all(value.equal(states[1][key]) for key, value in states[0].items()):
        raise PrivlabError(
            "Nothing was trained: before and after are the same weights. Take a copy before the training: "
            "copy.deepcopy(model.state_dict())."
        )
    folder = make()
    paths = folder / "before.safetensors", folder / "after.safetensors"
    for state, path in zip(states, paths, strict=True):
        _write(state, path, "weights")
    return paths


def _write(tensors: Mapping[str, Tensor], path: Path, what: str, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that is there whole or not at all."""
    facts = None if metadata is None else dict(metadata)
    try:
        write_whole(path, lambda draft: save_file(dict(tensors), draft, facts), durable=False, place="file")
    except SafetensorError as error:
        raise PrivlabError(f"The {what} cannot be written to '{path}': {error}.") from error


def _hash(model: nn.Module) -> str:
    """Return the hash that a victim with these weights has."""
    from privlab.victims import from_any_layout, hash_of

    return hash_of(from_any_layout({_WRAPPERS.sub("", key): value for key, value in model.state_dict().items()}))

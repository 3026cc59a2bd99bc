"""The gradient of a training step of your own, in a file that `privlab attack --gradients` audits.

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

Importing this brings torch and safetensors, and nothing else that is heavy.
"""

import json
import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from privlab.base import PrivlabError, check_range

__all__ = ["FORMAT", "REDUCTIONS", "VERSION", "capture"]

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
    temporary = Path(path).with_name(f".tmp-{Path(path).name}")
    try:
        save_file(gradients, temporary, metadata)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise PrivlabError(f"The gradients cannot be written to '{path}': {error}.") from error


def _hash(model: nn.Module) -> str:
    """Return the hash that a victim with these weights has."""
    from privlab.victims import from_any_layout, hash_of

    state, unknown = from_any_layout({_WRAPPERS.sub("", key): value for key, value in model.state_dict().items()})
    return hash_of(state if unknown is None else state | {"unk_embed": unknown.reshape(1, 1, -1)})

"""A released gradient in a file, as `privlab.capture` writes it: read, checked, and made an observation."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from privlab.base import PrivlabError, first, warn
from privlab.release.capture import FORMAT, REDUCTIONS, VERSION
from privlab.release.effects import AnyDefense
from privlab.release.given import check_gradients
from privlab.release.gradients import gradient_capabilities
from privlab.release.updates import partial_training
from privlab.threat import Capability, Observation
from privlab.victims import VictimModel, from_any_layout

HEAD_BIAS = "head.bias"
"""The gradient that tells labels, batch size and reduction."""

_HALVES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
_FLOATS = {torch.float32, torch.float64, *_HALVES}
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_ROUNDING_ERROR = 1e-2  # relative error that rounding may leave in a bias gradient; bfloat16 keeps eight bits


@dataclass(frozen=True, eq=False)
class GradientFile:
    """What a training client released of one step, as its file states it.

    `gradients` holds them by timm's parameter name, in the file's precision; the parameters in `without` have none.
    """

    source: str
    gradients: Mapping[str, Tensor]
    batch_size: int
    reduction: str
    without: frozenset[str] = frozenset()
    model: str | None = None
    weights_sha256: str | None = None

    @property
    def is_zero(self) -> bool:
        """Return whether nothing at all was released."""
        return not any(bool(g.any()) for g in self.gradients.values())


def read_gradient_file(path: Path) -> GradientFile:
    """Read a gradient file, without running any code in it.

    Raises:
        PrivlabError: if the file is missing, truncated, no safetensors, of another format or version, if its metadata
            are missing or out of range, or its entries are no floating-point numbers.

    Warns:
        PrivlabWarning: for entries in half precision, with what that costs.
    """
    tensors, metadata = _content(path)
    if metadata.get("format") != FORMAT and (told := partial_training(tensors)) is not None:
        raise PrivlabError(f"'{path}' {told}")
    if metadata.get("format") != FORMAT:
        raise PrivlabError(
            f"'{path}' must state format = {FORMAT} in its metadata. Found {metadata.get('format', 'none')}: "
            "write it with privlab.capture, or add format, version, batch_size and reduction."
        )
    if metadata.get("version") != VERSION:
        found = metadata.get("version", "none")
        raise PrivlabError(f"'{path}' must be of version {VERSION} of {FORMAT}. Found {found}.")
    size, reduction = metadata.get("batch_size", "none"), metadata.get("reduction", "none")
    if not size.isdecimal() or int(size) < 1:
        raise PrivlabError(f"'{path}': batch_size in the metadata must be a positive number. Found {size}.")
    if reduction not in REDUCTIONS:
        raise PrivlabError(f"'{path}': reduction in the metadata must be {' or '.join(REDUCTIONS)}. Found {reduction}.")
    foreign = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in _FLOATS]
    if foreign:
        raise PrivlabError(f"'{path}' must hold floating-point gradients. Found {first(foreign)}.")
    _warn_of_halves(path, tensors)
    return GradientFile(
        path.name,
        from_any_layout(tensors),
        int(size),
        reduction,
        _names(path, metadata.get("without_gradient", "[]")),
        metadata.get("model"),
        metadata.get("weights_sha256"),
    )


def check_fit(released: GradientFile, model: VictimModel) -> None:
    """Check that there is a finite gradient of the right shape for each parameter that the client trains.

    Raises:
        PrivlabError: with the first names of those that are missing, unexpected, mis-shaped or not finite; of adapters,
            or a head alone, with what they are.
    """
    want = {name: tuple(parameter.shape) for name, parameter in model.vit.named_parameters()}
    if model.unk_embed is not None:
        want["unk_embed"] = tuple(model.unk_embed.shape)
    found = {name: tuple(g.shape) for name, g in released.gradients.items()}
    missing = sorted(want.keys() - found.keys() - model.frozen - released.without)
    foreign = sorted(found.keys() - want.keys())
    if (missing or foreign) and (part := partial_training(found, want.keys() - model.frozen)) is not None:
        raise PrivlabError(f"{released.source} {part}")
    problems = {
        "missing": missing,
        "unexpected": foreign,
        "mis-shaped": [f"{k} {found[k]} instead of {want[k]}" for k in want if k in found and found[k] != want[k]],
    }
    told = "; ".join(f"{kind}: {first(names, 3)}" for kind, names in problems.items() if names)
    if told:
        hints = [
            "--img-size sets the client's resolution" if "pos_embed (" in told else "",
            "--weights takes the client's own, classes included" if "head." in told else "",
            f"the client calls its model {released.model}" if released.model else "",
        ]
        hint = "; ".join(filter(None, hints)) or "name the client's model"
        raise PrivlabError(f"The gradients of {released.source} do not fit this model ({hint}). {told}.")
    broken = [
        f"{name} ({count} of {g.numel()} entries)"
        for name, g in released.gradients.items()
        if (count := int((~g.isfinite()).sum()))
    ]
    if broken:
        raise PrivlabError(
            f"The gradients of {released.source} must be finite. Found NaN or infinity in {first(broken)}: "
            "such a step trains nothing; capture another."
        )


def head_of(released: GradientFile) -> Float[Tensor, " y"] | None:
    """Return the gradient of the classifier's bias, averaged over the batch; None where it was not released."""
    head = released.gradients.get(HEAD_BIAS)
    return None if head is None else head.double() / (1 if released.reduction == "mean" else released.batch_size)


def check_head(released: GradientFile) -> bool:
    """Check batch size and reduction by the head's gradient h = Σ_i (p_i − y_i); return whether it can be relied on.

    Whatever the targets y_i are, smoothed or mixed, Σ_j h_j = 0, and the positive entries of B images add up to B at
    most. Smoothing takes at most B/C from an entry. An entry below −B/C is thus that of a label, which n_j ≥ −h_j − B/C
    images have.

    Raises:
        PrivlabError: if these hold for no B images under the stated reduction.

    Warns:
        PrivlabWarning: where the head tells nothing: there is no gradient of it, or it is not that of a cross-entropy.
    """
    mean, size = head_of(released), released.batch_size
    if mean is None:
        warn(f"{released.source}: no gradient of {HEAD_BIAS}: labels, batch size and reduction cannot be checked.")
        return False
    h = mean * size
    positive = float(h.clamp(min=0).sum())
    if abs(float(h.sum())) > _ROUNDING_ERROR * float(h.abs().sum()) + 1e-5 * size:
        warn(
            f"{released.source}: the gradient of {HEAD_BIAS} adds up to {float(h.sum()):.3g} instead of 0: the loss is "
            "no softmax cross-entropy, there is noise, or the file holds what an optimiser made of gradients. Labels, "
            "batch size and reduction cannot be checked."
        )
        return False
    stated = f"batch size {size} under reduction {released.reduction}"
    if positive > size * (1 + _ROUNDING_ERROR):
        factor = size if released.reduction == "mean" else 1
        raise PrivlabError(
            f"{released.source} contradicts itself: with {stated}, the positive entries of {HEAD_BIAS} add up to at "
            f"most {size / factor:g}. Found {positive / factor:.4g}: the reduction is another, "
            "the batch larger, or the gradient scaled (unscale it first)."
        )
    room = size / len(h)
    fewest = sum(max(1, math.ceil(-value * (1 - _ROUNDING_ERROR) - room)) for value in h.tolist() if value < -room)
    if fewest > size:
        warn(
            f"{released.source}: with {stated}, the gradient of {HEAD_BIAS} names {fewest} labels. Mixed images "
            "have several; else the batch is larger, or its reduction another."
        )
        return False
    return True


def observation(
    released: GradientFile, model: VictimModel, *, defense: Sequence[AnyDefense] = (), knows_weights: bool = True
) -> Observation:
    """Return what the adversary sees: one gradient of the batch's mean loss, in the model's precision.

    What the file does not hold is not granted; `batch_size_one` is granted for one image alone.

    Args:
        released: the file, which fits the model (`check_fit`); under reduction "sum" it is divided by the batch size B.
        model: the client's model.
        defense: the defenses that the client is known to use, in their order.
        knows_weights: whether `model` has the weights of that step; otherwise `knows_weights` is not granted.
    """
    B = released.batch_size
    images = B if released.reduction == "sum" else 1  # by which the stated loss is divided
    gradients = {name: (g.to(model.mean) / images)[None] for name, g in released.gradients.items()}
    withheld = set() if knows_weights else {Capability.KNOWS_WEIGHTS}
    if "pos_embed" not in gradients:
        withheld |= {Capability.LEARNABLE_PE_GRADIENT, Capability.PE_OF_EVERY_TOKEN}
    return Observation(model, gradients, gradient_capabilities(model, defense, B) - withheld, tuple(defense), B)


def _content(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file."""
    check_gradients(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except OSError as error:
        raise PrivlabError(f"Cannot read the gradients '{path}': {error.strerror or error}.") from error
    except SafetensorError as error:
        with path.open("rb") as file:  # a pickle, or the archive that torch packs it in
            pickled = file.read(4).startswith(_PICKLES)
        if pickled:
            raise PrivlabError(
                f"'{path}' is refused: it is a pickle, as torch.save writes it, and may hold code. "
                "Write safetensors, with privlab.capture."
            ) from error
        raise PrivlabError(f"'{path}' is no safetensors file, or is truncated ({error}).") from error


def _names(path: Path, text: str) -> frozenset[str]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PrivlabError(f"'{path}': without_gradient in the metadata must be a JSON list of names. Found '{text}'.")
    return frozenset(names)


def _warn_of_halves(path: Path, tensors: Mapping[str, Tensor]) -> None:
    halves = {name: tensor for name, tensor in tensors.items() if tensor.dtype in _HALVES}
    if not halves:
        return
    dtype = next(iter(halves.values())).dtype
    eps, full = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    warn(
        f"{path.name}: {len(halves)} of {len(tensors)} gradients are {_HALVES[dtype]}, rounded to {eps:.0e} of their "
        f"value instead of {full:.0e}. Closed forms magnify that: capture in float32 if the client can. "
        "A low score here is no evidence of privacy."
    )

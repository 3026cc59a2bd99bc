"""A released gradient in a file, as `privlab.capture` writes it: read, checked, and made an observation.

A file may hold something else: an optimiser's difference of weights, signs, adapters, or the gradient of a head alone.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from privlab.base import PrivlabError, check_file, check_range, first, open_file, parse_json, warn
from privlab.release.capture import FORMAT, REDUCTIONS, VERSION
from privlab.release.effects import AnyDefense
from privlab.release.given import check_gradients
from privlab.release.releases import gradient_capabilities
from privlab.threat import Capability, Observation
from privlab.victims import VictimModel, from_any_layout, misfits

HEAD_BIAS = "head.bias"
"""The gradient that shows labels, batch size and reduction."""

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float64, *_HALVES)
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_ROUNDING_ERROR = 1e-2  # relative error that rounding may leave in a bias gradient; bfloat16 keeps eight bits

_MEDIAN_DISTANCE = 0.1
"""Relative distance of an entry's magnitude from the median of its parameter within which the two count as equal."""

_LEAST_NEAR, _MOST_ABOVE = 0.95, 1e-3
"""Entries are signs alone where at least the first share lies near the median, and at most the second above 1.5 times
the median. Gradients of ViT-Ti have 0.06 and 0.38, in four bits 0.82 to 0.88 and 0.17, the first steps of Adam and
AdamW at least 0.98 and 0."""

_PARALLEL_COSINE = 0.995
"""The cosine from which two directions count as one; for random ones of 64 coordinates it is below 0.7."""

_CANCELLED = 1e-6
"""What remains of a sum of rows that cancel, relative to the sum of their magnitudes: float32's rounding."""

_LORA = re.compile(r"(^|\.)lora_(A|B|embedding_A|embedding_B|magnitude_vector|up|down)(\.|$)")
_PEFT = re.compile(r"^base_model\.model\.|(?<=\.)(modules_to_save|base_layer)\.(default\.)?")

_ADVICE = "What is audited is the gradient: call privlab.capture after loss.backward() and before the optimiser's step."


@dataclass(frozen=True, eq=False)
class GradientFile:
    """What a training client released of one step, as its file states it.

    `gradients` holds them by timm's parameter name, in the file's precision; the parameters in `without` have none. Of
    an update, `sent_as` is the number format that was sent, and `sends` says whether of weights or of their difference.
    """

    source: str
    gradients: Mapping[str, Tensor]
    batch_size: int
    reduction: str
    without: frozenset[str] = frozenset()
    model: str | None = None
    weights_sha256: str | None = None
    sent_as: str = "float32"
    sends: str = "difference"

    @property
    def is_zero(self) -> bool:
        """Return whether nothing at all was released."""
        return not any(bool(g.any()) for g in self.gradients.values())


def read_gradient_file(path: Path) -> GradientFile:
    """Read a gradient file, without running any code in it.

    Raises:
        PrivlabError: if the file is missing, truncated, no safetensors, of another format or version, if its metadata
            are missing or out of range, or its entries are not floating-point numbers.

    Warns:
        PrivlabWarning: for entries in half precision, with what that costs.
    """
    tensors, metadata = _content(path)
    if metadata.get("format") != FORMAT:
        if (part := partial_training(tensors)) is not None:
            raise PrivlabError(f"'{path}' {part}")
        raise PrivlabError(
            f"'{path}' must state format = {FORMAT} in its metadata. Found {metadata.get('format', 'none')}: "
            "write it with privlab.capture, or add format, version, batch_size and reduction."
        )
    stated = {"version": "none", "batch_size": "none", "reduction": "none", "without_gradient": "[]"} | metadata
    size, reduction, without = stated["batch_size"], stated["reduction"], _names(stated["without_gradient"])
    right = {
        "version": (stated["version"] == VERSION, VERSION),
        "batch_size": (size.isdecimal() and int(size) >= 1, "a positive number"),
        "reduction": (reduction in REDUCTIONS, " or ".join(REDUCTIONS)),
        "without_gradient": (without is not None, "a JSON list of names"),
    }
    for name, (holds, wanted) in right.items():
        check_range(holds, f"'{path}': {name} in the metadata", wanted, stated[name])
    foreign = [f"{name} ({g.dtype})" for name, g in tensors.items() if g.dtype not in _FLOATS]
    if foreign:
        raise PrivlabError(f"'{path}' must hold floating-point gradients. Found {first(foreign)}.")
    _warn_of_halves(path, tensors)
    gradients, facts = from_any_layout(tensors), (stated.get("model"), stated.get("weights_sha256"))
    return GradientFile(path.name, gradients, int(size), reduction, without or frozenset(), *facts)


def check_fit(released: GradientFile, model: VictimModel) -> None:
    """Check that there is a finite gradient of the right shape for each parameter that the client trains.

    Raises:
        PrivlabError: with the first names of those that are missing, unexpected, mis-shaped or not finite; of adapters,
            or a head alone, with what they are.
    """
    want: dict[str, Tensor] = dict(model.vit.named_parameters())
    if model.unk_embed is not None:
        want["unk_embed"] = model.unk_embed
    found, optional = released.gradients, model.frozen | released.without
    differ = found.keys() - want.keys() or want.keys() - found.keys() - optional
    if differ and (part := partial_training(found, want.keys() - model.frozen)) is not None:
        raise PrivlabError(f"{released.source} {part}")
    if told := misfits(found, want, optional):
        hints = [
            "--img-size sets the client's resolution" if "pos_embed (" in told else "",
            "--weights takes the client's own, classes included" if "head." in told else "",
            f"the client calls its model {released.model}" if released.model else "",
        ]
        hint = "; ".join(filter(None, hints)) or "name the client's model"
        raise PrivlabError(f"The gradients of {released.source} do not fit this model ({hint}). {told}.")
    check_finite(released)


def check_finite(released: GradientFile) -> None:
    """Check that all gradients are finite.

    Raises:
        PrivlabError: with the first names of those that are not.
    """
    found = released.gradients
    broken = {name: int((~g.isfinite()).sum()) for name, g in found.items()}
    if any(broken.values()):
        counts = [f"{name} ({count} of {found[name].numel()} entries)" for name, count in broken.items() if count]
        raise PrivlabError(
            f"The gradients of {released.source} must be finite. Found NaN or infinity in {first(counts)}: "
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
        PrivlabWarning: where the head shows nothing: there is no gradient of it, or it is not that of a cross-entropy.
    """
    mean, size = head_of(released), released.batch_size
    if mean is None:
        warn(f"{released.source}: no gradient of {HEAD_BIAS}: labels, batch size and reduction cannot be checked.")
        return False
    h = mean * size
    if not _cancels(h, size):
        warn(
            f"{released.source}: the gradient of {HEAD_BIAS} adds up to {float(h.sum()):.3g} instead of 0: the loss is "
            "no softmax cross-entropy, there is noise, or the file holds what an optimiser made of gradients. Labels, "
            "batch size and reduction cannot be checked."
        )
        return False
    if (wrong := contradiction(released)) is not None:
        raise PrivlabError(wrong)
    stated = f"batch size {size} under reduction {released.reduction}"
    room = size / len(h)
    fewest = sum(max(1, math.ceil(-value * (1 - _ROUNDING_ERROR) - room)) for value in h.tolist() if value < -room)
    if fewest > size:
        warn(
            f"{released.source}: with {stated}, the gradient of {HEAD_BIAS} names {fewest} labels. Mixed images "
            "have several; else the batch is larger, or its reduction another."
        )
        return False
    return True


def _cancels(h: Float[Tensor, " y"], size: int) -> bool:
    """Return whether the summed gradient of the head's bias adds up to 0, as that of a softmax cross-entropy does."""
    return abs(float(h.sum())) <= _ROUNDING_ERROR * float(h.abs().sum()) + 1e-5 * size


def contradiction(released: GradientFile) -> str | None:
    """Return how the head's gradient contradicts batch size and reduction, where it is that of a cross-entropy."""
    mean, size = head_of(released), released.batch_size
    if mean is None or not _cancels(h := mean * size, size):
        return None
    positive = float(h.clamp(min=0).sum())
    if positive <= size * (1 + _ROUNDING_ERROR):
        return None
    factor = size if released.reduction == "mean" else 1
    return (
        f"{released.source} contradicts itself: with batch size {size} under reduction {released.reduction}, the "
        f"positive entries of {HEAD_BIAS} add up to at most {size / factor:g}. Found {positive / factor:.4g}: the "
        "reduction is another, the batch larger, or the gradient scaled (unscale it first)."
    )


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
    check_file(path, "gradients")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except OSError as error:
        raise PrivlabError(f"Cannot read the gradients '{path}': {error.strerror or error}.") from error
    except SafetensorError as error:
        with open_file(path, "gradients") as file:  # a pickle, or the archive that torch packs it in
            pickled = file.read(4).startswith(_PICKLES)
        if pickled:
            raise PrivlabError(
                f"'{path}' is refused: it is a pickle, as torch.save writes it, and may hold code. "
                "Write safetensors, with privlab.capture."
            ) from error
        raise PrivlabError(f"'{path}' is not a safetensors file, or is truncated ({error}).") from error


def _names(text: str) -> frozenset[str] | None:
    """Return the names in a JSON list; None if the text is not such a list."""
    try:
        names = parse_json(text, "the list")
    except PrivlabError:
        return None
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return frozenset(names) if is_list else None


def _warn_of_halves(path: Path, tensors: Mapping[str, Tensor]) -> None:
    halves = [tensor.dtype for tensor in tensors.values() if tensor.dtype in _HALVES]
    if halves:
        eps, full = torch.finfo(halves[0]).eps, torch.finfo(torch.float32).eps
        warn(
            f"{path.name}: {len(halves)} of {len(tensors)} gradients are {str(halves[0]).removeprefix('torch.')}, "
            f"rounded to {eps:.0e} of their value instead of {full:.0e}. Closed forms magnify that: capture in float32 "
            "if the client can. A low score here is no evidence of privacy."
        )


@dataclass(frozen=True)
class Signs:
    """Entries of one magnitude: `share` of the non-zero ones have it; `magnitude` is the median over all of them."""

    share: float
    magnitude: float


def signs_of(gradients: Mapping[str, Tensor]) -> Signs | None:
    """Return share and magnitude where the entries are signs alone, of one magnitude per parameter; else None.

    Adam's first step is −η g / (|g| + ε), which is ±η wherever |g| ≫ ε; AdamW's also subtracts η λ θ.

    Source: Adam (Kingma and Ba, ICLR 2015), Algorithm 1 at t = 1; AdamW (Loshchilov and Hutter, ICLR 2019).
    """
    total, same, above = 0, 0, 0
    medians: list[tuple[float, int]] = []
    for g in gradients.values():
        sizes = g[g != 0].abs().double()
        if not len(sizes):
            continue
        middle = sizes.median()
        medians.append((float(middle), len(sizes)))
        total += len(sizes)
        same += int(((sizes - middle).abs() <= _MEDIAN_DISTANCE * middle).sum())
        above += int((sizes > 1.5 * middle).sum())
    if total == 0 or same < _LEAST_NEAR * total or above > _MOST_ABOVE * total:
        return None
    values = torch.tensor([value for value, _ in medians], dtype=torch.float64)
    counts = torch.tensor([count for _, count in medians])
    order = values.argsort()
    at = int((counts[order].cumsum(0) * 2 < total).sum())
    return Signs(same / total, float(values[order[at]]))


def labels_of_signs(head: Tensor, batch_size: int) -> list[int] | None:
    """Return the classes with the rarer sign in the head's bias, where at most B have it and more than 2 B the other.

    Softmax cross-entropy has h_c = Σ_i p_ic − n_c. Without smoothing h_c < 0 for labels alone, whatever the sign and
    the scale of the whole of h. None where the signs are not so distributed.
    """
    positive, negative = (head > 0).nonzero().flatten(), (head < 0).nonzero().flatten()
    fewer, more = sorted((positive, negative), key=len)
    return fewer.tolist() if 0 < len(fewer) <= batch_size < len(more) / 2 else None


def decay_of(gradients: Mapping[str, Tensor], head: nn.Linear) -> float | None:
    """Return λ of a file of aG + λθ, with G the gradient of a cross-entropy, by its head; None where it shows no λ.

    Of a softmax's logits Σ_c ∂ℓ/∂z_c = 0, so the rows of ∂ℓ/∂W_head add up to zero. The rows of the file add up to λ
    Σ_c W_head,c, parallel to the sum of the weights' own rows.
    """
    G = gradients.get("head.weight")
    if G is None or G.shape[1] < 8:
        return None
    u, v = G.double().sum(0), head.weight.detach().double().cpu().sum(0)
    size, own = float(u.norm()), float(v.norm())
    if (
        own == 0
        or size <= _CANCELLED * float(G.double().abs().sum(0).norm())
        or abs(float(u @ v)) < _PARALLEL_COSINE * size * own
    ):
        return None
    return float(u @ v) / own**2


def sgd_rate(gradients: Mapping[str, Tensor], head: nn.Linear, decay: float = 0.0) -> float | None:
    """Return η of a file of −η G + λθ of one image under cross-entropy, by its head; None where it is not such a file.

    ∂ℓ/∂W_head = h fᵀ gives the features f up to their scale s by the rows and ∂ℓ/∂b_head = h gives that; then h = p − y
    for the probabilities p that the head's own weights make of f, and its sign is known. A rate above 1 counts as no
    such file.

    Args:
        gradients: the file's tensors by timm's parameter name; `head.weight` and `head.bias` are read.
        head: the classifier, with the weights θ of that step.
        decay: λ, as `decay_of` finds it; 0 for none.
    """
    G, h = gradients.get("head.weight"), gradients.get("head.bias")
    W, b = head.weight.detach().double().cpu(), head.bias
    if G is None or h is None or b is None or len(h) < 3:
        return None
    b = b.detach().double().cpu()
    G, h = G.double() - decay * W, h.double() - decay * b
    if not h.any():
        return None
    p = ((h @ G / h.square().sum()) @ W.T + b).softmax(0)
    turned = -(p - nn.functional.one_hot(h.argmax(), len(h)))
    size = float(turned.norm())
    if size == 0 or float(turned @ h) < 0.999 * size * float(h.norm()):
        return None
    rate = float(h.norm()) / size
    return rate if rate <= 1 else None


def update_in(gradients: Mapping[str, Tensor], model: VictimModel | None, batch_size: int, source: str) -> str | None:
    """Return what a file seems to hold instead of the gradient of a step, what is right, and what leaks all the same.

    Args:
        gradients: the file's tensors, by timm's parameter name.
        model: the model with the weights of that step; None where they are not known, and then neither weight decay nor
            a step of SGD is looked for.
        batch_size: the number of images of the step; a step of SGD is looked for in that of one image alone.
        source: name of the file, with which the text begins.
    """
    if (signs := signs_of(gradients)) is not None:
        adam = f"one step of Adam or AdamW (learning rate about {signs.magnitude:.2g}), or "
        return (
            f"{source} looks like {'' if signs.magnitude == 1 else adam}a gradient quantised to signs, not like a "
            f"whole one: in each parameter {100 * signs.share:.1f} % of the entries that are not zero have one "
            f"magnitude. {_ADVICE} Signs leak too: images keep shapes and lose scale, so that a low PSNR is no "
            "evidence of privacy."
        )
    if model is None or not isinstance(head := model.vit.head, nn.Linear):
        return None
    decay = decay_of(gradients, head)
    rate = sgd_rate(gradients, head, decay or 0.0) if batch_size == 1 else None
    if decay is None and rate is None:
        return None
    decayed = "" if decay is None else f"the sums of the head's rows are {decay:.2g} times those of its weights (decay)"
    undone = "" if decay is None else " Decay hides nothing: a server that knows the weights subtracts it."
    if rate is None:
        return f"{source} holds weights beside a gradient: {decayed}. {_ADVICE}{undone}"
    return (
        f"{source} looks like one step of SGD (learning rate about {rate:.2g}), not like a gradient: its sign is the "
        f"other one{decayed and ', and '}{decayed}. {_ADVICE}{undone or f' Or divide the file by {-rate:.2g}.'}"
    )


def partial_training(found: Collection[str], wanted: Collection[str] | None = None) -> str | None:
    """Return what a file of adapters, or of a head alone, holds of a model's parameters; None for any other file.

    The names found are timm's, or as PEFT has them (`base_model.model.…`). Those wanted are timm's names of the
    parameters that a client may train; None where the model is not known.

    Source: LoRA (Hu et al., ICLR 2022); names as Hugging Face's PEFT and loralib give them.
    """
    adapters = sorted(name for name in found if _LORA.search(name))
    whole = {_PEFT.sub("", name) for name in found if name not in adapters}
    trained = sorted(whole if wanted is None else whole & set(wanted))
    of = "no gradient of the other parameters"
    if wanted is not None:
        of = f"no gradient of {len(wanted) - len(trained)} of this model's {len(wanted)} parameters"
    if adapters:
        beside = f" beside {first(trained, 3)}" if trained else ""
        return (
            f"holds LoRA's {len(adapters)} adapters ({first(adapters, 1)}){beside}, and {of}. No attack here reads "
            "files of adapters yet, which is no evidence of privacy: audit a step that trains the model's own "
            "parameters."
        )
    if wanted is not None and trained and all(name.startswith("head.") for name in whole):
        return (
            f"holds the gradient of the head alone ({first(trained, 3)}), and {of}. If the client trains nothing else, "
            "list the others as without_gradient in the metadata, as privlab.capture does: labels are then read from "
            "it, and --attack gradient-matching may search for the image."
        )
    return None

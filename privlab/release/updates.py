"""What a file may hold instead of a gradient: an optimiser's difference of weights, adapters, or a head alone."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from privlab.base import first
from privlab.victims import VictimModel

_MEDIAN_DISTANCE = 0.1
"""Relative distance of an entry's magnitude from the median of its parameter within which the two count as equal."""

_LEAST_NEAR, _MOST_ABOVE = 0.95, 1e-3
"""Entries are signs alone where at least the first share lies near the median, and at most the second above 1.5 times
the median. Gradients of ViT-Ti have 0.06 and 0.38, in four bits 0.82 to 0.88 and 0.17, the first steps of Adam and
AdamW at least 0.98 and 0."""

_PARALLEL_COSINE = 0.995
"""The cosine from which two directions count as one; for random ones of 64 coordinates it is below 0.7."""

_ROUNDING_ERROR = 1e-6
"""What remains of a sum of rows that cancel, relative to the sum of their magnitudes: float32's rounding."""

_LORA = re.compile(r"(^|\.)lora_(A|B|embedding_A|embedding_B|magnitude_vector|up|down)(\.|$)")
_PEFT = re.compile(r"^base_model\.model\.|(?<=\.)(modules_to_save|base_layer)\.(default\.)?")

_ADVICE = "What is audited is the gradient: call privlab.capture after loss.backward() and before the optimiser's step."


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
        or size <= _ROUNDING_ERROR * float(G.double().abs().sum(0).norm())
        or abs(float(u @ v)) < _PARALLEL_COSINE * size * own
    ):
        return None
    return float(u @ v) / own**2


def sgd_rate(gradients: Mapping[str, Tensor], head: nn.Linear, decay: float = 0.0) -> float | None:
    """Return η of a file of −η G + λθ of one image under cross-entropy, by its head; None where it is no such file.

    ∂ℓ/∂W_head = h fᵀ gives the features f up to their scale s by the rows and ∂ℓ/∂b_head = h gives that; then h = p − y
    for the probabilities p that the head's own weights make of f, and its sign is told. A rate above 1 counts as no
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
    """Return what a file of adapters, or of a head alone, holds of a model's parameters, and what can be made of it.

    Args:
        found: the names in the file, timm's or as PEFT has them (`base_model.model.…`).
        wanted: timm's names of the parameters that a client may train; None where the model is not known.

    Returns:
        The text; None for any other file.

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

"""The audit of weights that a server sent: can single patches be read from the gradient that they would give?"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from privlab.base import PrivlabError, full_precision, gradients_enabled
from privlab.victims import VictimModel, check_classifies

PURE = 0.9
"""The least share of a row that one patch has where it can be read: the others move it by a ninth of its norm at most.

Of the patches of honest models, at most 1 % had so much of a row of any layer (docs/studies/dishonest_server.md).
"""

_ALONE = 0.99
"""The least leverage of a patch that some combination of the embedding's channels isolates as well as `PURE` says."""

MOST_READABLE = 0.02
"""The largest share of the patches that may be readable in any one layer of a model that somebody trained."""

_FEWEST = 64
"""The patches in which one is sought, at least: images of fewer patches are put together.

Of only four patches, an honest row may well belong to one.
"""

_ENOUGH, _FEWEST_IMAGES, MOST_IMAGES = 128, 2, 8
"""A round is tested on as few images as have so many patches, but two at least; then on no more than eight."""

_FEWEST_INPUTS = 16
"""The inputs of a layer in which rows are compared, at least: of two inputs, as places have, many rows are parallel."""

_SKETCH = 64
"""The combinations of its inputs by which the rows of a layer are compared."""

_FAINT = 1e-6
"""A row of less than this share of a layer's largest row is lost in the rounding of an update."""

TRAINED_DEPENDS = 0.5
"""The least dependence on the image, by slot, of a model that was trained before. In 152 it was 0.84 at least."""

RANGES: Mapping[str, tuple[float, float]] = {
    "parallel rows": (0.0, 0.2),
    "largest row / median row": (1.0, 100.0),
    "largest weight of a norm": (0.1, 50.0),
    "largest bias": (0.0, 50.0),
    "largest position embedding": (0.0, 30.0),
    "gradient of the embedding": (1e-7, 1e3),
    "isolated patches / channels": (0.0, 0.75),
    "dependence on the image": (0.05, math.inf),
    "change since the last round": (0.0, math.inf),
}
"""The values of each statistic that trained models may have: a wide range around those that were measured.

The change since the last round is shown only: honest first rounds from random weights changed a matrix ninefold.
"""


@dataclass(frozen=True)
class Statistic:
    """One number of the weights, and the range in which those of trained models are."""

    name: str
    value: float
    low: float
    high: float

    @property
    def is_usual(self) -> bool:
        """Return whether the value is in the range; NaN is not."""
        return self.low <= self.value <= self.high


@dataclass(frozen=True)
class ReadablePatches:
    """How many patches can be read from single rows of a layer's gradient, or from differences of two rows.

    `of_one_image` counts those that can be read if a client trains on their image alone, or on as few images as have 64
    patches; `of_batch` those that can be read from the gradient of all images together. `patches` is the number of
    patches of all images.
    """

    layer: str
    patches: int
    of_one_image: int
    of_batch: int

    @property
    def most(self) -> int:
        """Return the larger of both numbers."""
        return max(self.of_one_image, self.of_batch)

    @property
    def is_usual(self) -> bool:
        """Return whether no more patches are readable than trained models may have."""
        return self.most <= MOST_READABLE * self.patches


@dataclass(frozen=True)
class WeightsAudit:
    """What an audit found of weights that a server sent."""

    statistics: tuple[Statistic, ...]
    layers: tuple[ReadablePatches, ...]

    @property
    def unusual(self) -> tuple[Statistic | ReadablePatches, ...]:
        """Return what trained models do not have."""
        return tuple(each for each in (*self.layers, *self.statistics) if not each.is_usual)

    @property
    def suspicious(self) -> bool:
        """Return whether something was found that trained models do not have."""
        return bool(self.unusual)

    @property
    def verdict(self) -> str:
        """Return what was found, as one sentence."""
        layers = [each for each in self.unusual if isinstance(each, ReadablePatches)]
        said = [f"{each.name} is {each.value:.3g}" for each in self.unusual if isinstance(each, Statistic)]
        if layers:
            worst = max(layers, key=lambda each: each.most / each.patches)
            said.insert(0, f"{worst.most} of {worst.patches} patches can be read from {worst.layer}")
        if said:
            return f"suspicious: do not train on these weights; {', '.join(said)}"
        return "nothing unusual was found, which does not prove that nobody chose these weights"

    def table(self) -> pd.DataFrame:
        """Return the statistics, a row for each, and below them the layer with the most readable patches of each kind.

        The columns are `what`, `value`, `low`, `high` and `usual`.
        """
        rows = [asdict(each) | {"usual": each.is_usual} for each in self.statistics]
        for kind, name in (("of_one_image", "if alone"), ("of_batch", "of this batch")):
            worst = max(self.layers, key=lambda each: getattr(each, kind) / each.patches)
            share = getattr(worst, kind) / worst.patches
            found = Statistic(f"patches readable {name} ({worst.layer})", share, 0.0, MOST_READABLE)
            rows.append(asdict(found) | {"usual": found.is_usual})
        return pd.DataFrame(rows).rename(columns={"name": "what"})


def audit_sent_weights(
    model: VictimModel,
    images: Float[Tensor, "b c h w"],
    last: Mapping[str, Tensor] | None = None,
    pretrained: bool = False,
) -> WeightsAudit:
    """Return whether weights are like those of a model that somebody trained, by statistics and by a direct test.

    The direct test computes the gradient of the client's own images, as a training step would, and counts in each layer
    the patches that it shows one by one (`_pure`). Labels do not matter, so that image i has class i: the loss of a
    model that knows its images would be too small to test.

    Args:
        model: the model with the weights that the server sent; it is left as it is.
        images: images of the client in [0, 1], as the model is fed them before normalisation.
        last: the weights of the last round by timm's names; None if they are not known.
        pretrained: whether the model was trained before; its gradients must then depend more on the image, in more
            than the size of each slot.

    Raises:
        PrivlabError: if the weights are not finite, there is no image, or the model has no classifier.
    """
    check_classifies(model)
    named = dict(model.vit.named_parameters())
    if broken := [name for name, tensor in named.items() if not bool(tensor.isfinite().all())]:
        raise PrivlabError(f"The weights that the server sent must be finite. Found NaN or infinity in {broken[0]}.")
    if not len(images):
        raise PrivlabError("An audit of weights needs at least one image. Found none.")
    with full_precision():
        values = _statistics(model) | ({} if last is None else {"change since the last round": _change(named, last)})
        layers, of_embedding = _gradient_test(model, images)
        values |= of_embedding
        if len(images) > 1:
            values["dependence on the image"] = _dependence(model, images, pretrained)
    ranges = dict(RANGES) | ({"dependence on the image": (TRAINED_DEPENDS, math.inf)} if pretrained else {})
    statistics = [Statistic(name, value, *ranges[name]) for name, value in values.items()]
    return WeightsAudit(tuple(statistics), tuple(layers))


def audit_of_round(
    model: VictimModel,
    images: Float[Tensor, "b c h w"],
    last: Mapping[str, Tensor] | None = None,
    pretrained: bool = False,
) -> WeightsAudit:
    """Return the audit of weights on few images, and only if it finds something, that on eight of them.

    Of two images, three patches of 128 may be readable by chance in weights that show 0.2 % of the patches of many.

    Args:
        model: the model with the weights that the server sent; it is left as it is.
        images: images of the client, as `audit_sent_weights` takes them; the first eight at most are used.
        last: the weights of the last round, as there.
        pretrained: as there.

    Raises:
        PrivlabError: as `audit_sent_weights`.
    """
    few = max(math.ceil(_ENOUGH / model.vit.patch_embed.num_patches), _FEWEST_IMAGES)
    found = audit_sent_weights(model, images[: min(few, MOST_IMAGES)], last, pretrained)
    if found.suspicious and few < min(len(images), MOST_IMAGES):
        return audit_sent_weights(model, images[:MOST_IMAGES], last, pretrained)
    return found


@torch.no_grad()
def _statistics(model: VictimModel) -> dict[str, float]:
    """Return what manipulations of the weights change: rows that bins share, and values that switch tokens on or off.

    The classifier is left out: no patch can be read from it.
    """
    named = {name: tensor for name, tensor in model.vit.named_parameters() if not name.startswith("head")}
    parallel, spread = [0.0], [1.0]
    for name, tensor in named.items():
        if tensor.ndim > 1 and name.endswith("weight") and tensor[0].numel() >= _FEWEST_INPUTS:
            norms = tensor.flatten(1).norm(dim=1)  # of the weights of each neuron
            used = norms > 0
            directions = F.normalize(_sketch(tensor.flatten(1)[used]))
            cosines = (directions @ directions.mT).fill_diagonal_(0)
            if cosines.numel():
                nearest = torch.maximum(cosines.amax(1), -cosines.amin(1))
                parallel.append(float((nearest > _ALONE).float().mean()))
                spread.append(float(norms.amax() / norms.median().clamp_min(_FAINT * norms.amax())))
    vectors = {name: tensor for name, tensor in named.items() if tensor.ndim == 1 and tensor.numel()}
    norms = [
        float(tensor.abs().amax()) for name, tensor in vectors.items() if "norm" in name and name.endswith("weight")
    ]
    biases = [float(tensor.abs().amax()) for name, tensor in vectors.items() if name.endswith("bias")]
    values = {
        "parallel rows": max(parallel),
        "largest row / median row": max(spread),
        "largest weight of a norm": max(norms, default=1.0),
        "largest bias": max(biases, default=0.0),
    }
    if model.vit.pos_embed is not None:
        values["largest position embedding"] = float(model.vit.pos_embed.abs().amax())
    return values


def _sketch(rows: Float[Tensor, "o i"]) -> Float[Tensor, "o s"]:
    """Return random combinations of the inputs of rows that have many: parallel rows stay parallel, and no others are.

    The error of a cosine c is about (1 − c²) / √s, 0.0025 at 0.99, and comparing all rows costs s / i of the time.
    """
    inputs = rows.shape[1]
    if inputs <= _SKETCH:
        return rows
    return rows @ torch.randn(inputs, _SKETCH, generator=torch.Generator().manual_seed(0)).to(rows)


@torch.no_grad()
def _change(named: Mapping[str, Tensor], last: Mapping[str, Tensor]) -> float:
    """Return the largest ‖W − W₀‖ / ‖W₀‖ of the matrices since the last round; those that were 0 are left out.

    Class tokens are left out too: timm begins with 10⁻⁶.
    """
    found = [0.0]
    for name, tensor in named.items():
        before = last.get(name)
        is_matrix = tensor.ndim > 1 and name.endswith(("weight", "pos_embed"))
        if before is not None and is_matrix and bool(before.any()):
            before = before.to(tensor)
            found.append(float((tensor - before).norm() / before.norm()))
    return max(found)


def _gradient_test(
    model: VictimModel, images: Float[Tensor, "b c h w"]
) -> tuple[list[ReadablePatches], dict[str, float]]:
    """Return for each linear layer the patches that its gradient shows, and the statistics of the embedding's."""
    layers: list[ReadablePatches] = []
    of_embedding: dict[str, float] = {}
    count = model.vit.patch_embed.num_patches

    def visit(name: str, δ: Tensor, inputs: Tensor) -> None:
        if name == "patch_embed.proj":
            of_embedding.update(_of_embedding(δ, inputs))
        if δ.ndim == 3 and δ.shape[1] >= count:  # else a layer of the class token alone
            layers.append(_readable(name, δ, inputs, count))

    layer_gradients(model, images, torch.arange(len(images)) % model.classes, visit)
    return layers[::-1], of_embedding


def _dependence(model: VictimModel, images: Float[Tensor, "b c h w"], by_slot: bool) -> float:
    """Return how much the gradient δ of the embedding differs between images of one class, in the median pair.

    A server that knows δ of each token reads the inputs of a layer by least squares, whatever the channels: an adapter
    shows Σ_n δ_n y_nᵀ. Of two images the number is min_c ‖δ − c δ'‖ / ‖δ‖, the sine of the angle between both. By slot
    there is a factor c_n for each: a server can let factors depend on the image, and read them by a constant input.
    """
    found = math.nan

    def visit(name: str, δ: Tensor, _: Tensor) -> None:
        nonlocal found
        if name == "patch_embed.proj":
            rows = δ.double() if by_slot else δ.double().flatten(1)[:, None]
            products = torch.einsum("ind,jnd->ijn", rows, rows)
            i, j = torch.triu_indices(len(images), len(images), 1)
            whole, other = products[i, i], products[j, j].clamp(min=1e-300)
            left = (whole - products[i, j].square() / other).clamp(min=0)
            found = float((left.sum(1) / whole.sum(1).clamp(min=1e-300)).sqrt().median())

    layer_gradients(model, images, torch.zeros(len(images), dtype=torch.long), visit)
    return found


def layer_gradients(
    model: VictimModel,
    images: Float[Tensor, "b c h w"],
    labels: Int[Tensor, " b"],
    visit: Callable[[str, Tensor, Tensor], None],
) -> None:
    """Show the two factors of the gradient of each linear layer, of the last layer first: ∂W = Σ_n δ_n x_nᵀ.

    Args:
        model: the model; it gets no gradient.
        images: images in [0, 1].
        labels: their classes.
        visit: is called with the name of a layer, δ (… × o), the gradient of its outputs, and its inputs x (… × i).
    """
    embedding = model.vit.patch_embed.proj

    def backward(name: str, inputs: Tensor, δ: Tensor) -> None:
        if name == "patch_embed.proj":
            δ, inputs = δ.flatten(2).mT, F.unfold(inputs, embedding.kernel_size, stride=embedding.stride).mT
        visit(name, δ, inputs)

    def forward(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(backward, name, inputs[0].detach()))

    with ExitStack() as hooks, gradients_enabled():
        for name, layer in model.vit.named_modules():
            if isinstance(layer, nn.Linear) or layer is embedding:
                hooks.enter_context(layer.register_forward_hook(partial(forward, name)))
        # The gradient of the images is asked for, so that every layer gets its δ, and no weight a .grad.
        fed = images.to(model.mean).clone().requires_grad_(True)
        torch.autograd.grad(F.cross_entropy(model(fed), labels.to(fed.device)), fed)


def _readable(name: str, δ: Float[Tensor, "b t o"], inputs: Float[Tensor, "b t i"], count: int) -> ReadablePatches:
    """Return how many patches the gradient of a layer shows; the last `count` of the t tokens are those of patches."""
    parts = δ * inputs.norm(dim=2, keepdim=True)  # row o of ∂W is Σ_n δ_no x_nᵀ, whose terms have norms |δ_no| ‖x_n‖
    alone, of_batch = (
        pure.view(parts.shape[:2])[:, -count:]
        for pure in _pure(parts.flatten(0, 1), max(1, _FEWEST // count) * parts.shape[1])
    )
    return ReadablePatches(name, len(δ) * count, int(alone.sum()), int(of_batch.sum()))


def _pure(parts: Float[Tensor, "n o"], size: int) -> tuple[Bool[Tensor, " n"], Bool[Tensor, " n"]]:
    """Return which tokens have nearly all of one row of a gradient, or of the difference of two rows.

    The first are those of the gradient of each `size` tokens, the second those of the gradient of all tokens.

    Neurons whose weights form bins differ in how many tokens they are active for (Fowl et al. 2022). Ordered by the sum
    over the tokens, neighbours differ in the tokens of one bin, whatever the order in which the server has them.

    Args:
        parts: the norm of each token's term in each row, with the sign of δ.
        size: how many tokens are those of one image, or of as few images as are tested together.
    """
    alone, of_all = (torch.zeros(len(parts), dtype=torch.bool, device=parts.device) for _ in range(2))
    sizes = parts.abs()
    order = sizes.sum(0).argsort()
    for terms in (sizes, parts.index_select(1, order).diff(dim=1).abs_()):
        groups = terms.split(size)
        totals = torch.stack([group.sum(0) for group in groups])
        largest = torch.stack([group.amax(0) for group in groups])
        for mark, group, total, most in zip(alone.split(size), groups, totals, largest, strict=True):
            _mark(mark, group, total, most)
        _mark(of_all, terms, totals.sum(0), largest.amax(0))
    return alone, of_all


def _mark(pure: Bool[Tensor, " n"], terms: Float[Tensor, "n o"], total: Tensor, largest: Tensor) -> None:
    """Mark the tokens that have at least the share `PURE` of a row, of those that are not faint.

    A row in which a token has the share p is δ x of this token, and something of (1 − p) / p of its norm at most. As
    this share is above a half, no second token can have it: the token is that of the row's largest term.
    """
    rows = (largest >= PURE * total) & (total > _FAINT * total.amax())
    pure[terms[:, rows].argmax(0)] = True


def _of_embedding(δ: Float[Tensor, "b n d"], patches: Float[Tensor, "b n k"]) -> dict[str, float]:
    """Return the size of the embedding's gradient, and how many patches combinations of its rows isolate, by D.

    A server may rotate the channels of the embedding, so that no row is pure. Some combination v of rows then isolates
    patch n: Δv = e_n, with Δ (patches × D) the δ of all patches. It exists if the leverage Δ_n (ΔᵀΔ)⁻¹ Δ_nᵀ is 1. The
    leverages add up to D, so that this means something only if there are many more patches than channels.
    """
    Δ = (δ * patches.norm(dim=2, keepdim=True)).flatten(0, 1).double()
    found = {"gradient of the embedding": float((δ.flatten(0, 1).mT @ patches.flatten(0, 1)).square().mean().sqrt())}
    D = Δ.shape[1]
    if len(Δ) >= 4 * D and bool(Δ.any()):
        gram = Δ.mT @ Δ
        ridge = _FAINT**2 * gram.diagonal().sum() * torch.eye(D, dtype=gram.dtype, device=gram.device)
        leverage = (torch.linalg.solve(gram + ridge, Δ.mT).mT * Δ).sum(1)
        found["isolated patches / channels"] = int((leverage >= _ALONE).sum()) / D
    return found

"""What defenses on images and on features claim of their release, and how that is measured."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from privlab.attacks import LeastSquares, PatchGradient
from privlab.base import linear_sum_assignment
from privlab.metrics import psnr
from privlab.patches import patchify, permute, restore_features, unpatchify
from privlab.release import (
    AnyDefense,
    contradictions,
    effects_of,
    gradient_capabilities,
    observe,
    observe_features,
    released_gradients,
    released_parameters,
)
from privlab.testing.plugin_process import StandIn, as_exchanged
from privlab.threat import (
    Defense,
    Draws,
    Effects,
    FeatureDefense,
    Feed,
    Sent,
    Stack,
    check_capabilities,
    defense_declarations,
)
from privlab.victims import VictimModel

CONTROL_PSNR = 60.0
"""The least PSNR of the control, in dB."""
NOISE_FACTOR = 1.1
"""The largest factor between declared and measured variance of a noise."""
STEP = 1e-6
"""Step of finite differences in float64; rounding and the third derivative leave an error of about 1e-8."""
TOLERANCE = 1e-6
"""The largest error of a directional derivative, relative to the norm of the gradient."""
LEAST_DIVISOR = 1e-300
"""Is added to, or bounds, what is divided by, so that 0 / 0 is 0; it is far below the rounding of float64."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Check:
    """One check: it passed if `value` is within its limit (`bound`: "≤" or "≥"), which nan never is.

    Args:
        name: name of the check, such as "contents".
        value: what was measured.
        limit: the largest value that passes, or the least one.
        text: what the value measures, in words.
        bound: which of both the limit is.
    """

    name: str
    passed: bool = field(init=False)
    value: float
    limit: float
    text: str
    bound: Literal["≤", "≥"] = "≤"

    def __post_init__(self) -> None:
        within = self.value <= self.limit if self.bound == "≤" else self.value >= self.limit
        object.__setattr__(self, "passed", within)

    @classmethod
    def none(cls, name: str, found: Sequence[str], text: str) -> "Check":
        """Return a check that passes if nothing of what `text` says was found; else its text ends with three names.

        Args:
            name: name of the check, such as "untouched".
            found: the names of what was found.
            text: what was looked for, in words.
        """
        return cls(name, float(len(found)), 0.0, f"{text}: {', '.join(found[:3])}" if found else text)


@dataclass(frozen=True, eq=False)
class Claims(ABC):
    """A defense, a victim in float64, clients of one image each, and a last image that may take the second one's place.

    A plug-in in a separate process gets real numbers as `as_exchanged` gives them.
    """

    defense: AnyDefense
    model: VictimModel
    images: Float[Tensor, "n c h w"]
    seed: int = 0

    @property
    def labels(self) -> Int[Tensor, " b"]:
        """Return the classes of the clients' images; for a plug-in those that the victim predicts."""
        if isinstance(self.defense, StandIn):
            with torch.no_grad():
                return self.model(self.clients()).argmax(1)
        return torch.arange(len(self.images) - 1) % self.model.vit.num_classes

    def clients(self, *, neighbour: bool = False) -> Float[Tensor, "b c h w"]:
        """Return the clients' images."""
        last = len(self.images) - 1
        return self.images[[0, last if neighbour else 1, *range(2, last)]]

    @abstractmethod
    def inputs(self, *, neighbour: bool = False) -> dict[str, Tensor]:
        """Return what the defense gets of the clients."""

    def given(self, tensor: Tensor) -> Tensor:
        """Return a tensor as the defense gets it."""
        return as_exchanged(tensor) if isinstance(self.defense, StandIn) else tensor

    def draws(self, number: int = 0, *, neighbour: bool = False) -> Draws:
        """Return fresh generators, the same for the same number; a neighbour has its own."""
        others = range(5, 2 + len(self.images))  # of a third client and further ones
        seeds = [100 * (self.seed + 1) + 10 * number + i for i in (3, 4, 0, 2 if neighbour else 1, *others)]
        batch, model, *images = (torch.Generator().manual_seed(seed) for seed in seeds)
        return Draws(images, batch, model)

    def gradients(self, feed: Feed) -> dict[str, Tensor]:
        """Return the gradients of the released parameters on what is fed."""
        return released_gradients(self.model, feed, self.labels, sorted(released_parameters(self.model)))

    def directional(self, feed: Feed, gradients: Tensors, variance: Tensors) -> tuple[Float[Tensor, "p b"], ...]:
        """Return, for each parameter and image, g·v, its slope along v, ‖g‖, and the deviation of g·v.

        Each parameter θ has a random direction v, along which the slope is (ℓ(θ + hv) − ℓ(θ − hv)) / 2h. ℓ is the loss
        of the victim's own forward pass on what is fed.

        Args:
            feed: what the clients feed, one image each.
            gradients: released gradients g by parameter name, with the images in the first dimension.
            variance: declared variance of each of their entries; nothing for exact ones.
        """
        model, draw = copy.deepcopy(self.model), torch.Generator().manual_seed(self.seed)
        parameters = {name.removeprefix("vit."): θ for name, θ in model.named_parameters()}

        def loss() -> Float[Tensor, " b"]:
            logits = model(feed.images, feed.masked_pe, feed.replacement)
            return F.cross_entropy(logits, self.labels, reduction="none")

        rows = []
        for name, g in gradients.items():
            θ = parameters[name]
            v = torch.randn(θ.shape, generator=draw, dtype=θ.dtype)
            noise = variance[name] * v.square() if variance else torch.zeros_like(g)
            rows.append([(g * v).flatten(1).sum(1), _slope(θ, v, loss), g.flatten(1).norm(dim=1)])
            rows[-1].append(noise.flatten(1).sum(1).sqrt())
        found, slopes, norms, σ = (torch.stack(values) for values in zip(*rows, strict=True))
        return found, slopes, norms + 1e-3 * norms.square().mean(0).sqrt(), σ  # no norm is zero, even of g = 0

    def acts_as(self) -> Iterator[Check]:
        """Yield, for a defense that declares what it does, how many declarations its releases contradict.

        Made-up images show the most, and the clients' are those on which a defense may act otherwise.
        """
        if defense_declarations(self.defense).acts_as is not None:
            wrong = contradictions(self.model, self.defense, NOISE_FACTOR)
            if not wrong:
                of_clients = contradictions(self.model, self.defense, NOISE_FACTOR, self.inputs())
                wrong = [f"on photographs, {line}" for line in of_clients]
            text = "; ".join(wrong) or "effects that are not as declared"
            yield Check("acts-as", float(len(wrong)), 0.0, text)

    def control(self) -> Check:
        """Return what patch-gradient finds without the defense."""
        images, attack = self.clients(), PatchGradient()
        check_capabilities(attack, gradient_capabilities(self.model))
        seen = observe(self.model, images, self.labels, attack.parameters)
        value = float(psnr(attack(seen), images).min())
        return Check("control", value, CONTROL_PSNR, "PSNR of patch-gradient without it", "≥")


@dataclass(frozen=True, eq=False)
class OnImages(Claims):
    """A defense on images: what the client feeds is x̃, with its order."""

    defense: Defense

    contents: ClassVar[str] = "images in [0, 1], an order of the patches, masks"

    def inputs(self, *, neighbour: bool = False) -> dict[str, Tensor]:
        """Return the two images."""
        return {"images": self.clients(neighbour=neighbour)}

    def run(self, inputs: Tensors, draws: Draws) -> Feed:
        """Return what the clients feed."""
        own = draws.images if defense_declarations(self.defense).per != "model" else [draws.model]
        return self.defense(inputs["images"], self.model.patch, own)

    def tensors(self, feed: Feed) -> dict[str, Tensor]:
        """Return the images, their order, and the masks."""
        found = {name: getattr(feed, name) for name in ("images", "order", "moved", "masked_pe")}
        return {name: value for name, value in found.items() if value is not None}

    def own(self, feed: Feed) -> dict[str, Tensor]:
        """Return what the first client feeds."""
        return {name: value[0] for name, value in self.tensors(feed).items()}

    def without_defense(self) -> dict[str, Tensor]:
        """Return what would be fed without the defense."""
        return self.tensors(Feed.undefended(self.clients(), self.model.patch))

    def problems(self, feed: object) -> Iterator[str]:
        """Yield each deviation from images in [0, 1] and an order that says which slots moved."""
        if type(feed) is not Feed:
            yield f"{type(feed).__name__} instead of Feed"
            return
        images = self.clients()
        slots = (len(images), math.prod(self.model.grid))
        wrong = [
            *unlike("images", feed.images, images.shape, images.dtype),
            *unlike("order", feed.order, slots, torch.int64),
            *unlike("moved", feed.moved, slots, torch.bool),
            *(() if feed.masked_pe is None else unlike("masked_pe", feed.masked_pe, slots, torch.bool)),
        ]
        yield from wrong
        if wrong:
            return
        if not bool(((feed.images >= 0) & (feed.images <= 1)).all()):
            yield f"images in [{feed.images.min():.3g}, {feed.images.max():.3g}] instead of [0, 1]"
        yield from _permutation_faults("order", feed.order)
        if bool((feed.order != torch.arange(slots[1]))[~feed.moved].any()):
            yield "an order that moves slots which are not declared as moved"

    def checks(self, feed: Feed) -> Iterator[Check]:
        """Yield whether the order is the declared one, and the gradients are those of the defended model."""
        off = self._displacement(feed)
        yield Check("order", off, 0.01, "distance of slots from what order and moved say")
        found, slopes, norms, _ = self.directional(feed, self.gradients(feed), {})
        off = largest((found - slopes).abs() / norms)
        yield Check("gradients", off, TOLERANCE, "error against finite differences, relative to ‖∂ℓ/∂θ‖")

    def _displacement(self, feed: Feed) -> float:
        """Return how much worse than the best order the declared one is, or 1 if moved patches were changed.

        It is measured on smooth images in which no two patches are equal, so that patches are recognised after a
        defense has changed their pixels. A defense that moves slots must not change a bit of any patch, except that
        one which says so may permute the values: one that changes pixels as well is two defenses, stacked.
        """
        patch = self.model.patch
        moved = permute(self.clients(), feed.order, patch)
        if feed.moved.any() and not torch.equal(self._recognisable(feed.images), self._recognisable(moved)):
            return 1.0
        wheel = _colour_wheel(self.model.image_shape).repeat(len(self.labels), 1, 1, 1)
        fed = self.run({"images": wheel.clone()}, self.draws())
        return _worse_than_best(self._recognisable(fed.images), self._recognisable(wheel), fed.order, patch)

    def _recognisable(self, images: Tensor) -> Tensor:
        """Return images as they are, or with each patch's values in ascending order if the defense permutes them."""
        model = self.model
        if not effects_of(model, (self.defense,)).values:
            return images
        return unpatchify(patchify(images, model.patch).sort(-1).values, model.image_shape)


@dataclass(frozen=True, eq=False)
class OnFeatures(Claims):
    """A defense on the tokens that a client of split learning sends."""

    defense: FeatureDefense

    contents: ClassVar[str] = "as many rows as the embedding has, orders of rows and columns"

    def inputs(self, *, neighbour: bool = False) -> dict[str, Tensor]:
        """Return the embedded tokens of the two images."""
        with torch.no_grad():
            return {"tokens": self.given(self.model.embed(self.clients(neighbour=neighbour)))}

    def run(self, inputs: Tensors, draws: Draws) -> Sent:
        """Return what the clients send."""
        return self.defense.send(self._plain(inputs["tokens"]), draws)

    def tensors(self, sent: Sent) -> dict[str, Tensor]:
        """Return the rows, and the orders of rows and columns."""
        found = {name: getattr(sent, name) for name in ("features", "source", "columns")}
        return {name: value for name, value in found.items() if value is not None}

    def own(self, sent: Sent) -> dict[str, Tensor]:
        """Return the rows that are declared to be the first client's, wherever they are in the batch."""
        mine = sent.source < sent.source.shape[1]
        return {"features": sent.features[mine], "source": sent.source[mine]}

    def without_defense(self) -> dict[str, Tensor]:
        """Return what would be sent without the defense."""
        return self.tensors(self._plain(self.inputs()["tokens"]))

    def problems(self, sent: object) -> Iterator[str]:
        """Yield each deviation from rows as the embedding has them, with orders of rows and columns."""
        if type(sent) is not Sent:
            yield f"{type(sent).__name__} instead of Sent"
            return
        tokens, prefix = self.inputs()["tokens"], self.model.vit.num_prefix_tokens
        wrong = [
            *unlike("features", sent.features, tokens.shape, tokens.dtype),
            *unlike("source", sent.source, tokens.shape[:2], torch.int64),
            *(() if sent.columns is None else unlike("columns", sent.columns, tokens.shape[2:], torch.int64)),
        ]
        yield from wrong
        if wrong:
            return
        yield from _permutation_faults("source", sent.source.view(1, -1))
        yield from () if sent.columns is None else _permutation_faults("columns", sent.columns[None])
        if sent.prefix != prefix:
            yield f"prefix {sent.prefix} instead of {prefix}"
        if not 0 <= sent.key_bits < math.inf:
            yield f"key_bits {sent.key_bits} instead of a number of bits"

    def checks(self, sent: Sent) -> Iterator[Check]:
        """Yield whether the rows are the declared ones except for the declared noise, and can be trained through."""
        declared = defense_declarations(self.defense)
        effects = declared.acts_as
        std = float(effects.noise_std if isinstance(effects, Effects) else declared.std or 0.0)
        tokens, columns = self.inputs()["tokens"], sent.columns
        rows = tokens.flatten(0, 1)[sent.source]
        error = float((sent.features - (rows if columns is None else rows[..., columns])).square().mean())
        if std > 0:
            factor = max(error, LEAST_DIVISOR) / std**2
            worst = max(factor, 1 / factor)
            yield Check("rows", worst, NOISE_FACTOR, "factor between variance of the noise and std²")
        else:
            off = (error / float(tokens.square().mean())) ** 0.5
            yield Check("rows", off, 1e-9, "distance of rows from what source and columns say; no std")
        off = self._off_differences(tokens)
        yield Check("gradients", off, TOLERANCE, "error against finite differences, relative to ‖∂ℓ/∂tokens‖")

    def control(self) -> Check:
        """Return what leaks without the defense; images in the span of the embedding leak completely."""
        model = self.model
        images = _span_of(model, self.clients())
        with torch.no_grad():
            sent = self._plain(model.embed(images))
        seen = observe_features(model, sent, Stack(()), images[:0])
        value = float(psnr(LeastSquares(prior="ridge")(seen).images, images).min())
        return Check("control", value, CONTROL_PSNR, "PSNR of least-squares without it, as far as W carries", "≥")

    def _plain(self, tokens: Float[Tensor, "b t d"]) -> Sent:
        return Sent.plain(tokens, self.model.vit.num_prefix_tokens)

    def _off_differences(self, tokens: Float[Tensor, "b t d"]) -> float:
        """Return the error of the derivative through the release against finite differences, in random directions."""
        z = tokens.clone().requires_grad_()
        with torch.enable_grad():
            loss = self._loss(z * 1)  # a copy, which the defense may change in place
        g = torch.autograd.grad(loss, z)[0] if loss.requires_grad else torch.zeros_like(z)
        worst, draw = 0.0, torch.Generator().manual_seed(self.seed)
        for _ in range(8):
            v = torch.randn(z.shape, generator=draw, dtype=z.dtype)
            with torch.no_grad():
                slope = (self._loss(tokens + STEP * v) - self._loss(tokens - STEP * v)) / (2 * STEP)
            worst = max(worst, float((slope - (g * v).sum()).abs() / g.norm().clamp(min=1e-3 * float(slope.abs()))))
        return worst

    def _loss(self, tokens: Float[Tensor, "b t d"]) -> Tensor:
        """Return the client's loss on what the server returns; the server's weights are encrypted by the column key."""
        model, sent = self.model, self.run({"tokens": tokens}, self.draws())
        plain = replace(sent, features=restore_features(sent.features, columns=sent.columns), columns=None)
        logits = model.head(plain.restore(model.backbone(plain.features)))
        return F.cross_entropy(logits, self.labels, reduction="sum")


@torch.no_grad()
def _slope(θ: Tensor, v: Tensor, loss: Callable[[], Tensor]) -> Float[Tensor, " b"]:
    """Return the central difference of the losses in the direction v of θ, whose value is restored."""
    before, values = θ.detach().clone(), []
    for sign in (1, -1):
        θ.copy_(before + sign * STEP * v)
        values.append(loss())
    θ.copy_(before)
    return (values[0] - values[1]) / (2 * STEP)


def largest(errors: Tensor) -> float:
    """Return the largest of some errors, of which nan is infinite."""
    return float(errors.nan_to_num(math.inf).max())


def largest_difference(a: Tensors, b: Tensors) -> float:
    """Return the largest difference of two releases, in each tensor relative to its largest entry."""
    if {name: value.shape for name, value in a.items()} != {name: value.shape for name, value in b.items()}:
        return math.inf
    pairs = [(value.detach().double(), b[name].detach().double()) for name, value in a.items()]
    return max(float((x - y).abs().max() / x.abs().max().clamp(min=LEAST_DIVISOR)) for x, y in pairs if x.numel())


def unlike(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
    """Yield each way in which a value of this name is not a finite tensor of this shape and type, in words.

    Args:
        name: name of the value, with which each text begins.
        value: what the defense returned; a missing value is None.
        shape: the expected shape.
        dtype: the expected type.
    """
    if not isinstance(value, Tensor):
        yield f"{name}: {type(value).__name__} instead of a tensor"
        return
    if tuple(value.shape) != tuple(shape):
        yield f"{name} of shape {tuple(value.shape)} instead of {tuple(shape)}"
    if value.dtype != dtype:
        yield f"{name} of {value.dtype} instead of {dtype}"
    if not value.isfinite().all():
        yield f"{name} with nan or inf"


def _permutation_faults(name: str, orders: Int[Tensor, "b n"]) -> Iterator[str]:
    """Yield a text if an order is not a permutation of 0 to n − 1."""
    if not torch.equal(orders.sort(1).values, torch.arange(orders.shape[1]).expand_as(orders)):
        yield f"{name} that leaves some out or repeats others"


def _worse_than_best(
    fed: Float[Tensor, "b c h w"], source: Float[Tensor, "b c h w"], order: Int[Tensor, "b n"], patch: int
) -> float:
    """Return how much further the fed patches are from those that `order` names than from the best assignment.

    It is the difference of the sums of squared distances, over the expected sum for a random order, of the worst image.
    Slot i of a fed image holds patch order[i] of its source.
    """
    worst = 0.0
    for slots, patches, named in zip(patchify(fed, patch), patchify(source, patch), order, strict=True):
        costs = torch.cdist(slots, patches).square()
        best = costs[linear_sum_assignment(costs.numpy())].sum()
        random = torch.cdist(patches, patches).square().mean(1).sum()
        worst = max(worst, float((costs.gather(1, named[:, None]).sum() - best) / random.clamp(min=LEAST_DIVISOR)))
    return worst


def _colour_wheel(shape: tuple[int, int, int]) -> Float[Tensor, "c h w"]:
    """Return one period of colours across and down, a torus in RGB: low frequencies, and no two places equal."""
    down, across = (2 * math.pi * (torch.arange(n, dtype=torch.float64) + 0.5) / n for n in shape[1:])
    ring = 0.3 + 0.15 * down.cos()[:, None]
    blue = (0.15 * down.sin())[:, None].expand(shape[1:])
    return 0.5 + torch.stack([ring * across.cos(), ring * across.sin(), blue])


def _span_of(model: VictimModel, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Return the images without what the patch projection W loses, with contrast reduced if they would leave [0, 1]."""
    W = model.vit.patch_embed.proj.weight.detach().flatten(1)
    X = patchify(model.normalise(images), model.patch)
    offset = unpatchify(X @ torch.linalg.pinv(W) @ W, model.image_shape) * model.std
    room = 0.9 * torch.minimum(model.mean, 1 - model.mean) / offset.abs().amax((2, 3), keepdim=True)
    return model.mean + offset * room.amin(1, keepdim=True).clamp(max=1)

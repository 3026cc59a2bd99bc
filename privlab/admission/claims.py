"""What defenses on images and on features claim of their release, and how that is measured."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from privlab.admission.measures import (
    STEP,
    TOLERANCE,
    colour_wheel,
    off_differences,
    permutation_faults,
    span_of,
    unlike,
    worse_than_best,
)
from privlab.attacks import LeastSquares, PatchGradient
from privlab.metrics import psnr
from privlab.patches import patchify, permute, restore_features, unpatchify
from privlab.release import (
    AnyDefense,
    contradictions,
    effects_of,
    gradient_capabilities,
    observe,
    observe_features,
    per_sample_gradients,
    released_parameters,
)
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

__all__ = [
    "NOISE_FACTOR",
    "Check",
    "OnFeatures",
    "OnImages",
    "Tensors",
    "TwoClients",
    "acts_as",
    "control_of_gradients",
]

CONTROL_PSNR = 60.0
"""The least PSNR of the control, in dB."""
NOISE_FACTOR = 1.1
"""The largest factor between declared and measured variance of a noise."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Check:
    """One check, which passed if `value` is within its limit (`bound`: "≤" or "≥"); `text` says what was measured."""

    name: str
    passed: bool
    value: float
    limit: float
    text: str
    bound: Literal["≤", "≥"] = "≤"

    @classmethod
    def at_most(cls, name: str, value: float, limit: float, text: str) -> "Check":
        """Return a check that passes if its value is not above its limit; nan fails.

        Args:
            name: name of the check, such as "contents".
            value: what was measured.
            limit: the largest value that passes.
            text: what the value measures, in words.
        """
        return cls(name, value <= limit, value, limit, text)

    @classmethod
    def at_least(cls, name: str, value: float, limit: float, text: str) -> "Check":
        """Return a check that passes if its value is not below its limit; nan fails.

        Args:
            name: name of the check, such as "control".
            value: what was measured.
            limit: the least value that passes.
            text: what the value measures, in words.
        """
        return cls(name, value >= limit, value, limit, text, "≥")


@dataclass(frozen=True, eq=False)
class TwoClients:
    """A victim in float64 with two clients of one image each, and a third that may take the second's place."""

    model: VictimModel
    images: Float[Tensor, "3 c h w"]
    seed: int = 0

    @property
    def labels(self) -> Int[Tensor, "2"]:
        """Return the classes of the two images."""
        return torch.arange(2) % self.model.vit.num_classes

    @property
    def released(self) -> list[str]:
        """Return the names of the released parameters."""
        return sorted(released_parameters(self.model))

    def clients(self, *, neighbour: bool = False) -> Float[Tensor, "2 c h w"]:
        """Return the two images."""
        return self.images[[0, 2 if neighbour else 1]]

    def draws(self, number: int = 0, *, neighbour: bool = False) -> Draws:
        """Return fresh generators, the same for the same number; a neighbour has its own."""
        seeds = [100 * (self.seed + 1) + 10 * number + i for i in (0, 2 if neighbour else 1, 3, 4)]
        own, other, batch, model = (torch.Generator().manual_seed(seed) for seed in seeds)
        return Draws([own, other], batch, model)


@dataclass(frozen=True, eq=False)
class OnImages:
    """A defense on images: what the client feeds is x̃, with its order."""

    defense: Defense
    subject: TwoClients

    contents: ClassVar[str] = "images in [0, 1], an order of the patches, masks"

    def inputs(self, *, neighbour: bool = False) -> dict[str, Tensor]:
        """Return the inputs of the defense."""
        return {"images": self.subject.clients(neighbour=neighbour)}

    def run(self, inputs: Tensors, draws: Draws) -> Feed:
        """Return what the defense makes of these inputs."""
        own = draws.images if defense_declarations(self.defense).per != "model" else [draws.model]
        return self.defense(inputs["images"], self.subject.model.patch, own)

    def tensors(self, feed: Feed) -> dict[str, Tensor]:
        """Return the release as tensors by name."""
        found = {"images": feed.images, "order": feed.order, "moved": feed.moved, "masked_pe": feed.masked_pe}
        return {name: value for name, value in found.items() if value is not None}

    def own(self, feed: Feed) -> dict[str, Tensor]:
        """Return what the first client feeds."""
        return {name: value[0] for name, value in self.tensors(feed).items()}

    def without_defense(self) -> dict[str, Tensor]:
        """Return what would be fed without the defense."""
        return self.tensors(Feed.undefended(self.subject.clients(), self.subject.model.patch))

    def problems(self, feed: object) -> Iterator[str]:
        """Yield each deviation of the release from its form, in words."""
        if type(feed) is not Feed:
            yield f"{type(feed).__name__} instead of Feed"
            return
        images = self.subject.clients()
        slots = (len(images), math.prod(self.subject.model.grid))
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
        yield from permutation_faults("order", feed.order)
        if bool((feed.order != torch.arange(slots[1]))[~feed.moved].any()):
            yield "an order that moves slots which are not declared as moved"

    def checks(self, feed: Feed) -> Iterator[Check]:
        """Yield the checks of a release that has its form."""
        yield from acts_as(self.defense, self.subject.model)
        yield Check.at_most("order", self._displacement(feed), 0.01, "distance of slots from what order and moved say")
        model, labels, names = self.subject.model, self.subject.labels, self.subject.released
        gradients = per_sample_gradients(model, feed, labels, names)
        off = off_differences(model, feed, labels, gradients, self.subject.seed)
        yield Check.at_most("gradients", off, TOLERANCE, "error against finite differences, relative to ‖∂ℓ/∂θ‖")

    def _displacement(self, feed: Feed) -> float:
        """Return how much worse than the best order the declared one is, or 1 if moved patches were changed.

        It is measured on smooth images in which no two patches are alike, so that patches are recognised after a
        defense has changed their pixels. A defense that moves slots must not change a bit of any patch, except that
        one which says so may permute the values: one that changes pixels as well is two defenses, stacked.
        """
        subject, patch = self.subject, self.subject.model.patch
        moved = permute(subject.clients(), feed.order, patch)
        if feed.moved.any() and not torch.equal(self._recognisable(feed.images), self._recognisable(moved)):
            return 1.0
        wheel = colour_wheel(subject.model.image_shape).repeat(2, 1, 1, 1)
        fed = self.run({"images": wheel.clone()}, subject.draws())
        return worse_than_best(self._recognisable(fed.images), self._recognisable(wheel), fed.order, patch)

    def _recognisable(self, images: Tensor) -> Tensor:
        """Return images as they are, or with each patch's values in ascending order if the defense permutes them."""
        model = self.subject.model
        if not effects_of(model, (self.defense,)).values:
            return images
        return unpatchify(patchify(images, model.patch).sort(-1).values, model.image_shape)

    def control(self) -> Check:
        """Return what leaks without the defense."""
        return control_of_gradients(self.subject)


@dataclass(frozen=True, eq=False)
class OnFeatures:
    """A defense on the tokens that a client of split learning sends."""

    defense: FeatureDefense
    subject: TwoClients

    contents: ClassVar[str] = "as many rows as the embedding has, orders of rows and columns"

    def inputs(self, *, neighbour: bool = False) -> dict[str, Tensor]:
        """Return the inputs of the defense."""
        with torch.no_grad():
            return {"tokens": self.subject.model.embed(self.subject.clients(neighbour=neighbour))}

    def run(self, inputs: Tensors, draws: Draws) -> Sent:
        """Return what the defense makes of these inputs."""
        return self.defense.send(Sent.plain(inputs["tokens"], self.subject.model.vit.num_prefix_tokens), draws)

    def tensors(self, sent: Sent) -> dict[str, Tensor]:
        """Return the release as tensors by name."""
        found = {"features": sent.features, "source": sent.source, "columns": sent.columns}
        return {name: value for name, value in found.items() if value is not None}

    def own(self, sent: Sent) -> dict[str, Tensor]:
        """Return the rows that are declared to be the first client's, wherever they are in the batch."""
        mine = sent.source < sent.source.shape[1]
        return {"features": sent.features[mine], "source": sent.source[mine]}

    def without_defense(self) -> dict[str, Tensor]:
        """Return what would be sent without the defense."""
        return self.tensors(Sent.plain(self.inputs()["tokens"], self.subject.model.vit.num_prefix_tokens))

    def problems(self, sent: object) -> Iterator[str]:
        """Yield each deviation of the release from its form, in words."""
        if type(sent) is not Sent:
            yield f"{type(sent).__name__} instead of Sent"
            return
        tokens, prefix = self.inputs()["tokens"], self.subject.model.vit.num_prefix_tokens
        wrong = [
            *unlike("features", sent.features, tokens.shape, tokens.dtype),
            *unlike("source", sent.source, tokens.shape[:2], torch.int64),
            *(() if sent.columns is None else unlike("columns", sent.columns, tokens.shape[2:], torch.int64)),
        ]
        yield from wrong
        if wrong:
            return
        yield from permutation_faults("source", sent.source.view(1, -1))
        yield from () if sent.columns is None else permutation_faults("columns", sent.columns[None])
        if sent.prefix != prefix:
            yield f"prefix {sent.prefix} instead of {prefix}"
        if not 0 <= sent.key_bits < math.inf:
            yield f"key_bits {sent.key_bits} instead of a number of bits"

    def checks(self, sent: Sent) -> Iterator[Check]:
        """Yield the checks of a release that has its form."""
        yield from acts_as(self.defense, self.subject.model)
        declared = defense_declarations(self.defense)
        effects = declared.acts_as
        std = float(effects.noise_std if isinstance(effects, Effects) else declared.std or 0.0)
        tokens = self.inputs()["tokens"]
        rows = tokens.flatten(0, 1)[sent.source]
        error = float((sent.features - (rows if sent.columns is None else rows[..., sent.columns])).square().mean())
        if std > 0:
            factor = max(error, 1e-300) / std**2
            yield Check.at_most(
                "rows", max(factor, 1 / factor), NOISE_FACTOR, "factor between variance of the noise and std²"
            )
        else:
            off = (error / float(tokens.square().mean())) ** 0.5
            yield Check.at_most("rows", off, 1e-9, "distance of rows from what source and columns say; no std")
        off = self._off_differences(tokens)
        yield Check.at_most("gradients", off, TOLERANCE, "error against finite differences, relative to ‖∂ℓ/∂tokens‖")

    def _off_differences(self, tokens: Float[Tensor, "b t d"]) -> float:
        """Return the error of the derivative through the release against finite differences, in random directions."""
        z = tokens.clone().requires_grad_()
        with torch.enable_grad():
            loss = self._loss(z * 1)  # a copy, which the defense may change in place
        g = torch.autograd.grad(loss, z)[0] if loss.requires_grad else torch.zeros_like(z)
        worst, draw = 0.0, torch.Generator().manual_seed(self.subject.seed)
        for _ in range(8):
            v = torch.randn(z.shape, generator=draw, dtype=z.dtype)
            with torch.no_grad():
                slope = (self._loss(tokens + STEP * v) - self._loss(tokens - STEP * v)) / (2 * STEP)
            worst = max(worst, float((slope - (g * v).sum()).abs() / g.norm().clamp(min=1e-3 * float(slope.abs()))))
        return worst

    def _loss(self, tokens: Float[Tensor, "b t d"]) -> Tensor:
        """Return the client's loss on what the server returns; the server's weights are encrypted by the column key."""
        model, sent = self.subject.model, self.run({"tokens": tokens}, self.subject.draws())
        plain = replace(sent, features=restore_features(sent.features, columns=sent.columns), columns=None)
        logits = model.head(plain.restore(model.backbone(plain.features)))
        return F.cross_entropy(logits, self.subject.labels, reduction="sum")

    def control(self) -> Check:
        """Return what leaks without the defense; images in the span of the embedding leak completely."""
        model = self.subject.model
        images = span_of(model, self.subject.clients())
        with torch.no_grad():
            sent = Sent.plain(model.embed(images), model.vit.num_prefix_tokens)
        seen = observe_features(model, sent, Stack(()), images[:0])
        value = float(psnr(LeastSquares(prior="ridge")(seen).images, images).min())
        return Check.at_least("control", value, CONTROL_PSNR, "PSNR of least-squares without it, as far as W carries")


def acts_as(defense: AnyDefense, model: VictimModel) -> Iterator[Check]:
    """Yield, for a defense that declares what it does, the number of declarations that its releases contradict."""
    if defense_declarations(defense).acts_as is not None:
        wrong = contradictions(model, defense, NOISE_FACTOR)
        yield Check.at_most("acts-as", float(len(wrong)), 0.0, "; ".join(wrong) or "effects that are not as declared")


def control_of_gradients(subject: TwoClients) -> Check:
    """Return what patch-gradient finds without a defense."""
    images, attack = subject.clients(), PatchGradient()
    check_capabilities(attack, gradient_capabilities(subject.model))
    seen = observe(subject.model, images, subject.labels, attack.parameters)
    return Check.at_least(
        "control", float(psnr(attack(seen), images).min()), CONTROL_PSNR, "PSNR of patch-gradient without it"
    )

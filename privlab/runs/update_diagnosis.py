"""What an update shows of the client and its model: the settings, another normalisation, or two different models."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks import PatchGradient
from privlab.base import collect_warnings, full_precision, option_text, warn
from privlab.release import EXPLAINED_RESIDUAL, is_explained, labels_that_rise, undecayed, without_decay
from privlab.release.explained import residual, residual_of_head
from privlab.runs.client_fit import ClientFit, Fitted, decay_shown, share_of_weights
from privlab.threat import Client, Observation
from privlab.victims.named import of_channels
from privlab.victims.names import NORMALISATIONS

_RANGE = 512  # the normalised pixels that can be held, from −512 to 512: images of 0 to 255 that nobody scaled fit too

_BEYOND = 0.01  # how far a pixel may be from black and white, by rounding, for a normalisation to fit
TWO_MODELS = 0.1
"""The least share of the weights' norm by which two models differ, and the most of it that a stated round moves.

Fine-tuning moved the victims of the package by 0.3 to 0.4 of it, other trainings by 0.9 and more. A round of 5 steps of
SGD at a rate of 0.01 moved them by 0.02, one of 20 at 0.1 with momentum by 0.32, which its own settings explain.
"""


@dataclass(frozen=True, eq=False)
class UpdateDiagnosis(ClientFit):
    """How a client of one image trained, in words; `source` names the files in warnings."""

    source: str

    def fitted(self) -> Fitted | None:
        """Return how the client trained, where settings explain its update; None where none does.

        Warns:
            PrivlabWarning: for settings that are fitted.
        """
        with full_precision(), collect_warnings([]):
            found = self.simplest()
        if found is not None and (changed := found.settings(self.stated)):
            said = _stated(changed, self.stated)
            warn(f"{self.source}: {said}. Other settings may explain the update as well.")
        if found is not None and found.of_head != 1:
            warn(
                f"{self.source}: the head moved {found.of_head:.3g} times as far as these settings say. It has a "
                "learning rate of its own, and the rest of the update is explained without it."
            )
        return found

    def normalisation(self) -> str | None:
        """Return the name of another normalisation than the stated one, where that explains what the model was fed.

        Warns:
            PrivlabWarning: if pixels that the stated normalisation makes of no image explain the update.
        """
        seen = self.seen
        if self.start != self.stated or self.image is None:
            return None
        with full_precision(), collect_warnings([]):
            pixels = fed_pixels(seen, decay_shown(seen))
            explained = residual_of_pixels(seen, pixels, self.label) < EXPLAINED_RESIDUAL
        if not explained or _is_image(pixels * seen.model.std + seen.model.mean):  # the stated normalisation fits
            return None
        named = []
        for name, parts in NORMALISATIONS.items():
            mean, std = (pixels.new_tensor(of_channels(values, pixels.shape[1])).view(-1, 1, 1) for values in parts)
            if _is_image(pixels * std + mean):
                named.append(name)
        right = f"--normalisation {named[0]} is taken" if named else "Give the client's by --normalisation MEAN/STD"
        warn(
            f"{self.source} does not match images under the stated normalisation: the model was fed pixels from "
            f"{float(pixels.min()):.3g} to {float(pixels.max()):.3g}, which explain it. {right}."
        )
        return named[0] if named else None

    def why_unexplained(self) -> str | None:
        """Return that no image explains the update, and whether it looks like the weights of two models.

        It is None for a client of Adam or AdamW, for dropout, where the closed form does not apply, and where an image
        explains the update by another loss.
        """
        if self.start != self.stated or self.image is None or self.of_any_loss:
            return None
        with full_precision(), collect_warnings([]):
            of_round = share_of_weights(self.seen, self.made(self.stated))
        share = share_of_weights(self.seen)
        if share >= TWO_MODELS and share * TWO_MODELS >= of_round:
            return (
                f"{self.source} look like weights of two models, or like noise, not like weights before and after a "
                f"round: the difference is {share:.0%} of the weights, a round with these settings moves "
                f"{of_round:.1%}, and no image explains it. Give the weights that this client began with: low scores "
                "say nothing here."
            )
        return (
            f"{self.source}: no image explains it, with these settings or others that were tried. Another optimiser, "
            "number of images or loss than stated, weights of two models, noise, rounding, or a defense: low scores "
            "say nothing here."
        )

    @cached_property
    def of_any_loss(self) -> bool:
        """Whether the image explains the update whatever its loss, targets and rate were, as of one step it may."""
        if self.start != self.stated or self.image is None or self.start.total_steps > 1:
            return False
        with full_precision(), collect_warnings([]):
            seen = replace(self.seen, client=self.decayed(self.start))
            left = residual_of_head(seen, self.image)
        return left is not None and is_explained(left, self.start)


def _stated(changed: Mapping[str, Any], stated: Client) -> str:
    """Return what was fitted, and in place of what."""
    new, old, said = list[str](), list[str](), list[str]()
    for name, value in changed.items():
        if name != "label":
            before = getattr(stated, name)
            new.append(
                f"client.{name}={value:.4g}" if isinstance(value, float) else f"client.{name}={option_text(value)}"
            )
            old.append(f"{name} not stated" if before is None else f"{name}={option_text(before)}")
    if new:
        said.append(f"{' and '.join(new)} fitted to the update, in place of {', '.join(old)}")
    if "label" in changed:
        said.append(f"the label is fitted to the update: {label_shares(changed['label'])}")
    return "; ".join(said)


def label_shares(label: Mapping[int, float]) -> str:
    """Return a fitted label in words: "0.51 of class 44, 0.39 of class 94"."""
    return ", ".join(f"{share:.2f} of class {c}" for c, share in label.items()) or "none of the classes"


def fed_pixels(seen: Observation, lost: float) -> Float[Tensor, "1 c h w"]:
    """Return the normalised pixels of one image in float64, by `patch-gradient`, beyond those of an image too.

    `lost` is the share of the weights that decay took, which is added again.
    """
    moved = without_decay(seen.model, {name: seen.gradients[name][0] for name in PatchGradient.parameters}, lost)
    mean, std = torch.full_like(seen.model.mean, 0.5).double(), torch.full_like(seen.model.std, 0.5 / _RANGE).double()
    model = seen.model.normalised_by(mean, std)
    found = PatchGradient()(replace(seen, model=model, gradients={name: u[None] for name, u in moved.items()}))
    return model.normalise(found)


def residual_of_pixels(seen: Observation, pixels: Float[Tensor, "1 c h w"], label: int | None) -> float:
    """Return `residual` of what the model was fed, in place of an image that it normalises.

    Args:
        seen: the update of a client of one image.
        pixels: normalised pixels.
        label: the class index of the private image; None if it is not known. Where it explains nothing, what the head
            shows in place of it is taken.
    """
    model = seen.model.normalised_by(torch.zeros_like(seen.model.mean), torch.ones_like(seen.model.std))
    fed, pixels = replace(seen, model=model), pixels.to(model.mean)
    left = math.inf if label is None else residual(fed, pixels, label)
    if not is_explained(left, seen.client) and (of_head := residual_of_head(fed, pixels)) is not None:
        left = of_head if label is None or is_explained(of_head, seen.client) else left
    return left


def label_of_image(seen: Observation) -> int | None:
    """Return the label with which the image of the closed form explains an update without the head's; None without one.

    Of the classes whose logits of the image rise most along the update, the one that leaves the least counts.
    """
    client = seen.client
    if client is None or client.optimiser != "sgd" or (image := ClientFit(seen, -1).image) is None:
        return None
    with full_precision(), collect_warnings([]):
        moved = undecayed(seen.model, {name: u[0] for name, u in seen.gradients.items()}, client)
        left = {label: residual(seen, image, label) for label in labels_that_rise(seen.model, moved, image)}
    best = min(left, key=lambda label: left[label])
    return best if left[best] < EXPLAINED_RESIDUAL else None


def _is_image(pixels: Tensor) -> bool:
    return bool(pixels.min() >= -_BEYOND and pixels.max() <= 1 + _BEYOND)

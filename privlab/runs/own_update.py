"""The audit of a client's own round: of the weights that it gets, and of its update before it is sent."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks import PatchGradient
from privlab.base import PrivlabError, check_range, collect_warnings, first, full_precision, plain_data, unwritable
from privlab.evaluation import batch_of
from privlab.images import Preprocessing, open_images
from privlab.metrics import correlation, psnr, psnr_affine
from privlab.release import (
    EXPLAINED_RESIDUAL,
    rounding_deviation,
    trained_parameters,
    update_capabilities,
)
from privlab.release.explained import explained_share
from privlab.release.labels import label_of_update
from privlab.release.update_files import update_between
from privlab.runs.client_fit import decay_shown
from privlab.runs.sent_weights import MOST_IMAGES, audit_of_round
from privlab.runs.update_diagnosis import fed_pixels, residual_of_pixels
from privlab.threat import Client, Observation
from privlab.victims import VictimModel

_PE, _PROJECTION = PatchGradient.parameters

LEAKS = "an image of the client can be reconstructed from it"
"""Why an update is withheld."""

UNEXPLAINED = "no single image explains it with these settings, which other settings and several images may do"
"""Why a small explained share means nothing."""

_STRUCTURE = 0.5
"""The least share of an image's variance that a reconstruction of other contrasts must have, as ρ².

Without it, whatever is put in the place of a pale image would leak: one of variance 0.01 has 20 dB as one colour.
"""

_LEAST_SIGNAL = 30.0
"""The norm of an update, in norms of its rounding, below which the closed form is out of its range.

At 17 its reconstruction of a photograph had 12 dB on a random ViT, at 49 it had 32 dB on the trained ViT-Ti.
"""


@dataclass(frozen=True)
class Verdict:
    """What an audit found of one update.

    `psnr` is that of the reconstruction to the nearest of the client's images, number `image`, in dB; None without
    images. `psnr_affine` is that after the best gain and offset of each channel: much more than `psnr` where the client
    normalises its images otherwise than the model says. `explained` is the certificate's share; None with images.
    `limits` says why a low score means nothing.
    """

    psnr: float | None
    psnr_affine: float | None
    image: int | None
    explained: float | None
    limits: str | None
    leaks: bool


@dataclass(frozen=True, eq=False)
class OwnUpdateAudit:
    """Reconstruct an image from an update by `patch-gradient`, and judge it by the client's own images.

    Weight decay is subtracted as the settings state it, and once more as the update itself shows it
    (`fit_decay` without its Gauss-Newton steps), so that a decay that is stated wrongly hides nothing; the better
    reconstruction counts. How the client normalises its images hides nothing either: an image leaks too if it is
    recognised after the best gain and offset of each channel, with half of its variance or more. Without images the
    certificate judges: the client is run again on what its model was fed, as it is reconstructed, which costs a round
    of one image.

    That nothing leaks here is no evidence of privacy: one attack has failed. `limits` of a verdict says where it must.

    Args:
        model: the client's model; a copy is kept.
        client: its settings; `images` is replaced by the count of the images where these are given.
        max_psnr: the largest PSNR in dB that does not count as a leak; > 0. One colour has about 12 dB.
        max_explained: the largest share of the update that a reconstruction may explain, in (0, 1]. Of 1,000 wrong
            images none was above 0.70 (docs/how-to/updates.md).

    Raises:
        PrivlabError: if a threshold is out of its range, or the client trains no patch or position embedding.
    """

    model: VictimModel
    client: Client
    max_psnr: float = 20.0
    max_explained: float = 1 - EXPLAINED_RESIDUAL**2

    def __post_init__(self) -> None:
        """Copy the model; raise PrivlabError if the client's updates cannot be audited."""
        check_range(0 < self.max_psnr < float("inf"), "max_psnr", "a finite number of dB > 0", f"{self.max_psnr:g}")
        check_range(0 < self.max_explained <= 1, "max_explained", "in (0, 1]", f"{self.max_explained:g}")
        if self.client.clients > 1:
            raise PrivlabError(
                "An audit of one's own update reads it before it is added to those of others. Found client.clients="
                f"{self.client.clients}: take 1."
            )
        if lacking := sorted({_PE, _PROJECTION} - {*trained_parameters(self.model, self.client)}):
            raise PrivlabError(
                f"An audit reads {_PE} and {_PROJECTION}. Found client.trains={self.client.trains}, without "
                f"{' and '.join(lacking)}: no attack here reads such updates, which is no evidence of privacy."
            )
        object.__setattr__(self, "model", copy.deepcopy(self.model).eval())

    def check_certificate(self) -> None:
        """Check that the certificate can judge updates of this client without its images.

        Raises:
            PrivlabError: for several images, an optimiser other than SGD, or dropout, none of which it explains, and
                for several steps of a loss whose targets cannot be solved for.
        """
        client = self.client
        if client.total_steps > 1 and not (client.has_labels or client.is_numeric):
            raise PrivlabError(
                "Without images an audit of several steps needs a loss of labels or numbers. Found client.loss="
                f"{client.loss_name} and {client.total_steps} steps: give the client's images."
            )
        if client.images > 1 or client.optimiser != "sgd" or client.dropout or client.drop_path:
            raise PrivlabError(
                "Without images an audit is judged by the certificate, which needs client.images=1, "
                "client.optimiser=sgd and no dropout. Found "
                f"client.images={client.images}, client.optimiser={client.optimiser}, client.dropout={client.dropout:g}"
                f", client.drop_path={client.drop_path:g}: give the client's images."
            )

    def why_not_train(self, sent: Mapping[str, Tensor], images: Float[Tensor, "b c h w"]) -> str | None:
        """Return why a client must not train on weights that the server sent; None where nothing unusual was found.

        Args:
            sent: the weights by timm's names; those that are not sent are the model's own.
            images: images of the client or public ones, in [0, 1] before normalisation; the first ones are tested.

        Raises:
            PrivlabError: if the weights or the images do not fit the model, or some are not finite.
        """
        self._check_images(images)
        taken = {name: sent[name] for name in self.names(whole=True) if name in sent}
        if not taken:
            raise PrivlabError(f"An audit needs the weights by timm's names. Found {first([*sent], 3) or 'none'}.")
        self._take(taken)
        audit = audit_of_round(self.model, images)
        return f"the server's weights are {audit.verdict}" if audit.suspicious else None

    def __call__(
        self,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        images: Float[Tensor, "b c h w"] | None = None,
    ) -> Verdict:
        """Audit one update.

        Args:
            before: the weights that the server sent, by timm's names: those of `names`, or more.
            after: the weights that are to be sent.
            images: the images of the round in [0, 1], augmented and not yet normalised; None for the certificate.

        Raises:
            PrivlabError: if the two belong to another model, hold NaN or are equal, or images do not fit the model.
        """
        client = self.client if images is None else replace(self.client, images=len(images))
        if images is None:
            self.check_certificate()
        else:
            self._check_images(images)
        with full_precision(), collect_warnings([]):  # what weakens the attack is in `limits`
            seen = self._observe(before, after, client, self.names(whole=images is None))
            found = [fed_pixels(seen, lost) for lost in _decays(seen, client)]
            limits = _limits(seen, client)
            return self._certified(seen, found, limits) if images is None else self._scored(seen, found, images, limits)

    def _check_images(self, images: Float[Tensor, "b c h w"]) -> None:
        if images.shape[1:] != self.model.image_shape:
            raise PrivlabError(
                f"The images of the audit must be of shape {self.model.image_shape}, the size that the model is fed. "
                f"Found {tuple(images.shape[1:])}."
            )

    def _certified(self, seen: Observation, found: Sequence[Float[Tensor, "1 c h w"]], limits: str | None) -> Verdict:
        """Return the verdict by the share of the update that the best reconstruction explains."""
        label = label_of_update(seen)
        if "head.bias" not in seen.gradients or not seen.gradients["head.bias"].any():
            raise PrivlabError("The certificate needs the update of head.bias. Found none: give the client's images.")
        shares = (explained_share(residual_of_pixels(seen, pixels, label)) for pixels in found)  # each costs a round
        explained = next(shares)
        if explained <= self.max_explained:
            explained = max(explained, *shares)
        leaks = explained > self.max_explained
        return Verdict(None, None, None, explained, limits or (None if leaks else UNEXPLAINED), leaks)

    def _scored(
        self,
        seen: Observation,
        found: Sequence[Float[Tensor, "1 c h w"]],
        images: Float[Tensor, "b c h w"],
        limits: str | None,
    ) -> Verdict:
        """Return the verdict by the client's images: of each the best reconstruction counts, and the nearest image."""
        images = images.to(found[0])
        as_said = [(pixels * seen.model.std + seen.model.mean).clamp(0, 1) for pixels in found]
        stretched = [_stretched(pixels) for pixels in found]
        plain, free, alike = (
            torch.stack([score(each.expand_as(images), images) for each in reconstructions]).amax(0)
            for score, reconstructions in ((psnr, as_said), (psnr_affine, stretched), (correlation, stretched))
        )
        scores = torch.where(alike.square() >= _STRUCTURE, torch.maximum(plain, free), plain)
        best = int(scores.argmax())
        leaks = not scores[best] <= self.max_psnr  # NaN is no pass
        return Verdict(float(plain[best]), float(free[best]), best, None, limits, bool(leaks))

    def names(self, *, whole: bool) -> list[str]:
        """Return the timm names of the parameters that an audit reads."""
        names = [name for name, _ in self.model.vit.named_parameters()]
        return [n for n in names if whole or n in (_PE, _PROJECTION, "head.weight") or n.endswith("attn.qkv.bias")]

    def _observe(
        self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], client: Client, names: Sequence[str]
    ) -> Observation:
        """Return what the adversary sees of the update of these parameters, with the weights before in the model."""
        trained = trained_parameters(self.model, client)
        if lacking := [name for name in names if name not in before or name not in after]:
            raise PrivlabError(
                f"An audit needs the weights by timm's names. Found no {first(lacking, 3)}: send the state_dict of the "
                "VisionTransformer itself."
            )
        old, new = ({name: state[name] for name in names} for state in (before, after))
        self._check_shapes(old)
        released = update_between(old, new, client.images, ("the server's weights", "the client's weights"), names)
        self._take(old)
        gradients = {n: u.to(self.model.mean)[None] for n, u in released.gradients.items() if n in trained}
        grants = update_capabilities(self.model, client)
        return Observation(self.model, gradients, grants, images_per_release=client.images, client=client)

    def _check_shapes(self, weights: Mapping[str, Tensor]) -> None:
        own = self.model.vit.get_parameter
        if other := [f"{n} {tuple(w.shape)}" for n, w in weights.items() if w.shape != own(n).shape]:
            raise PrivlabError(
                f"The weights must be those of the model that the audit was given. Found {first(other)}."
            )

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights into the model."""
        self._check_shapes(weights)
        for name, value in weights.items():
            self.model.vit.get_parameter(name).copy_(value)


@lru_cache(maxsize=1)
def sample_images(preprocessing: Preprocessing) -> Float[Tensor, "b c h w"]:
    """Return bundled photographs as a victim is fed them, on which weights are tested where no others are given."""
    return batch_of(open_images("samples", limit=MOST_IMAGES), preprocessing).images


def write_line(path: Path, line: Mapping[str, object]) -> None:
    """Add a line of JSON to a file, which is made with its folder if it is not there.

    Raises:
        PrivlabError: if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain_data(line)) + "\n")
    except OSError as error:
        raise unwritable(path, error) from error


def _decays(seen: Observation, client: Client) -> list[float]:
    """Return the shares of the weights that decay took: as it is stated, and as the update shows."""
    shown = decay_shown(seen, rounds=0)
    return [1 - client.kept_share, shown] if client.is_linear else [shown]


def _stretched(image: Float[Tensor, "1 c h w"]) -> Float[Tensor, "1 c h w"]:
    """Return an image whose channels go from 0 to 1, which no gain and offset distinguishes from the first."""
    least, most = image.amin((2, 3), keepdim=True), image.amax((2, 3), keepdim=True)
    return (image - least) / (most - least).clamp(min=torch.finfo(image.dtype).tiny)


def _limits(seen: Observation, client: Client) -> str | None:
    """Return why the closed form is not exact for this update; None if it is, except for rounding."""
    B = seen.images_per_release
    found = [PatchGradient().beyond(replace(seen, client=replace(client, weight_decay=0.0)))]  # it is subtracted
    found += [f"{B} images in one update"] if B > 1 else []
    for name in (_PE, _PROJECTION):
        θ, u = seen.model.vit.get_parameter(name).detach(), seen.gradients[name][0]
        if u.norm() < _LEAST_SIGNAL * rounding_deviation(θ, u, client).norm():
            found.append(f"{name} moved by little more than rounding")
    return " and ".join(filter(None, found)) or None

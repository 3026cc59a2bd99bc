"""A U-Net that corrects what attacks make of released features, trained on what they make of the adversary's own."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from privlab.attacks.decoders.networks import silent
from privlab.attacks.decoders.pairs import PairTraining, own_images
from privlab.attacks.decoders.store import kept_decoder, warn_of_few
from privlab.attacks.decoders.training import make_release
from privlab.base import draw_for, full_precision
from privlab.release import effects_of
from privlab.threat import FeatureAttack, FeatureObservation, Reconstruction, Stack
from privlab.training import Compute, Listener, Plan, train
from privlab.victims import hash_of

__all__ = ["CorrectionSpec", "UNet", "correction_for", "own_starts", "started"]

FORMAT = "privlab-correction/1"

PUBLIC_OF_STARTS = 64
"""Public images that the attacks to be corrected get for a prior of their own; more cost time in each release alone."""

IN_PLACE = 32
"""Images of an own release whose rows stay in place: there the size of the client's batch makes no difference."""

SCALE = 4
"""Pixels in a pixel of the U-Net's coarsest scale."""


@dataclass(frozen=True)
class CorrectionSpec:
    """How large the U-Net is, and how it is trained.

    Args:
        width: number of its channels at the images' own size.
        releases: number of public images, counted with repetition, that are released for its training.
        client_batch: number of images that are released together, where the defense moves rows.
        augment: whether public images are mirrored and rolled at random, from their second release on.
        plan: how it is trained.
    """

    width: int
    releases: int
    client_batch: int
    augment: bool
    plan: Plan


class UNet(nn.Module):
    """x ↦ x₁ + f(x): the first of several images of the same thing, corrected by convolutions at three scales.

    f begins at zero. Sides need not be multiples of the coarsest scale.

    Source: U-Net (Ronneberger et al. 2015); FBPConvNet (Jin et al. 2017) puts one behind a linear inverse.
    """

    def __init__(self, channels: int, images: int, width: int) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        pairs = list(pairwise(widths))
        self.channels = channels
        self.inwards = nn.Conv2d(channels * images, width, 3, padding=1)
        self.before = nn.ModuleList(_Residual(fine) for fine, _ in pairs)
        self.down = nn.ModuleList(nn.Conv2d(fine, coarse, 2, 2) for fine, coarse in pairs)
        self.coarsest = nn.Sequential(_Residual(widths[-1]), _Residual(widths[-1]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(coarse, fine, 2, 2) for fine, coarse in pairs)
        self.after = nn.ModuleList(nn.Sequential(_Residual(fine), _Residual(fine)) for fine, _ in pairs)
        self.outwards = silent(nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, x: Float[Tensor, "b s h w"]) -> Float[Tensor, "b c h w"]:
        """Return images, which may leave [0, 1]."""
        height, width = x.shape[2:]
        h = self.inwards(F.pad(x - 0.5, (0, -width % SCALE, 0, -height % SCALE), mode="replicate"))
        finer = []
        for before, down in zip(self.before, self.down, strict=True):
            finer.append(before(h))
            h = down(finer[-1])
        h = self.coarsest(h)
        for kept, up, after in reversed(list(zip(finer, self.up, self.after, strict=True))):
            h = after(kept + up(h))
        return x[:, : self.channels] + self.outwards(h)[:, :, :height, :width]


class _Residual(nn.Module):
    """x + g(x), with two convolutions and no norm, which would forget how strong what is corrected is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GELU(), silent(nn.Conv2d(width, width, 3, padding=1))
        )

    def forward(self, x: Float[Tensor, "b e h w"]) -> Float[Tensor, "b e h w"]:
        return x + self.layers(x)


def started(starts: Sequence[FeatureAttack], seen: FeatureObservation) -> Float[Tensor, "b s h w"]:
    """Return what attacks make of a release, one behind the other, in single precision.

    Args:
        starts: the attacks; the first is corrected.
        seen: the release, of which they get a few public images.
    """
    few = replace(seen, public=seen.public[:PUBLIC_OF_STARTS])
    return torch.cat([Reconstruction.of(start(few)).images.float() for start in starts], 1)


def own_starts(
    seen: FeatureObservation, starts: Sequence[FeatureAttack], spec: CorrectionSpec
) -> tuple[Float[Tensor, "r s h w"], Float[Tensor, "r c h w"]]:
    """Return what attacks make of releases of public images, and the images; keys and draws are the adversary's own.

    Args:
        seen: the private release, of which the model, the defense, the public images and the grants count.
        starts: the attacks.
        spec: how many releases there are, of how many images, and whether these are mirrored and rolled.
    """
    draw = draw_for(spec.plan.seed, "", "own releases of features")
    kept = effects_of(seen.model, seen.defense).rows == "kept"
    found: list[tuple[Tensor, Tensor]] = []
    for images in own_images(seen.public, spec.releases, IN_PLACE if kept else spec.client_batch, spec.augment, draw):
        own = make_release(seen.model, seen.defense, images.to(seen.model.mean), draw, seen.cut_layer)
        released = replace(seen, features=own.features.to(seen.features))
        found.append((started(starts, released), own.images))
    inputs, images = (torch.cat(parts) for parts in zip(*found, strict=True))
    return inputs, images


def correction_for(
    seen: FeatureObservation,
    starts: Sequence[FeatureAttack],
    spec: CorrectionSpec,
    *,
    progress: Listener | None = None,
) -> UNet:
    """Return the U-Net of this victim, defense, public images, attacks and spec: from the cache, or trained and cached.

    Args:
        seen: a release, of which the features do not count.
        starts: attacks that are frozen dataclasses, whose options count.
        spec: the size of the U-Net, and its training.
        progress: is called with the progress of a training; never, if the U-Net is in the cache.

    Warns:
        PrivlabWarning: for few public images, and if the stored file is damaged or foreign, or cannot be written.
    """
    warn_of_few(seen.public)
    model, channels = seen.model, seen.model.image_shape[0]
    victim = hash_of(model.state_dict() | {"mean": model.mean, "std": model.std})
    parts = (FORMAT, victim, repr(Stack(seen.defense)), repr(spec), repr(tuple(starts)), f"cut layer {seen.cut_layer}")
    key = hashlib.sha256("\n".join((*parts, hash_of({"public": seen.public}))).encode()).hexdigest()

    def made() -> UNet:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(spec.plan.seed)
            return UNet(channels, len(starts), spec.width)

    def trained() -> UNet:
        inputs, images = own_starts(seen, starts, spec)
        unet = made().to(inputs.device)
        with full_precision():
            recipe = PairTraining(unet, inputs, images, key)
            train(recipe, spec.plan, compute=Compute(device=str(inputs.device)), progress=progress)
        return unet

    return kept_decoder("unet", key, made, trained).to(seen.model.mean.device).eval()

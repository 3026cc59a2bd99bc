"""`map-unet`: what `map-inversion` makes of noisy features, corrected by a network that saw what noise does to it."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from privlab.attacks.decoders import CorrectionSpec, correction_for, decoder_plan, started
from privlab.attacks.features.map_inversion import MapInversion
from privlab.attacks.rows import effects
from privlab.base import check_range
from privlab.threat import Capability, FeatureObservation, Reconstruction

__all__ = ["MapUNet"]

STARTS = (MapInversion(), MapInversion(rounds=0))
"""What the network reads: the likeliest image, which it corrects, and the estimate of each patch by itself."""


@dataclass(frozen=True)
class MapUNet:
    """Train f_φ on min E ‖x̂(z) + f_φ(x̂(z), x̂₀(z)) − x‖² over public images x and what the client sends of them, z.

    x̂ is the image that `map-inversion` finds under a prior written by hand, and x̂₀ its start, the linear estimate of
    each patch. f_φ is a U-Net: it learns what photographs look like, and what errors both make under this noise. Keys
    and noise of the releases that it is trained on are the adversary's own. It is trained once for each victim, defense
    and set of public images, and cached. With few public images it learns little. Without noise it is `map-inversion`.

    Args:
        width: number of the U-Net's channels at the images' own size.
        releases: number of public images, counted with repetition, that are released for the training.
        client_batch: number of images that are released together, where the defense moves rows.
        steps: number of training steps.
        batch_size: number of images in a step.
        learning_rate: the largest learning rate, reached after a warm-up and followed by a cosine decay to zero.
        augment: whether public images are mirrored and rolled at random, from their second release on.
        seed: seed of the U-Net's first weights, of its training and of the adversary's own draws.
    """

    name: ClassVar[str] = "map-unet"
    paper: ClassVar[str] = "FBPConvNet (Jin et al., IEEE TIP 2017), behind map-inversion, against noise on features"
    knows: ClassVar[frozenset[str]] = MapInversion.knows
    undefended: ClassVar[str] = "least-squares"
    requires: ClassVar[frozenset[Capability]] = MapInversion.requires | {
        Capability.AUXILIARY_IMAGES,
        Capability.QUERIES,
        Capability.KNOWS_DEFENSE,
    }
    effort: ClassVar[str] = "full"
    named_only: ClassVar[bool] = True

    width: int = 24
    releases: int = 6000
    client_batch: int = 4
    steps: int = 600
    batch_size: int = 32
    learning_rate: float = 2e-3
    augment: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError for a number that is out of range."""
        check_range(self.releases >= self.batch_size, f"releases of {self.name}", "at least batch_size", self.releases)
        for name in ("width", "client_batch"):
            check_range(getattr(self, name) >= 1, f"{name} of {self.name}", "at least 1", getattr(self, name))

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Reconstruct the images that the client embedded."""
        if effects(seen).noise_std == 0:
            return STARTS[0](seen)
        unet = correction_for(seen, STARTS, self.spec)
        with torch.no_grad():
            images = unet(started(STARTS, seen)).clamp(0, 1)
        rows = STARTS[1](seen).rows  # both place them alike, and this one does no more
        return Reconstruction(images.to(seen.model.mean.dtype), rows)

    @property
    def spec(self) -> CorrectionSpec:
        """Return the U-Net and its training."""
        plan = decoder_plan(
            steps=self.steps, batch_size=self.batch_size, learning_rate=self.learning_rate, seed=self.seed
        )
        return CorrectionSpec(self.width, self.releases, self.client_batch, self.augment, plan)

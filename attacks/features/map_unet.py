"""`map-unet`: what `map-inversion` makes of noisy features, corrected by a network that saw what noise does to it.

Known are noisy rows of the client, and the client's part of the model to run; sought are the images. `_own_starts`
inverts noisy releases of public images that the adversary makes, a U-Net learns their errors, and it corrects what the
same inversion makes of the client's rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from privlab.attacks.decoders import PairTrained, PairTraining, make_release
from privlab.attacks.decoders.networks import Residual, silent
from privlab.attacks.decoders.training import Pairs
from privlab.attacks.features.map_inversion import MapInversion
from privlab.attacks.rows import effects
from privlab.attacks.solvers import Scales
from privlab.base import AtLeast1, check_range, draw_for
from privlab.release import effects_of
from privlab.threat import Capability, FeatureAttack, FeatureObservation, Reconstruction

STARTS = (MapInversion(), MapInversion(rounds=0))
"""What the network reads: the likeliest image, which it corrects, and the separate estimate of each patch."""


@dataclass(frozen=True)
class MapUNet(PairTrained["UNet"]):
    """Train f_φ on min E ‖x̂(z) + f_φ(x̂(z), x̂₀(z)) − x‖² over public images x and what the client sends of them, z.

    Idea: The best formulas for noise and for photographs leave errors, which look similar from image to
    image. The adversary computes noisy features of its own images with the client's part of the model, and
    inverts them. It trains a network to correct these images, and applies it to the client's images.

    Steps: invert own noisy releases → train a U-Net on the errors → correct the image of the client

    Algorithm: x̂ is the image that `map-inversion` finds under a prior written by hand, and x̂₀ its start, the linear
    estimate of each patch. f_φ is a U-Net: it learns what photographs look like, and what errors both make under this
    noise. Keys and noise of the releases that it is trained on are the adversary's own. It is trained once for each
    victim, defense and set of public images, and cached.

    Exact if: no condition is known: it is a trained network without a guarantee. Without noise it is `least-squares`.

    Fails if: the noise is not white, not known, or not on the embedding's rows. With the bundled photographs alone it
    learns little: it needs `--public` with hundreds of images.

    Cost: 5 to 7 minutes of training on one busy core, its 6,000 own releases included (`cifar_vit`, 32 pixels).

    Studies: published

    Example: privlab attack --model cifar_vit --attack map-unet --defense gaussian-noise --limit 1

    Args:
        width: number of the U-Net's channels at the images' own size.
        releases: number of public images, counted with repetition, that are released for the training.
        client_batch: number of images that are released together, where the defense moves rows.
        augment: whether public images are mirrored and rolled at random, from their second release on.

    Source: [@jin2017fbpconvnet; @ronneberger2015unet]
    """

    name: ClassVar[str] = "map-unet"
    kind: ClassVar[str] = "unet"
    paper: ClassVar[str] = "FBPConvNet (Jin et al., IEEE TIP 2017), behind map-inversion, against noise on features"
    order: ClassVar[int] = 350
    short: ClassVar[Mapping[str, Any]] = {"steps": 1, "releases": 8, "batch_size": 8, "width": 4}
    knows: ClassVar[frozenset[str]] = MapInversion.knows
    undefended: ClassVar[str] = "least-squares"
    requires: ClassVar[frozenset[Capability]] = MapInversion.requires | {
        Capability.AUXILIARY_IMAGES,
        Capability.QUERIES,
        Capability.KNOWS_DEFENSE,
    }
    effort: ClassVar[str] = "full"
    named_only: ClassVar[bool] = True

    width: AtLeast1 = 24
    releases: int = 6000
    client_batch: AtLeast1 = 4
    steps: int = 600
    batch_size: int = 32
    learning_rate: float = 2e-3
    augment: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError for a number that is out of range."""
        super().__post_init__()
        check_range(self.releases >= self.batch_size, f"releases of {self.name}", "at least batch_size", self.releases)

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Reconstruct the images that the client embedded."""
        if effects(seen).noise_std == 0:
            return STARTS[0](seen)
        # Both starts of the client's release are the U-Net's input, b × (2 c) × h × w.
        unet = self.network(seen)
        with torch.no_grad():
            images = unet(_started(STARTS, seen)).clamp(0, 1)
        rows = STARTS[1](seen).rows  # both place them alike, and this one does no more
        return Reconstruction(images.to(seen.model.mean.dtype), rows)

    def form(self, seen: FeatureObservation) -> tuple[str, ...]:
        """Return the version of the networks, the attacks to be corrected and the cut layer."""
        return FORMAT, repr(STARTS), f"cut layer {seen.cut_layer}"

    def made(self, seen: FeatureObservation) -> "UNet":
        """Return an untrained U-Net."""
        return UNet(seen.model.image_shape[0], len(STARTS), self.width)

    def recipe(self, seen: FeatureObservation, network: "UNet") -> PairTraining:
        """Return the training on what the attacks make of own releases."""
        return PairTraining(network, *_own_starts(seen, STARTS, self))


FORMAT = "privlab-correction/1"

PUBLIC_OF_STARTS = 64
"""Public images that the attacks to be corrected get for their prior; more cost time in each release alone."""

IN_PLACE = 32
"""Images of an own release whose rows stay in place: there the size of the client's batch makes no difference."""

SCALE = 4  # pixels in a pixel of the U-Net's coarsest scale


class UNet(Scales):
    """x ↦ x₁ + f(x): the first of several images of the same thing, corrected by convolutions at three scales.

    f begins at zero. Sides need not be multiples of the coarsest scale.

    Source: U-Net (Ronneberger et al. 2015); FBPConvNet (Jin et al. 2017) puts one behind a linear inverse.
    """

    def __init__(self, channels: int, images: int, width: int) -> None:
        super().__init__()
        self.channels = channels
        self.inwards = nn.Conv2d(channels * images, width, 3, padding=1)
        self.add_scales((width, 2 * width, 4 * width), _residual)
        self.outwards = silent(nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, x: Float[Tensor, "b s h w"]) -> Float[Tensor, "b c h w"]:
        """Return images, which may leave [0, 1]."""
        height, width = x.shape[2:]
        # Both sides are padded to multiples of the coarsest scale; the border's pixels are repeated.
        h = self.inwards(F.pad(x - 0.5, (0, -width % SCALE, 0, -height % SCALE), mode="replicate"))
        h = self.through_scales(h)
        # The correction is added to the first image, and the padding is cut off.
        return x[:, : self.channels] + self.outwards(h)[:, :, :height, :width]


def _residual(width: int) -> Residual:
    """Return x + g(x), with two convolutions and no norm, which would forget how strong what is corrected is."""
    first, second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
    return Residual(first, nn.GELU(), silent(second))


def _started(starts: Sequence[FeatureAttack], seen: FeatureObservation) -> Float[Tensor, "b s h w"]:
    """Return what attacks make of a release, one behind the other, in single precision."""
    few = replace(seen, public=seen.public[:PUBLIC_OF_STARTS])
    return torch.cat([Reconstruction.of(start(few)).images.float() for start in starts], 1)


def _own_starts(seen: FeatureObservation, starts: Sequence[FeatureAttack], attack: MapUNet) -> Pairs:
    """Return what attacks make of releases of public images, and the images; keys and draws are the adversary's own."""
    draw = draw_for(attack.seed, "", "own releases of features")
    kept = effects_of(seen.model, seen.defense).rows == "kept"

    def release(images: Tensor) -> Pairs:
        own = make_release(seen.model, seen.defense, images.to(seen.model.mean), draw, seen.cut_layer)
        return _started(starts, replace(seen, features=own.features.to(seen.features))), own.images

    return attack.own_pairs(seen.public, IN_PLACE if kept else attack.client_batch, draw, release)

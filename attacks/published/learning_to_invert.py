"""`learning-to-invert`: a decoder that is trained on what public images release under the defense."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from privlab.attacks.decoders import GradientDecoderSpec, decoder_plan, gradient_decoder_for, slots_of
from privlab.base import PrivlabError
from privlab.threat import Capability, Observation

__all__ = ["LearningToInvert"]


@dataclass(frozen=True)
class LearningToInvert:
    """Train a decoder on pairs of a public image and what it releases under the defense; apply it to the release.

    min_φ E ‖f_φ(d(∇ℓ(x))) − x‖², over public images x and draws of the defense d. The paper trains one decoder for all
    parameters. Here A = ∂ℓ/∂E_pos and G = ∂ℓ/∂W are read, slot by slot, by a Transformer: without a defense they
    determine the image, since G = Aᵀ X, and the decoder learns to use what a defense leaves of both. It is trained once
    for each victim, defense and set of public images, and cached.

    The public images have the classes that the model predicts. With few of them the decoder learns little.

    Args:
        width: width of the decoder's tokens; a multiple of 32.
        depth: number of its blocks.
        releases: number of releases of public images that it is trained on.
        steps: number of training steps.
        batch_size: number of releases in a step.
        learning_rate: the largest learning rate, reached after a warm-up and followed by a cosine decay to zero.
        augment: whether public images are mirrored and rolled at random, from their second release on.
        seed: seed of the decoder's first weights, of its training and of the adversary's own draws.
    """

    name: ClassVar[str] = "learning-to-invert"
    paper: ClassVar[str] = "Learning To Invert (Wu et al., UAI 2023), on two gradients of a ViT"
    knows: ClassVar[frozenset[str]] = frozenset(
        {
            *("gradient-noise", "gradient-pruning", "gradient-sign"),
            *("svt-privacy", "binary-weights", "censor"),
        }
    )
    undefended: ClassVar[str] = "patch-gradient"
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {
            *(Capability.KNOWS_WEIGHTS, Capability.BATCH_SIZE_ONE, Capability.LEARNABLE_PE_GRADIENT),
            *(Capability.KNOWS_DEFENSE, Capability.GRADIENT_DEFENSE, Capability.AUXILIARY_IMAGES),
            Capability.CLASS_LABELS,
        }
    )
    effort: ClassVar[str] = "full"
    named_only: ClassVar[bool] = True
    parameters: ClassVar[tuple[str, ...]] = ("pos_embed", "patch_embed.proj.weight")

    width: int = 192
    depth: int = 4
    releases: int = 8000
    steps: int = 800
    batch_size: int = 64
    learning_rate: float = 2e-3
    augment: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PrivlabError if there is nothing to train on."""
        if self.releases < self.batch_size:
            raise PrivlabError(
                f"releases of learning-to-invert must be at least batch_size={self.batch_size}. Found {self.releases}."
            )

    def __call__(self, seen: Observation) -> Float[Tensor, "b c h w"]:
        """Reconstruct the images that the clients fed.

        Raises:
            PrivlabError: if they are not RGB.
        """
        if (channels := seen.model.image_shape[0]) != 3:
            raise PrivlabError(f"The decoder paints RGB images. Found a victim of {channels} channels.")
        assert seen.public is not None  # the capability auxiliary_images says so
        decoder = gradient_decoder_for(seen.model, seen.defense, seen.public, self.spec)
        with torch.no_grad():
            images = decoder(slots_of(seen.model, seen.gradients)).clamp(0, 1)
        return images.to(seen.model.mean.dtype)

    @property
    def spec(self) -> GradientDecoderSpec:
        """Return the decoder and its training."""
        plan = decoder_plan(
            steps=self.steps, batch_size=self.batch_size, learning_rate=self.learning_rate, seed=self.seed
        )
        return GradientDecoderSpec(self.width, self.depth, self.releases, self.augment, plan)

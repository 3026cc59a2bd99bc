"""`inversion-mae`, `-conv`, `-set` and `-token`: a decoder trained on what public images become under the defense."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from privlab.attacks.decoders import DecoderSpec, decoder_for, decoder_plan
from privlab.base import PrivlabError
from privlab.release import effects_of
from privlab.threat import Capability, FeatureObservation, Reconstruction

__all__ = ["InversionConv", "InversionMae", "InversionSet", "InversionToken"]

PAPER = "Permutation Equivariance (Xu et al. 2024), section 5.3"

IN_PLACE = frozenset({"low-pass", "blur", "cutmix", "gaussian-noise"})
"""Defenses that leave rows in place: a decoder that is trained on their releases allows for them."""


@dataclass(frozen=True)
class _Inversion:
    """Train a decoder on pairs of a public image and what the client sends of it; apply it to what was sent.

    The adversary runs the client's part of the model, whatever the cut layer, and the defense, whose algorithm it
    knows, on its own images, with keys and draws of its own that are new in every batch. The attack reads no weight of
    the victim. A decoder is trained once for each victim, cut layer, defense and set of public images, and cached.

    Args:
        width: width of the decoder's tokens, or number of its channels; a multiple of 32.
        depth: number of its blocks.
        steps: number of training steps.
        batch_size: number of public images in a step.
        learning_rate: the largest learning rate, reached after a warm-up and followed by a cosine decay to zero.
        augment: whether public images are mirrored and rolled at random.
        seed: seed of the decoder's first weights and of its training.
    """

    kind: ClassVar[str]
    knows: ClassVar[frozenset[str]] = IN_PLACE
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.RELEASED_FEATURES, Capability.AUXILIARY_IMAGES, Capability.QUERIES, Capability.KNOWS_DEFENSE}
    )

    effort: ClassVar[str] = "full"

    width: int = 192
    depth: int = 3
    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 3e-3
    augment: bool = True
    seed: int = 0

    def __call__(self, seen: FeatureObservation) -> Reconstruction:
        """Reconstruct the images that the client embedded.

        Raises:
            PrivlabError: if they are not RGB.
        """
        if (channels := seen.model.image_shape[0]) != 3:
            raise PrivlabError(f"{self.kind} decoders paint RGB images. Found a victim of {channels} channels.")
        decoder = decoder_for(seen.model, seen.defense, seen.public, self.spec, seen.cut_layer)
        order = effects_of(seen.model, seen.defense).rows
        with torch.no_grad():
            images, rows = decoder.reconstruct(seen.features.float(), order)
        return Reconstruction(images.to(seen.model.mean.dtype), rows)

    @property
    def spec(self) -> DecoderSpec:
        """Return the decoder and its training."""
        plan = decoder_plan(
            steps=self.steps, batch_size=self.batch_size, learning_rate=self.learning_rate, seed=self.seed
        )
        return DecoderSpec(self.kind, self.width, self.depth, self.augment, plan)


@dataclass(frozen=True)
class InversionMae(_Inversion):
    """The paper's attack: a decoder like that of MAE, with Transformer blocks over rows, of which row i writes slot i.

    It does not undo a row permutation. If rows contain position embeddings, attention may learn to use them.
    """

    name: ClassVar[str] = "inversion-mae"
    paper: ClassVar[str] = f"{PAPER}; MAE (He et al. 2022)"
    kind: ClassVar[str] = "mae"


@dataclass(frozen=True)
class InversionConv(_Inversion):
    """A convolutional decoder over the grid of rows; row i is taken for slot i."""

    name: ClassVar[str] = "inversion-conv"
    paper: ClassVar[str] = f"Dosovitskiy and Brox (CVPR 2016), which {PAPER} cites"
    kind: ClassVar[str] = "conv"

    depth: int = 1


@dataclass(frozen=True)
class InversionSet(_Inversion):
    """A decoder that treats the rows as a set: one query for each slot attends to all of them.

    A permutation of the rows does not change its output, but it can learn what position embeddings reveal.
    """

    name: ClassVar[str] = "inversion-set"
    paper: ClassVar[str] = "Set Transformer (Lee et al. 2019), against row permutation"
    kind: ClassVar[str] = "set"
    knows: ClassVar[frozenset[str]] = IN_PLACE | {"row-permutation"}

    depth: int = 2


@dataclass(frozen=True)
class InversionToken(_Inversion):
    """A decoder of single rows that also predicts the slot of each row; an assignment places the rows.

    If the defense leaves rows in place, their order is used instead.
    """

    name: ClassVar[str] = "inversion-token"
    paper: ClassVar[str] = "linear discriminant of slots and an assignment, against row permutation"
    kind: ClassVar[str] = "token"
    knows: ClassVar[frozenset[str]] = IN_PLACE | {"row-permutation"}

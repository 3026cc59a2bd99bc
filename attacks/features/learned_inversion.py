"""`inversion-mae`, `-conv`, `-set` and `-token`: a decoder trained on what public images become under the defense.

Known are the client's part of the model and the defense, both as something to run; sought is a map from features to
images. Public images are released by the adversary (`Inversion.batch`), a decoder is trained on them, and applied.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from privlab.attacks.decoders import DECODERS, Decoder, Shape, Trained, make_release, mirrored_and_rolled
from privlab.attacks.decoders.networks import OwnRelease
from privlab.base import PrivlabError, draw_for
from privlab.release import effects_of
from privlab.threat import Capability, FeatureObservation, Reconstruction

FORMAT = "privlab-decoder/1"
PAPER = "Permutation Equivariance (Xu et al. 2024), section 5.3"

IN_PLACE = frozenset({"low-pass", "blur", "cutmix", "gaussian-noise"})
"""Defenses that leave rows in place: a decoder that is trained on their releases allows for them."""


@dataclass(frozen=True)
class _Inversion(Trained[Decoder]):
    """Train a decoder on pairs of a public image and what the client sends of it; apply it to what was sent.

    The adversary runs the client's part of the model, whatever the cut layer, and the defense, whose algorithm it
    knows, on its own images, with its own keys and draws, which are new in every batch. The attack reads no weight of
    the victim. A decoder is trained once for each victim, cut layer, defense and set of public images, and cached.

    Exact if: no condition is known: it is a trained decoder without a guarantee.

    Args:
        width: width of the decoder's tokens, or number of its channels; a multiple of 32.
        depth: number of its blocks.
    """

    knows: ClassVar[frozenset[str]] = IN_PLACE
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.RELEASED_FEATURES, Capability.AUXILIARY_IMAGES, Capability.QUERIES, Capability.KNOWS_DEFENSE}
    )

    effort: ClassVar[str] = "full"
    short: ClassVar[Mapping[str, Any]] = {"steps": 1}

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
        # From the cache, or trained now; then one forward pass over the released rows.
        decoder = self.network(seen)
        order = effects_of(seen.model, seen.defense).rows
        with torch.no_grad():
            images, rows = decoder.reconstruct(seen.features.float(), order)
        return Reconstruction(images.to(seen.model.mean.dtype), rows)

    def form(self, seen: FeatureObservation) -> tuple[str, ...]:
        """Return the version of the decoders, and the cut layer."""
        cut = (f"cut layer {seen.cut_layer}",) if seen.cut_layer else ()  # 0 has the keys of before there was a choice
        return FORMAT, *cut

    def made(self, seen: FeatureObservation) -> Decoder:
        """Return an untrained decoder."""
        return DECODERS[self.kind](Shape.of(seen.model), self.width, self.depth)

    def recipe(self, seen: FeatureObservation, network: Decoder) -> "Inversion":
        """Return the training on releases of public images, by whose rows the decoder is whitened."""
        return Inversion(seen, self, network)


class Inversion:
    """The training recipe of a decoder: from releases of public images back to these images."""

    def __init__(self, seen: FeatureObservation, attack: _Inversion, decoder: Decoder) -> None:
        self.seen, self.attack, self.model = seen, attack, decoder
        # The whitening is fixed before the training, from the adversary's releases.
        decoder.whiten.fit(self._rows())

    def __len__(self) -> int:
        return len(self.seen.public)

    def batch(self, rows: Tensor, draw: Generator) -> OwnRelease:
        """Return a new release of some public images."""
        seen, public = self.seen, self.seen.public
        images = public[rows.to(public.device)].to(seen.model.mean)
        if self.attack.augment:
            images = mirrored_and_rolled(images, draw)
        return make_release(seen.model, seen.defense, images, draw, seen.cut_layer)

    def loss(self, model: nn.Module, batch: OwnRelease, draw: Generator) -> Tensor:
        """Return the objective of the decoder on one release (`Decoder.objective`).

        Args:
            model: the decoder; it makes the forward pass.
            batch: as `batch` returns it.
            draw: not used, because the objective is not random.
        """
        return self.model.objective(model, batch)

    def _rows(self) -> Float[Tensor, "m d"]:
        """Return the rows of some releases under several keys; the whitening takes its statistics from them."""
        draw = draw_for(self.attack.seed, "", "whitening")
        # At most 256 public images in batches of 32, each under another key.
        batches = torch.randperm(len(self), generator=draw)[:256].split(32)
        return torch.cat([self.batch(rows, draw).features.flatten(0, 1) for rows in batches])


@dataclass(frozen=True)
class InversionMae(_Inversion):
    """The paper's attack: a decoder like that of MAE, with Transformer blocks over rows, of which row i writes slot i.

    Idea: The adversary sends its own images through the client's embedding and defense. It trains a decoder of
    Transformer blocks, as the paper of permutation equivariance does. Row permutations disturb its order of rows.

    Steps: features of public images → train a decoder (MAE) → apply it to the release

    Algorithm: It does not undo a row permutation. If rows contain position embeddings, attention may learn to use them.

    Fails if: rows are permuted: with 196 rows, in another order for each image, it learns almost nothing in 300 steps.

    Cost: 70 to 95 s of training on one core (ViT-Ti, 64 pixels).

    Studies: permutation

    Source: [@xu2024permutation; @he2022mae]
    """

    name: ClassVar[str] = "inversion-mae"
    paper: ClassVar[str] = f"{PAPER}; MAE (He et al. 2022)"
    order: ClassVar[int] = 390
    kind: ClassVar[str] = "mae"


@dataclass(frozen=True)
class InversionConv(_Inversion):
    """A convolutional decoder over the grid of rows; row i is taken for slot i.

    Idea: The adversary sends its own images through the client's embedding and defense. It trains a convolutional
    decoder that turns what is sent back into the image. The decoder is then applied to what the client sent, with row i
    as slot i.

    Steps: features of public images → train a decoder (CNN) → apply it to the release

    Fails if: rows are permuted: it expects them in their order.

    Cost: 203 s of training on one core (ViT-Ti, 64 pixels).

    Source: [@dosovitskiy2016inverting; @xu2024permutation]
    """

    name: ClassVar[str] = "inversion-conv"
    paper: ClassVar[str] = f"Dosovitskiy and Brox (CVPR 2016), which {PAPER} cites"
    order: ClassVar[int] = 380
    kind: ClassVar[str] = "conv"

    depth: int = 1


@dataclass(frozen=True)
class InversionSet(_Inversion):
    """A decoder that treats the rows as a set: one query for each slot attends to all of them.

    Idea: The adversary sends its own images through the client's embedding and defense. It trains a decoder that reads
    the rows as a set: each slot asks all rows for its patch. The order of the rows therefore does not matter to it.

    Steps: features of public images → train a decoder of sets → apply it to the release

    Algorithm: A permutation of the rows does not change its output, but it can learn what position embeddings reveal.

    Fails if: there are many permuted rows: it finds 16 in 1000 steps, and 196 not within 300.

    Cost: 77 to 100 s of training on one core (ViT-Ti, 64 pixels).

    Studies: permutation

    Source: [@lee2019set]
    """

    name: ClassVar[str] = "inversion-set"
    paper: ClassVar[str] = "Set Transformer (Lee et al. 2019), against row permutation"
    order: ClassVar[int] = 400
    kind: ClassVar[str] = "set"
    knows: ClassVar[frozenset[str]] = IN_PLACE | {"row-permutation"}

    depth: int = 2


@dataclass(frozen=True)
class InversionToken(_Inversion):
    """A decoder of single rows that also predicts the slot of each row; an assignment places the rows.

    Idea: The adversary sends its own images through the client's embedding and defense. It trains a decoder of single
    rows that also says to which slot a row belongs. An assignment then places the rows, each of them once.

    Steps: features of public images → train patch and slot decoders → assign rows to slots

    Algorithm: If the defense leaves rows in place, their order is used instead.

    Fails if: there are no position embeddings: it cannot place rows then.

    Cost: 45 to 55 s of training on one core (ViT-Ti, 64 pixels).

    Studies: permutation
    """

    name: ClassVar[str] = "inversion-token"
    paper: ClassVar[str] = "linear discriminant of slots and an assignment, against row permutation"
    order: ClassVar[int] = 410
    kind: ClassVar[str] = "token"
    knows: ClassVar[frozenset[str]] = IN_PLACE | {"row-permutation"}
